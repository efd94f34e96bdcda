"""A step that is extended: its first groups stay, the new ones are generated, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.audit import audit
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    AssignmentEnd,
    AssignMessage,
    DeliverGroupMessage,
    InstanceReadyMessage,
    SleepMessage,
    SleptMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    WakeMessage,
    Welcome,
)
from rlboost_runtime.run.folder import RunFolder
from tests.integration.coordinator.test_coordinator_shell import (
    Peer,
    begin_step,
    frame,
    hello,
    join,
    request,
    segments,
    shell,
    texts,
    tmp_path,
)

__all__ = ["tmp_path"]
pytestmark = pytest.mark.integration


async def finish(agent: Peer, seq: int, a: int, b: int, token: int) -> None:
    """Generate both responses of a group: the token, then the end."""
    await agent.say(
        frame(seq, [(a, 0, [token, 9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
    )


async def first_group(agent: Peer, trainer: Peer) -> None:
    """Roll out a step of one group, up to where the trainer has it."""
    await finish(agent, 0, *await begin_step(agent, trainer), 4)
    assert texts(await trainer.hear(DeliverGroupMessage)) == [[4, 9], [9]]
    await agent.hear(SleepMessage)
    await agent.say(SleptMessage())


async def extend(agent: Peer, trainer: Peer) -> list[int]:
    await trainer.say(request(num_prompts=2))
    await agent.hear(WakeMessage)
    await agent.say(InstanceReadyMessage(0))
    return [item.assignment for item in (await agent.hear(AssignMessage)).items]


async def trained(trainer: Peer) -> None:
    await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 6, 0.5, {}))
    await asyncio.sleep(0.1)


def check_books(folder: Path) -> None:
    found = audit(RunFolder(folder))
    assert found.problems == []
    assert (found.requested, found.finished, found.cancelled) == (4, 4, 0)
    assert [len(step.tokens) for step in found.steps] == [4]


async def test_the_new_prompts_alone_are_generated_and_delivered(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await first_group(agent, trainer)
        await finish(agent, 1, *await extend(agent, trainer), 5)
        group = await trainer.hear(DeliverGroupMessage)
        assert (group.group, texts(group)) == (1, [[5, 9], [9]]), "it has the first group"
        await trained(trainer)
        assert made.driver.core.step is not None
        assert made.driver.core.step.trained
        made.driver.core.check()
    check_books(tmp_path)


async def test_a_killed_trainer_asks_for_less_first_and_nothing_is_generated_twice(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await first_group(agent, trainer)
        a, b = await extend(agent, trainer)
        await trainer.hang_up()
        await finish(agent, 1, a, b, 5)
        again = made.trainers()
        await again.say(TrainerHello(SCHEMA, "job", "another boot"))
        await again.hear(TrainerWelcome)
        await again.say(request())
        group = await again.hear(DeliverGroupMessage)
        assert (group.group, texts(group)) == (0, [[4, 9], [9]])
        with pytest.raises(TimeoutError):
            await again.hear(DeliverGroupMessage, timeout_s=0.2)  # it has not asked for the other one
        await again.say(request(num_prompts=2))
        group = await again.hear(DeliverGroupMessage)
        assert (group.group, texts(group)) == (1, [[5, 9], [9]])
        await trained(again)
    check_books(tmp_path)


@pytest.mark.parametrize("knows", [False, True], ids=["before-its-event", "after"])
@pytest.mark.parametrize("is_new_trainer", [False, True], ids=["same-trainer", "new-trainer"])
async def test_a_killed_coordinator_goes_on_with_the_longer_step(
    tmp_path: Path, knows: bool, is_new_trainer: bool
) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await first_group(agent, trainer)
        events = (tmp_path / "events.log").read_bytes()
        await extend(agent, trainer)
    if not knows:  # the header of the longer step is on disk, its event is not
        (tmp_path / "events.log").write_bytes(events)
    assert segments(tmp_path)
    async with shell(tmp_path) as made:
        agent, trainer = made.agent(), made.trainers()
        await agent.say(hello())
        await agent.hear(Welcome)
        if not knows:  # the GPU is the trainer's
            await agent.hear(SleepMessage)
            await agent.say(SleptMessage())
        await trainer.say(TrainerHello(SCHEMA, "job", "boot", holds_lease=not is_new_trainer))
        if is_new_trainer:
            await trainer.say(request())
            assert (await trainer.hear(DeliverGroupMessage)).group == 0
        await trainer.say(request(num_prompts=2))
        if not knows:
            await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        a, b = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        await finish(agent, 0, a, b, 5)
        group = await trainer.hear(DeliverGroupMessage)
        if not is_new_trainer:
            assert group.group == 0
            group = await trainer.hear(DeliverGroupMessage)
        assert (group.group, texts(group)) == (1, [[5, 9], [9]])
        await trained(trainer)
        made.driver.core.check()
    check_books(tmp_path)
