"""Warnings begin at their limit, not below it, end by the milder one, and neither flicker nor repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from rlboost_runtime.health import limits
from rlboost_runtime.health.monitor import FleetFacts, HealthMonitor
from rlboost_runtime.health.rules import FLEET_KINDS, step_rules
from rlboost_runtime.protocol.status import CurriculumStatus, EvaluationStatus

HEALTHY = {
    "reward_mean": 0.4,
    "reward_std": 0.4,
    "zero_variance_share": 0.2,
    "truncated_share": 0.05,
    "mismatch_tokens": 1000.0,
    "mismatch_kl": 0.001,
    "mismatch_abs_max": 1.0,
    "lag_tokens": 1000.0,
    "lag_kl": 0.01,
    "entropy": 1.0,
    "grad_norm": 0.5,
    "minibatches_not_finite": 0.0,
    "train_wait_s": 1.0,
    "step_s": 10.0,
}
REFERENCE_STEPS = max(limits.ENTROPY_FIRST_STEPS, limits.GRAD_NORM_FIRST_STEPS)
STEPS = limits.STEPS_IN_A_ROW
CASES = [
    # code, (beyond, at, short of its limit), between the limits, on the good side of the milder one
    ("reward_zero", "reward_mean", (0.0, 0.01, 0.011), 0.015, 0.03),
    ("reward_one", "reward_mean", (1.0, 0.995, 0.985), 0.985, 0.95),
    ("zero_variance", "zero_variance_share", (1.0, 0.8, 0.79), 0.75, 0.6),
    ("truncated", "truncated_share", (1.0, 0.3, 0.29), 0.25, 0.1),
    ("mismatch_kl", "mismatch_kl", (0.1, 0.01, 0.0099), 0.007, 0.001),
    ("mismatch_token", "mismatch_abs_max", (20.0, 8.0, 7.9), 7.0, 5.0),
    ("lag_kl", "lag_kl", (1.0, 0.1, 0.099), 0.07, 0.01),
    ("entropy_collapse", "entropy", (0.01, 0.1, 0.11), 0.12, 0.5),
    ("grad_exploding", "grad_norm", (50.0, 5.0, 4.9), 4.0, 1.0),
    ("idle_reserved_gpu", "train_wait_s", (9.0, 5.0, 4.9), 4.5, 1.0),
]


class Driven:
    """A monitor that has seen healthy steps, and what it reported since."""

    def __init__(self) -> None:
        self.monitor = HealthMonitor((n, HEALTHY) for n in range(REFERENCE_STEPS))
        self.step = REFERENCE_STEPS

    def steps(self, count: int, **changes: float) -> list[tuple[str, bool]]:
        found = []
        for _ in range(count):
            row = {**HEALTHY, **({"reward_std": 0.0} if "reward_mean" in changes else {}), **changes}
            found += [(c.warning.code, c.has_begun) for c in self.monitor.trained(self.step, row)]
            self.step += 1
        return found

    @property
    def codes(self) -> list[str]:
        return [warning.code for warning in self.monitor.active]


def test_healthy_steps_warn_of_nothing() -> None:
    driven = Driven()
    assert driven.steps(20) == []
    assert driven.codes == []


@pytest.mark.parametrize(("code", "name", "values", "between", "good"), CASES, ids=[c[0] for c in CASES])
def test_a_warning_begins_at_its_limit_and_ends_by_the_milder_one(
    code: str, name: str, values: tuple[float, float, float], between: float, good: float
) -> None:
    beyond, at, short = values
    assert Driven().steps(2 * STEPS, **{name: short}) == []
    assert Driven().steps(STEPS, **{name: beyond}) == [(code, True)]
    driven = Driven()
    assert driven.steps(STEPS - 1, **{name: at}) == []
    assert driven.steps(1, **{name: at}) == [(code, True)]
    assert driven.codes == [code]
    assert driven.steps(10, **{name: at}) == [], "it is not repeated"
    assert driven.steps(10, **{name: between}) == [], "between the limits nothing changes"
    assert driven.steps(STEPS - 1, **{name: good}) == []
    assert driven.steps(1, **{name: good}) == [(code, False)]
    assert driven.codes == []


@pytest.mark.parametrize(("code", "name", "values", "between", "good"), CASES, ids=[c[0] for c in CASES])
def test_a_value_that_goes_up_and_down_neither_begins_nor_ends_one(
    code: str, name: str, values: tuple[float, float, float], between: float, good: float
) -> None:
    driven = Driven()
    for _ in range(5):
        assert driven.steps(STEPS - 1, **{name: values[1]}) == []
        assert driven.steps(1, **{name: between}) == []
    driven.steps(STEPS, **{name: values[1]})
    for _ in range(5):
        assert driven.steps(STEPS - 1, **{name: good}) == []
        assert driven.steps(1, **{name: values[1]}) == []
    assert driven.codes == [code]


def test_a_gradient_that_is_not_finite_warns_at_once() -> None:
    for changes in ({"minibatches_not_finite": 1.0}, {"grad_norm": math.nan}, {"grad_norm": math.inf}):
        driven = Driven()
        assert driven.steps(1, **changes) == [("grad_not_finite", True)]
        assert driven.steps(limits.NOT_FINITE_ENDS_AFTER - 1) == []
        assert driven.steps(1) == [("grad_not_finite", False)]


def test_rewards_of_both_signs_with_mean_zero_are_not_flat() -> None:
    driven = Driven()
    assert driven.steps(10, reward_mean=0.0, reward_std=1.0) == []
    no_spread = {"reward_mean": 0.0, "step_s": 10.0}
    monitor = HealthMonitor((n, no_spread) for n in range(10))
    assert monitor.active == []


def test_flat_rewards_are_one_warning_not_two() -> None:
    driven = Driven()
    assert driven.steps(10, reward_mean=0.0, zero_variance_share=1.0) == [("reward_zero", True)]


def test_a_gradient_that_grows_below_the_clip_is_not_reported() -> None:
    rows = [{**HEALTHY, "grad_norm": norm} for norm in [0.01] * 5 + [0.9] * 10]
    assert HealthMonitor(enumerate(rows)).active == []


def test_entropy_that_was_nil_from_the_start_has_not_collapsed() -> None:
    rows = [{**HEALTHY, "entropy": e} for e in [0.005] * 5 + [0.0001] * 10]
    assert HealthMonitor(enumerate(rows)).active == []


def test_missing_metrics_and_steps_without_tokens_change_nothing() -> None:
    driven = Driven()
    assert HealthMonitor((n, {"step": float(n)}) for n in range(20)).active == []
    assert driven.steps(10, mismatch_tokens=0.0, mismatch_kl=9.0) == []
    assert driven.steps(10, lag_tokens=0.0, lag_kl=9.0) == []
    assert driven.steps(10, mismatch_kl=math.nan, truncated_share=math.nan, grad_norm=0.0) == []


def test_the_curriculum_of_the_last_step_is_kept() -> None:
    assert HealthMonitor([(0, HEALTHY)]).curriculum is None
    row = {"prompts_resting_solved": 2.0, "prompts_resting_unsolved": 1.0, "prompts_passed_over": 4.0}
    assert HealthMonitor([(0, HEALTHY | row)]).curriculum == CurriculumStatus(2, 1, 4)


def test_a_restart_keeps_warnings_and_does_not_report_them_again() -> None:
    rows = [(n, {**HEALTHY, "truncated_share": 0.9}) for n in range(6)]
    monitor = HealthMonitor(rows)
    assert [w.code for w in monitor.active] == ["truncated"]
    assert monitor.trained(6, rows[0][1]) == []


def test_a_warning_has_value_limit_reason_and_advice() -> None:
    driven = Driven()
    driven.steps(STEPS, truncated_share=0.9)
    (warning,) = driven.monitor.active
    assert warning.text == "Length limit reached by 90% of responses since step 6 (limit 30%)."
    assert (warning.value, warning.limit, warning.since_step) == (0.9, 0.3, REFERENCE_STEPS + 1)
    assert warning.reason.endswith(".")
    assert "max_response_tokens" in warning.advice
    driven.steps(1, truncated_share=0.5)
    assert "50%" in driven.monitor.active[0].text, "it shows the newest value"
    assert driven.monitor.active[0].since_step == REFERENCE_STEPS + 1


def test_every_kind_is_one_plain_sentence_that_fits_a_line() -> None:
    kinds = [*(rule.kind for rule in step_rules()), *FLEET_KINDS]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        text = kind.text.format(value=0.123, limit=kind.begins, since=123, minutes=15, count=64)
        assert len(text) <= 70, text  # 80 columns less the label and the last one
        assert text.endswith(".")
        assert kind.reason.endswith(".")
        assert kind.advice.endswith(".")


# --- the fleet and the bill --------------------------------------------------------------------------------


def facts(now: float, connected: int = 4, **changes: Any) -> FleetFacts:
    return FleetFacts(
        **{"now": now, "steps": 3, "connected": connected, "useful": 8, "tokens": int(now)} | changes
    )


def looks(
    monitor: HealthMonitor, until: float, make: Callable[[float], FleetFacts], since: float = 0.0
) -> list[str]:
    """What is reported between two moments, one look per 10 s."""
    found: list[str] = []
    now = since
    while now <= until:
        found += [change.text for change in monitor.look(make(now))]
        now += 10.0
    return found


def test_a_fleet_that_stays_at_half_is_reported_once_after_long() -> None:
    monitor = HealthMonitor()
    long_s = limits.FLEET_LONG_S
    assert looks(monitor, long_s - 10, facts) == []
    (text,) = looks(monitor, 3 * long_s, facts, since=long_s)
    assert "Spot instances at 50% of the useful number for 15 min (limit 50%)." in text
    assert [w.code for w in monitor.active] == ["fleet_too_small"]
    later = 3 * long_s + 10
    assert looks(monitor, later + 600, lambda now: facts(now, 5), since=later) == [], "5 of 8: between"
    later += 610
    assert looks(monitor, later + 50, lambda now: facts(now, 6), since=later) == []
    assert looks(monitor, later + 70, lambda now: facts(now, 6), since=later + 60) == [
        "warning fleet_too_small has ended"
    ]
    assert monitor.active == []


def test_a_fleet_above_half_or_short_for_a_while_is_not_reported() -> None:
    assert looks(HealthMonitor(), 5000, lambda now: facts(now, 5)) == []
    assert looks(HealthMonitor(), 5000, lambda now: facts(now, 2 if now % 800 else 8)) == []
    assert looks(HealthMonitor(), 5000, lambda now: facts(now, 0, useful=0)) == []
    assert looks(HealthMonitor(), 5000, lambda now: facts(now, 0, is_rolling_out=False)) == []


@pytest.mark.parametrize(("saving", "warns"), [(-0.5, True), (0.0, True), (0.001, False), (None, False)])
def test_spot_that_does_not_pay_is_reported_from_the_tenth_step(saving: float | None, warns: bool) -> None:
    monitor = HealthMonitor()
    begun: list[int] = []
    for step in range(1, 30):
        for _ in range(3):  # several looks per step count once
            changes = monitor.look(facts(0.0, 8, steps=step, saving_fraction=saving))
            begun += [step for change in changes if change.has_begun]
    assert begun == ([limits.SAVING_FROM_STEP + STEPS - 1] if warns else [])


def test_spot_that_pays_again_ends_the_warning() -> None:
    monitor = HealthMonitor()
    savings = [-0.1] * 15 + [0.01] * 5 + [0.03] * 3
    texts: list[str] = []
    for step, saving in enumerate(savings, 1):
        looked = monitor.look(facts(0.0, 8, steps=step, saving_fraction=saving))
        texts += [f"{step} {change.kind}" for change in looked]
    assert texts == ["12 warning", "23 recovered"]


def test_evaluations_are_remembered() -> None:
    monitor = HealthMonitor()
    assert monitor.evaluations == {}
    first = {"eval_reward_mean": 0.1, "eval_reward_best": 0.2, "eval_aime-24_pass_at_8": 0.5}
    monitor.trained(0, first | {"eval_updates": 0.0})
    monitor.trained(1, {})
    monitor.trained(2, {"eval_reward_mean": 0.3, "eval_updates": 2.0})
    monitor.evaluated(3, {"eval_aime-24_pass_at_8": 0.75, "eval_updates": 3.0})
    before = {"reward_mean": 0.1, "reward_best": 0.2}
    assert list(monitor.evaluations.values()) == [
        EvaluationStatus("", 3, 2, {"reward_mean": 0.3}, before),
        EvaluationStatus("aime-24", 3, 3, {"pass_at_8": 0.75}, {"pass_at_8": 0.5}),
    ]


def test_a_fleet_that_is_half_lost_is_a_storm_once_and_usual_losses_are_none() -> None:
    calm = looks(HealthMonitor(), 7200, lambda now: facts(now, 8, lost=int(now / 600)))
    assert calm == [], "one of eight every ten minutes"
    assert looks(HealthMonitor(), 800, lambda now: facts(now, 0, lost=2 * (now > 100))) == [], "too few"
    assert looks(HealthMonitor(), 60, lambda now: facts(now, 0, lost=40)) == [], "lost before the first look"
    monitor = HealthMonitor()
    (text,) = looks(monitor, 300, lambda now: facts(now, 4, lost=4 * (now > 100)))
    assert "4 spot instances (50%) lost within 10 min (limit 50%)." in text
    assert looks(monitor, 310, lambda now: facts(now, 3, lost=7), since=310) == []
    (storm,) = monitor.active
    assert "7 spot instances (70%) lost" in storm.text, "it says how things are now"
    assert looks(monitor, 700, lambda now: facts(now, 14, lost=7), since=320) == [], "7 of 21: between"
    assert looks(monitor, 900, lambda now: facts(now, 14, lost=7), since=710) == [
        "warning preemption_storm has ended"
    ]


def test_machines_that_the_jobs_own_market_takes_are_no_storm() -> None:
    monitor = HealthMonitor(is_market_ours=True)
    assert looks(monitor, 300, lambda now: facts(now, 4, lost=9 * (now > 100))) == []


def test_no_token_for_half_an_hour_is_stuck_unless_none_is_due() -> None:
    def silent(now: float, **changes: Any) -> FleetFacts:
        return facts(now, 8, tokens=7, **changes)

    monitor = HealthMonitor()
    (text,) = looks(monitor, 3000, silent)
    assert "Stuck: no new token or step for 30 min (limit 30 min)." in text
    assert looks(monitor, 3010, lambda now: facts(now, 8), since=3010) == ["warning stuck has ended"]
    assert looks(HealthMonitor(), 9000, lambda now: silent(now, is_progress_due=False)) == []
    slow = HealthMonitor([(0, {"step_s": 2000.0})])
    assert looks(slow, 5990, silent) == [], "its steps take that long"
    assert [w.code for w in slow.active] == []
    assert "limit 100 min" in looks(slow, 6010, silent, since=6000)[0]


def test_a_copy_of_the_head_that_is_a_minute_old_is_reported_until_it_is_young_again() -> None:
    monitor = HealthMonitor()
    assert monitor.look(facts(0.0, 8, backup_lag_s=59.0)) == []
    (begun,) = monitor.look(facts(1.0, 8, backup_lag_s=61.0, backup_problem="403 Forbidden"))
    assert (begun.kind, begun.warning.code) == ("warning", "backup")
    assert begun.warning.text.endswith("is 61 s old (limit 60 s). Last error: 403 Forbidden")
    assert monitor.look(facts(2.0, 8, backup_lag_s=31.0)) == []
    assert [warning.value for warning in monitor.active] == [31.0]
    (ended,) = monitor.look(facts(3.0, 8, backup_lag_s=6.0))
    assert ended.kind == "recovered"
    assert monitor.look(facts(4.0, 8, backup_lag_s=None)) == []
