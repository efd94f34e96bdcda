"""An inference engine as a roofline: when each response is done, computed from event to event.

All running sequences grow by one token per decode step, so the engine counts steps (ticks): a sequence
admitted at tick a with r tokens to go ends at tick a + r. Between two changes of the batch, k steps take::

    k (max(weights, b flops) + fixed) + kv_s (k kv + b k (k - 1) / 2)

seconds, b sequences holding kv tokens at the first of them. Nothing is done per token.

With drafts (speculative decoding) a step computes d further tokens of each sequence, reads weights and caches
once, and brings a tokens in the mean: the seconds of a token are those of such a step over a. They are used
where that is faster, as live engines measure it (`engines.vllm.drafts`).

Rules, as of vLLM and SGLang: first come, first served; a sequence is admitted while its context and some
headroom for every running one fit (an empty engine takes any); a prefill holds up decoding; when the KV
cache is full the youngest goes back to the queue, keeps its tokens and pays a prefill again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rlboost_runtime.sim.presets import Assumptions, Calibration, MachineShape, ModelShape

SLACK_S = 1e-9
"""A decode step that ends this much after a moment counts as done by then: rounding of floats."""
PREFILL_TOKENS = 8_192
"""Tokens of one prefill (SGLang's `chunked_prefill_size` on large GPUs); more is admitted at its end."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds that things take on one engine."""

    weights_s: float
    """Reading all weights once."""
    sequence_s: float
    """Matrix products of one sequence in one decode step."""
    kv_token_s: float
    """Reading one token's keys and values."""
    fixed_s: float
    """A decode step's time that depends on nothing."""
    prefill_token_s: float
    """Matrix products of one token in a prefill."""
    prefill_square_s: float
    """Attention in a prefill, times the square of its tokens."""
    kv_tokens: int
    """KV capacity."""
    headroom_tokens: int
    """KV tokens kept free per running sequence at an admission."""
    max_running: int
    """Sequences decoded at once at most."""
    draft_tokens: int = 0
    """Tokens that a decode step proposes for each sequence; 0: none."""
    accepted_length: float = 1.0
    """Tokens of a step with drafts, in the mean: what is accepted and the one that is sampled in any case."""

    def base_s(self, batch: int) -> float:
        """Return the part of a decode step that does not depend on the contexts."""
        return max(self.weights_s, self.sequence_s * batch) + self.fixed_s

    def pace(self, batch: int, contexts: int) -> tuple[float, float]:
        """Return the seconds for one more token of each sequence, and those besides for each token of their
        contexts; with drafts if `contexts` are read faster so."""
        plain = self.base_s(batch)
        if not self.draft_tokens:
            return plain, self.kv_token_s
        drafted = self.base_s(batch * (1 + self.draft_tokens)) / self.accepted_length
        kv_token_s = self.kv_token_s / self.accepted_length
        is_faster = drafted + kv_token_s * contexts < plain + self.kv_token_s * contexts
        return (drafted, kv_token_s) if is_faster else (plain, self.kv_token_s)

    @property
    def work_rate(self) -> float:
        """Contexts decoded per second at best, in token-steps: a full KV cache in each decode step."""
        token_s, kv_token_s = self.pace(1, self.kv_tokens)
        return self.kv_tokens / (token_s + kv_token_s * self.kv_tokens)

    def prefill_s(self, tokens: int) -> float:
        """Return the time to compute the KV cache of `tokens`."""
        return (self.prefill_token_s + self.prefill_square_s * tokens) * tokens


def engine_speed(
    model: ModelShape,
    shape: MachineShape,
    memory_share: float,
    calibration: Calibration,
    assumptions: Assumptions,
) -> EngineSpeed:
    """Return the roofline of one engine. Raises `ValueError` where the weights leave no room for a KV
    cache."""
    gpus = shape.tensor_parallel
    bandwidth = gpus * shape.gpu.bandwidth * calibration.decode_bandwidth_share * shape.engine_pace
    flops = gpus * shape.gpu.flops * shape.engine_pace
    free_bytes = gpus * shape.gpu.memory_bytes * memory_share - model.weight_bytes
    if free_bytes <= 0:
        raise ValueError(
            f"{model.name} has {model.weight_bytes / 1e9:.0f} GB of weights, more than {memory_share:.0%} of "
            f"{gpus} x {shape.gpu.name}: raise tensor_parallel"
        )
    return EngineSpeed(
        weights_s=model.weight_bytes / bandwidth,
        sequence_s=2.0 * model.parameters / (flops * assumptions.decode_flops_share),
        kv_token_s=model.kv_bytes_per_token / bandwidth,
        fixed_s=calibration.decode_step_s / shape.engine_pace,
        prefill_token_s=2.0 * model.parameters / (flops * assumptions.prefill_flops_share),
        prefill_square_s=2.0 * model.hidden * model.layers / (flops * assumptions.prefill_flops_share),
        kv_tokens=int(free_bytes / model.kv_bytes_per_token),
        headroom_tokens=calibration.growth_headroom_tokens,
        max_running=assumptions.max_running,
        draft_tokens=assumptions.draft_tokens,
        accepted_length=assumptions.accepted_length,
    )


@dataclass(slots=True, eq=False)
class Sequence:
    """One response on one engine."""

    key: int
    """The assignment."""
    response: int
    prompt: int
    tokens: int
    """Response tokens when it was last admitted; use `EngineModel.tokens_of` for the present."""
    goal: int
    """Response tokens when it is done."""
    received: int = 0
    """Response tokens that it came with: they are safe whatever happens here."""
    order: int = 0
    start_tick: int = -1
    """Tick of its admission; -1: it waits."""
    session: int | None = None
    """Sequences of one session begin alike: what one leaves in the cache the next need not compute."""

    @property
    def is_running(self) -> bool:
        """True if it is being decoded."""
        return self.start_tick >= 0


class EngineModel:
    """One engine; `time` is the moment up to which it has been computed."""

    def __init__(self, speed: EngineSpeed, now: float = 0.0) -> None:
        self.speed = speed
        self.time = now
        self.tick = 0
        self.kv_used = 0
        """KV tokens of the running sequences."""
        self.generated = 0
        """Tokens decoded in all."""
        self.repeated_prefill_s = 0.0
        """Time in prefills of responses that had been begun before."""
        self.num_running = 0
        self.preemptions = 0
        """Running sequences that were sent back to the queue because the KV cache was full."""
        self.sequences: dict[int, Sequence] = {}
        """Running and waiting ones, by key."""
        self._waiting: deque[Sequence] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._youngest: list[tuple[int, Sequence]] = []
        self._next_order = 0
        self._prefixes: dict[int, int] = {}
        """By session: tokens of ended sequences that are still in the cache, the oldest first."""

    @property
    def num_waiting(self) -> int:
        """Sequences that are not decoded yet."""
        return len(self.sequences) - self.num_running

    def tokens_of(self, sequence: Sequence) -> int:
        """Return a sequence's response tokens at `time`."""
        if not sequence.is_running:
            return sequence.tokens
        return sequence.tokens + self.tick - sequence.start_tick

    def running_tokens(self) -> list[tuple[int, int]]:
        """Return (response, its tokens) of every running sequence."""
        tick = self.tick
        return [
            (s.response, s.tokens + tick - s.start_tick) for s in self.sequences.values() if s.start_tick >= 0
        ]

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence at `time`. Call `advance` before and after."""
        assert sequence.goal > sequence.tokens, f"nothing to generate for {sequence.response}"
        self.sequences[sequence.key] = sequence
        self._waiting.append(sequence)

    def step_s(self) -> float:
        """Return what a decode step takes now."""
        return self._duration(1)

    def abort(self, key: int) -> int:
        """Drop a sequence at `time`; return its response tokens. Raises `KeyError` if it is not here."""
        sequence = self.sequences.pop(key)
        tokens = self.tokens_of(sequence)
        if sequence.is_running:
            self._stop(sequence, tokens)
        return tokens

    def advance(self, now: float) -> list[Sequence]:
        """Compute up to `now`; return the sequences that are done, in order. They are gone from here."""
        done: list[Sequence] = []
        while True:
            self._admit(now)
            if not self.num_running:
                self.time = max(self.time, now)
                return done
            if self.time > now + SLACK_S:
                return done  # in a prefill
            ticks = self._ticks_to_change()
            end = self.time + self._duration(ticks)
            if end > now + SLACK_S:
                self._run(self._ticks_within(now - self.time))
                return done
            self._run(ticks)
            done += self._finish_due()
            if self.num_running > 1 and self.kv_used + self.num_running > self.speed.kv_tokens:
                self._retract()

    def forget_prefixes(self) -> None:
        """The weights are others: nothing in the cache is of use."""
        self._prefixes.clear()

    def next_change(self) -> float | None:
        """Return when something ends or the KV cache is full; None: nothing runs."""
        if not self.num_running:
            return None
        if self._waiting and self._fits(self._waiting[0]):
            return self.time  # the end of a prefill: the next one follows
        return self.time + self._duration(self._ticks_to_change())

    # --- helpers ------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Admit what fits, one prefill after the other; each takes up to `PREFILL_TOKENS`."""
        while self._waiting and self.time <= now + SLACK_S:
            taken = 0
            while self._waiting and taken < PREFILL_TOKENS:
                sequence = self._waiting[0]
                if self.sequences.get(sequence.key) is not sequence:
                    self._waiting.popleft()  # aborted while it waited
                    continue
                if not self._fits(sequence):
                    return
                self._waiting.popleft()
                context = sequence.prompt + sequence.tokens
                cached = self._take_prefix(sequence, context)
                taken += context - cached
                self._start(sequence, context, cached)

    def _fits(self, sequence: Sequence) -> bool:
        if not self.num_running:
            return True
        headroom = max(1, self.speed.headroom_tokens)  # with none, two would be sent back and let in for ever
        context = sequence.prompt + sequence.tokens
        need = self.kv_used + context + headroom * (self.num_running + 1)
        return need <= self.speed.kv_tokens and self.num_running < self.speed.max_running

    def _take_prefix(self, sequence: Sequence, context: int) -> int:
        """Return how many tokens of a context are in the cache. Ended sequences stay there as long as nobody
        needs the room; the oldest go first."""
        if sequence.session is None:
            return 0
        left = sum(self._prefixes.values()) - (self.speed.kv_tokens - self.kv_used)
        while left > 0:
            left -= self._prefixes.pop(next(iter(self._prefixes)))
        return min(self._prefixes.pop(sequence.session, 0), context)

    def _start(self, sequence: Sequence, context: int, cached: int) -> None:
        prefill_s = self.speed.prefill_s(context) - self.speed.prefill_s(cached)
        self.time += prefill_s
        if sequence.tokens:
            self.repeated_prefill_s += prefill_s
        sequence.start_tick = self.tick
        sequence.order = self._next_order
        self._next_order += 1
        self.kv_used += context
        self.num_running += 1
        end = self.tick + sequence.goal - sequence.tokens
        heapq.heappush(self._ends, (end, sequence.order, sequence))
        heapq.heappush(self._youngest, (-sequence.order, sequence))

    def _stop(self, sequence: Sequence, tokens: int) -> None:
        self.kv_used -= sequence.prompt + tokens
        self.num_running -= 1
        sequence.tokens, sequence.start_tick = tokens, -1

    def _retract(self) -> None:
        while True:
            order, sequence = heapq.heappop(self._youngest)
            if self._is_current(-order, sequence):
                break
        self.preemptions += 1
        self._stop(sequence, self.tokens_of(sequence))
        self._waiting.appendleft(sequence)

    def _ticks_to_change(self) -> int:
        """Return the decode steps until the first end, or until the next one would not fit."""
        while not self._is_current(self._ends[0][1], self._ends[0][2]):
            heapq.heappop(self._ends)
        to_end = self._ends[0][0] - self.tick
        if self.num_running == 1:
            return to_end
        return min(to_end, max(0, (self.speed.kv_tokens - self.kv_used) // self.num_running))

    def _is_current(self, order: int, sequence: Sequence) -> bool:
        return sequence.start_tick >= 0 and sequence.order == order

    def _finish_due(self) -> list[Sequence]:
        done = []
        while self._ends and self._ends[0][0] <= self.tick:
            _, order, sequence = heapq.heappop(self._ends)
            if self._is_current(order, sequence):
                tokens = self.tokens_of(sequence)
                self._stop(sequence, tokens)
                del self.sequences[sequence.key]
                done.append(sequence)
                if sequence.session is not None:
                    self._prefixes.pop(sequence.session, None)
                    self._prefixes[sequence.session] = sequence.prompt + tokens
        return done

    def _run(self, ticks: int) -> None:
        if ticks <= 0:
            return
        self.time += self._duration(ticks)
        self.tick += ticks
        self.kv_used += self.num_running * ticks
        self.generated += self.num_running * ticks

    def _duration(self, ticks: int) -> float:
        batch = self.num_running
        contexts = ticks * self.kv_used + batch * ticks * (ticks - 1) / 2.0
        token_s, kv_token_s = self.speed.pace(batch, self.kv_used)
        return ticks * token_s + kv_token_s * contexts

    def _ticks_within(self, seconds: float) -> int:
        """Return the whole decode steps that fit: the root of the quadratic that `_duration` is."""
        if seconds <= 0:
            return 0
        batch = self.num_running
        token_s, kv_token_s = self.speed.pace(batch, self.kv_used)
        square = kv_token_s * batch / 2.0
        linear = token_s + kv_token_s * self.kv_used - square
        root = 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))
        ticks = int(root)
        while ticks and self._duration(ticks) > seconds + SLACK_S:
            ticks -= 1
        return ticks
