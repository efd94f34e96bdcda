"""Curriculum by pass rate: who rests, who comes back, and what a killed trainer goes on with."""

from __future__ import annotations

import json
import random

import pytest
from pydantic import ValidationError

from rlboost_runtime.job import Curriculum, Job
from rlboost_runtime.trainer.data.feed import PromptFeed
from rlboost_runtime.trainer.data.prompts import Prompt, PromptSource
from rlboost_runtime.trainer.data.reading import Example

STEPS = 40


def source(
    curriculum: Curriculum | None, num: int = 10, *, per_step: int = 4, weights: tuple[float, ...] = (1.0,)
) -> PromptSource:
    examples = [
        Example(f"{number}-{i}", None, {}, source=number, weight=weight, curriculum=curriculum)
        for number, weight in enumerate(weights)
        for i in range(num)
    ]
    return PromptSource(
        examples, lambda each: (each.text, [1]), prompts_per_step=per_step, max_prompt_tokens=9, seed=0
    )


def rewards(step: int, prompt: Prompt) -> list[float]:
    """Prompts 0 and 1 are always solved, 2 and 3 never, the others now and then."""
    if prompt.index % 10 < 4:
        return [float(prompt.index % 10 < 2)] * 3
    draw = random.Random(f"{step}/{prompt.index}")
    return [float(draw.random() < 0.5) for _ in range(3)]


def run(feed: PromptFeed, begin: int = 0, end: int = STEPS, order: int = 0) -> list[list[int]]:
    """Train steps whose groups arrive in an order of their own; return their prompts."""
    found = []
    for step in range(begin, end):
        prompts = feed.of_step(step)
        arrived = list(enumerate(prompts))
        random.Random(f"{order}/{step}").shuffle(arrived)
        for group, prompt in arrived:
            feed.saw(step, group, prompt, rewards(step, prompt))
        found.append([prompt.index for prompt in prompts])
    return found


def test_without_a_curriculum_a_step_has_the_prompts_that_follow_from_its_number() -> None:
    prompts = source(None)
    feed = PromptFeed(prompts)
    assert run(feed) == [[each.index for each in prompts.batch(step)] for step in range(STEPS)]
    assert feed.state_after(3) is None
    assert feed.metrics(3) == {}


def test_settled_prompts_rest_and_come_back_after_so_many_of_their_turns() -> None:
    feed = PromptFeed(source(Curriculum(visits=2, rest_epochs=3), num=10, per_step=10))
    steps = run(feed, end=13)
    visits = {index: [step for step, found in enumerate(steps) if index in found] for index in (0, 2)}
    for index in (0, 2):
        assert visits[index][:2] == [0, 1], "two visits settle it"
        resting = visits[index][2] - visits[index][1]
        assert 2 <= resting <= 4, "passed over in three epochs, which are shorter now"
    assert {4, 5, 6, 7, 8, 9} <= set(steps[2]), "the others are visited"
    found = feed.metrics(12)
    assert (found["prompts_resting_solved"], found["prompts_resting_unsolved"]) == (2, 2)


def test_turns_that_are_passed_over_are_counted_per_step() -> None:
    feed = PromptFeed(source(Curriculum(visits=1, rest_epochs=1000), num=10, per_step=6))
    run(feed, end=2)  # 12 turns: all were visited
    feed.of_step(2)
    first = feed.metrics(2)["prompts_passed_over"]
    assert feed.metrics(0)["prompts_passed_over"] == 0
    assert first > 0


@pytest.mark.parametrize(("skip", "rest"), [("solved", (2, 0)), ("unsolved", (0, 2)), ("both", (2, 2))])
def test_either_kind_may_be_left_alone(skip: str, rest: tuple[int, int]) -> None:
    feed = PromptFeed(source(Curriculum(skip=skip, visits=1)))
    run(feed)
    found = feed.metrics(STEPS - 1)
    settled = found["prompts_resting_solved"] >= rest[0], found["prompts_resting_unsolved"] >= rest[1]
    assert settled == (True, True)
    if 0 in rest:
        assert found["prompts_resting_solved" if rest[0] == 0 else "prompts_resting_unsolved"] == 0


def test_a_data_set_of_settled_prompts_alone_is_still_visited() -> None:
    examples_rest = Curriculum(visits=1, rest_epochs=5)
    feed = PromptFeed(source(examples_rest, num=3, per_step=3))
    for step in range(10):
        prompts = feed.of_step(step)
        assert len(prompts) == 3
        for group, prompt in enumerate(prompts):
            feed.saw(step, group, prompt, [1.0, 1.0])


def test_weights_of_sources_stay_exact() -> None:
    feed = PromptFeed(source(Curriculum(visits=1), per_step=8, weights=(3.0, 1.0)))
    counts = [sum(index >= 10 for index in step) for step in run(feed)]
    assert sum(counts) == pytest.approx(8 * STEPS / 4, abs=1)


def test_neither_arrival_nor_failed_rewards_mean_anything() -> None:
    curriculum = Curriculum(visits=2)
    assert run(PromptFeed(source(curriculum)), order=1) == run(PromptFeed(source(curriculum)), order=2)
    feed = PromptFeed(source(curriculum))
    for step in range(STEPS):
        for group, prompt in enumerate(feed.of_step(step)):
            feed.saw(step, group, prompt, [])
    assert feed.metrics(STEPS - 1)["prompts_resting_unsolved"] == 0


@pytest.mark.parametrize("killed_after", [0, 1, 7, 23])
def test_a_killed_trainer_goes_on_with_the_same_prompts(killed_after: int) -> None:
    curriculum = Curriculum(visits=2, rest_epochs=2)
    wanted = run(PromptFeed(source(curriculum)))
    feed = PromptFeed(source(curriculum))
    run(feed, end=killed_after + 1)
    state = feed.state_after(killed_after)
    feed.of_step(killed_after + 1)  # the checkpoint is written meanwhile
    state = json.loads(json.dumps(state))
    again = PromptFeed(source(curriculum))
    again.restore(state, killed_after + 1)
    assert run(again, begin=killed_after + 1) == wanted[killed_after + 1 :]


@pytest.mark.parametrize("killed_after", [0, 5, 20])
def test_steps_asked_for_ahead_follow_from_what_is_certain_by_then(killed_after: int) -> None:
    """Step n + 1 is asked for while step n is trained, before or after its rewards are known."""

    def ahead(feed: PromptFeed, begin: int, end: int, early: bool) -> tuple[list[list[int]], object]:
        asked = {begin: feed.of_step(begin)}
        for step in range(begin, end):
            if early:
                asked[step + 1] = feed.of_step(step + 1)
            for group, prompt in enumerate(asked[step]):
                feed.saw(step, group, prompt, rewards(step, prompt))
            if not early:
                asked[step + 1] = feed.of_step(step + 1)
        state = json.loads(json.dumps(feed.state_after(end - 1)))
        return [[each.index for each in asked[step]] for step in sorted(asked)], state

    def new() -> PromptFeed:
        return PromptFeed(source(Curriculum(visits=1)), max_staleness=1)

    wanted, _ = ahead(new(), 0, STEPS, early=True)
    assert ahead(new(), 0, STEPS, early=False)[0] == wanted
    _, state = ahead(new(), 0, killed_after + 1, early=True)
    again = new()
    again.restore(state, killed_after + 1)
    assert ahead(again, killed_after + 1, STEPS, early=True)[0] == wanted[killed_after + 1 :]


def test_other_data_begins_anew_at_the_same_step() -> None:
    feed = PromptFeed(source(Curriculum(visits=1)))
    run(feed, end=5)
    other = source(Curriculum(visits=1), num=11)
    again = PromptFeed(other)
    again.restore(feed.state_after(4), 5)
    assert again.metrics(5)["prompts_resting_solved"] == 0
    assert again.of_step(5) == other.batch(5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": {"loss": "sft"}}, "sft has none"),
        ({"trainer": {"script": "mine.py"}}, "trainer.script is set"),
    ],
)
def test_a_curriculum_without_rewards_to_go_by_is_refused(changes: dict[str, object], told: str) -> None:
    job = {"name": "r", "model": "m", "data": {"source": "p.jsonl", "curriculum": {}}, "reward": "math"}
    with pytest.raises(ValidationError, match=told):
        Job.model_validate({**job, **changes})
    Job.model_validate(job)
