"""What happened in a simulated run, as rows, intervals and series."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.sim.result import RESERVED, Activity, Interval, Kill, StepRow

BIN_S = 60.0
"""Seconds of one point of the throughput series."""


@dataclass(slots=True)
class Recorder:
    """Collects while the run goes on."""

    rows: list[StepRow] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: dict[Activity, float] = field(default_factory=dict)
    """Seconds of the reserved node, by what it did."""
    _doing: dict[str, tuple[float, Activity]] = field(default_factory=dict)
    _generated: list[int] = field(default_factory=list)

    def does(self, machine: str, what: Activity, at: float) -> None:
        """A machine does something from `at` on."""
        known = self._doing.get(machine)
        if known is not None and known[1] == what:
            return
        self.stops(machine, at)
        self._doing[machine] = at, what

    def stops(self, machine: str, at: float) -> None:
        """A machine is gone."""
        known = self._doing.pop(machine, None)
        if known is None:
            return
        start, what = known
        if at > start:
            self.intervals.append(Interval(machine, start, at, what))
        if machine == RESERVED:
            self.seconds[what] = self.seconds.get(what, 0.0) + at - start

    def reserved_s(self, what: Activity, at: float) -> float:
        """Return the reserved node's seconds with something until `at`."""
        start, doing = self._doing.get(RESERVED, (at, what))
        return self.seconds.get(what, 0.0) + (at - start if doing == what else 0.0)

    def generated(self, tokens: int, at: float) -> None:
        """Engines have generated more tokens."""
        index = int(at / BIN_S)
        while len(self._generated) <= index:
            self._generated.append(0)
        self._generated[index] += tokens

    def close(self, at: float) -> None:
        """The run is over."""
        for machine in list(self._doing):
            self.stops(machine, at)

    def throughput(self) -> tuple[tuple[float, float], ...]:
        """Return (end of the bin, tokens per second)."""
        return tuple(((i + 1) * BIN_S, tokens / BIN_S) for i, tokens in enumerate(self._generated))
