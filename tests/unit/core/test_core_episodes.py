"""A step whose responses are episodes: nothing of it waits, its turns are requests, it ends by the trainer's
word."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    Command,
    DeliverGroup,
    Disconnected,
    GrantLease,
    InstanceLeft,
    LossCause,
    RecallLease,
    RequestArrived,
    ResponseRequest,
    StepStarted,
    Wake,
)
from rlboost_runtime.core.dispatch.assignments import YIELD_S
from rlboost_runtime.core.state.rates import BATCH
from rlboost_runtime.core.state.responses import ResponseState

TURN = FIRST_REQUEST


def episodes(run, groups: int = 1, size: int = 2, step: int = 0, version: int = 0) -> list[Command]:
    requests = tuple(
        ResponseRequest(step * 100 + number, number // size, 10, 100) for number in range(groups * size)
    )
    return run.send(StepStarted(run.now, step, version, requests, are_episodes=True))


def turn(run, number: int, episode: int, prompt: int = 20) -> list[Command]:
    return run.send(RequestArrived(run.now, ResponseRequest(number, 7, prompt, 50, episode)))


def test_an_episode_holds_no_slot_while_it_waits_for_its_environment(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    assert not [c for c in episodes(run) if isinstance(c, Assign)]
    assert run.assigned(turn(run, TURN, 0)) == {TURN: "a"}
    assert not turn(run, TURN + 1, 1)
    assert run.assigned(run.finish(TURN)) == {TURN + 1: "a"}
    run.finish(TURN + 1)
    assert not run.core.instances["a"].assignments
    assert run.core.step.num_unfinished == 2


def test_turns_add_up_and_the_trainers_word_ends_an_episode_and_its_group(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    episodes(run)
    for number, tokens in enumerate((5, 6)):
        turn(run, TURN + number, 0)
        run.finish(TURN + number, tokens)
    first = run.core.response(0)
    assert (first.num_tokens, first.state) == (11, ResponseState.EPISODE)
    assert run.finish(0, 12) == []
    assert DeliverGroup(0, 0) in run.finish(1, 0)
    assert (first.num_tokens, run.core.step.num_unfinished) == (12, 0)
    assert run.core.observation(run.now + 1.0, 0.0, 1.0).num_tokens == 12


def test_a_turn_goes_on_elsewhere_when_its_machine_is_lost(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", "b")
    episodes(run)
    (holder,) = run.assigned(turn(run, TURN, 0)).values()
    lost = run.send(InstanceLeft(run.now, holder, run.epoch(holder), LossCause.RESET))
    assert run.assigned(lost) == {TURN: "b" if holder == "a" else "a"}


def test_open_episodes_hold_the_window_and_recall_the_gpu(new_run) -> None:
    """Without spot instances the reserved engines serve turns until the last episode is over."""
    run = new_run(reserved_instances=1)
    run.publish()
    run.reserved()
    assert any(isinstance(c, Wake) for c in episodes(run))
    run.ready("head-0")
    assert run.assigned(turn(run, TURN, 0)) == {TURN: "head-0"}
    run.finish(TURN)
    assert not [c for c in run.commands if isinstance(c, GrantLease)]
    run.spot("a")
    run.until(run.now + 60, beating=("a", "head-0"))
    run.slept("head-0")
    assert [c for c in run.commands if isinstance(c, GrantLease)]
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.RESET))
    run.until(run.now + 10, beating=("head-0",))
    assert RecallLease(0) in run.commands


def test_the_same_step_again_keeps_what_is_over(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    episodes(run)
    run.finish(0)
    episodes(run)
    assert run.core.step.num_unfinished == 1
    assert run.core.response(0).state is ResponseState.FINISHED


def test_another_step_cancels_episodes_and_a_late_turn_of_theirs_is_harmless(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a")
    episodes(run)
    turn(run, TURN, 0)
    run.publish(1)
    episodes(run, step=1, version=1)
    assert run.core.counters.cancelled == 2
    run.finish(TURN, 9)
    assert run.core.response(100).num_tokens == 0


def test_a_turn_of_the_nearest_group_goes_first(new_run) -> None:
    run = new_run()
    run.publish()
    run.spot("a", max_running=1)
    episodes(run, groups=2, size=2)
    run.finish(2)
    turn(run, TURN, 0)
    turn(run, TURN + 1, 1)
    turn(run, TURN + 2, 3)
    assert run.assigned(run.finish(TURN)) == {TURN + 2: "a"}


def test_a_turn_does_not_give_way(new_run) -> None:
    """It is over soon, and its prefix, which another engine would have to compute, is long."""
    run = new_run()
    run.publish()
    run.spot("a", max_running=3)
    episodes(run, groups=2, size=4)
    for number in range(3):  # of a group of four
        turn(run, TURN + number, number)
    for number in (4, 5, 6):
        run.finish(number)
    turn(run, TURN + 7, 7)  # its group lacks it alone
    assert not [c for c in run.until(run.now + 5 * YIELD_S, beating=("a",)) if isinstance(c, Abort)]


def test_a_turn_goes_where_the_newest_of_its_episode_ran(new_run) -> None:
    run = new_run(affinity_slack=1.0)
    run.publish()
    run.spot("a", "b")
    episodes(run)
    (first,) = run.assigned(turn(run, TURN, 0)).values()
    second = "b" if first == "a" else "a"
    run.send(Disconnected(run.now, first, run.epoch(first)))
    run.send(InstanceLeft(run.now, first, run.epoch(first), LossCause.RESET))
    assert run.where()[TURN] == second
    run.finish(TURN)
    run.spot(first)
    assert set(run.assigned(turn(run, TURN + 1, 0)).values()) == {second}, "its prefix is there, and longer"


def test_what_turns_book_follows_from_turns(new_run) -> None:
    """The token limit of a turn is all that its episode may still have; few need a hundredth of it."""
    run = new_run()
    run.publish()
    run.spot("a", max_running=999, kv_tokens=100_000)
    episodes(run, groups=40)
    limit = 20_000

    def held(number: int) -> int:
        request = ResponseRequest(number, number, 20, limit, number % 80)
        run.send(RequestArrived(run.now, request))
        return run.core.instances["a"].kv_load

    assert held(TURN) > 2_000
    run.finish(TURN, 50)
    for number in range(TURN + 1, TURN + BATCH):
        held(number)
        run.finish(number, 50)
    assert 20 < held(TURN + 900) < 100
