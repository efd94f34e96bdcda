"""What a person asked to be simulated, checked before anything long begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlboost_cli.simulation.job import simulated_job, turns_in_words
from rlboost_cli.simulation.market import ASSUMED, has_own_market, market_of
from rlboost_cli.simulation.runs import SimulatedMarket, SimulationRequest
from rlboost_cli.simulation.trace_views import cut, trace_of
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.sim import POLICIES, WITHOUT_TURNS, Preset, agent_preset, presets
from rlboost_runtime.traces import PROFILES, Trace, sample_nodes

MAX_SEEDS = 1000
"""More than anybody waits for."""


def simulation_request(
    *,
    job: Path | None,
    preset: str | None,
    trace: str | None,
    window: str | None,
    sample: float,
    seed: int | None,
    seeds: int | None,
    policies: Sequence[str],
    whole_groups: bool = True,
) -> SimulationRequest:
    """Return what the command line of `rlboost simulate` asks for. Raises `ConfigError`."""
    loaded = None if job is None else load_job(job)
    machines, notes = _preset(loaded, job, preset)
    machines = replace(machines, assumptions=replace(machines.assumptions, trains_whole_groups=whole_groups))
    if whole_groups:
        notes = (*notes, "micro-batches are of whole groups, as in live runs")
    all_seeds, wanted = _seeds(seed, seeds), _policies(policies, machines)
    if not 0 < sample <= 1:
        raise ConfigError(f"--sample {sample:g} is not a share of nodes", "write a share such as 0.5")
    own = loaded if trace is None and loaded is not None and has_own_market(loaded) else None
    named = trace or ASSUMED
    different = all_seeds if own is not None or named in PROFILES else all_seeds[:1]
    whole = {each: _trace(own, job, named, window, each) for each in different}
    first = whole[all_seeds[0]]
    return SimulationRequest(
        preset=machines,
        whole=first,
        start_h=float(window.partition(":")[0] or 0) if window else 0.0,
        sample=sample,
        markets=tuple(
            SimulatedMarket(each, sample_nodes(whole.get(each, first), sample, each)) for each in all_seeds
        ),
        policies=wanted,
        notes=notes,
    )


def _trace(own: Job | None, job: Path | None, named: str, window: str | None, seed: int) -> Trace:
    if own is None or job is None:
        return trace_of(named, window, seed)
    whole = market_of(own, job.parent, seed)
    return whole if window is None else cut(whole, window)


def _preset(loaded: Job | None, job: Path | None, preset: str | None) -> tuple[Preset, tuple[str, ...]]:
    agent = agent_preset()
    known = presets() | {agent.name: agent}
    names = ", ".join(known)
    if (job is None) == (preset is None):
        given = "neither a job file nor --preset" if job is None else "both a job file and --preset"
        raise ConfigError(f"{given} was given", f"give a job file, or one of --preset {names}")
    if loaded is not None and job is not None:
        found = simulated_job(loaded, job.parent)
        return found.preset, found.notes
    if preset not in known:
        raise ConfigError(f"no preset is called `{preset}`", f"choose one of {names}")
    turns = known[preset].workload.turns
    return known[preset], () if turns is None else (turns_in_words(turns),)


def _seeds(seed: int | None, seeds: int | None) -> tuple[int, ...]:
    if seed is not None and seeds is not None:
        raise ConfigError("both --seed and --seeds were given", "leave one of them out")
    if seeds is None:
        return (seed or 0,)
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds {seeds} cannot be used", f"give 1 to {MAX_SEEDS}")
    return tuple(range(seeds))


def _policies(named: Sequence[str], preset: Preset) -> tuple[str, ...]:
    unknown = [name for name in named if name not in POLICIES]
    if unknown:
        raise ConfigError(f"no policy is called `{unknown[0]}`", f"choose of {', '.join(POLICIES)}")
    if preset.workload.turns is None:
        return tuple(dict.fromkeys(named)) or tuple(POLICIES)
    without = [name for name in named if name in WITHOUT_TURNS]
    if without:
        raise ConfigError(f"--policy {without[0]} has no turns, but {preset.name} has", "leave it out")
    return tuple(dict.fromkeys(named)) or tuple(name for name in POLICIES if name not in WITHOUT_TURNS)
