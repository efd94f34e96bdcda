"""A played engine: its tokens follow from the version and everything before them, so that a gap, a repetition
or a token of another version shows in every later token."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

from rlboost_runtime.engines.base import (
    EngineDied,
    EngineOutput,
    EngineProgress,
    KvCache,
    LoadTimes,
    Request,
    RequestEnded,
)
from rlboost_runtime.weights.manifest import Manifest, Probe

STOP = 9
LOGPROB = -0.5
STEP_S = (0.02, 0.08)
TOKENS_PER_STEP = 3
MAX_RUNNING = 8
LOAD_S = (0.02, 0.5)
STOP_ONE_IN = 40
_PROBE = ((1, 2, 3), (4,))


def context(version: int, token_ids: Sequence[int]) -> int:
    """Return what the next token follows from."""
    return zlib.crc32(array("i", token_ids).tobytes(), version + 1)


def next_token(state: int) -> int:
    """Return the token after such a context."""
    return STOP if state % STOP_ONE_IN == 0 else 10 + state % 989


def extended(state: int, token: int) -> int:
    """Return the context with one token more."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def manifest_of(version: int) -> Manifest:
    """Return what a pulled version's manifest says."""
    probe = Probe(_PROBE[0], _PROBE[1], (-1.0 - version % 7,), 0.01)
    return Manifest((1, 1), version, "full", None, (), (), (), probe, f"digest {version}", 0.0)


class PlayedEngine:
    """An `Engine`. `spoil` makes the next load serve other weights than the version's."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.version: int | None = None
        self.kv_cache = KvCache(20_000, 16, MAX_RUNNING)
        self._running: dict[int, tuple[int, int]] = {}
        """By request: its context and how many tokens may still come."""
        self._waiting: list[Request] = []
        self._ended: list[RequestEnded] = []
        self._num_generated = self._num_steps = 0
        self._death: str | None = None
        self.spoils_next = False
        self._is_spoilt = False

    async def start(self, timeout_s: float) -> None:
        """Start."""
        await asyncio.sleep(self._random.uniform(0.1, 1.0))

    async def stop(self) -> None:
        """Nothing is left behind."""

    def submit(self, requests: list[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these."""
        waiting = {request.request_id for request in self._waiting}
        for each in request_ids:
            if self._running.pop(each, None) is not None or each in waiting:
                self._ended.append(RequestEnded(each, "aborted"))
        self._waiting = [request for request in self._waiting if request.request_id not in request_ids]

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """Generate."""
        while True:
            await asyncio.sleep(self._random.uniform(*STEP_S))
            if self._death is not None:
                raise EngineDied(self._death, "it is started again")
            output = self._step()
            if output.request_ids or output.ended:
                yield output

    async def load(self, version: int, folder: Path) -> LoadTimes:
        """Serve a version."""
        await asyncio.sleep(self._random.uniform(*LOAD_S))
        self._check()
        self.version = version
        self._is_spoilt, self.spoils_next = self.spoils_next, False
        return LoadTimes(0.1, 0.1, {})

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Answer the probe."""
        self._check()
        probe = manifest_of(self.version or 0).probe
        off = 5.0 if self._is_spoilt else 0.0
        return list(probe.next_token_ids), [each + off for each in probe.logprobs]

    async def sleep(self) -> None:
        """Free the memory."""
        await asyncio.sleep(self._random.uniform(0.01, 0.3))
        self._check()
        self.version = None

    async def wake(self) -> None:
        """Take it again."""
        await asyncio.sleep(self._random.uniform(0.01, 0.3))
        self._check()

    def progress(self) -> EngineProgress:
        """Return counters."""
        running, waiting = len(self._running), len(self._waiting)
        return EngineProgress(self._num_steps, running, waiting, self._num_generated, 0, 10_000)

    def die(self, problem: str) -> None:
        """End as a child process that crashed."""
        self._death = problem

    def _check(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death, "it is started again")

    def _step(self) -> EngineOutput:
        self._num_steps += 1
        version = self.version
        output = EngineOutput(version or 0, ended=self._ended)
        self._ended = []
        if version is None:
            return output
        token_version = version + 1000 if self._is_spoilt else version
        while self._waiting and len(self._running) < MAX_RUNNING:
            request = self._waiting.pop(0)
            self._running[request.request_id] = (
                context(token_version, request.token_ids),
                request.max_new_tokens,
            )
        for request_id, (state, left) in list(self._running.items()):
            tokens: list[int] = []
            while left and len(tokens) < self._random.randint(1, TOKENS_PER_STEP) and STOP not in tokens:
                tokens.append(next_token(state))
                state, left = extended(state, tokens[-1]), left - 1
            self._num_generated += len(tokens)
            output.add(request_id, tokens, [LOGPROB] * len(tokens))
            if STOP in tokens or not left:
                del self._running[request_id]
                output.end(request_id, "stop" if STOP in tokens else "length")
            else:
                self._running[request_id] = (state, left)
        return output
