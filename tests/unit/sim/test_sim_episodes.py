"""Steps of episodes in virtual time: turns arrive while a step is open, and find their prefix or not."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from rlboost_runtime.core.base.messages import FIRST_REQUEST, Event, Finished, RequestArrived, StepStarted
from rlboost_runtime.sim import WITHOUT_TURNS, Preset, agent_preset, simulate
from rlboost_runtime.sim.engine_model import EngineModel, EngineSpeed, Sequence
from rlboost_runtime.sim.faults import Referee
from rlboost_runtime.sim.presets import Turns
from rlboost_runtime.sim.responses import draw_lengths
from rlboost_runtime.traces import Trace, TraceEvent

SPEED = EngineSpeed(
    weights_s=0.01, sequence_s=0.0, kv_token_s=0.0, fixed_s=0.0, prefill_token_s=0.001, prefill_square_s=0.0,
    kv_tokens=1_000, headroom_tokens=1, max_running=10,
)  # fmt: skip


def small() -> Preset:
    known = agent_preset()
    turns = Turns(mean=4, told_tokens=40, pause_s=3.0, concurrency=10)
    workload = replace(
        known.workload, prompts=6, group_size=4, prompt_tokens=100, max_response_tokens=1_500, turns=turns
    )
    assumptions = replace(known.assumptions, length_median=400.0, boot_s=10.0)
    return replace(
        known, workload=workload, assumptions=assumptions, max_spot_instances=3, seeding_initial_s=10.0
    )


def churn() -> Trace:
    events = [TraceEvent(0.0, f"n{i}", "add") for i in range(3)]
    for start in (40.0, 80.0, 120.0):
        events += [TraceEvent(start, "n0", "remove"), TraceEvent(start + 20.0, "n0", "add")]
    return Trace("churn", "made for tests", tuple(events), 3_600.0)


@pytest.mark.parametrize("policy", ["on_demand", "recompute", "paper", "rlboost"])
def test_every_promise_holds_and_every_turn_is_sampled_once(policy: str) -> None:
    seen: list[Event] = []
    referee = Referee()

    def watch(event: Event, commands: list[object]) -> None:
        seen.append(event)
        referee(event, commands)  # type: ignore[arg-type]

    result = simulate(small(), churn(), policy, seed=0, hours=1.0, max_steps=3, watch=watch)
    assert result.steps == 3
    drawn = [draw_lengths(small().workload, small().assumptions, 0, step) for step in range(3)]
    assert [row.tokens for row in result.rows] == [sum(each.tokens) for each in drawn]
    wanted = sorted(turn.tokens for each in drawn for episode in each.turns for turn in episode)
    fourth = next(i for i, event in enumerate(seen) if isinstance(event, StepStarted) and event.step == 3)
    turns = [e for e in seen[:fourth] if isinstance(e, Finished) and e.response >= FIRST_REQUEST]
    assert sorted(event.num_tokens for event in turns) == wanted
    assert (
        result.commands_digest
        == simulate(small(), churn(), policy, seed=0, hours=1.0, max_steps=3).commands_digest
    )


def test_no_more_episodes_are_open_than_may_be() -> None:
    open_now, most, left = set[int](), 0, dict[int, int]()
    workload = small().workload

    def watch(event: Event, commands: list[object]) -> None:
        nonlocal most
        if isinstance(event, RequestArrived):
            assert event.request.episode is not None
            open_now.add(event.request.episode)
            left[event.request.episode] = event.request.max_tokens
            assert event.request.prompt_tokens + event.request.max_tokens <= 1.5 * 100 + 1_500
        if isinstance(event, Finished) and event.response < FIRST_REQUEST:
            open_now.discard(event.response)
        most = max(most, len(open_now))

    simulate(small(), churn(), "rlboost", seed=0, hours=1.0, max_steps=1, watch=watch)
    assert workload.turns is not None
    assert most == workload.turns.concurrency
    assert len(left) >= workload.responses


def test_a_turn_that_finds_its_prefix_computes_only_what_is_new() -> None:
    engine = EngineModel(SPEED)
    engine.submit(Sequence(0, 0, prompt=100, tokens=0, goal=10, session=7))
    assert [each.key for each in engine.advance(10.0)] == [0]
    began = engine.time
    engine.submit(Sequence(1, 1, prompt=150, tokens=0, goal=10, session=7))
    engine.submit(Sequence(2, 2, prompt=150, tokens=0, goal=10, session=8))
    engine.advance(began)
    assert engine.time - began == pytest.approx(0.001 * (150 - 110) + 0.001 * 150)


def test_a_prefix_goes_when_others_need_its_room_and_when_the_weights_change() -> None:
    def prefill_of_second(between: Sequence | None, *, forgets: bool = False) -> float:
        engine = EngineModel(SPEED)
        engine.submit(Sequence(0, 0, prompt=100, tokens=0, goal=10, session=7))
        engine.advance(10.0)
        if between is not None:
            engine.submit(between)
            engine.advance(50.0)
        if forgets:
            engine.forget_prefixes()
        began = engine.time
        engine.submit(Sequence(9, 9, prompt=150, tokens=0, goal=10, session=7))
        engine.advance(began)
        return engine.time - began

    assert prefill_of_second(None) == pytest.approx(0.040)
    assert prefill_of_second(Sequence(1, 1, prompt=300, tokens=0, goal=10, session=8)) == pytest.approx(0.040)
    assert prefill_of_second(Sequence(1, 1, prompt=960, tokens=0, goal=10, session=8)) == pytest.approx(0.150)
    assert prefill_of_second(None, forgets=True) == pytest.approx(0.150)


def test_the_agents_preset_is_like_its_source() -> None:
    preset = agent_preset()
    drawn = draw_lengths(preset.workload, preset.assumptions, 0, 0)
    assert fmean(map(len, drawn.turns)) == pytest.approx(24, rel=0.1)
    contexts = [
        prompt + sum(turn.tokens + turn.told for turn in episode)
        for prompt, episode in zip(drawn.prompts, drawn.turns, strict=True)
    ]
    assert sorted(contexts)[len(contexts) // 2] == pytest.approx(18_855, rel=0.1)
    assert max(contexts) < 42_000


@pytest.mark.parametrize("policy", WITHOUT_TURNS)
def test_a_policy_without_turns_says_so(policy: str) -> None:
    with pytest.raises(ValueError, match=f"{policy} has no turns; leave it out"):
        simulate(small(), churn(), policy, seed=0, hours=1.0)
