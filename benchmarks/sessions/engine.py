"""An engine without a model whose probe is the published one: `RLBOOST_ENGINE` names it to the agents."""

from __future__ import annotations

from pathlib import Path

from rlboost_runtime.engines.base import EngineSpec
from rlboost_runtime.engines.emulated import EmulatedEngine
from rlboost_runtime.weights.manifest import MANIFEST, decode_manifest


class ProbedEngine(EmulatedEngine):
    """Its tokens are hashes; what it says when it proves its version is what the trainer computed."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._probe: tuple[list[int], list[float]] = ([], [])

    async def load(self, version: int, folder: Path) -> None:
        """Serve `version`."""
        await super().load(version, folder)
        probe = decode_manifest((folder / MANIFEST).read_bytes()).probe
        self._probe = list(probe.token_ids), list(probe.logprobs)

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the probe's continuation."""
        ids, logprobs = self._probe
        return ids[:max_new_tokens], logprobs[:max_new_tokens]
