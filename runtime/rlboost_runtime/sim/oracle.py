"""What no policy can beat: a lower bound on a step's time, and what a run of such steps would make.

A step takes at least as long as

- its work: every response token costs the memory traffic of its context, and its share of a decode step, on
  some engine. Reserved engines can work only while the trainer does not, spot ones only while they are
  there;
- the longest response, decoded alone at full speed, and then the optimizer;
- the training of all responses, and the optimizer;
- one pull of the weights, where spot engines do any of it.

Work is measured in token-steps: the sum over all tokens of the context that each was generated with. An
engine that decodes with its KV cache full does `EngineSpeed.work_rate` of them per second, and never more:
in each decode step its contexts add up to at most its capacity. Hand-overs, prefills, boots and imbalance
cost the oracle nothing. It bounds throughput; its dollars are those of all machines that it may use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlboost_runtime.sim.engine_model import EngineSpeed, engine_speed
from rlboost_runtime.sim.presets import MachineShape, Preset
from rlboost_runtime.sim.responses import StepLengths, draw_lengths
from rlboost_runtime.sim.result import SimResult, StepRow, summed_up
from rlboost_runtime.sim.trainer_model import train_s
from rlboost_runtime.traces import Trace

Curve = Sequence[tuple[float, float]]
"""A step curve: (from second, value), the last value for ever."""


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What a step needs. Times in seconds."""

    work: float
    """Token-steps."""
    reserved_rate: float
    """Token-steps per second of all reserved engines."""
    train_s: float
    fixed_s: float
    """Optimizer and publication: nothing overlaps with them."""
    longest_s: float
    """The longest response alone on the fastest engine."""
    pull_s: float


def oracle_step_s(demand: StepDemand, spot_rate: Curve) -> float:
    """Return the shortest time that a step can take: max(work / capacity(t), longest response, pull).

    `spot_rate` is in token-steps per second, from the step's begin at 0 on. The reserved engines' capacity
    counts for all of the step but training and what is fixed.
    """
    busy_s = demand.train_s + demand.fixed_s
    has_spot = any(rate > 0 for _, rate in spot_rate)
    floor = max(demand.longest_s + demand.fixed_s, busy_s, demand.pull_s if has_spot else 0.0)
    return max(floor, _work_s(demand, spot_rate, busy_s))


def integral(curve: Curve, until: float) -> float:
    """Return the integral of a step curve from 0 to `until`; an empty one is 0."""
    if not curve:
        return 0.0
    ends = [*(at for at, _ in curve[1:]), float("inf")]
    return sum(
        value * (min(end, until) - at) for (at, value), end in zip(curve, ends, strict=True) if at < until
    )


def work_of(lengths: StepLengths) -> float:
    """Return the token-steps of a step's responses."""
    return sum(t * p + t * (t - 1) / 2.0 for p, t in zip(lengths.prompts, lengths.tokens, strict=True))


def alone_s(speed: EngineSpeed, prompt: int, tokens: int) -> float:
    """Return how long one response takes on an engine of its own, its first prefill left out."""
    contexts = tokens * prompt + tokens * (tokens - 1) / 2.0
    token_s, kv_token_s = speed.pace(1, prompt + tokens)
    return tokens * token_s + kv_token_s * contexts


def simulate_oracle(
    preset: Preset, trace: Trace, seed: int, hours: float, *, engine_share: float = 1.0
) -> SimResult:
    """Return what steps of the shortest possible time would make of the first `hours` of a trace. Engines do
    `engine_share` of the most that they could."""
    fleet = _Fleet.of(preset)
    machines = [(at, min(fleet.limit, count)) for at, count in trace.capacity_steps]
    rows: list[StepRow] = []
    now = machine_s = 0.0
    while True:
        lengths = draw_lengths(preset.workload, preset.assumptions, seed, len(rows))
        demand = _demand(preset, fleet, lengths)
        demand = replace(demand, work=demand.work / engine_share)
        ahead = _from(machines, now)
        seconds = oracle_step_s(demand, [(at, count * fleet.rate) for at, count in ahead])
        if rows and now + seconds > hours * 3600.0:
            summed = summed_up(preset.name, trace.name, "oracle", seed, hours, rows)
            return replace(summed, mean_spot_machines=machine_s / now)
        used_s = integral(ahead, seconds)
        usd = (preset.reserved_usd_per_hour * seconds + fleet.shape.usd_per_hour * used_s) / 3600.0
        rows.append(_row(len(rows), now, seconds, lengths, demand, used_s * fleet.shape.engines, usd))
        now += seconds
        machine_s += used_s


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The fastest kind of spot machine, which the oracle always gets, and the reserved engines."""

    shape: MachineShape
    engine: EngineSpeed
    reserved: EngineSpeed
    limit: int

    @property
    def rate(self) -> float:
        """Token-steps per second of one spot machine."""
        return self.engine.work_rate * self.shape.engines

    @classmethod
    def of(cls, preset: Preset) -> _Fleet:
        model, calibration, assumptions = preset.model, preset.calibration, preset.assumptions
        spot_share, reserved_share = assumptions.spot_memory_share, assumptions.reserved_memory_share
        kinds = [(engine_speed(model, s, spot_share, calibration, assumptions), s) for s in preset.spot]
        engine, shape = max(kinds, key=lambda kind: kind[0].work_rate * kind[1].engines)
        reserved = engine_speed(model, preset.reserved, reserved_share, calibration, assumptions)
        return cls(shape, engine, reserved, preset.max_spot_instances // shape.engines)


def _work_s(demand: StepDemand, spot_rate: Curve, busy_s: float) -> float:
    def done(until: float) -> float:
        return integral(spot_rate, until) + demand.reserved_rate * max(0.0, until - busy_s)

    before = 0.0
    for point in sorted({busy_s, *(at for at, _ in spot_rate)} - {0.0}):
        if done(point) >= demand.work:  # a straight line from the point before
            share = (demand.work - done(before)) / (done(point) - done(before))
            return before + share * (point - before)
        before = point
    rate = demand.reserved_rate + (spot_rate[-1][1] if spot_rate else 0.0)
    return before + (demand.work - done(before)) / rate


def _from(curve: Sequence[tuple[float, int]], start: float) -> list[tuple[float, int]]:
    """Return a step curve as seen from `start` on."""
    index = max(0, bisect_right(curve, start, key=lambda step: step[0]) - 1)
    return [(max(0.0, at - start), count) for at, count in curve[index:]]


def _demand(preset: Preset, fleet: _Fleet, lengths: StepLengths) -> StepDemand:
    pairs = list(zip(lengths.prompts, lengths.tokens, strict=True))
    prompt, tokens = max(pairs, key=lambda pair: (pair[1], pair[0]))
    link = min(fleet.shape.link_bytes_per_s, preset.reserved_nodes * preset.reserved.link_bytes_per_s)
    return StepDemand(
        work=work_of(lengths),
        reserved_rate=fleet.reserved.work_rate * preset.reserved_engines,
        train_s=train_s(preset, pairs) - preset.calibration.micro_batch_s,
        fixed_s=preset.assumptions.optimizer_s + preset.assumptions.gather_s,
        longest_s=min(alone_s(engine, prompt, tokens) for engine in (fleet.engine, fleet.reserved)),
        pull_s=preset.model.weight_bytes / link,
    )


def _row(
    step: int,
    start: float,
    seconds: float,
    lengths: StepLengths,
    demand: StepDemand,
    instance_s: float,
    usd: float,
) -> StepRow:
    return StepRow(
        step=step,
        started_s=start,
        seconds=seconds,
        tokens=sum(lengths.tokens),
        t_seed_s=0.0,
        seeded_s=max(0.0, seconds - demand.train_s - demand.fixed_s),
        wait_s=0.0,
        train_s=demand.train_s,
        spot_instances=instance_s / seconds,
        useful_instances=0,
        longest_tokens=max(lengths.tokens),
        usd=usd,
        migrations=0,
        tokens_redone=0,
    )
