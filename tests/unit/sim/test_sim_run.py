"""Whole simulated runs of a small job: every policy lives through churn; a seed decides everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.sim import POLICIES, Preset, SimResult, Switches, presets, simulate
from rlboost_runtime.sim.faults import Referee
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.responses import draw_lengths
from rlboost_runtime.sim.trainer_model import train_s
from rlboost_runtime.traces import Trace, TraceEvent

HOURS = 0.15


def small() -> Preset:
    known = presets()["paper-8b"]
    assumptions = replace(known.assumptions, length_median=1_500.0, boot_s=10.0)
    workload = Workload(prompts=6, group_size=4, prompt_tokens=100, max_response_tokens=4_000)
    return replace(
        known,
        reserved=replace(known.reserved, usd_per_hour=1e5),  # where time is cheap, fewer machines would do
        workload=workload,
        assumptions=assumptions,
        max_spot_instances=3,
        seeding_initial_s=10.0,
    )


def churn() -> Trace:
    events = [TraceEvent(0.0, f"n{i}", "add") for i in range(3)]
    for start in (70.0, 200.0, 330.0):
        events += [
            TraceEvent(start, "n0", "remove"),
            TraceEvent(start + 5.0, "n1", "notice"),
            TraceEvent(start + 20.0, "n1", "remove"),
            TraceEvent(start + 40.0, "n0", "add"),
            TraceEvent(start + 60.0, "n1", "add"),
        ]
    return Trace("churn", "made for tests", tuple(events), 3_600.0)


def run(policy: str, seed: int = 0, **options: object) -> SimResult:
    return simulate(small(), churn(), policy, seed=seed, hours=HOURS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "oracle"])
def test_every_promise_holds_under_churn(policy: str) -> None:
    referee = Referee()
    result = run(policy, watch=referee)
    assert result.steps >= 3
    assert referee.num_finished >= result.steps * 24
    assert result.preemptions == (0 if policy == "on_demand" else 6)
    assert sum(row.tokens for row in result.rows) == sum(
        sum(draw_lengths(small().workload, small().assumptions, 0, row.step).tokens) for row in result.rows
    )


def ahead(max_staleness: int = 1, *, in_flight: bool = False) -> Preset:
    workload = replace(small().workload, max_staleness=max_staleness, in_flight_updates=in_flight)
    return replace(small(), workload=workload)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "oracle"])
@pytest.mark.parametrize("preset", [ahead(), ahead(2, in_flight=True)], ids=["ahead", "in flight"])
def test_every_promise_holds_under_churn_where_steps_are_asked_for_ahead(policy: str, preset: Preset) -> None:
    referee = Referee()
    result = simulate(preset, churn(), policy, seed=0, hours=HOURS, watch=referee)
    assert result.steps >= 3
    assert [row.step for row in result.rows] == list(range(result.steps))
    assert sum(row.tokens for row in result.rows) == sum(
        sum(draw_lengths(small().workload, small().assumptions, 0, row.step).tokens) for row in result.rows
    )
    assert all(row.seconds > 0 and row.train_s > 0 for row in result.rows)


def test_a_trainer_that_works_ahead_waits_less() -> None:
    known = presets()["paper-8b"]
    stays = Trace("stays", "", tuple(TraceEvent(0.0, f"n{i}", "add") for i in range(4)), 7_200.0)

    def seconds(**workload: object) -> float:
        changed = replace(known, workload=replace(known.workload, **workload))  # type: ignore[arg-type]
        late = Switches(early_passes=False)  # it makes up for a part of the same waits
        rows = simulate(changed, stays, "rlboost", seed=0, hours=1.0, max_steps=7, switches=late).rows[2:]
        return sum(row.seconds for row in rows) / len(rows)

    synchronous = seconds()
    assert seconds(max_staleness=1) < 0.95 * synchronous
    assert seconds(max_staleness=1, in_flight_updates=True) < 0.95 * synchronous


def test_the_same_seed_decides_the_same_and_another_one_does_not() -> None:
    one, again, other = run("paper"), run("paper"), run("paper", seed=1)
    assert one == again
    assert one.commands_digest != other.commands_digest


def test_no_policy_beats_the_oracle_and_spot_machines_help() -> None:
    found = {policy: run(policy).tokens_per_s for policy in POLICIES}
    assert max(found, key=lambda policy: found[policy]) == "oracle"
    assert found["paper"] > 1.1 * found["on_demand"]


def test_only_recompute_throws_received_tokens_away_when_machines_go() -> None:
    kept, redone = run("paper"), run("recompute")
    assert sum(row.tokens_redone for row in kept.rows) == 0
    assert sum(row.tokens_redone for row in redone.rows) > 1_000
    assert kept.tokens_lost < 0.1 * redone.tokens_lost
    without = run("paper", switches=Switches(migration=False))
    assert without.commands_digest == redone.commands_digest


def test_without_seeding_the_reserved_engines_stay_asleep_while_spot_machines_live() -> None:
    steady = Trace("steady", "made for tests", churn().events[:3], 3_600.0)
    with_seeding = simulate(small(), steady, "paper", seed=0, hours=HOURS)
    without = simulate(small(), steady, "paper", seed=0, hours=HOURS, switches=Switches(seeding=False))
    assert all(row.seeded_s > 0 for row in with_seeding.rows)
    assert all(row.seeded_s == 0 for row in without.rows[1:])


def test_synchronised_weights_keep_newcomers_idle_until_the_next_version() -> None:
    pulled, synchronised = run("paper"), run("paper", switches=Switches(pull=False))
    assert synchronised.tokens_per_s < pulled.tokens_per_s


def test_money_and_time_add_up() -> None:
    result = run("paper")
    seconds = sum(row.seconds for row in result.rows)
    reserved = small().reserved_usd_per_hour
    spot = (result.usd_per_hour - reserved) / small().spot[0].usd_per_hour
    assert spot == pytest.approx(result.mean_spot_machines)
    busy = sum(i.end_s - i.start_s for i in result.timeline if i.machine == "reserved")
    assert busy >= seconds - 1e-6
    per_machine: dict[str, float] = {}
    for interval in sorted(result.timeline, key=lambda i: (i.machine, i.start_s)):
        assert interval.start_s >= per_machine.get(interval.machine, 0.0) - 1e-9, "does two things at once"
        per_machine[interval.machine] = interval.end_s


def test_a_version_travels_to_a_machine_once_however_many_engines_it_has() -> None:
    still = Trace("still", "made for tests", (TraceEvent(0.0, "n0", "add"),), 3_600.0)
    preset = replace(small(), egress_usd_per_gb=1.0)
    single = replace(preset.spot[0], gpus=preset.spot[0].tensor_parallel)
    gigabytes = preset.model.weight_bytes / 1e9
    for shape in (single, replace(single, gpus=2 * single.gpus)):
        result = simulate(replace(preset, spot=(shape,)), still, "rlboost", seed=0, hours=HOURS)
        versions = result.bill["egress"] / gigabytes
        assert result.steps - 1 <= versions <= result.steps + 1.01, (
            "one of each, whatever the number of engines"
        )


def test_frozen_weights_travel_to_a_machine_once_and_adapters_with_each_version() -> None:
    still = Trace("still", "made for tests", (TraceEvent(0.0, "n0", "add"),), 3_600.0)
    preset = replace(small(), egress_usd_per_gb=1.0)
    whole = preset.model.weight_bytes
    adapters = replace(preset.assumptions, wire_share=0.01, frozen_bytes=whole)
    result = simulate(replace(preset, assumptions=adapters), still, "rlboost", seed=0, hours=HOURS)
    versions = (result.bill["egress"] - whole / 1e9) / (0.01 * whole / 1e9)
    assert result.steps - 1 <= versions <= result.steps + 1.01


def test_training_seconds_by_hand() -> None:
    preset = small()
    model, calibration = preset.model, preset.calibration
    tokens = 300
    flops = 6 * (2 * model.parameters + 2 * model.hidden * model.layers * tokens) * tokens
    expected = flops / (8 * 989e12 * calibration.train_mfu) + calibration.micro_batch_s
    assert train_s(preset, [(100, 200)]) == pytest.approx(expected)


def test_lengths_depend_on_seed_and_step_alone_and_siblings_resemble_each_other() -> None:
    preset = presets()["paper-8b"]
    lengths = draw_lengths(preset.workload, preset.assumptions, 3, 5)
    assert lengths == draw_lengths(preset.workload, preset.assumptions, 3, 5)
    assert lengths != draw_lengths(preset.workload, preset.assumptions, 3, 6)
    assert len(lengths.tokens) == 1_024
    assert max(lengths.tokens) == 14_336
    assert 6_300 < sum(lengths.tokens) / 1_024 < 7_900
    means = [sum(lengths.tokens[g : g + 8]) / 8 for g in range(0, 1_024, 8)]
    overall = sum(means) / len(means)
    between = sum((m - overall) ** 2 for m in means) / len(means)
    within = sum((t - overall) ** 2 for t in lengths.tokens) / 1_024
    assert between > 2.0 * within / 8, "more alike than strangers"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'; there are on_demand"):
        run("best")
