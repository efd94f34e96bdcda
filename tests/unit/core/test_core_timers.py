from __future__ import annotations

from rlboost_runtime.core.base.timers import INSTANCE_TIMERS, Timer, Timers


def test_the_earliest_deadline_is_exact_when_deadlines_move() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 5.0)
    timers.set(Timer.LEASE, "b", 6.0)
    timers.set(Timer.LEASE, "a", 9.0)
    assert timers.earliest() == 6.0
    timers.set(Timer.LEASE, "a", 4.0)
    assert timers.earliest() == 4.0
    timers.cancel(Timer.LEASE, "a")
    assert timers.earliest() == 6.0
    assert list(timers.pop_due(100.0)) == [(Timer.LEASE, "b")]
    assert timers.earliest() is None


def test_deadlines_come_in_order_and_once() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 3.0)
    timers.set(Timer.GRACE, "b", 1.0)
    timers.set(Timer.LEASE, "a", 2.0)
    timers.set(Timer.HANG, "c", 2.0)
    timers.set(Timer.HANG, "d", 7.0)
    assert list(timers.pop_due(3.0)) == [(Timer.GRACE, "b"), (Timer.HANG, "c"), (Timer.LEASE, "a")]
    assert list(timers.pop_due(3.0)) == []
    assert timers.due(Timer.HANG, "d") == 7.0


def test_looking_does_not_change_the_order_of_equal_deadlines() -> None:
    watched, unwatched = Timers(), Timers()
    for timers in (watched, unwatched):
        for at in (1.0, 4.0):
            for name in ("b", "a", "c"):
                timers.set(Timer.LEASE, name, at)
                if timers is watched:
                    timers.earliest()
        timers.set(Timer.LEASE, "a", 4.0)
    assert list(watched.pop_due(9.0)) == list(unwatched.pop_due(9.0))


def test_a_round_ends_although_the_consumer_sets_deadlines() -> None:
    timers = Timers()
    timers.set(Timer.TERMINATE, "a", 1.0)
    rounds = 0
    for timer, name in timers.pop_due(1.0):
        timers.set(timer, name, 1.0)
        rounds += 1
    assert rounds == 1
    assert timers.earliest() == 1.0


def test_a_subject_can_be_forgotten_without_its_namesake() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "spot-0", 1.0)
    timers.set(Timer.BOOT, "spot-0", 2.0)
    timers.cancel_all(INSTANCE_TIMERS, "spot-0")
    assert timers.earliest() == 2.0
