"""A coordinator with two open steps: one frame for both, a journal segment each, and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rlboost_runtime.audit.run import audit
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    Ack,
    AssignmentEnd,
    AssignMessage,
    DeliverGroupMessage,
    InstanceReadyMessage,
    LoadVersionMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionFetchedMessage,
    VersionPublishedMessage,
    WakeMessage,
)
from rlboost_runtime.run.folder import RunFolder
from tests.integration.coordinator.test_coordinator_shell import (
    Peer,
    Shell,
    frame,
    hello,
    join,
    request,
    segments,
    shell,
    texts,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The run's folder, which bears the run's name."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def early(step: int, version: int = 0, since: int = 0, *, holds: bool = False):
    return msgspec.structs.replace(
        request(step, version), in_flight_updates=True, open_from=since, keeps_lease=holds
    )


async def begin(made: Shell, trainer: Peer) -> tuple[Peer, list[int]]:
    """Have steps 0 and 1 open, and all four of their responses on one agent; return their assignments."""
    agent = await join(made, trainer)
    await trainer.say(early(0))
    await trainer.say(early(1))
    await agent.hear(WakeMessage)
    await agent.say(InstanceReadyMessage(0))
    given: list[int] = []
    while len(given) < 4:
        given += [item.assignment for item in (await agent.hear(AssignMessage)).items]
    return agent, given


async def test_a_frame_is_journalled_in_the_segments_of_both_steps(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent, (a, b, c, d) = await begin(made, trainer)
        entries = [(a, 0, [1, 9]), (b, 0, [2]), (c, 0, [3]), (d, 0, [4, 9])]
        await agent.say(frame(0, entries, AssignmentEnd(a, "stop"), AssignmentEnd(d, "stop")))
        assert (await agent.hear(Ack)).seq == 0
        assert [path.name for path in segments(tmp_path)] == ["step-000000.seg", "step-000001.seg"]
        await agent.say(
            frame(1, [(c, 1, [9]), (b, 1, [9])], AssignmentEnd(c, "stop"), AssignmentEnd(b, "stop"))
        )
        groups = [await trainer.hear(DeliverGroupMessage) for _ in range(2)]
        assert {group.step: texts(group) for group in groups} == {0: [[1, 9], [2, 9]], 1: [[3, 9], [4, 9]]}
        made.driver.store.check()
    assert audit(RunFolder(tmp_path)).problems == []


async def test_after_a_restart_both_steps_go_on_with_their_tokens(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent, (a, b, c, d) = await begin(made, trainer)
        await agent.say(
            frame(0, [(a, 0, [1, 9]), (b, 0, [2]), (c, 0, [3, 5]), (d, 0, [4])], AssignmentEnd(a, "stop"))
        )
        await agent.hear(Ack)
    async with shell(tmp_path) as made:
        assert [step.step for step in made.driver.core.open_steps] == [0, 1]
        assert [made.driver.store.length(response) for response in range(4)] == [2, 1, 2, 1]
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "boot"))
        await trainer.hear(TrainerWelcome)
        await trainer.say(early(0))
        await trainer.say(early(1))
        agent = made.agent()
        await agent.say(hello())
        await agent.hear(LoadVersionMessage)  # the GPUs are the engines', so it need not wake
        await agent.say(InstanceReadyMessage(0))
        items = []
        while len(items) < 3:
            items += (await agent.hear(AssignMessage)).items
        kept = [(np.frombuffer(item.token_ids, "<i4").tolist()[3:], item.offset) for item in items]
        assert sorted(kept) == [([2], 1), ([3, 5], 2), ([4], 1)]
        ends = [AssignmentEnd(item.assignment, "stop") for item in items]
        await agent.say(frame(0, [(item.assignment, item.offset, [9]) for item in items], *ends))
        groups = {}
        while len(groups) < 2:
            group = await trainer.hear(DeliverGroupMessage)
            groups[group.step] = texts(group)
        assert groups == {0: [[1, 9], [2, 9]], 1: [[3, 5, 9], [4, 9]]}
    assert audit(RunFolder(tmp_path)).problems == []


async def test_a_trained_step_is_dropped_while_the_next_goes_on(tmp_path: Path) -> None:
    async with shell(tmp_path, keep_journal=False) as made:
        trainer = made.trainers()
        agent, (a, b, c, d) = await begin(made, trainer)
        ends = AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop")
        await agent.say(frame(0, [(a, 0, [9]), (b, 0, [9]), (c, 0, [3])], *ends))
        assert (await trainer.hear(DeliverGroupMessage)).step == 0
        await trainer.say(VersionPublishedMessage(1, "digest 1", 1, 0.0))
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 2, 0.5, {}, checkpointed=True))
        await trainer.say(early(2, 1, since=1))
        while (await agent.hear(LoadVersionMessage)).version != 1:
            pass
        async with asyncio.timeout(5.0):
            while [step.step for step in made.driver.core.open_steps] != [1, 2]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sorted(made.driver.earlier) == [1]
        await agent.say(frame(1, [(c, 1, [9])], AssignmentEnd(c, "stop")))
        await agent.say(VersionFetchedMessage(1))
        await agent.say(frame(2, [], AssignmentEnd(d, "aborted")))
        await agent.say(InstanceReadyMessage(1))
        items = []
        while len(items) < 3:
            items += (await agent.hear(AssignMessage)).items
        ends = [AssignmentEnd(item.assignment, "stop") for item in items]
        await agent.say(frame(3, [(item.assignment, 0, [9]) for item in items], *ends, version=1))
        groups = [await trainer.hear(DeliverGroupMessage) for _ in range(2)]
        assert sorted(group.step for group in groups) == [1, 2]
        await made.driver.journal.flushed()
        assert [path.name for path in segments(tmp_path)] == ["step-000001.seg", "step-000002.seg"]


async def test_a_step_without_in_flight_updates_keeps_none_open(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        await join(made, trainer)
        await trainer.say(msgspec.structs.replace(request(), open_from=0))
        await asyncio.sleep(0.1)
        assert made.driver.core.step is None
