"""A step that is extended: its first groups stay, the new ones are generated, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rlboost_runtime.audit.run import audit
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    AssignmentEnd,
    AssignMessage,
    DeliverGroupMessage,
    GrantLeaseMessage,
    InstanceReadyMessage,
    PromptSpec,
    SleepMessage,
    SleptMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    WakeMessage,
    Welcome,
)
from rlboost_runtime.run.folder import RunFolder
from tests.fakes.damage import spoil
from tests.integration.coordinator.test_coordinator_shell import (
    FLIPS,
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
    work,
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
        assert await trainer.hear(GrantLeaseMessage) == GrantLeaseMessage(0, 1)
        before = segments(tmp_path)[0].read_bytes()
        await finish(agent, 1, *await extend(agent, trainer), 5)
        group = await trainer.hear(DeliverGroupMessage)
        assert (group.group, texts(group)) == (1, [[5, 9], [9]]), "it has the first group"
        assert segments(tmp_path)[0].read_bytes().startswith(before), "nothing is written again"
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        assert await trainer.hear(GrantLeaseMessage) == GrantLeaseMessage(0, 2)
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


async def finish_extended_step(folder: Path) -> bytes:
    """Roll out both groups; return the event log from before the second was asked for."""
    async with shell(folder) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await first_group(agent, trainer)
        events = (folder / "events.log").read_bytes()
        await finish(agent, 1, *await extend(agent, trainer), 5)
        await trainer.hear(DeliverGroupMessage)
    return events


async def ask_again(made: Any) -> list[list[list[int]]]:
    """Be a restarted trainer: ask for the first prompt, then for both; return what it is given."""
    trainer, agent = made.trainers(), made.agent()
    await trainer.say(TrainerHello(SCHEMA, "job", "again"))
    await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
    await agent.say(hello())
    working = asyncio.create_task(work(agent))
    found = []
    for num_prompts in (1, 2):
        await trainer.say(request(num_prompts=num_prompts))
        group = await trainer.hear(DeliverGroupMessage)
        assert group.group == num_prompts - 1
        found.append(texts(group))
    working.cancel()
    made.driver.core.check()
    made.driver.store.check()
    return found


async def test_what_the_event_log_lost_of_a_longer_step_the_journal_has(tmp_path: Path) -> None:
    (tmp_path / "events.log").write_bytes(await finish_extended_step(tmp_path))  # as after a power cut
    async with shell(tmp_path) as made:
        assert made.driver.repairs
        assert await ask_again(made) == [[[4, 9], [9]], [[5, 9], [9]]]


@pytest.mark.parametrize("name", ["journal/step-000000.seg", "events.log"])
async def test_no_damage_of_a_longer_step_has_wrong_tokens_trained(tmp_path: Path, name: str) -> None:
    intact = tmp_path / "intact" / "job"
    intact.mkdir(parents=True)
    await finish_extended_step(intact)
    rng = random.Random(5)
    for i in range(FLIPS):
        folder = tmp_path / str(i) / "job"
        shutil.copytree(intact, folder)
        spoil(folder / name, rng)
        async with shell(folder) as made:
            (a, b), (c, d) = await ask_again(made)
        assert [a in ([4, 9], [7, 7, 9]), b in ([9], [7, 7, 9])] == [True, True]
        assert [c in ([5, 9], [7, 7, 9]), d in ([9], [7, 7, 9])] == [True, True]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_trainer_whose_step_has_other_prompts_now_is_given_theirs(
    tmp_path: Path, restarts: bool
) -> None:
    """A reward that changed while the run was down chooses other prompts under the same version."""
    other = PromptSpec(0, np.arange(2, dtype="<i4").tobytes())
    changed = msgspec.structs.replace(request(), prompts=(other,))

    async def ask(made: Any) -> None:
        trainer, agent = made.trainers(), made.agent()
        await agent.say(hello())
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        await trainer.hear(TrainerWelcome)
        working = asyncio.create_task(work(agent))
        await trainer.say(changed)
        group = await trainer.hear(DeliverGroupMessage)
        working.cancel()
        assert (group.group, texts(group)) == (0, [[7, 7, 9], [7, 7, 9]])
        made.driver.core.check()
        assert made.driver.totals.next_response == 6

    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await first_group(agent, trainer)
        await extend(agent, trainer)
        await trainer.hang_up()
        await agent.hang_up()
        if not restarts:
            await ask(made)
    if restarts:
        async with shell(tmp_path) as made:
            await ask(made)
    assert audit(RunFolder(tmp_path)).problems == []
