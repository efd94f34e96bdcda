"""Requests outside a step: placed, moved, finished and withdrawn by the core that rolls out steps."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    Command,
    EndRequest,
    Finished,
    FinishReason,
    InstanceLeft,
    LoadVersion,
    LossCause,
    RecallLease,
    ReleaseReason,
    RequestArrived,
    RequestWithdrawn,
    ResponseRequest,
    RunEnding,
)

FIRST = FIRST_REQUEST


def arrive(run, number: int = FIRST, prompt: int = 10, limit: int = 100) -> list[Command]:
    return run.send(RequestArrived(run.now, ResponseRequest(number, number, prompt, limit)))


def test_a_request_needs_no_step_and_ends_once(new_run) -> None:
    run = new_run()
    run.publish()
    assert arrive(run) == []
    run.join("a")
    assert run.assigned(run.ready("a")) == {FIRST: "a"}
    assert run.finish(FIRST) == [EndRequest(FIRST, FinishReason.STOP)]
    assert run.finish(FIRST) == []
    assert not run.core.open_requests
    assert not run.core.instances["a"].assignments


def test_a_request_goes_on_elsewhere_when_its_machine_is_lost(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b")
    (holder,) = run.assigned(arrive(run)).values()
    run.release(FIRST, num_tokens=5, reason=ReleaseReason.ENGINE_FAILED)
    other = run.where()[FIRST]
    assert other != holder
    lost = run.send(InstanceLeft(run.now, other, run.epoch(other), LossCause.NOTICED))
    assert not run.assigned(lost), "the other one is paused"
    assert run.core.counters.migrations == 1
    assert run.assigned(run.until(run.now + 3)) == {FIRST: holder}


def test_requests_go_before_the_responses_of_a_step(new_run) -> None:
    run = new_run()
    run.publish()
    run.join("a", max_running=1)
    run.step(groups=2, size=2)
    arrive(run)
    run.ready("a")
    assert run.where() == {FIRST: "a"}


def test_a_step_does_not_forget_requests_that_wait_or_run(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    arrive(run)
    arrive(run, FIRST + 1)
    assert run.where() == {FIRST: "a"}
    run.step()
    assert run.where() == {FIRST: "a"}, "under the same version nothing moves"
    assert run.assigned(run.finish(FIRST)) == {FIRST + 1: "a"}
    assert run.assigned(run.finish(FIRST + 1)) == {0: "a"}


def test_a_new_version_takes_requests_along(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    arrive(run)
    told = run.publish(1)
    assert [type(c) for c in told] == [LoadVersion, Abort]
    assert not run.assigned(run.release(FIRST, 5)), "it serves the former version until it has loaded"
    assert run.assigned(run.ready("a", 1)) == {FIRST: "a"}
    assert run.core.response(FIRST).num_tokens == 5


def test_the_version_of_an_open_step_goes_before_a_newer_one(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step()
    arrive(run)
    assert run.publish(1) == []
    told = run.finish(0)
    assert {type(c) for c in told} >= {LoadVersion, Abort}


def test_a_withdrawn_request_is_stopped_at_once(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    arrive(run)
    arrive(run, FIRST + 1)
    (assigned,) = [c for c in run.commands if isinstance(c, Assign)]
    told = run.send(RequestWithdrawn(run.now, FIRST))
    assert told[0] == Abort("a", run.epoch("a"), assigned.assignment)
    assert run.assigned(told) == {FIRST + 1: "a"}
    assert run.send(RequestWithdrawn(run.now, FIRST)) == []
    assert run.send(RequestWithdrawn(run.now, FIRST + 1))
    assert not run.core.open_requests


def test_a_request_that_breaks_engines_is_quarantined_and_its_client_told(new_run) -> None:
    run = new_run(quarantine_after=2)
    run.publish()
    run.spot("a", "b", "c")
    arrive(run)
    run.release(FIRST, reason=ReleaseReason.RESPONSE_FAILED)
    told = run.release(FIRST, reason=ReleaseReason.RESPONSE_FAILED)
    assert EndRequest(FIRST, FinishReason.QUARANTINED) in told


def test_requests_neither_keep_the_window_open_nor_recall_the_gpu(new_run) -> None:
    run = new_run(reserved_instances=1)
    run.publish()
    run.reserved()
    arrive(run)
    assert not [c for c in run.until(30.0) if isinstance(c, RecallLease)]
    run.step()
    run.ready("head-0")
    assert set(run.where()) == {0, FIRST}, "reserved engines serve them while they are awake"
    told = run.finish(0)
    assert [type(c) for c in told if isinstance(c, Abort)] == [Abort], "the trainer waits for the GPU"
    run.release(FIRST)
    run.slept("head-0")
    assert run.core.lease == "trainer"


def test_a_run_that_ends_takes_no_requests(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.send(RunEnding(run.now, "done"))
    arrive(run)
    assert not run.core.open_requests
    assert run.send(Finished(run.now, FIRST, 3, FinishReason.STOP)) == []


def test_a_session_stays_where_its_prefix_is_cached(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b", max_running=8)
    session = FIRST + 77_000
    for number in range(FIRST, FIRST + 4):
        run.send(RequestArrived(run.now, ResponseRequest(number, session, 10, 100)))
    assert len(set(run.where().values())) == 1
    (home,) = set(run.where().values())
    for number in range(FIRST, FIRST + 4):
        run.finish(number)
    arrive(run, FIRST + 4)
    other = run.where()[FIRST + 4]
    run.send(RequestArrived(run.now, ResponseRequest(FIRST + 5, session, 10, 100)))
    assert run.where()[FIRST + 5] == home, "also after the former request of the session has ended"
    assert other == "a"
    run.send(InstanceLeft(run.now, home, run.epoch(home), LossCause.NOTICED))
    assert run.where()[FIRST + 5] != home
