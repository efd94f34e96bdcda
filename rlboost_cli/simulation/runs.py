"""Simulations of several policies under several seeds, side by side, as one comparison.

All policies of one seed see the same market, the same sample of its nodes and the same lengths, so that they
can be compared seed by seed. Everything here is simulated.

Means over seeds with the interval that they lie in: pure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import sqrt
from multiprocessing import active_children, get_context
from statistics import fmean, stdev
from typing import Any

from msgspec import to_builtins

from rlboost_runtime.billing.counterfactual import Counterfactual, on_demand_only
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.money import parse_usd
from rlboost_runtime.sim import Preset, SimResult, simulate
from rlboost_runtime.traces import Trace

Json = dict[str, Any]  # one object as printed by --json

BASELINE, OURS = "on_demand", "rlboost"
MEASURES = ("tokens_per_s", "usd_per_hour", "tokens_per_usd", "steps", "preemptions", "tokens_lost")

Done = Callable[[SimResult], None]


@dataclass(frozen=True, slots=True)
class SimulatedMarket:
    """The trace that one seed is simulated on."""

    seed: int
    trace: Trace

    @property
    def hours(self) -> float:
        """How long it lasts."""
        return self.trace.duration_s / 3600


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """What is to be simulated."""

    preset: Preset
    whole: Trace
    """The first seed's trace before nodes were sampled."""
    start_h: float
    sample: float
    """Share of the trace's nodes."""
    markets: tuple[SimulatedMarket, ...]
    policies: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What a person should know: what was assumed."""

    @property
    def trace_source(self) -> str:
        """Where the trace is from; a generated one differs from seed to seed."""
        own = len({market.trace.source for market in self.markets}) > 1
        return self.whole.source + (", and so on for each seed" if own else "")

    @property
    def num_runs(self) -> int:
        """Simulations to do."""
        return len(self.markets) * len(self.policies)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was wanted, and the results: by policy, in the order of the markets."""

    wanted: SimulationRequest
    results: dict[str, tuple[SimResult, ...]]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds, in the order of the results."""
        return tuple(market.seed for market in self.wanted.markets)

    @property
    def hours(self) -> float:
        """Length of what was simulated."""
        return self.wanted.whole.duration_s / 3600

    def measure(self, policy: str, name: str) -> Estimate:
        """Return a measure of `MEASURES` over the seeds."""
        return estimate([getattr(result, name) for result in self.results[policy]])

    def ratio(self, name: str, policy: str, base: str = BASELINE) -> Estimate | None:
        """Return the mean over seeds of `policy` over `base`.

        None where either was not simulated, or the base is 0.
        """
        if policy not in self.results or base not in self.results:
            return None
        pairs = list(zip(self.results[policy], self.results[base], strict=True))
        if any(getattr(theirs, name) == 0 for _, theirs in pairs):
            return None
        return estimate([getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs])

    def on_demand(self) -> Counterfactual | None:
        """Return what the tokens of `OURS` would have cost on demand only; None where either is missing."""
        if OURS not in self.results or BASELINE not in self.results:
            return None
        if not all(result.tokens_per_usd for result in self.results[OURS]):
            return None  # the job has no prices
        ours, alone = self.results[OURS], self.results[BASELINE]
        tokens = sum(result.tokens for result in ours)
        return on_demand_only(
            tokens=tokens,
            seconds=tokens * sum(r.seconds for r in alone) / sum(r.tokens for r in alone),
            reserved_micro_usd_per_hour=parse_usd(round(self.wanted.preset.reserved_usd_per_hour, 6)),
            spent_micro_usd=round(sum(result.tokens / result.tokens_per_usd for result in ours) * 1e6),
            basis="simulated, nothing was measured: the same market and lengths, reserved machines alone",
        )

    def as_json(self) -> Json:
        """Return the object that `--json` prints."""
        ratios = {"throughput": "tokens_per_s", "tokens_per_usd": "tokens_per_usd"}
        found = {key: self.ratio(name, OURS) for key, name in ratios.items()}
        wanted = self.wanted
        return {
            "preset": wanted.preset.name,
            "trace": wanted.whole.name,
            "trace_source": wanted.trace_source,
            "window_h": self.hours,
            "window": {"start_h": wanted.start_h, "end_h": wanted.start_h + self.hours},
            "sample": wanted.sample,
            "seed": self.seeds[0],
            "seeds": list(self.seeds),
            "basis": "simulated, nothing was measured",
            "notes": list(wanted.notes),
            "policies": {policy: self._policy(policy) for policy in self.results},
            "on_demand": None if (alone := self.on_demand()) is None else to_builtins(alone),
            "ratio": {key: None if ratio is None else ratio.mean for key, ratio in found.items()},
            "ratio_interval": {key: _half_width(ratio) for key, ratio in found.items()},
        }

    def _policy(self, policy: str) -> Json:
        measures = {name: self.measure(policy, name) for name in MEASURES}
        means = {name: found.mean for name, found in measures.items()}
        if len(self.seeds) == 1:  # what was counted stays a whole number
            means = {name: getattr(self.results[policy][0], name) for name in measures}
        return {**means, "interval": {name: found.half_width for name, found in measures.items()}}


def run(wanted: SimulationRequest, done: Done) -> Comparison:
    """Simulate every policy on every market, on all cores; `done` hears of each result as it comes."""
    tasks = [(wanted.preset, policy, market) for market in wanted.markets for policy in wanted.policies]
    found: dict[tuple[str, int], SimResult] = {}
    for result in _results(tasks):
        found[result.policy, result.seed] = result
        done(result)
    by_policy = {p: tuple(found[p, market.seed] for market in wanted.markets) for p in wanted.policies}
    return Comparison(wanted, by_policy)


_Task = tuple[Preset, str, SimulatedMarket]


def _results(tasks: list[_Task]) -> Iterator[SimResult]:
    workers = min(len(tasks), len(os.sched_getaffinity(0)))
    if workers == 1:
        yield from map(_simulate, tasks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_leave_interrupts_to_parent)
    try:
        for future in as_completed([pool.submit(_simulate, task) for task in tasks]):
            yield future.result()
    except BaseException:  # not to be waited for: a simulation may take long
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            child.terminate()
        raise
    pool.shutdown()


def _simulate(task: _Task) -> SimResult:
    preset, policy, market = task
    try:
        return simulate(preset, market.trace, policy, seed=market.seed, hours=market.hours)
    except ValueError as exc:  # the model does not fit its machines
        raise ConfigError(f"{preset.name} cannot be simulated: {exc}", "take a smaller model") from None


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _half_width(found: Estimate | None) -> float | None:
    return None if found is None else found.half_width


# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the last is used, which makes
# the interval a little too wide
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval (Student's t); None for a single value."""

    mean: float
    half_width: float | None

    def text(self, places: int = 0) -> str:
        """Return it as people write it: `12,345 ±67`."""
        spread = "" if self.half_width is None else f" ±{self.half_width:,.{places}f}"
        return f"{self.mean:,.{places}f}{spread}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, one per seed. Raises `ValueError` where there are none."""
    if not values:
        raise ValueError("no values to take the mean of")
    if len(values) == 1:
        return Estimate(float(values[0]), None)
    quantile = _T[min(len(values) - 1, len(_T)) - 1]
    return Estimate(fmean(values), quantile * stdev(values) / sqrt(len(values)))
