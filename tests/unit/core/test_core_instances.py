from __future__ import annotations

import pytest

from rlboost_runtime.core.base.messages import (
    Abort,
    Disconnected,
    Evict,
    FinishReason,
    Heartbeat,
    InstanceJoined,
    InstanceReady,
    LoadVersion,
    LossCause,
    NoticeReceived,
    Pool,
    Reconnected,
    ReleaseReason,
    RunEnding,
    TerminateMachine,
    Tick,
    VersionRefused,
)
from rlboost_runtime.core.base.state_machine import IllegalMove
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.core.state.responses import ResponseState


@pytest.fixture
def run(new_run):
    """Two spot instances with two responses each."""
    run = new_run()
    run.publish()
    run.spot("a", "b")
    run.step(groups=4)
    return run


def held_by(run, name: str) -> list[int]:
    return [r for r, holder in run.where().items() if holder == name]


# --- losing an instance ----------------------------------------------------------------------------------


def test_silence_ends_a_lease_and_the_work_goes_on_elsewhere(run) -> None:
    orphans = held_by(run, "a")
    epoch = run.epoch("a")
    assert run.until(5.5, beating=("b",)) == []
    commands = run.until(6.0, beating=("b",))
    assert commands[0] == Evict("a", epoch, LossCause.SILENT)
    assert run.assigned(commands) == dict.fromkeys(orphans, "b")
    assert run.core.counters.losses == {LossCause.SILENT: 1}


def test_a_reset_gets_its_grace(run) -> None:
    run.send(Disconnected(0.0, "a", run.epoch("a")))
    assert run.core.instances["a"].shown_state == "disconnected"
    assert run.core.next_deadline() == 0.5
    assert held_by(run, "a"), "nothing moves within the grace"
    assert run.assigned(run.send(Tick(0.5)))
    assert run.core.counters.losses == {LossCause.RESET: 1}


def test_a_reset_instance_gets_no_new_work(run) -> None:
    run.send(Disconnected(0.0, "a", run.epoch("a")))
    given = run.assigned(run.step(1, groups=3))
    assert set(given.values()) == {"b"}


def test_coming_back_settles_who_holds_what(run) -> None:
    kept, gone = run.core.instances["a"].assignments
    lost = run.core.instances["a"].assignments[gone].response
    run.send(Disconnected(0.0, "a", run.epoch("a")))
    commands = run.send(Reconnected(0.2, "a", run.epoch("a"), (kept, 777)))
    assert Abort("a", run.epoch("a"), 777) in commands
    assert lost in run.assigned(commands), "what it does not hold any more is given out again"
    assert kept in run.core.instances["a"].assignments
    run.until(3.0)
    assert not run.core.counters.losses


def test_aborts_are_repeated_after_a_reset(run) -> None:
    run.send(NoticeReceived(0.0, "a", run.epoch("a"), 30.0))
    run.send(Disconnected(0.1, "a", run.epoch("a")))
    held = tuple(run.core.instances["a"].assignments)
    commands = run.send(Reconnected(0.2, "a", run.epoch("a"), held))
    assert commands == [Abort("a", run.epoch("a"), assignment) for assignment in held]


def test_a_second_registration_ends_the_former_life(run) -> None:
    orphans = held_by(run, "a")
    former = run.epoch("a")
    commands = run.join("a", machine="by-hand-a")
    assert not any(isinstance(c, Evict) for c in commands), "the new connection must live"
    assert sorted(run.assigned(commands)) == orphans
    assert run.core.counters.losses == {LossCause.REPLACED: 1}
    assert run.send(InstanceReady(0.0, "a", former, 0)) == []
    assert run.core.counters.stale_events == 1
    assert run.core.instances["a"].version is None


def test_an_old_registration_that_comes_late_is_ignored(run) -> None:
    known = run.core.instances["a"]
    run.send(InstanceJoined(0.0, "a", "by-hand-a", Pool.SPOT, known.epoch, 4, 100))
    run.send(InstanceJoined(0.0, "a", "by-hand-a", Pool.SPOT, known.epoch - 1, 4, 100))
    assert run.core.instances["a"] is known
    assert run.core.counters.duplicates == 2


def test_an_announced_end_is_counted_as_noticed(run) -> None:
    commands = run.send(NoticeReceived(0.0, "a", run.epoch("a"), 5.0))
    assert [type(c) for c in commands] == [Abort, Abort]
    assert run.core.instances["a"].shown_state == "draining"
    for response in held_by(run, "a"):
        run.release(response, 12)
        assert run.core.response(response).num_tokens == 12
    assert set(run.where().values()) == {"b"}
    run.send(Disconnected(1.0, "a", run.epoch("a")))
    run.now = 1.0
    run.until(2.0)
    assert run.core.counters.losses == {LossCause.NOTICED: 1}


# --- hanging ---------------------------------------------------------------------------------------------


def test_an_engine_without_progress_is_evicted(new_run) -> None:
    run = new_run(hang_after_s=4.0)
    run.publish()
    run.spot("a", "b")
    run.step(groups=4)
    run.until(1.0)
    assert not any(isinstance(c, Evict) for c in run.until(4.5, stuck=("a",)))
    commands = run.until(6.0, stuck=("a",))
    assert Evict("a", 1, LossCause.HUNG) in commands
    assert len(run.assigned(commands)) == 2


def test_an_idle_engine_does_not_hang(new_run) -> None:
    run = new_run(hang_after_s=4.0)
    run.publish()
    run.spot("a")
    run.until(20.0, stuck=("a",))
    run.step()
    assert not any(isinstance(c, Evict) for c in run.until(23.5, stuck=("a",)))


def test_an_instance_that_never_answers_an_abort_is_evicted(new_run) -> None:
    run = new_run(hang_after_s=4.0)
    run.publish()
    run.spot("a")
    run.step()
    run.send(NoticeReceived(0.0, "a", 1, 100.0))
    assert Evict("a", 1, LossCause.HUNG) in run.until(4.0), "although its engine moves"


# --- versions --------------------------------------------------------------------------------------------


def test_a_joining_instance_is_told_the_newest_version(new_run) -> None:
    run = new_run()
    assert run.join("a") == []
    assert run.publish(3) == [LoadVersion("a", 1, 3)]
    assert run.join("b") == [LoadVersion("b", 2, 3)]
    assert run.publish(3) == [], "said once is enough"
    run.ready("a", 3)
    assert run.publish(4) == [LoadVersion("a", 1, 4), LoadVersion("b", 2, 4)]


def test_a_refusal_is_tried_again_and_three_in_a_row_end_it(new_run) -> None:
    run = new_run()
    run.publish(0)
    run.join("a")

    def refuse() -> list[object]:
        return run.send(VersionRefused(run.now, "a", 1, 0, "digest of chunk 3 does not match"))

    assert refuse() == []
    assert refuse() == [], "the same refusal twice counts once"
    assert run.until(0.9) == []
    assert LoadVersion("a", 1, 0) in run.until(1.0)
    refuse()
    assert run.until(2.9) == []
    assert LoadVersion("a", 1, 0) in run.until(3.0)
    assert refuse() == [Evict("a", 1, LossCause.HUNG)]


def test_a_refusal_takes_the_proof_away(run) -> None:
    run.send(VersionRefused(0.0, "a", run.epoch("a"), 1, "probe"))
    assert run.core.instances["a"].state is InstanceState.LOADING
    assert set(run.assigned(run.step(1, groups=2)).values()) == {"b"}


def test_refusals_that_are_not_in_a_row_do_not_add_up(new_run) -> None:
    run = new_run()
    run.join("a")
    for version in range(5):
        run.publish(version)
        run.send(VersionRefused(run.now, "a", 1, version, "timeout"))
        run.until(run.now + 1.0)
        run.ready("a", version)
    assert "a" in run.core.instances


def test_a_rolled_back_step_makes_instances_load_its_version_again(new_run) -> None:
    run = new_run()
    run.publish(4)
    run.publish(5)
    run.spot("a", version=5)
    assert LoadVersion("a", 1, 4) in run.step(2, version=4)
    assert run.ready("a", 5) == [LoadVersion("a", 1, 4)], "it may not have heard"
    assert run.assigned(run.ready("a", 4)) == {0: "a"}


def test_a_version_published_in_the_middle_of_a_step_waits_for_its_end(run) -> None:
    assert run.publish(1) == []
    commands = [c for response in range(4) for c in run.finish(response)]
    assert [c for c in commands if isinstance(c, LoadVersion)] == [
        LoadVersion("a", 1, 1),
        LoadVersion("b", 2, 1),
    ]


# --- failing ---------------------------------------------------------------------------------------------


def test_a_response_that_breaks_several_instances_is_quarantined(new_run) -> None:
    run = new_run(quarantine_after=3)
    run.publish()
    run.spot("a", "b", "c")
    run.step(groups=1)
    broken = []
    for _ in range(3):
        broken.append(run.where()[0])
        commands = run.release(0, 11, ReleaseReason.RESPONSE_FAILED)
    assert sorted(broken) == ["a", "b", "c"], "each time another one"
    response = run.core.response(0)
    assert (response.state, response.finish_reason) == (ResponseState.FINISHED, FinishReason.QUARANTINED)
    assert response.num_tokens == 11
    assert run.core.counters.quarantined == [0]
    assert run.core.complete_groups() == [0], "its group is complete as usual"
    assert run.assigned(commands) == {}


def test_a_response_that_breaks_the_only_instance_cannot_hold_up_the_run(new_run) -> None:
    run = new_run(quarantine_after=2)
    run.publish()
    run.spot("a")
    run.step()
    for _ in range(6):
        assert run.where() == {0: "a"}, "better to try again than to give up at once"
        run.release(0, 0, ReleaseReason.RESPONSE_FAILED)
    assert run.core.counters.quarantined == [0]


def test_a_failed_engine_says_nothing_about_its_responses_but_gets_a_pause(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step(groups=2)
    assert run.release(0, 4, ReleaseReason.ENGINE_FAILED) == []
    assert run.release(1, 4, ReleaseReason.ENGINE_FAILED) == [], "the same failure"
    assert not run.core.response(0).failed_on
    assert run.core.next_deadline() == 2.0
    assert run.assigned(run.until(2.0)) == {0: "a", 1: "a"}
    assert run.release(0, 4, ReleaseReason.ENGINE_FAILED) == []
    assert run.assigned(run.ready("a")) == {0: "a"}, "a fresh proof ends the pause"


def test_an_engine_that_only_fails_is_given_up(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step()
    evicted = False
    for _ in range(200):
        if 0 in run.where():
            evicted = any(isinstance(c, Evict) for c in run.release(0, 0, ReleaseReason.ENGINE_FAILED))
        if evicted:
            break
        run.until(run.now + 0.5)
    assert evicted
    assert 25 < run.now < 40


def test_a_response_at_its_limit_is_finished_by_us(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    run.step(limit=100)
    run.release(0, 100)
    assert run.core.response(0).finish_reason is FinishReason.LENGTH


# --- the rest --------------------------------------------------------------------------------------------


def test_beats_of_unknown_or_former_lives_are_counted(run) -> None:
    run.send(Heartbeat(0.0, "a", 99, 1, ()))
    run.send(Heartbeat(0.0, "stranger", 1, 1, ()))
    assert run.core.counters.stale_events == 2


def test_a_run_that_ends_takes_everything_back(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.publish()
    run.launched("spot-0")
    run.join("a", machine="spot-0")
    run.ready("a")
    run.step(groups=2)
    commands = run.send(RunEnding(1.0, "done"))
    assert [type(c) for c in commands] == [Abort, Abort, TerminateMachine]
    for response in (0, 1):
        assert run.release(response) == [], "no new work"
    duplicates = run.core.counters.duplicates
    assert run.send(RunEnding(1.0, "done")) == []
    assert run.core.counters.duplicates == duplicates + 1
    assert run.step(1) == []


def test_a_run_that_ends_gives_reserved_engines_no_more_work_either(new_run) -> None:
    run = new_run(reserved_instances=1)
    run.publish()
    run.reserved()
    run.step(groups=2)
    run.ready("head-0")
    assert len(run.send(RunEnding(1.0, "done"))) == 2
    assert run.release(0) == []


def test_who_hangs_up_while_the_run_ends_was_not_preempted(new_run) -> None:
    run = new_run(reserved_instances=1)
    run.publish()
    run.reserved()
    run.spot("a")
    run.send(RunEnding(1.0, "done"))
    for name in ("head-0", "a"):
        run.send(Disconnected(1.0, name, run.epoch(name)))
    run.send(Tick(2.0))
    assert run.core.counters.losses == {LossCause.STOPPED: 2}


def test_an_illegal_move_tells_the_story(run) -> None:
    run.finish(0)
    with pytest.raises(
        IllegalMove, match=r"response 0: finished -> running .*history: 0 s waiting \(created\)"
    ):
        run.core.response(0).lifecycle.move(ResponseState.RUNNING, "test", 1.0)


def test_time_never_goes_back(run) -> None:
    run.until(2.0)
    run.send(Heartbeat(1.0, "a", run.epoch("a"), 5, ()))
    assert run.core.now == 2.0
