"""A simulation with the rates that a run measured in the place of those that are assumed: pure.

The model stays the simulator's; a run only says how fast its parts are. `decode`: the reserved engines'
tokens per second while they generate with full batches, else a spot instance's over its whole rollout.
`train`: seconds per trained token. What a step takes beside rollout and training is its publication's time.
Boots, version sizes and the responses' lengths are taken as measured.

Spot engines may be slower than the reserved ones by what no ledger tells: they share cores, links or caches.
`spot_pace` finds by how much: the former run is simulated until its steps last as long as measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlboost_cli.simulation.rates import FIRST_STEPS_LEFT_OUT, Rates, makes_like_responses
from rlboost_cli.simulation.runs import OURS
from rlboost_runtime.job import Job
from rlboost_runtime.sim import simulate
from rlboost_runtime.sim.engine_model import engine_speed
from rlboost_runtime.sim.presets import Preset
from rlboost_runtime.sim.trainer_model import MAX_SHARE, train_s
from rlboost_runtime.traces import Trace

TRIES = 4
CLOSE = 0.02
"""Share of a step's time by which the simulated step may differ from the measured one."""
SLOWEST, FASTEST = 0.1, 4.0
"""Bounds of a spot engine's pace: what lies beyond has another reason than its speed."""
FEWEST_STEPS, MOST_RESPONSES = 4, 7_000
"""Simulated for one pace: about a second of a core."""
DECILES = 2 * 1.2816
"""From the first to the ninth decile of a normal distribution, in standard deviations."""


def calibrated(preset: Preset, job: Job, rates: Rates, former: Job) -> Preset:
    """Return the preset of `job` at the rates that the run of its like `former` measured."""
    found = _lengths(preset, rates) if makes_like_responses(job, former) else preset
    return _training(_decoding(_other(found, rates), rates), rates)


def with_engine_pace(preset: Preset, pace: float) -> Preset:
    """Return the preset whose spot engines run at `pace` times the calibrated speed."""
    return replace(preset, spot=tuple(replace(shape, engine_pace=pace) for shape in preset.spot))


def spot_pace(preset: Preset, market: Trace, rates: Rates) -> float:
    """Return the pace of spot engines at which a simulated step lasts as long as measured, within `CLOSE`.

    `preset` and `market` are those that the former run had. First steps are left out as in `rates`.
    """
    steps = min(rates.num_steps, max(FEWEST_STEPS, MOST_RESPONSES // preset.workload.responses))
    pace = 1.0
    for _ in range(TRIES):
        run = with_engine_pace(preset, pace)
        found = simulate(run, market, OURS, seed=0, hours=1e6, max_steps=FIRST_STEPS_LEFT_OUT + steps)
        ratio = (found.seconds - found.rows[FIRST_STEPS_LEFT_OUT].started_s) / steps / rates.step_s
        if abs(ratio - 1.0) <= CLOSE:
            break
        pace = min(max(pace * ratio, SLOWEST), FASTEST)
    return pace


def _lengths(preset: Preset, rates: Rates) -> Preset:
    known = preset.assumptions
    spread = rates.length_spread
    sigma = known.length_sigma if spread is None else math.log(max(1.0, spread)) / DECILES
    limit = preset.workload.max_response_tokens
    median = min(rates.tokens_per_response / math.exp(sigma**2 / 2), limit)
    found = replace(preset, assumptions=replace(known, length_median=median, length_sigma=sigma))
    turns, measured = preset.workload.turns, rates.turns
    if turns is None or measured is None:
        return found
    turns = replace(turns, mean=measured.mean, told_tokens=measured.told_tokens, pause_s=measured.pause_s)
    return replace(found, workload=replace(preset.workload, turns=turns))


def _other(preset: Preset, rates: Rates) -> Preset:
    known = preset.assumptions
    wire_share = rates.weight_bytes / preset.model.weight_bytes if rates.weight_bytes else known.wire_share
    return replace(
        preset,
        assumptions=replace(
            known,
            boot_s=known.boot_s if rates.boot_s is None else rates.boot_s,
            wire_share=wire_share,
            optimizer_s=0.0,
            gather_s=rates.overhead_s,
        ),
    )


def _decoding(preset: Preset, rates: Rates) -> Preset:
    """Return the preset whose engines generate as fast as measured, at the batch that they had."""
    known, calibration = preset.assumptions, preset.calibration
    speed = engine_speed(
        preset.model, preset.reserved, known.reserved_memory_share, preset.calibration, known
    )
    engines = preset.reserved_engines if rates.reserved_tokens_per_s else 1
    measured = rates.reserved_tokens_per_s or rates.spot_tokens_per_s
    if not measured or not engines:
        return preset
    batch = min(speed.max_running, max(1, preset.workload.responses // engines))
    context = preset.workload.prompt_tokens + known.length_median / 2
    step_s = speed.base_s(batch) + speed.kv_token_s * batch * context
    faster = measured * step_s / (engines * batch)
    return replace(
        preset,
        calibration=replace(
            calibration,
            decode_step_s=calibration.decode_step_s / faster,
            decode_bandwidth_share=calibration.decode_bandwidth_share * faster,
        ),
        assumptions=replace(known, decode_flops_share=known.decode_flops_share * faster),
    )


def _training(preset: Preset, rates: Rates) -> Preset:
    """Return the preset whose trainer takes as long per token as measured."""
    if not rates.train_s_per_token:
        return preset
    workload, known = preset.workload, preset.assumptions
    most = max(known.micro_batch_responses, int(MAX_SHARE * workload.responses))
    tokens = max(1, round(min(known.length_median * math.exp(known.length_sigma**2 / 2), 1e9)))
    assumed_s = train_s(preset, [(workload.prompt_tokens, tokens)] * most)
    slower = rates.train_s_per_token * tokens * most / assumed_s
    calibration = preset.calibration
    return replace(
        preset,
        calibration=replace(
            calibration,
            train_mfu=calibration.train_mfu / slower,
            micro_batch_s=calibration.micro_batch_s * slower,
        ),
    )
