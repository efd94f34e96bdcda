"""An engine without a model that takes as long as the simulator's: `RLBOOST_ENGINE` names it to the agents.

Which responses run, wait and end, and when, says `sim.engine_model` at the present time; tokens are handed
out every 50 ms. Booting, pulling, loading, sleeping and waking take the simulator's seconds beside what the
real agent needs for them.

What it did and when it notes in `engine-N.jsonl` of its machine's folder, for latencies: (assignment, when
it came) and (assignment, when it ended), in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from benchmarks.paper_scale.scenario import Scenario, tokens_of
from rlboost_runtime.agent.bootstrap import age_of_this_process
from rlboost_runtime.engines.base import (
    EngineOutput,
    EngineProgress,
    EngineSpec,
    KvCache,
    LoadFailed,
    Request,
)
from rlboost_runtime.engines.emulated import emulated_response
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.seams import SystemClock
from rlboost_runtime.sim.engine_model import EngineModel, Sequence

TICK_S = 0.05
"""Tokens of so long are handed out together: as long as an agent collects them for a frame."""
LOGPROB = -0.5


class ModelledEngine:
    """See `engines.base.Engine` for the contract."""

    def __init__(self, spec: EngineSpec) -> None:
        self._scenario = Scenario.of_run()
        self._preset = self._scenario.preset
        self._is_reserved = spec.vllm.may_sleep
        self._model = EngineModel(self._scenario.speed(reserved=self._is_reserved), time.monotonic())
        self._version: int | None = None
        self._has_woken = False
        self._sent: dict[int, int] = {}
        """Response tokens handed out, by request."""
        self._limits: dict[int, int] = {}
        self._outputs: deque[EngineOutput] = deque()
        self._news, self._work = asyncio.Event(), asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._notes: IO[str] = _notes(spec.log).open("a")

    @property
    def kv_cache(self) -> KvCache:
        """As the roofline has it."""
        return KvCache(self._model.speed.kv_tokens, 1, self._model.speed.max_running)

    @property
    def version(self) -> int | None:
        """Policy version being served."""
        return self._version

    async def start(self, timeout_s: float) -> None:
        """Be there once a machine would have booted."""
        if not self._is_reserved:
            clock = SystemClock()
            age_s = age_of_this_process(clock).age_s(clock.now())
            await asyncio.sleep(max(0.0, self._preset.assumptions.boot_s - age_s))
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def submit(self, requests: list[Request]) -> None:
        """Queue requests."""
        now = self._advance()
        for request in requests:
            kept = -request.priority  # the agent's offset
            prompt = request.token_ids[: len(request.token_ids) - kept]
            name = request.token_ids[len(prompt)] if kept else request.request_id
            goal = min(self._scenario.length(prompt, name), kept + request.max_new_tokens)
            key = request.request_id
            self._limits[key] = kept + request.max_new_tokens
            self._sent[key] = kept
            self._model.submit(Sequence(key, name, len(prompt), kept, goal, kept))
            self._note("begin", key, now)
        self._advance()
        self._work.set()

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these, after their last tokens."""
        now = self._advance()
        output = self._output()
        for key in request_ids:
            sequence = self._model.sequences.get(key)
            if sequence is not None:
                self._hand_out(output, sequence, self._model.abort(key))
                self._end(output, key, "aborted", now)
        self._put(output)
        self._advance()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs until the engine stops."""
        while not self._is_stopped:
            while self._outputs:
                yield self._outputs.popleft()
            self._news.clear()
            await self._news.wait()

    async def load(self, version: int, folder: Path) -> None:
        """Serve `version`, after what its transfer and its application take."""
        if self._model.sequences:
            raise LoadFailed(f"version {version} cannot be loaded: requests are held", "load an idle engine")
        self._version = None
        assumed = self._preset.assumptions
        if self._is_reserved:
            await asyncio.sleep(0.0 if self._has_woken else assumed.apply_s)
        else:
            await asyncio.sleep(self._transfer_s() + assumed.apply_s)
        self._has_woken = False
        self._version = version

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the continuation that the emulated trainer's probe has."""
        return emulated_response(token_ids, max_new_tokens, Sampling())

    async def sleep(self) -> None:
        """Free the memory."""
        await asyncio.sleep(0.0 if self._version is None else self._preset.assumptions.sleep_s)
        self._version = None

    async def wake(self) -> None:
        """Take the memory."""
        await asyncio.sleep(self._preset.assumptions.wake_s)
        self._has_woken = True

    def progress(self) -> EngineProgress:
        """Return the model's counters."""
        model = self._model
        free = model.speed.kv_tokens - model.kv_used
        return EngineProgress(
            model.tick, model.num_running, model.num_waiting, model.generated, model.preemptions, free
        )

    async def stop(self) -> None:
        """End; idempotent."""
        self._is_stopped = True
        self._news.set()
        if self._ticking is not None:
            self._ticking.cancel()
        self._notes.close()

    # --- helpers ------------------------------------------------------------------------------------------

    def _transfer_s(self) -> float:
        """Return what pulling the weights takes when all machines pull at once."""
        preset = self._preset
        head = preset.reserved_nodes * preset.reserved.link_bytes_per_s / preset.max_spot_instances
        return preset.model.weight_bytes / min(preset.spot[0].link_bytes_per_s, head)

    async def _tick(self) -> None:
        while True:
            if not self._model.sequences:
                self._work.clear()
                await self._work.wait()
            self._advance()
            await asyncio.sleep(TICK_S)

    def _advance(self) -> float:
        """Compute up to now, hand out what is new; return the time."""
        now = time.monotonic()
        output = self._output()
        for sequence in self._model.advance(now):
            self._hand_out(output, sequence, sequence.goal)
            reason = "length" if sequence.goal >= self._limits[sequence.key] else "stop"
            self._end(output, sequence.key, reason, now)
        for sequence in self._model.sequences.values():
            self._hand_out(output, sequence, self._model.tokens_of(sequence))
        self._put(output)
        return now

    def _hand_out(self, output: EngineOutput, sequence: Sequence, until: int) -> None:
        start = self._sent[sequence.key]
        if until > start:
            tokens = tokens_of(sequence.response, start, until)
            output.add(sequence.key, tokens, [LOGPROB] * len(tokens))
            self._sent[sequence.key] = until

    def _end(self, output: EngineOutput, key: int, reason: str, now: float) -> None:
        output.end(key, reason)
        del self._sent[key], self._limits[key]
        self._note(reason, key, now)

    def _note(self, what: str, key: int, now: float) -> None:
        if not self._notes.closed:
            self._notes.write(json.dumps([what, key, round(now, 4)]) + "\n")

    def _output(self) -> EngineOutput:
        return EngineOutput(-1 if self._version is None else self._version)

    def _put(self, output: EngineOutput) -> None:
        if output.request_ids or output.ended:
            self._outputs.append(output)
            self._news.set()


def _notes(log: Path) -> Path:
    return log.with_suffix(".jsonl")
