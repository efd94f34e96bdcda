"""Another version's weights into a running vLLM server: in place, or as an adapter beside the base model.

In place (`Swapper`): always pause -> start -> update (each file) -> finish -> resume; updating without the
pause kills an engine that has requests. On servers without that interface it calls `reload_weights`. Which
one there is, is found out once. Raises `ApiError` on any failure; the caller must then end the server, whose
weights may be a mixture.

Weights are taken in place only if model and tensors are those that the server was started for
(`ServedModel`).

An adapter-only version (`Adapters`) has a name of its own on the server and is unloaded once unused.
Guarantees: a request stays with the adapter that it was submitted under, so its tokens are all of one
version; an adapter is unloaded only when a newer one is current and no request is in flight under it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.engines.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlboost_runtime.engines.model_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    CONFIG_FILE,
    Header,
    Unreadable,
    config_text,
    read_config,
    read_header,
)
from rlboost_runtime.engines.vllm.api import ApiError, VllmApi
from rlboost_runtime.engines.vllm.command import MODEL
from rlboost_runtime.engines.vllm.server import VllmServer
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

UPDATE_TIMEOUT_S = 600.0
"""Longest reading of one file by every worker: 140 GB from a slow disk."""


class Swapper:
    """Swaps weights on one server."""

    def __init__(self, api: VllmApi, has_transfer: bool, has_version: bool, has_extension: bool) -> None:
        self._api = api
        self.has_transfer = has_transfer
        """True if weights go through our backend; else through `reload_weights`."""
        self._has_version = has_version
        self._has_extension = has_extension

    @classmethod
    async def of(cls, server: VllmServer) -> Swapper:
        """Find out what `server` supports. Raises `ApiError`."""
        api = server.api
        return cls(
            api,
            server.has_flag("--weight-transfer-config") and await api.has_route("/start_weight_update"),
            await api.has_route("/weight_info") and await api.has_route("/update_weight_version"),
            server.has_flag("--worker-extension-cls"),
        )

    async def name_version(self, version: int) -> None:
        """Set the version number of a server that was just started."""
        if self._has_version:
            await self._api.post("/update_weight_version", {"new_version": str(version)})

    async def swap(self, version: int, folder: Path, in_place: Callable[[], None]) -> float:
        """Take the weights in `folder`; return the seconds without tokens.

        Running requests go on under the new version, their cache computed anew. `in_place` is called when
        every token of before has come and none of after can have.
        """
        began = time.monotonic()
        await self._api.post("/pause?mode=keep")
        if self.has_transfer:
            await self._transfer(version, folder)
        else:
            await self._reload(version, folder)
        await self._check_version(version)
        in_place()
        await self._api.post("/resume")
        pause_s = time.monotonic() - began
        event(log, "weights.swapped", version=version, pause_s=round(pause_s, 4), transfer=self.has_transfer)
        return pause_s

    async def _transfer(self, version: int, folder: Path) -> None:
        await self._api.post("/start_weight_update")
        for file in _files(folder):
            update = {"update_info": {"path": str(file)}}
            await self._api.post("/update_weights", update, UPDATE_TIMEOUT_S)
        await self._api.post("/finish_weight_update", {"weight_version": str(version)}, UPDATE_TIMEOUT_S)

    async def _reload(self, version: int, folder: Path) -> None:
        arguments = {"weights_path": str(folder)}
        body = {"method": "reload_weights", "kwargs": arguments}
        await self._api.post("/collective_rpc", body, UPDATE_TIMEOUT_S)
        if self._has_extension:
            await self._api.rpc("rlboost_repack")
        await self.name_version(version)

    async def _check_version(self, version: int) -> None:
        if not self._has_version:
            return
        found = (await self._api.get("/weight_info"))["weight_version"]
        if found != str(version):
            raise ApiError(f"the server reports version {found}, not {version}")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's configuration and the form of each of its tensors."""

    config: str
    tensors: Header
    vocabulary: int
    """Token ids are below this."""

    @classmethod
    def of(cls, folder: Path) -> ServedModel:
        """Read the version in `folder`. Raises `Unreadable`."""
        tensors: Header = {}
        for file in _files(folder):
            tensors |= read_header(file)
        if not tensors:
            raise Unreadable("no tensor in any safetensors file")
        vocabulary = read_config(folder).get("vocab_size")
        if not isinstance(vocabulary, int):
            raise Unreadable(f"{CONFIG_FILE} has no vocab_size")
        return cls(config_text(folder), tensors, vocabulary)

    def check_same_tensors(self, served: ServedModel) -> None:
        """Raise `Unreadable` unless every tensor is there as in `served`: vLLM would keep an old one."""
        if self.tensors == served.tensors:
            return
        wrong = sorted({name for name, _ in self.tensors.items() ^ served.tensors.items()})
        raise Unreadable(f"{len(wrong)} tensors are missing, new or of another form, such as {wrong[0]}")
