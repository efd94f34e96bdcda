"""The market's plan: the same seed means the same market, notices are an exact share, traces are strict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlboost_providers.local.market_plan import SHORTEST_LIFE, Presence, SeededPlan, TracePlan, plan_for
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Market


def seeded(seed: int = 7, **options) -> SeededPlan:
    plan = plan_for(Market(seed=seed, **options), 3, Path("unused"))
    assert isinstance(plan, SeededPlan)
    return plan


def trace(tmp_path: Path, text: str, **options) -> TracePlan:
    (tmp_path / "trace.csv").write_text(text)
    plan = plan_for(Market(trace="trace.csv", **options), 3, tmp_path)
    assert isinstance(plan, TracePlan)
    return plan


def test_the_same_seed_gives_the_same_lives_in_any_order():
    lives = [(node, life) for node in seeded().nodes for life in range(4)]
    forward = {key: seeded().lifetime_s(*key) for key in lives}
    plan = seeded()
    backward = {key: plan.lifetime_s(*key) for key in reversed(lives)}
    assert forward == backward
    assert len(set(forward.values())) == len(lives)
    assert forward != {key: seeded(seed=8).lifetime_s(*key) for key in lives}


def test_lifetimes_and_absences_have_their_means_and_every_machine_gets_a_chance():
    plan = seeded(mean_lifetime_s=60.0, mean_absence_s=10.0)
    lifetimes = [plan.lifetime_s("node-0", life) for life in range(4000)]
    absences = [plan.absence_s("node-0", life) for life in range(4000)]
    assert min(lifetimes) >= 60.0 * SHORTEST_LIFE
    assert sum(lifetimes) / 4000 == pytest.approx(60.0, rel=0.05)
    assert sum(absences) / 4000 == pytest.approx(10.0, rel=0.05)


def test_a_life_counts_from_its_own_launch_and_absence_follows_its_end():
    plan = seeded()
    reclaim = plan.reclaim("node-1", 2, launched_at=1000.0, started_at=5.0)
    assert reclaim.at == 1000.0 + plan.lifetime_s("node-1", 2)
    back_at = plan.available_from("node-1", 3, reclaimed_at=1100.0, now=1100.0, started_at=5.0)
    assert back_at == 1100.0 + plan.absence_s("node-1", 2)
    assert plan.available_from("node-1", 3, reclaimed_at=None, now=1100.0, started_at=5.0) == 1100.0


@pytest.mark.parametrize(
    ("fraction", "announced"),
    [
        (0.0, []),
        (0.2, [5, 10, 15, 20]),
        (0.3, [4, 7, 10, 14, 17, 20]),
        (0.5, list(range(2, 21, 2))),
        (1.0, list(range(1, 21))),
    ],
)
def test_exactly_the_asked_share_of_reclaims_is_announced(fraction, announced):
    plan = seeded(notice_fraction=fraction, notice_s=5.0)
    notices = {number: plan.notice_s(number) for number in range(1, 21)}
    assert [number for number, seconds in notices.items() if seconds == 5.0] == announced
    assert all(notices[number] is None for number in notices if number not in announced)


def test_a_trace_is_read_relative_to_its_first_row(tmp_path):
    plan = trace(tmp_path, "# recorded\n60000,add,a\n60000,add,b\n\n90000,remove,a,2.5\n120000,add,a\n")
    assert plan.nodes == ("a", "b")
    assert plan.presences == {
        "a": (Presence(0.0, 30.0, 2.5), Presence(60.0, math.inf)),
        "b": (Presence(0.0, math.inf),),
    }


def test_a_trace_takes_and_gives_at_its_own_times(tmp_path):
    plan = trace(tmp_path, "0,add,a\n30000,remove,a\n60000,add,a\n90000,remove,a\n")
    reclaim = plan.reclaim("a", 0, launched_at=1010.0, started_at=1000.0)
    assert reclaim is not None
    assert (reclaim.at, reclaim.notice_s) == (1030.0, None)
    assert plan.available_from("a", 1, 1030.0, now=1031.0, started_at=1000.0) == 1060.0
    later = plan.reclaim("a", 1, launched_at=1070.0, started_at=1000.0)
    assert later is not None
    assert later.at == 1090.0
    assert plan.available_from("a", 2, 1090.0, now=1090.0, started_at=1000.0) is None


def test_a_trace_says_what_is_announced_or_leaves_it_to_the_share(tmp_path):
    rows = "0,add,a\n0,add,b\n30000,remove,a{notice}\n60000,remove,b\n"
    silent = trace(tmp_path, rows.format(notice=""))
    assert [presences[0].notice_s for presences in silent.presences.values()] == [None, None]
    telling = trace(tmp_path, rows.format(notice=",2.5"))
    assert [presences[0].notice_s for presences in telling.presences.values()] == [2.5, 0.0]


def test_a_bad_trace_is_refused_by_line_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError) as caught:
        trace(tmp_path, "0,add,a\n1,remove,b\n")
    assert caught.value.problem == f"{tmp_path}/trace.csv:2: `b` is removed but never came"
    assert caught.value.remedy
