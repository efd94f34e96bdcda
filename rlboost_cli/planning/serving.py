"""What a served model costs at several loads, simulated on its machines and market; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlboost_cli.simulation.job import simulated_job
from rlboost_cli.simulation.market import market_of
from rlboost_runtime.coordinator.tunables import autoscaling_of
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.sim import Preset
from rlboost_runtime.sim.engine_model import EngineSpeed, engine_speed
from rlboost_runtime.sim.presets import MachineShape
from rlboost_runtime.sim.serving import ServingResult, Traffic, simulate_serving

SHARES = (0.1, 0.5, 0.9)
"""Loads, as shares of what the whole fleet generates."""
FEWEST_REQUESTS, MOST_REQUESTS = 1_000, 8_000
"""Of one simulation: some two seconds of a core at most."""
BOOTS = 6
"""Boots of a machine that a simulation lasts at least."""


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """One load, simulated."""

    share: float
    tokens_per_s: float
    requests_per_s: float
    usd_per_hour: float
    usd_per_million_tokens: float | None
    mean_spot_machines: float
    preemptions: int
    p50_wait_s: float
    p99_wait_s: float
    """From a request's arrival to its first engine."""


@dataclass(frozen=True, slots=True)
class ServingForecast:
    """A served model at several loads."""

    loads: tuple[LoadForecast, ...]
    notes: tuple[str, ...]


def project_serving(job: Job, folder: Path) -> ServingForecast:
    """Return what `job`, whose files are in `folder`, costs at several loads. Raises `ConfigError` where its
    model or a GPU is unknown to the simulator, or its model does not fit."""
    found = simulated_job(job, folder)
    mean_tokens = job.algorithm.max_response_tokens / 2
    preset = replace(found.preset, max_spot_instances=max(1, found.preset.max_spot_instances))
    try:
        full = _full_tokens_per_s(job, preset, mean_tokens)
        loads = tuple(_load(job, folder, preset, share, share * full, mean_tokens) for share in SHARES)
    except ValueError as problem:
        raise ConfigError(f"{job.name} cannot be simulated: {problem}", "take larger GPUs") from None
    notes = (
        f"requests arrive at random; responses have {mean_tokens:,.0f} tokens in the mean (half the limit)"
        f" and prompts {job.algorithm.max_prompt_tokens // 2:,}",
        *(note for note in found.notes if "response lengths" not in note and "first step" not in note),
    )
    return ServingForecast(loads, notes)


def _load(
    job: Job, folder: Path, preset: Preset, share: float, tokens_per_s: float, mean_tokens: float
) -> LoadForecast:
    requests_per_s = tokens_per_s / mean_tokens
    seconds = max(FEWEST_REQUESTS / requests_per_s, BOOTS * preset.assumptions.boot_s)
    seconds = min(seconds, MOST_REQUESTS / requests_per_s)
    traffic = Traffic(
        requests_per_s, mean_tokens=mean_tokens, prompt_tokens=max(1, job.algorithm.max_prompt_tokens // 2)
    )
    rule = autoscaling_of(job, job.rollout.spot.max_instances)
    result = simulate_serving(preset, market_of(job, folder, 0), rule, traffic, seed=0, hours=seconds / 3600)
    return _forecast(share, traffic, result)


def _forecast(share: float, traffic: Traffic, result: ServingResult) -> LoadForecast:
    return LoadForecast(
        share=share,
        tokens_per_s=result.tokens / result.seconds,
        requests_per_s=traffic.requests_per_s,
        usd_per_hour=3600.0 * result.usd / result.seconds,
        usd_per_million_tokens=result.usd_per_million_tokens,
        mean_spot_machines=result.mean_spot_machines,
        preemptions=result.preemptions,
        p50_wait_s=result.wait_s(0.5),
        p99_wait_s=result.wait_s(0.99),
    )


def _full_tokens_per_s(job: Job, preset: Preset, mean_tokens: float) -> float:
    """Return what the whole fleet decodes per second, every engine as full as scaling fills it."""
    context = job.algorithm.max_prompt_tokens / 2 + mean_tokens
    shares = preset.assumptions

    def engine(shape: MachineShape, memory_share: float) -> float:
        speed = engine_speed(preset.model, shape, memory_share, preset.calibration, preset.assumptions)
        return _tokens_per_s(speed, context)

    spot = job.rollout.spot.max_instances * preset.best_spot.engines
    return preset.reserved_engines * engine(preset.reserved, shares.reserved_memory_share) + spot * engine(
        preset.best_spot, shares.spot_memory_share
    )


def _tokens_per_s(speed: EngineSpeed, context: float) -> float:
    batch = max(1, min(speed.max_running, int(speed.kv_tokens / context)))
    return batch / (speed.base_s(batch) + speed.kv_token_s * batch * context)
