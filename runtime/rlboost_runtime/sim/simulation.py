"""One policy over one trace: builds the world, runs it, sums up."""

from __future__ import annotations

from collections.abc import Callable

from rlboost_runtime.sim.oracle import simulate_oracle
from rlboost_runtime.sim.policies import ORACLE, Switches, policy_setup
from rlboost_runtime.sim.presets import Preset
from rlboost_runtime.sim.result import SimResult
from rlboost_runtime.sim.world import Watch, World
from rlboost_runtime.traces import Trace


def simulate(
    preset: Preset,
    trace: Trace,
    policy: str,
    *,
    seed: int,
    hours: float,
    max_steps: int | None = None,
    switches: Switches | None = None,
    progress: Callable[[float], None] | None = None,
    watch: Watch | None = None,
) -> SimResult:
    """Simulate `hours` of a policy on a trace, or `max_steps` if they take less; at least one step is
    finished, even if it takes longer.

    `seed` decides the responses' lengths, the same for every policy. `progress` receives the simulated
    seconds, `watch` every event and the core's commands. After the trace's end its last nodes stay. Raises
    `ValueError` for an unknown policy and for a model that its machines cannot hold.
    """
    if policy == ORACLE:
        return simulate_oracle(preset, trace, seed, hours)
    setup = policy_setup(policy, preset, Switches() if switches is None else switches)
    end_s = hours * 3600.0
    world = World(preset, trace, setup, seed, watch=watch)
    world.run(end_s, max_steps, progress)
    return _summed_up(world, preset, trace, policy, seed, hours)


def _summed_up(world: World, preset: Preset, trace: Trace, policy: str, seed: int, hours: float) -> SimResult:
    rows = tuple(world.recorder.rows)
    seconds = rows[-1].started_s + rows[-1].seconds
    tokens, usd = sum(row.tokens for row in rows), sum(row.usd for row in rows)
    return SimResult(
        preset=preset.name,
        trace=trace.name,
        policy=policy,
        seed=seed,
        hours=hours,
        tokens_per_s=tokens / seconds,
        usd_per_hour=3600.0 * usd / seconds,
        tokens_per_usd=tokens / usd,
        steps=len(rows),
        preemptions=len(world.recorder.kills),
        tokens_lost=world.tokens_lost(),
        mean_spot_machines=world.mean_spot_machines,
        rows=rows,
        timeline=tuple(world.recorder.intervals),
        throughput=world.recorder.throughput(),
        kills=tuple(world.recorder.kills),
        events=world.num_events,
        commands_digest=world.digest,
        overheads_s={
            "hand-over": world.recorder.reserved_s("hand-over", seconds),
            "repeated prefill": world.repeated_prefill_s(),
        },
    )
