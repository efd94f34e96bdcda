"""How fast instances generate, from their heartbeats.

`GenerationRate`: tokens per second of a busy spot instance. Every heartbeat counts by how full the instance
was, so that the tail of a step, with a few responses on each instance, hardly does.

`StepTimes`: seconds of a decode step as a straight line of the KV tokens that it reads, one line for each
kind of instance: what decoding is while it is bound by memory (a roofline), and what makes crowded instances
slow.

How long responses become, as finished ones showed: what is still to be expected of one that runs.

A response that has got far will get farther than the mean: given x tokens so far, the expected length is the
mean of those finished ones that were longer than x. Costs O(log samples) per question.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rlboost_runtime.core.base.prior import EnginePrior

Kind = tuple[int, int]
"""A kind of engine: KV capacity and slots."""

KEPT_SHARE = 0.5
"""Of what earlier steps showed, at the end of a step."""
KEPT_BEATS = 0.9
"""The same of decode step times: an engine does not change, and only different loads show its line."""
ENOUGH_BEATS = 4.0
"""Fewer heartbeats do not make a line."""
SAME_LOAD = 1e-3
"""Relative variance of the load below which all heartbeats were alike."""


@dataclass(slots=True)
class GenerationRate:
    """Tokens per second of one instance, weighted by its load."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def learn(self, share: float, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by an instance that was `share` full."""
        self._tokens += share * num_tokens
        self._seconds += share * seconds

    def close_step(self) -> None:
        """A step is over: its measurements count half from now on."""
        self._tokens *= KEPT_SHARE
        self._seconds *= KEPT_SHARE

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None while nothing was shown."""
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None


@dataclass(slots=True)
class _Line:
    """Sums of a least-squares line through (KV tokens, seconds)."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    known: tuple[float, float] | None = None
    """The last line that made sense."""

    def add(self, x: float, y: float) -> None:
        self.n += 1.0
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y

    def fade(self) -> None:
        self.n *= KEPT_BEATS
        self.x *= KEPT_BEATS
        self.y *= KEPT_BEATS
        self.xx *= KEPT_BEATS
        self.xy *= KEPT_BEATS

    def slope_and_start(self) -> tuple[float, float] | None:
        spread = self.n * self.xx - self.x * self.x
        if self.n < ENOUGH_BEATS or spread <= SAME_LOAD * self.x * self.x:
            return self.known
        slope = (self.n * self.xy - self.x * self.y) / spread
        start = (self.y - slope * self.x) / self.n
        if slope > 0 and start > 0:
            self.known = slope, start
        return self.known


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One kind of engine as a straight line."""

    kv_tokens: int
    """KV capacity."""
    kv_token_s: float
    """Seconds of a decode step per KV token."""
    empty_s: float
    """Seconds of a decode step without any."""


SAME_KV = 0.03
"""KV capacities that differ by less, as a share, are of one kind of engine."""


@dataclass(slots=True)
class StepTimes:
    """Decode step time by KV tokens and kind of instance."""

    _lines: dict[Kind, _Line] = field(default_factory=dict)

    def learn(self, kind: Kind, kv_tokens: int, step_s: float) -> None:
        """Take in a step time, with so many KV tokens in the batch."""
        self._lines.setdefault(self._known_kind(kind), _Line()).add(float(kv_tokens), step_s)

    def close_step(self) -> None:
        """A step is over: its measurements count less from now on."""
        for line in self._lines.values():
            line.fade()

    def prior(self) -> tuple[EnginePrior, ...]:
        """Return the lines that heartbeats have shown, for the next run."""
        lines = {kind: line.slope_and_start() for kind, line in self._lines.items()}
        return tuple(EnginePrior(*kind, *known) for kind, known in lines.items() if known is not None)

    def begin_with(self, prior: Iterable[EnginePrior]) -> None:
        """Begin with the lines of a former run."""
        for engine in prior:
            kind = engine.kv_tokens, engine.max_running
            self._lines[kind] = _Line(known=(engine.kv_token_s, engine.empty_s))

    def typical(self) -> EngineLine | None:
        """Return the kind that most heartbeats were of; None while they have not shown a line."""
        if not self._lines:
            return None
        kind = max(self._lines, key=lambda k: (self._lines[k].n, k))
        line = self.line(kind)
        return None if line is None else EngineLine(kind[0], *line)

    def line(self, kind: Kind) -> tuple[float, float] | None:
        """Return (seconds per KV token, seconds without any); None while beats have not shown both."""
        line = self._lines.get(self._known_kind(kind))
        return None if line is None else line.slope_and_start()

    def full_tokens_per_s(self, kind: Kind, mean_context: float) -> float | None:
        """Return what a full engine of that kind decodes per second where responses have `mean_context`
        tokens; None while beats have not shown it."""
        line, (kv_tokens, max_running) = self.line(kind), kind
        if line is None:
            return None
        per_token_s, empty_s = line
        running = min(max_running, kv_tokens / max(1.0, mean_context))
        return running / (empty_s + per_token_s * running * mean_context)

    def _known_kind(self, kind: Kind) -> Kind:
        """Return the known kind that this one is: engines on equal GPUs differ by a few blocks of cache."""
        tokens, max_running = kind
        alike = (
            known
            for known in self._lines
            if abs(known[0] - tokens) <= SAME_KV * known[0]
            and abs(known[1] - max_running) <= SAME_KV * known[1]
        )
        return kind if kind in self._lines else next(alike, kind)


ENOUGH = 512
"""Finished responses that are remembered, in whole steps; fewer and the mean of the long ones is a guess."""


BATCH = 32
"""Finished requests whose lengths are taken in together."""


class Lengths:
    """Lengths of the responses of the last steps, in tokens."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[int]] = deque()
        self._sorted: list[int] = []
        self._sum_from: list[int] = []
        self._squares = 0.0
        self.first: tuple[int, ...] = ()
        """Those of the run's first steps, at least `ENOUGH` where there were so many."""

    @property
    def is_known(self) -> bool:
        """True if anything has finished."""
        return bool(self._sorted)

    @property
    def longest(self) -> float:
        """Tokens of the longest. Ask only if `is_known`."""
        return float(self._sorted[-1])

    @property
    def mean_context(self) -> float:
        """Response tokens before a token, in the mean over all tokens. Ask only if `is_known`."""
        return self._squares / (2.0 * self._sum_from[0]) if self._sum_from[0] else 0.0

    def learn(self, finished: Iterable[int]) -> None:
        """Take in the lengths of one step's finished responses; old steps are forgotten."""
        step = tuple(finished)
        if len(self.first) < ENOUGH:
            self.first += step
        self._take_in(step)

    def begin_with(self, lengths: Sequence[int]) -> None:
        """Begin with what a former run's first responses were like."""
        self._take_in(lengths)

    def _take_in(self, step: Sequence[int]) -> None:
        if not step:
            return
        self._steps.append(step)
        while sum(map(len, self._steps)) - len(self._steps[0]) >= ENOUGH:
            self._steps.popleft()
        self._sorted = sorted(length for each in self._steps for length in each)
        self._squares = float(sum(length * length for length in self._sorted))
        self._sum_from = [*accumulate(reversed(self._sorted))][::-1]

    def expected(self, so_far: int) -> float:
        """Return the expected length of a response with so many tokens that is not over.

        One longer than all known ones is about to end, for all that is known. Ask only if `is_known`.
        """
        index = bisect_right(self._sorted, so_far)
        if index == len(self._sorted):
            return float(so_far)
        return self._sum_from[index] / (len(self._sorted) - index)


class RequestLengths(Lengths):
    """Lengths of what is requested on its own, turns of episodes among it: known as it finishes, not once a
    step is over."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh: list[int] = []

    def add(self, num_tokens: int) -> None:
        """Take in a request that has finished; they count by the batch."""
        self._fresh.append(num_tokens)
        if len(self._fresh) >= BATCH:
            self.learn(self._fresh)
            self._fresh.clear()


def spread(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Return at most so many of `lengths`, distributed as they are, in order of length."""
    count = min(most, len(lengths))
    ordered = sorted(lengths)
    return tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count))
