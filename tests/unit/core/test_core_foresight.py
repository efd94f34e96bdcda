"""What `rlboost` adds to the paper: expected lengths, the predicted window, even loads, fair fill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.core.base.messages import RLBOOST, Abort, Heartbeat, Pool, ResponseRequest, StepStarted
from rlboost_runtime.core.dispatch.balance import Balancer
from rlboost_runtime.core.state.eligible import LoadIndex
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.rates import ENOUGH, GenerationRate, Lengths, RequestLengths, StepTimes
from rlboost_runtime.core.state.responses import StepResponses
from rlboost_runtime.core.window.predicted import PredictedWindow
from rlboost_runtime.core.window.seeding_window import OpenWindow, StepObservation

# --- lengths ----------------------------------------------------------------------------------------------


def test_a_long_response_is_expected_to_become_longer() -> None:
    lengths = Lengths()
    lengths.learn([100, 200, 300, 400])
    assert lengths.expected(0) == 250.0
    assert lengths.expected(200) == 350.0, "the mean of those longer than 200"
    assert lengths.expected(400) == 400.0, "longer than all known: about to end"


def test_old_steps_are_forgotten_once_there_are_enough_new_ones() -> None:
    lengths = Lengths()
    lengths.learn([9_000] * ENOUGH)
    lengths.learn([100] * (ENOUGH - 1))
    assert lengths.expected(0) > 4_000.0, "the new step alone is not enough"
    lengths.learn([100])
    assert lengths.expected(0) == 100.0


# --- rates ------------------------------------------------------------------------------------------------


def test_the_pace_is_that_of_full_instances() -> None:
    pace = GenerationRate()
    assert pace.tokens_per_s is None
    pace.learn(1.0, 3_000, 10.0)
    pace.learn(0.0, 10, 10.0)
    assert pace.tokens_per_s == 300.0


def test_step_times_are_a_line() -> None:
    times, kind = StepTimes(), (10_000, 8)
    for kv_tokens in (1_000, 2_000, 3_000):
        times.learn(kind, kv_tokens, 0.010 + 2e-6 * kv_tokens)
    assert times.line(kind) is None, "three heartbeats are too few"
    times.learn(kind, 4_000, 0.018)
    line = times.line(kind)
    assert line is not None
    assert line == pytest.approx((2e-6, 0.010))
    assert times.line((1, 1)) is None


def test_step_times_of_one_load_make_no_line() -> None:
    times, kind = StepTimes(), (10_000, 8)
    for _ in range(9):
        times.learn(kind, 1_000, 0.010)
    assert times.line(kind) is None


# --- the predicted window ---------------------------------------------------------------------------------

RESERVED, RATE, TAIL_S, TRAIN_S_PER_TOKEN, TOKENS = 4, 100.0, 20.0, 0.001, 100_000.0
"""A world that is a formula: rollout and training as the module's docstring has them."""
LOOK_SLACK_S = 1.0
"""The core looks at an open window once a second at most."""


def lived(
    seeding: PredictedWindow,
    number: int,
    num_spot: int,
    scale: float = 1.0,
    handover_s: float = 0.0,
    tail_s: float = TAIL_S,
    rate: float = RATE,
) -> tuple[float, float]:
    """Live one step of that world; return the window's length and the best one."""
    total = TOKENS * scale
    responses = 100
    requests = tuple(ResponseRequest(i, i, 10, 10**6) for i in range(responses))
    began = number * 10_000.0
    book = StepResponses(StepStarted(began, number, number, requests))
    seeding.restart()
    if rate != RATE:
        seeding.woken(0.0)
    now, made = began, 0.0
    while True:
        for response in book.responses.values():
            response.num_tokens = round(made / responses)
        moment = OpenWindow(now, began, num_spot)
        look_at = seeding.look(moment, book)
        closes_at = began + seeding.t_seed_s
        if now >= closes_at:
            break
        until = closes_at if look_at is None else min(look_at, closes_at)
        made += (RESERVED + num_spot) * rate * (until - now)
        now = until
    seeding.close(moment, book)
    rollout_s = (total - made) / (num_spot * rate) + tail_s
    training_s = total * TRAIN_S_PER_TOKEN + handover_s
    last_at = now + rollout_s
    wait_s = max(0.0, rollout_s - training_s)
    ended_at = now + max(rollout_s, training_s) + 10.0
    seeding.learn(
        StepObservation(
            n_prem=num_spot,
            n_hat=num_spot,
            t_train_wait=wait_s,
            t_remote_wait=ended_at - last_at,
            t_train=training_s + 10.0 - handover_s,
            t_remote=last_at - began,
            num_tokens=round(total),
            ended_at=ended_at,
            t_handover=handover_s,
        )
    )
    seeding.lengths.learn([round(total / responses)] * responses)
    best = (total / (num_spot * rate) + tail_s - training_s) / (1.0 + RESERVED / num_spot)
    return now - began, best


def taught() -> PredictedWindow:
    seeding = PredictedWindow(30.0, RESERVED, has_gate=False)
    seeding.pace.learn(1.0, round(RATE * 10), 10.0)
    lived(seeding, 0, 2)
    lived(seeding, 1, 2)
    return seeding


@pytest.mark.parametrize("num_spot", [1, 3, 4, 6])
def test_the_window_is_right_one_step_after_a_change(num_spot: int) -> None:
    seeding = taught()
    length_s, best_s = lived(seeding, 2, num_spot)
    assert length_s == pytest.approx(best_s, rel=0.10, abs=LOOK_SLACK_S)
    settled_s = [lived(seeding, 3 + i, num_spot)[0] for i in range(6)][-1]
    assert length_s == pytest.approx(settled_s, rel=0.10, abs=LOOK_SLACK_S)


def test_a_tail_is_that_of_steps_with_as_many_instances() -> None:
    seeding = taught()
    lived(seeding, 2, 4, tail_s=TAIL_S / 4)
    window, best = lived(seeding, 3, 4, tail_s=TAIL_S / 4)
    assert window == pytest.approx(best, abs=LOOK_SLACK_S), "two steps with two instances had longer ones"
    window, best = lived(seeding, 4, 3)
    tails = (TAIL_S + 2 * TAIL_S / 4) / 3
    short_s = (TAIL_S - tails) / (1.0 + RESERVED / 3)
    assert window == pytest.approx(best - short_s, abs=LOOK_SLACK_S), "of all, where none had as many"


def test_the_window_goes_by_the_pace_that_it_shows() -> None:
    """Heartbeats of a step as a whole tell of engines twice as fast as those at its window's end. With fewer
    instances the tail grows, so the first window is off, and what it left is no measure of what is best."""
    seeding, slow = taught(), RATE / 2.0
    for number in range(2, 5):
        lived(seeding, number, 6, rate=slow)
    first, best = lived(seeding, 5, 3, rate=slow, tail_s=4 * TAIL_S)
    assert abs(first - best) > 10 * LOOK_SLACK_S
    window, best = lived(seeding, 6, 3, rate=slow, tail_s=4 * TAIL_S)
    assert window == pytest.approx(best, abs=2 * LOOK_SLACK_S)


def test_the_window_stays_where_it_is_right() -> None:
    seeding = taught()
    lengths = [lived(seeding, 2 + i, 2) for i in range(8)]
    assert all(length == pytest.approx(best, rel=0.05) for length, best in lengths)


def test_a_hand_over_that_takes_its_time_is_no_part_of_what_a_token_costs() -> None:
    """The trainer measures it: a step of three times the tokens has one hand-over like any other."""
    seeding = PredictedWindow(30.0, RESERVED, has_gate=False)
    seeding.pace.learn(1.0, round(RATE * 10), 10.0)
    for number in range(4):
        lived(seeding, number, 2, handover_s=40.0)
    assert seeding.handover_s == pytest.approx(40.0)
    assert seeding.train_s_per_token == pytest.approx(TRAIN_S_PER_TOKEN, rel=0.02)
    seeding.lengths.learn([3_000] * 400)
    length_s, best_s = lived(seeding, 4, 2, scale=3.0, handover_s=40.0)
    assert length_s == pytest.approx(best_s, rel=0.05, abs=LOOK_SLACK_S)


def test_a_lead_makes_the_window_longer_by_what_all_engines_do_in_it() -> None:
    plain, best_s = lived(taught(), 2, 2)
    seeding = taught()
    seeding.lead_s = 60.0
    length_s, _ = lived(seeding, 2, 2)
    more_s = 60.0 / (1.0 + RESERVED / 2)
    assert length_s == pytest.approx(best_s + more_s, rel=0.10, abs=LOOK_SLACK_S)
    assert length_s > plain + more_s / 2


def test_where_waking_costs_more_than_it_helps_there_is_no_window() -> None:
    seeding = replace(taught(), has_gate=True)
    seeding.woken(60.0)
    assert lived(seeding, 2, 8)[0] == 0.0
    assert seeding.skips_window
    assert lived(seeding, 3, 1)[0] > 100.0, "with one instance it pays"
    assert not seeding.skips_window


def skips(seeding: PredictedWindow, num_spot: int, toggle_s: float) -> list[bool]:
    """Whether each of five steps does without a window where waking and sleeping take so long."""
    found = []
    for number in range(2, 7):
        seeding.wake_s = seeding.sleep_s = toggle_s
        lived(seeding, number, num_spot)
        found.append(seeding.skips_window)
    return found


def test_a_dear_window_is_tried_without_once_and_kept_where_it_pays() -> None:
    assert skips(replace(taught(), has_gate=True), 6, toggle_s=20.0) == [False, True, False, False, False]


def test_a_dear_window_is_left_out_for_good_where_a_step_without_was_faster() -> None:
    seeding = replace(taught(), has_gate=True)
    lived(seeding, 2, 6)
    seeding._with_window[6] *= 2.0
    assert skips(seeding, 6, toggle_s=20.0) == [True] * 5


def test_a_cheap_window_and_one_that_is_needed_are_never_left_out_for_a_trial() -> None:
    assert skips(replace(taught(), has_gate=True), 6, toggle_s=2.0) == [False] * 5
    assert skips(replace(taught(), has_gate=True), 1, toggle_s=20.0) == [False] * 5


def test_without_spot_instances_nothing_is_learned() -> None:
    seeding = taught()
    before = seeding.train_s_per_token
    seeding.learn(StepObservation(0.0, 0, 5.0, 5.0, 10.0, 10.0, 1_000, 20.0))
    assert seeding.train_s_per_token == before


# --- even loads, fair fill --------------------------------------------------------------------------------


def beat(run, name: str, tokens: dict[int, int]) -> list:
    return run.send(
        Heartbeat(run.now, name, run.epoch(name), round(run.now * 1000), tuple(tokens.items()), 0)
    )


def crowded(new_run, policy):
    """A step taught lengths and step times; in the next `a` holds all eight and `b` has just come."""
    run = new_run(policy=policy, max_spot_instances=2)
    run.publish()
    run.spot("a", max_running=99, kv_tokens=10_000)
    run.step(groups=8, limit=2_000)
    tokens = dict.fromkeys(range(8), 0)
    for second in range(1, 13):  # decode steps of 10 ms and 2 us per KV token
        run.now = float(second)
        step_s = 0.010 + 2e-6 * (sum(tokens.values()) + 10 * 8)
        tokens = {response: so_far + round(1.0 / step_s) for response, so_far in tokens.items()}
        beat(run, "a", tokens)
    for response in range(8):
        run.finish(response, 1_500)
    run.publish(1)
    run.ready("a", 1)
    run.step(1, 1, groups=8, limit=2_000)
    run.now += 1.0
    beat(run, "a", {8 + i: 50 + i for i in range(8)})
    run.now += 2.0
    run.join("b", max_running=99, kv_tokens=10_000)
    return run, run.ready("b", 1)


def test_running_responses_move_until_both_are_as_full(new_run) -> None:
    run, commands = crowded(new_run, replace(RLBOOST, fits_small_caches=False))
    taken = [c.assignment for c in commands if isinstance(c, Abort)]
    assert 2 <= len(taken) <= 4, "not more than half of eight"
    responses = [run.core.instances["a"].assignments[a].response for a in taken]
    moved = {}
    for response in responses:
        moved |= run.assigned(run.release(response, num_tokens=11))
    assert moved == dict.fromkeys(responses, "b")


@pytest.mark.parametrize(
    ("pools", "moves"),
    [
        ((Pool.RESERVED, Pool.RESERVED), True),
        ((Pool.SPOT, Pool.SPOT), True),
        ((Pool.RESERVED, Pool.SPOT), False),
    ],
)
def test_reserved_engines_even_out_among_themselves_while_no_spot_instance_serves(pools, moves) -> None:
    eligible = {
        name: Instance(
            name,
            "m",
            pool,
            0,
            99,
            10_000,
            0.0,
        )
        for name, pool in zip("ab", pools, strict=True)
    }
    lengths = Lengths()
    lengths.learn([1_500] * 8)
    balancer = Balancer(eligible, LoadIndex(eligible, lambda _: None), lengths, RequestLengths())
    for kv_tokens in (1_000, 2_000, 3_000, 4_000):
        balancer.step_times.learn((10_000, 99), kv_tokens, 0.010 + 2e-6 * kv_tokens)
    requests = tuple(ResponseRequest(i, i, 10, 2_000) for i in range(8))
    for number, response in enumerate(StepResponses(StepStarted(0.0, 0, 0, requests)).responses.values()):
        eligible["a"].hold(number, response, 500)
    for name in eligible:
        balancer.touch(name)
    rebalance = balancer.rebalance(1.0)
    assert (rebalance is not None) == moves
    if rebalance is not None:
        assert (rebalance.source.instance, rebalance.target.instance) == ("a", "b")
        assert 2 <= len(rebalance.assignments) <= 4


def test_an_idle_instance_takes_pending_responses_together(new_run) -> None:
    run = new_run(policy=RLBOOST, max_spot_instances=2)
    run.publish()
    run.spot("a", max_running=99, kv_tokens=100_000)
    run.step(groups=8, limit=2_000)
    run.send(Heartbeat(run.now, "a", run.epoch("a"), 1, (), 6))
    run.now = 5.0
    run.join("b", max_running=99, kv_tokens=100_000)
    commands = run.ready("b")
    assert 3 <= len([c for c in commands if isinstance(c, Abort)]) <= 4, "half of eight"


def test_without_balance_nothing_moves(new_run) -> None:
    _, commands = crowded(new_run, replace(RLBOOST, balances=False))
    assert not [c for c in commands if isinstance(c, Abort)]


def test_the_first_instance_ready_leaves_work_for_the_second(new_run) -> None:
    run = new_run(policy=RLBOOST, max_spot_instances=2)
    run.publish()
    run.join("a", max_running=99, kv_tokens=100_000)
    run.join("b", max_running=99, kv_tokens=100_000)
    run.step(groups=20, limit=1_000)
    assert run.where() == {}
    run.ready("a")
    assert 9 <= len(run.where()) <= 12, "about half"
    run.ready("b")
    held = list(run.where().values())
    assert len(held) == 20
    assert 8 <= held.count("b") <= 11


def test_an_instance_that_does_not_come_is_not_waited_for(new_run) -> None:
    run = new_run(policy=RLBOOST, max_spot_instances=2, lease_s=60.0)
    run.publish()
    run.join("a", max_running=99, kv_tokens=100_000)
    run.join("b", max_running=99, kv_tokens=100_000)
    run.step(groups=20, limit=1_000)
    run.ready("a")
    run.until(25.0)
    assert list(run.where().values()) == ["a"] * 20


def test_reserved_engines_are_waited_for_as_long_as_waking_may_take(new_run) -> None:
    config = {"reserved_instances": 1, "seeding_initial_s": 200.0, "lease_s": 100.0, "hang_after_s": 100.0}
    run = new_run(policy=RLBOOST, max_spot_instances=1, **config)
    run.publish()
    run.reserved(max_running=99, kv_tokens=100_000)
    run.spot("a", max_running=99, kv_tokens=100_000)
    run.step(groups=20, limit=1_000)
    run.until(35.0)
    assert 9 <= len(run.where()) <= 12, "it wakes since half a minute"
    run.until(65.0)
    assert len(run.where()) == 20, "it does not come"


def test_a_window_longer_than_the_rollout_is_cut_until_it_teaches() -> None:
    seeding = PredictedWindow(500.0, RESERVED, has_gate=False)
    seeding.pace.learn(1.0, round(RATE * 10), 10.0)
    requests = tuple(ResponseRequest(i, i, 10, 10**6) for i in range(10))
    book = StepResponses(StepStarted(0.0, 0, 0, requests))
    for response in book.responses.values():
        response.num_tokens = 100
    seeding.close(OpenWindow(40.0, 0.0, 2), book)  # all are finished
    seeding.learn(StepObservation(2.0, 2, 0.0, 60.0, 50.0, 40.0, 1_000, 100.0))
    assert seeding.train_s_per_token is None
    assert seeding.t_seed_s == 20.0


def test_a_cache_that_nobody_has_measured_does_not_withhold_work(new_run) -> None:
    run = new_run(policy=RLBOOST, max_spot_instances=2)
    run.publish()
    for name in "ab":
        run.join(name, max_running=99, kv_tokens=1_000_000)  # what the agents guess before they have engines
    run.step(groups=20, limit=1_000)
    run.ready("a", kv_tokens=100_000)
    assert 9 <= len(run.where()) <= 12, "about half, as if b's cache were as large"


def test_an_engine_that_takes_long_to_start_is_not_waited_for(new_run) -> None:
    run = new_run(policy=RLBOOST, max_spot_instances=2)
    run.publish()
    for name in "ab":
        run.join(name, max_running=99, kv_tokens=100_000)
    run.now = 30.0
    run.step(groups=20, limit=1_000)
    run.ready("a")
    assert len(run.where()) == 20, "b has joined half a minute ago and still starts"
