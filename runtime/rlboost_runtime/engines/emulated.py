"""An engine without a model, for load tests only; its timing is no measure of inference.

Token k of a sequence is a hash of all ids before it, so a response that moves between emulated engines at any
point ends up with the same tokens as one that stays. It runs in this process, so that thousands of responses
cost little.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.engines.base import (
    EngineOutput,
    EngineProgress,
    EngineSpec,
    KvCache,
    LoadFailed,
    Request,
)
from rlboost_runtime.protocol.messages import Sampling

VOCABULARY = 256
DEFAULT_TOKENS_PER_S = 1000.0
_DIGEST = struct.Struct("<II")
MAX_UNREAD_STEPS = 256
"""Steps that may wait for the reader of `outputs`; then generation waits."""


def emulated_token(token_ids: list[int]) -> tuple[int, float]:
    """Return the token that follows `token_ids` and its logprob: a pure function."""
    data = struct.pack(f"<{len(token_ids)}i", *token_ids)
    first, second = _DIGEST.unpack(hashlib.blake2b(data, digest_size=_DIGEST.size).digest())
    return first % VOCABULARY, -(second % 4096) / 1024


def emulated_response(
    prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> tuple[list[int], list[float]]:
    """Return the whole response to `prompt`, which any chain of emulated engines must produce."""
    ids, logprobs = list(prompt), []
    for _ in range(max_new_tokens):
        token, logprob = emulated_token(ids)
        ids.append(token)
        logprobs.append(logprob)
        if token in sampling.stop_token_ids:
            break
    return ids[len(prompt) :], logprobs


def _is_folder(path: Path) -> bool:  # quick enough for an event loop
    return path.is_dir()


@dataclass(slots=True)
class _Running:
    request: Request
    ids: list[int]
    num_new: int = 0


class EmulatedEngine:
    """See `engines.base.Engine` for the contract."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._period_s = 1.0 / (spec.tokens_per_s_per_response or DEFAULT_TOKENS_PER_S)
        self._version: int | None = None
        self._asleep = False
        self._running: dict[int, _Running] = {}
        self._waiting: dict[int, Request] = {}
        self._outputs: deque[EngineOutput] = deque()
        self._news = asyncio.Event()
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stopped = False
        self._counter = 0
        self._generated = 0

    @property
    def kv_cache(self) -> KvCache:
        """Slots, and one full context for each of them."""
        spec = self._spec
        return KvCache(spec.most_running() * spec.max_context_tokens, 1)

    @property
    def version(self) -> int | None:
        """Policy version being served."""
        return self._version

    async def start(self, timeout_s: float) -> None:
        """Begin to generate."""
        self._loop_task = asyncio.get_running_loop().create_task(self._generate())

    def submit(self, requests: list[Request]) -> None:
        """Queue requests."""
        refused = EngineOutput(-1)
        for request in requests:
            if self._version is None:
                refused.end(request.request_id, "failed", "no weights are loaded")
            else:
                self._waiting[request.request_id] = request
        self._put(refused)
        self._work.set()

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these."""
        output = EngineOutput(-1 if self._version is None else self._version)
        for request_id in request_ids:
            held = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
            if held is not None:
                output.end(request_id, "aborted")
        self._put(output)

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs until the engine stops."""
        while True:
            while self._outputs:
                output = self._outputs.popleft()
                self._work.set()
                yield output
            if self._stopped:
                return
            self._news.clear()
            await self._news.wait()

    async def load(self, version: int, folder: Path) -> None:
        """Serve `version`; the folder must exist, its content is not looked at."""
        self._version = None
        if self._running or self._waiting or self._asleep or not _is_folder(folder):
            raise LoadFailed(f"version {version} does not load from {folder}", "load an idle, awake engine")
        self._version = version
        self._counter += 1

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the continuation."""
        return emulated_response(token_ids, max_new_tokens, Sampling())

    async def sleep(self) -> None:
        """Serve nothing."""
        self._version, self._asleep = None, True

    async def wake(self) -> None:
        """Allow loading."""
        self._asleep = False

    def progress(self) -> EngineProgress:
        """Return counters."""
        return EngineProgress(self._counter, len(self._running), len(self._waiting), self._generated)

    async def stop(self) -> None:
        """End; idempotent."""
        self._stopped = True
        self._version = None
        self._news.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)

    # --- generation ---------------------------------------------------------------------------------------

    async def _generate(self) -> None:
        while True:
            if not self._can_step():
                self._work.clear()
                await self._work.wait()
                continue
            self._admit()
            self._step()
            await asyncio.sleep(self._period_s)

    def _can_step(self) -> bool:
        has_room = len(self._outputs) <= MAX_UNREAD_STEPS
        return bool(self._running or self._waiting) and has_room

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._spec.most_running():
            request = self._waiting.pop(next(iter(self._waiting)))
            self._running[request.request_id] = _Running(request, list(request.token_ids))

    def _step(self) -> None:
        assert self._version is not None  # requests are accepted only with weights
        self._counter += 1
        output = EngineOutput(self._version)
        for running in self._running.values():
            self._advance(running, output)
        for ended in output.ended:
            del self._running[ended.request_id]
        self._put(output)

    def _advance(self, running: _Running, output: EngineOutput) -> None:
        request_id = running.request.request_id
        token, logprob = emulated_token(running.ids)
        running.ids.append(token)
        running.num_new += 1
        self._generated += 1
        output.add(request_id, [token], [logprob])
        if token in running.request.sampled(self._spec.sampling).stop_token_ids:
            output.end(request_id, "stop")
        elif running.num_new >= running.request.max_new_tokens:
            output.end(request_id, "length")

    def _put(self, output: EngineOutput) -> None:
        if output.request_ids or output.ended:
            self._outputs.append(output)
            self._news.set()
