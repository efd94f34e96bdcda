from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rlboost_runtime.core.base.messages import (
    RLBOOST,
    Abort,
    Heartbeat,
    InstanceLeft,
    LossCause,
    Released,
    ReleaseReason,
)
from rlboost_runtime.core.dispatch import dispatcher as dispatch


def test_responses_go_to_the_emptiest_instance(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b", max_running=8)
    given = run.assigned(run.step(groups=8))
    assert Counter(given.values()) == {"a": 4, "b": 4}
    assert list(given) == list(range(8)), "fresh responses go in order"


def test_load_is_measured_against_each_capacity(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("large", max_running=99, kv_tokens=9_000)
    run.spot("small", max_running=99, kv_tokens=3_000)
    given = run.assigned(run.step(groups=40))
    assert Counter(given.values()) == {"large": 30, "small": 10}


def test_siblings_stay_together_until_it_costs_too_much_balance(new_run) -> None:
    run = new_run(affinity_slack=0.25)
    run.publish()
    run.spot("a", "b", max_running=99, kv_tokens=1_000)
    given = run.assigned(run.step(groups=1, size=8, prompt=60, limit=80))  # 60 + 40 / 2: 80 of 1,000 each
    assert [given[r] for r in range(4)] == ["a"] * 4
    assert set(given.values()) == {"a", "b"}, "0.32 fuller is too much"


def test_without_slack_siblings_are_spread(new_run) -> None:
    run = new_run(affinity_slack=0.0)
    run.publish()
    run.spot("a", "b", max_running=99)
    given = run.assigned(run.step(groups=1, size=8))
    assert Counter(given.values()) == {"a": 4, "b": 4}


def test_what_nobody_can_admit_waits_for_room(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=2)
    assert run.assigned(run.step(groups=3)) == {0: "a", 1: "a"}
    assert run.assigned(run.finish(0)) == {2: "a"}


LARGE = replace(RLBOOST, fill_limit=1.0, fits_small_caches=False)
"""Books a small cache as if it were a large one, so that few responses show the rule."""


def test_kv_capacity_bounds_as_well(new_run) -> None:
    run = new_run(policy=LARGE)
    run.publish()
    run.spot("a", max_running=99, kv_tokens=100)
    given = run.assigned(run.step(groups=9, prompt=10, limit=100))  # 10 + 50 / 4: 22 each
    assert len(given) == 4


def test_the_capacity_that_the_engine_measured_counts_not_the_promised_one(new_run) -> None:
    run = new_run(policy=LARGE)
    run.publish()
    run.join("a", max_running=99, kv_tokens=99 * 110)
    run.ready("a", kv_tokens=100)
    assert len(run.assigned(run.step(groups=9, prompt=10, limit=100))) == 4
    run.ready("a", kv_tokens=200)  # its engine was started again, with more memory
    assert run.core.instances["a"].kv_tokens == 200
    run.ready("a")  # of an engine that does not report it
    assert run.core.instances["a"].kv_tokens == 200


def test_an_instance_is_found_again_after_its_capacity_changed(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b", max_running=99, kv_tokens=100)
    run.ready("a", kv_tokens=10_000)
    given = run.assigned(run.step(groups=40, prompt=10, limit=100))
    assert Counter(given.values()) == {"a": 39, "b": 1}, "one fills b more than 39 fill a"


def test_an_empty_instance_takes_even_what_does_not_fit(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", kv_tokens=10)
    assert run.assigned(run.step(groups=2, prompt=500)) == {0: "a"}


@pytest.mark.parametrize("least_first", [True, False])
def test_the_response_that_got_least_far_goes_first_or_the_longest(new_run, least_first: bool) -> None:
    run = new_run(policy=replace(RLBOOST, least_first=least_first))
    run.publish()
    run.spot("a", max_running=3)
    run.spot("b", max_running=2)
    run.step(groups=6, limit=500)
    lost = [r for r, name in run.where().items() if name == "b"]
    run.send(Heartbeat(run.now, "b", run.epoch("b"), 1, tuple(zip(lost, (30, 200), strict=True))))
    run.send(InstanceLeft(run.now, "b", run.epoch("b"), LossCause.STOPPED))
    order = []
    for response in [r for r, name in run.where().items() if name == "a"]:
        order += run.assigned(run.finish(response))
    longest_first = [lost[1], lost[0], 5]
    assert order == (longest_first[::-1] if least_first else longest_first)


def test_a_release_keeps_the_exact_tokens(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step()
    run.send(Heartbeat(run.now, "a", run.epoch("a"), 1, ((0, 99),)))
    run.release(0, 42)
    assert run.core.response(0).num_tokens == 42


def test_migrations_count_kept_tokens_and_redispatches_all(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    run.step()
    run.release(0, 0)
    assert (run.core.counters.redispatches, run.core.counters.migrations) == (1, 0)
    run.release(0, 30)
    assert (run.core.counters.redispatches, run.core.counters.migrations) == (2, 0), "the same instance"
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.STOPPED))
    run.spot("b")
    counters = run.core.counters
    assert (counters.redispatches, counters.migrations, counters.tokens_migrated) == (3, 1, 30)


def test_a_stale_release_changes_nothing(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b")
    run.step()
    first = run.core.response(0).assignment
    holder = run.where()[0]
    run.release(0, 5)
    assert run.core.response(0).assignment != first
    before = run.where()
    run.send(Released(run.now, holder, first, 3, ReleaseReason.ABORTED))
    run.send(Released(run.now, "stranger", run.core.response(0).assignment, 3, ReleaseReason.ABORTED))
    assert run.where() == before
    assert run.core.response(0).num_tokens == 5
    assert run.core.counters.stale_events == 2
    assert first not in {assignment for assignment, _, _ in run.core.assignments()}


def test_a_second_end_is_counted_and_ignored(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step()
    assert run.finish(0, 7)
    assert run.finish(0, 9) == []
    assert run.core.response(0).num_tokens == 7
    assert run.core.counters.duplicates == 1
    assert run.finish(12345) == []
    assert run.core.counters.stale_events == 1


def test_the_expected_length_is_learned_from_the_former_step(new_run) -> None:
    run = new_run(policy=LARGE)
    run.publish()
    run.spot("a", max_running=99, kv_tokens=1_000)
    assert len(run.assigned(run.step(0, groups=30, prompt=0, limit=400))) == 20  # 200 / 4 each
    for response in range(30):
        run.finish(response, 50)
    assert len(run.assigned(run.step(1, groups=99, prompt=0, limit=400))) == 83  # 50 / 4 each


def test_another_step_cancels_the_open_one(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    run.step(0, groups=2)
    former = run.core.response(0).assignment
    commands = run.step(1, groups=1)
    assert Abort("a", run.epoch("a"), former) in commands
    assert run.assigned(commands) == {2: "a"}
    assert run.core.counters.cancelled == 2


def test_nothing_goes_to_an_instance_under_another_version(new_run) -> None:
    run = new_run()
    run.publish(0)
    run.spot("a")
    run.publish(1)
    assert run.assigned(run.step(0, version=1)) == {}
    assert run.assigned(run.ready("a", 1)) == {0: "a"}


def test_one_placement_does_not_look_at_the_whole_fleet(new_run, monkeypatch) -> None:
    run = new_run()
    run.publish()
    run.core.check = lambda: None  # it looks at everything
    run.spot(*(f"i{n:03d}" for n in range(300)), max_running=8)
    ranked = 0

    def rank(instance):
        nonlocal ranked
        ranked += 1
        return original(instance)

    original = dispatch._rank
    monkeypatch.setattr(dispatch, "_rank", rank)
    given = run.assigned(run.step(groups=600, size=4, limit=1000))
    assert Counter(given.values()) == {f"i{n:03d}": 8 for n in range(300)}
    assert ranked < 300 + 12 * 2_400
