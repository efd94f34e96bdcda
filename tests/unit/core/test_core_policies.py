"""Rules that a policy turns on or off; what all have in common is tested under the default one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from rlboost_runtime.coordinator.storage.journal import decode_event, encode_event
from rlboost_runtime.core.base.messages import (
    RLBOOST,
    Abort,
    Assign,
    CoreConfig,
    Disconnected,
    Heartbeat,
    InstanceLeft,
    LeaseReturned,
    LoadVersion,
    LossCause,
    Pool,
    RecallLease,
    RunStarted,
    SizeRule,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LOADING_S, LeaseState
from rlboost_runtime.core.state.eligible import LoadIndex
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.rates import GenerationRate, Lengths, StepTimes
from rlboost_runtime.core.window.seeding_window import StepObservation, useful_instances
from rlboost_runtime.sim.baselines.dispatch import RateProfile, _batch, _bucket
from rlboost_runtime.sim.baselines.windows import PublishedWindow
from rlboost_runtime.sim.policies import (
    CLOSED,
    CORE_POLICIES,
    ON_DEMAND,
    PAPER,
    POLYRL,
    RECOMPUTE,
    baseline_rules,
)


def queue(run, name: str, queued: int, tokens: dict[int, int] | None = None) -> list:
    counts = tuple((tokens or {}).items())
    return run.send(Heartbeat(run.now, name, run.epoch(name), round(1e3 * run.now), counts, queued))


def instance(name: str) -> Instance:
    return Instance(name, "m", Pool.SPOT, 0, max_running=99, kv_tokens=1_000, joined_at=0.0)


# --- the policies themselves ------------------------------------------------------------------------------


def test_live_runs_follow_the_default_and_a_log_keeps_the_policy() -> None:
    assert CoreConfig(max_spot_instances=1).policy == RLBOOST
    for policy in CORE_POLICIES.values():
        event = RunStarted(0.0, CoreConfig(max_spot_instances=3, policy=policy))
        assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize("policy", [PAPER, replace(PAPER, dispatch="booked")])
def test_a_live_core_does_not_know_the_baselines(policy) -> None:
    with pytest.raises(ValueError, match=r"unknown (dispatch|balance) rule .*there are (booked|even)"):
        Core().handle(RunStarted(0.0, CoreConfig(max_spot_instances=3, policy=policy)))


# --- who gets what ----------------------------------------------------------------------------------------


def test_the_paper_waits_rather_than_queue_more_than_theta(new_run) -> None:
    run = new_run(policy=replace(PAPER, max_pending=2))
    run.publish()
    run.spot("a", "b", max_running=99)
    queue(run, "a", 0)
    queue(run, "b", 0)
    given = run.assigned(run.step(groups=10))
    assert Counter(given.values()) == {"a": 2, "b": 2}
    more = run.assigned(queue(run, "a", 0))
    assert Counter(more.values()) == {"a": 2}, "a executes both now"
    assert run.assigned(queue(run, "b", 2)) == {}


def test_a_co_located_trainer_deals_groups_once_all_its_engines_serve(new_run) -> None:
    run = new_run(reserved_instances=2, policy=ON_DEMAND)
    run.publish()
    run.reserved("head-0", max_running=99, kv_tokens=100)
    run.reserved("head-1", max_running=99, kv_tokens=100)
    run.step(groups=4, size=2)
    assert run.assigned(run.ready("head-0")) == {}
    given = run.assigned(run.ready("head-1"))
    assert given == {r: f"head-{r // 4}" for r in range(8)}, "whatever fits"


def test_the_published_code_gives_out_four_groups_a_second(new_run) -> None:
    run = new_run(policy=POLYRL)
    run.publish()
    run.spot("a", "b", max_running=99)
    given = run.assigned(run.step(groups=6, size=2))
    assert given == {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "a", 6: "b", 7: "b"}
    assert run.assigned(run.until(0.5)) == {}
    assert set(run.assigned(run.until(1.0))) == {8, 9, 10, 11}


def test_the_published_code_cuts_a_moved_group_to_its_shortest_member(new_run) -> None:
    run = new_run(policy=POLYRL)
    run.publish()
    run.spot("a", max_running=99)
    run.step(groups=1, size=3)
    run.finish(2)
    run.join("b")
    run.ready("b")
    commands = run.release(0, num_tokens=30)
    assert run.assigned(commands) == {}, "a sibling is still on a"
    run.now += 1.0
    commands = run.release(1, num_tokens=20)
    kept = {c.response: c.keep_tokens for c in commands if isinstance(c, Assign)}
    assert kept == {0: 20, 1: None}


def test_recompute_begins_anew_what_a_lost_instance_had(new_run) -> None:
    kept = {}
    for policy in (PAPER, RECOMPUTE):
        run = new_run(policy=policy)
        run.publish()
        run.spot("a")
        run.step()
        run.send(Heartbeat(1.0, "a", run.epoch("a"), 1, ((0, 50),), 0))
        run.spot("b")
        run.send(Disconnected(2.0, "a", run.epoch("a")))
        run.now = 2.0
        moved = [c for c in run.until(3.0) if isinstance(c, Assign)]
        assert [c.instance for c in moved] == ["b"]
        kept[policy.name] = moved[0].keep_tokens
    assert kept == {"paper": None, "recompute": 0}


# --- balance ----------------------------------------------------------------------------------------------


def crowded(new_run, policy):
    """One step taught that two responses at once are as fast as it gets; now `a` runs five and `b` none."""
    run = new_run(policy=policy)
    run.publish()
    run.spot("a", max_running=99)
    run.step(groups=5)
    for second in range(1, 4):  # five together: 100 tokens/s
        run.now = float(second)
        queue(run, "a", 0, dict.fromkeys(range(5), 20 * second))
    for response in (0, 1, 2):
        run.finish(response, 60)
    for second in range(4, 7):  # two together: 96
        run.now = float(second)
        queue(run, "a", 0, dict.fromkeys((3, 4), 60 + 48 * (second - 3)))
    run.finish(3, 300)
    run.finish(4, 300)
    run.publish(1)
    run.ready("a", 1)
    run.step(1, 1, groups=5, limit=9_000)
    queue(run, "a", 0, {5 + i: 10 + i for i in range(5)})
    run.now += 2.0
    run.join("b", max_running=99)
    return run, run.ready("b", 1)


def test_running_responses_beyond_the_plateau_move_to_an_idle_instance(new_run) -> None:
    run, commands = crowded(new_run, replace(PAPER, max_pending=8))
    taken = [c.assignment for c in commands if isinstance(c, Abort)]
    held = run.core.instances["a"].assignments
    assert [held[a].response for a in taken] == [5, 6, 7], "those whose prefill is cheapest"
    moved = [run.release(r, num_tokens=11) for r in (5, 6, 7)]
    assert [run.assigned(each) for each in moved] == [{5: "b"}, {6: "b"}, {7: "b"}]


def test_without_balance_nothing_moves(new_run) -> None:
    _, commands = crowded(new_run, replace(PAPER, max_pending=8, balances=False))
    assert not [c for c in commands if isinstance(c, Abort)]


def test_pending_responses_move_to_who_has_none(new_run) -> None:
    run = new_run(policy=replace(PAPER, max_pending=8))
    run.publish()
    run.spot("a", max_running=99)
    queue(run, "a", 0)
    run.step(groups=4)
    queue(run, "a", 2)
    run.now = 5.0
    run.join("b", max_running=99)
    commands = run.ready("b")
    assert [type(c) for c in commands] == [Abort]
    assert run.assigned(run.release(3, num_tokens=0)) == {3: "b"}


def test_the_profile_knows_the_plateau_of_the_former_step() -> None:
    profile, one = RateProfile(), instance("a")
    for batch, rate in ((1, 50), (4, 160), (16, 380), (32, 400)):
        profile.learn(one, batch, rate * 10, 10.0)
    assert profile.plateau(one) is None
    profile.close_step()
    assert profile.plateau(one) == 16


def test_buckets_cover_all_batches_in_order() -> None:
    buckets = [_bucket(batch) for batch in range(1, 2_000)]
    assert buckets == sorted(buckets)
    assert all(_batch(_bucket(batch)) <= batch for batch in range(1, 2_000))
    assert all(_batch(_bucket(batch)) > 0.75 * batch for batch in range(8, 2_000))


# --- crowds -----------------------------------------------------------------------------------------------


def test_a_crowd_finds_what_looking_at_everybody_finds() -> None:
    random = Random(0)
    eligible = {f"i{n}": instance(f"i{n}") for n in range(20)}
    load_index = LoadIndex(eligible, lambda i: (i.share, i.fill, i.instance) if i.kv_load < 900 else None)
    gone: dict[str, Instance] = {}
    for name in eligible:
        load_index.touch(name)
    for _ in range(2_000):
        name = random.choice(list({**eligible, **gone}))
        if random.random() < 0.1:
            source, target = (eligible, gone) if name in eligible else (gone, eligible)
            target[name] = source.pop(name)
        else:
            {**eligible, **gone}[name].kv_load = random.randrange(1_000)
        load_index.touch(name)
        need, avoid = random.randrange(1_000), set(random.sample(sorted(eligible), min(2, len(eligible))))
        best = load_index.best(lambda i, need=need: i.kv_load + need <= 1_000, avoid)
        fits = [i for i in eligible.values() if i.kv_load < 900 and i.kv_load + need <= 1_000]
        expected = min(
            (i for i in fits if i.instance not in avoid),
            key=lambda i: (i.share, i.fill, i.instance),
            default=None,
        )
        assert best is expected


# --- windows, sizes, weights ------------------------------------------------------------------------------


def test_without_seeding_engines_sleep_while_a_spot_instance_loads(new_run) -> None:
    run = new_run(reserved_instances=1, seeding_initial_s=50.0, policy=replace(PAPER, window=CLOSED))
    run.publish()
    run.reserved()
    run.join("a")
    run.step()
    assert run.core.lease is LeaseState.TRAINER
    assert run.assigned(run.ready("a")) == {0: "a"}


def test_without_seeding_and_without_spot_the_engines_do_the_work(new_run) -> None:
    run = new_run(reserved_instances=1, policy=replace(PAPER, window=CLOSED))
    run.publish()
    run.reserved()
    run.step()
    assert run.assigned(run.ready("head-0")) == {0: "head-0"}


def test_synchronised_weights_reach_newcomers_with_the_next_version(new_run) -> None:
    run = new_run(policy=replace(PAPER, loads_any_time=False))
    run.publish()
    run.spot("a")
    run.step()
    assert not [c for c in run.join("b") if isinstance(c, LoadVersion)]
    run.finish(0)
    told = [c.instance for c in run.publish(1) if isinstance(c, LoadVersion)]
    assert told == ["a", "b"]


@pytest.mark.parametrize(
    ("rule", "first"), [(SizeRule.N_PREM, 8), (SizeRule.N_PREM_FROM_RESERVED, 4), (SizeRule.CAP, 8)]
)
def test_sizes(rule: SizeRule, first: int) -> None:
    config = CoreConfig(max_spot_instances=8, reserved_instances=4, policy=replace(PAPER, sizing=rule))
    assert useful_instances(None, config) == first
    assert useful_instances(2.5, config) == (8 if rule is SizeRule.CAP else 3)


def seen(wait: float, remote_wait: float, n: int, tokens: int = 1_000) -> StepObservation:
    return StepObservation(n, n, wait, remote_wait, 100.0, 200.0, tokens)


def test_the_published_window_moves_in_whole_seconds_with_a_floor() -> None:
    seeding = PublishedWindow(20.0, 4, 3.0)
    seeding.learn(seen(10.0, 0.0, 2))
    assert seeding.t_seed_s == 23.0
    seeding.learn(seen(0.0, 100.0, 2))
    assert seeding.t_seed_s == 5.0


def test_the_published_memory_holds_the_window_of_the_peak() -> None:
    seeding = PublishedWindow(20.0, 4, 3.0, memory={1: 100.0})
    seeding.learn(seen(0.0, 0.0, 2, tokens=1_000))  # throughput rises: 20 s is the peak
    seeding.learn(seen(9.0, 0.0, 2, tokens=900))  # falls: M[2] moves to it
    assert seeding.memory == {1: 100.0, 2: 20.0}
    seeding.learn(seen(9.0, 0.0, 1, tokens=900))
    assert seeding.t_seed_s == 100.0, "the window of one instance is known"
    assert seeding.memory[2] == 20.0


def test_a_memory_that_is_off_is_not_used() -> None:
    config = CoreConfig(max_spot_instances=2, seeding_initial_s=30.0, policy=PAPER)
    rules = baseline_rules({1: 99.0}, has_memory=False)
    seeding = rules.windows[PAPER.window](config, Lengths(), GenerationRate(), StepTimes())
    seeding.learn(seen(3.0, 0.0, 1))
    assert seeding.t_seed_s == 31.0


@pytest.mark.parametrize("policy", [replace(PAPER, window=CLOSED), RLBOOST])
def test_an_instance_that_never_loads_does_not_hold_up_a_step_without_a_window(new_run, policy) -> None:
    run = new_run(reserved_instances=1, max_spot_instances=2, policy=policy, seeding_initial_s=0.0)
    run.publish()
    run.reserved()
    run.spot("a")
    run.step()
    run.core.seeding.skips_window = True  # as a step taught: waking would cost more than it brings
    run.join("b")
    run.until(1.0)
    if run.core.instances["head-0"].state is not InstanceState.ASLEEP:
        run.slept("head-0")
    assert run.core.lease is LeaseState.TRAINER
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.NOTICED))
    commands = run.until(LOADING_S - 1.0)
    assert RecallLease(0) not in commands, "a pull takes a while"
    commands = run.until(LOADING_S + run.core.config.recall_after_s + 1.0)
    assert RecallLease(0) in commands
    run.send(LeaseReturned(run.now))
    assert run.assigned(run.ready("head-0")) == {0: "head-0"}
