"""Adapter-only versions on a vLLM server: each under a name of its own, unloaded once unused.

Guarantees: a request stays with the adapter that it was submitted under, so its tokens are all of one
version; an adapter is unloaded only when a newer one is current and no request is in flight under it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from rlboost_runtime.engines.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlboost_runtime.engines.model_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    Unreadable,
    read_header,
)
from rlboost_runtime.engines.vllm.api import VllmApi
from rlboost_runtime.engines.vllm.command import MODEL
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0


def is_adapter(folder: Path) -> bool:
    """Return True if the version in `folder` is an adapter (PEFT's layout) rather than a whole model."""
    return (folder / ADAPTER_CONFIG_FILE).exists()


def peft_folder(folder: Path) -> Path:
    """Return the folder to load a version from: where it has adapters beside its model, one inside it with
    the names that vLLM looks for, else `folder` itself."""
    if not (folder / ADAPTER_WEIGHTS).exists():
        return folder
    inner = folder / "peft"
    inner.mkdir(exist_ok=True)
    names = ((ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_FILE), (ADAPTER_CONFIG, ADAPTER_CONFIG_FILE))
    for name, expected in names:
        (inner / expected).unlink(missing_ok=True)
        (inner / expected).symlink_to(Path("..") / name)
    return inner


def base_folder(folder: Path) -> Path:
    """Return the folder of the adapter's base model, as named in its configuration, relative to the
    adapter's.

    Raises `Unreadable`.
    """
    try:
        named = json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())["base_model_name_or_path"]
        base = (folder / str(named)).resolve()
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise Unreadable(f"{ADAPTER_CONFIG_FILE} does not name its base: {exc}") from exc
    if not base.is_dir():
        raise Unreadable(f"the adapter's base {named} is not on this machine; load that version first")
    return base


class Adapters:
    """The adapters of one server."""

    def __init__(self, api: VllmApi) -> None:
        self._api = api
        self._in_flight: Counter[str] = Counter()
        self._loaded: list[str] = []
        self.current = MODEL
        """The model that new requests name: the base model, or the newest adapter."""

    async def load(self, version: int, folder: Path) -> None:
        """Make the adapter in `folder` current. Raises `ApiError`, `Unreadable`."""
        read_header(folder / ADAPTER_WEIGHTS_FILE)
        name = f"{MODEL}-v{version}"
        if name in self._loaded:  # a version number is never used for other weights
            self.current = name
            return
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._api.send("/v1/load_lora_adapter", body, LOAD_TIMEOUT_S)
        self._loaded.append(name)
        self.current = name
        await self.tidy()

    async def leave(self) -> None:
        """Serve the base model again."""
        self.current = MODEL
        await self.tidy()

    def begin(self) -> str:
        """Count a request that is submitted; return the model that it names."""
        self._in_flight[self.current] += 1
        return self.current

    def end(self, name: str) -> bool:
        """Count the end of a request under `name`; return True if `tidy` now has something to do."""
        self._in_flight[name] -= 1
        return self._is_unused(name)

    async def tidy(self) -> None:
        """Unload adapters that are no longer used. Raises `ApiError`."""
        for name in [name for name in self._loaded if self._is_unused(name)]:
            self._loaded.remove(name)
            await self._api.send("/v1/unload_lora_adapter", {"lora_name": name})
            event(log, "adapter.unloaded", adapter=name)

    def _is_unused(self, name: str) -> bool:
        return name in self._loaded and name != self.current and self._in_flight[name] <= 0
