"""Another version's weights into a running vLLM server, in place.

Always pause -> start -> update (each file) -> finish -> resume: updating without the pause kills an engine
that has requests. On servers without that interface it calls `reload_weights`. Which one there is, is found
out once. Raises `ApiError` on any failure; the caller must then end the server, whose weights may be a
mixture.

Weights are taken in place only if model and tensors are those that the server was started for
(`ServedModel`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.engines.model_folder import (
    CONFIG_FILE,
    Header,
    Unreadable,
    config_text,
    read_config,
    read_header,
)
from rlboost_runtime.engines.vllm.api import ApiError, VllmApi
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
        for file in sorted(folder.glob("*.safetensors")):
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
