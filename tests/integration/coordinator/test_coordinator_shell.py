"""The coordinator's shell over in-memory connections: what is acknowledged, what survives, who is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import random
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rlboost_runtime.audit.run import audit
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver import ingest as ingest_module
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.ingest import Ingest
from rlboost_runtime.coordinator.driver.totals import recover
from rlboost_runtime.coordinator.links.agents import AgentLinks, InstanceStats, Timing
from rlboost_runtime.coordinator.links.trainer import TrainerLink
from rlboost_runtime.coordinator.links.weights import WeightTracker
from rlboost_runtime.coordinator.observers.boot_times import BootTimes
from rlboost_runtime.coordinator.observers.steps import ReservedMeter
from rlboost_runtime.coordinator.storage import snapshot
from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.core.base.messages import (
    Assign,
    CoreConfig,
    Finished,
    GrantLease,
    LeaseReturned,
    RecallLease,
    RunEnding,
    StepTrained,
    Tick,
)
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    TIMELESS_NOTICE,
    AbortMessage,
    Ack,
    AgentHello,
    AssignmentEnd,
    AssignMessage,
    Checkpointed,
    DeliverGroupMessage,
    DeliverResponseMessage,
    Frame,
    GrantLeaseMessage,
    InstanceReadyMessage,
    NoticeReceivedMessage,
    PromptSpec,
    Refused,
    SleepMessage,
    SleptMessage,
    StepStartedMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    WakeMessage,
    Welcome,
    WorkItem,
    agent_command_decoder,
    encode,
    trainer_command_decoder,
)
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.seams import SystemClock, SystemDisk
from tests.fakes.damage import spoil

pytestmark = pytest.mark.integration


class Pipe:
    """One end of an in-memory connection."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: Pipe

    async def send(self, message: bytes) -> None:
        self.other.inbox.put_nowait(message)

    async def receive(self) -> bytes:
        message = await self.inbox.get()
        if message is None:
            self.inbox.put_nowait(None)
            raise ConnectionError("closed")
        return message

    async def close(self) -> None:
        self.inbox.put_nowait(None)
        self.other.inbox.put_nowait(None)


def pipe() -> tuple[Pipe, Pipe]:
    a, b = Pipe(), Pipe()
    a.other, b.other = b, a
    return a, b


class Peer:
    """The far end of a connection, speaking one protocol."""

    def __init__(self, end: Pipe, decoder: Any, task: asyncio.Task[None]) -> None:
        self.end, self.decoder, self.task = end, decoder, task

    async def say(self, message: Any) -> None:
        await self.end.send(encode(message))

    async def hear(self, kind: type, timeout_s: float = 5.0) -> Any:
        """Return the next message of that kind; others are passed over."""
        async with asyncio.timeout(timeout_s):
            while True:
                message = self.decoder.decode(await self.end.receive())
                if isinstance(message, kind):
                    return message

    async def hang_up(self) -> None:
        await self.end.close()
        await asyncio.wait_for(self.task, 5)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The run's folder, which bears the run's name."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


_tasks: set[asyncio.Task[None]] = set()


def kept(serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that lives until the loop ends: one that was collected as garbage would note its end in an
    event log that another coordinator writes by then, which no killed process can."""
    task = asyncio.create_task(serving)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


class Shell:
    """Everything of a coordinator but its port and its fleet."""

    def __init__(self, folder: Path, disk: SystemDisk, *, keep_journal: bool = True) -> None:
        self.run = RunFolder(folder)
        for path in (self.run.journal,):
            path.mkdir(parents=True, exist_ok=True)
        clock = SystemClock()
        self.ended: list[tuple[str, str, str]] = []
        self.ledger = Ledger(self.run.ledger)
        config = CoreConfig(max_spot_instances=0, reserved_instances=1, seeding_initial_s=0.2)
        recovered, timing = recover(self.run.events, self.run.snapshot), Timing(lease_s=6.0)
        self.num_replayed = recovered.num_replayed
        weights, reserved = WeightTracker(), ReservedMeter()
        stats = InstanceStats(weights, timing.flush_s)
        boot_times = BootTimes(lambda: recovered.core.machines)
        self.config = config
        self.driver = CoreDriver(
            self.run, recovered, clock, disk, self, (reserved, stats), keep_journal=keep_journal
        )
        ingest = Ingest(self.driver, (boot_times,))
        self.agents = AgentLinks(
            self.driver, ingest, weights, boot_times, stats, timing, frozenset({"reserved-0"})
        )
        self.trainer = TrainerLink(
            self.driver, self.ledger, clock, weights, reserved, lambda *words: self.ended.append(words)
        )

    def to_agent(self, command: Any) -> None:
        self.agents.carry_out(command)

    def work(self, command: Assign, item: WorkItem) -> None:
        self.agents.work(command, item)

    def deliver(self, group: DeliverGroupMessage) -> None:
        self.trainer.deliver(group)

    def lease(self, command: GrantLease | RecallLease) -> None:
        self.trainer.lease(command)

    def fleet(self, command: Any) -> None:
        """There is none: machines are the test's."""

    async def start(self) -> None:
        self.driver.journal.start(asyncio.get_running_loop())
        self.driver.begin(self.config)
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.driver.tick()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._ticker.cancel()
        await self.driver.journal.close()
        self.ledger.close()

    def agent(self) -> Peer:
        ours, theirs = pipe()
        return Peer(theirs, agent_command_decoder, kept(self.agents.serve(ours)))

    def trainers(self) -> Peer:
        ours, theirs = pipe()
        return Peer(theirs, trainer_command_decoder, kept(self.trainer.serve(ours)))


@asynccontextmanager
async def shell(
    folder: Path, disk: SystemDisk | None = None, *, keep_journal: bool = True
) -> AsyncIterator[Shell]:
    made = Shell(folder, disk or SystemDisk(), keep_journal=keep_journal)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "journal").glob("*.seg"))


def hello(**changes: Any) -> AgentHello:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "run": "job",
        "instance": "reserved-0/0",
        "machine": "reserved-0",
        "pool": "reserved",
        "max_running": 8,
        "kv_tokens": 4096,
        "engine": "emulated",
    }
    return AgentHello(**(fields | changes))


def request(step: int = 0, version: int = 0, num_prompts: int = 1) -> StepStartedMessage:
    prompt = np.arange(3, dtype="<i4").tobytes()
    prompts = tuple(PromptSpec(group, prompt) for group in range(num_prompts))
    return StepStartedMessage(
        step, version, prompts, group_size=2, max_response_tokens=4, stop_token_ids=(9,)
    )


def frame(
    seq: int, entries: list[tuple[int, int, list[int]]], *endings: AssignmentEnd, version: int = 0
) -> Frame:
    """Return a frame of (assignment, offset, token ids)."""
    tokens = [token for _, _, ids in entries for token in ids]
    return Frame(
        seq=seq,
        policy_version=version,
        assignments=np.array([e[0] for e in entries], "<u4").tobytes(),
        offsets=np.array([e[1] for e in entries], "<u4").tobytes(),
        counts=np.array([len(e[2]) for e in entries], "<u2").tobytes(),
        token_ids=np.array(tokens, "<i4").tobytes(),
        logprobs=np.full(len(tokens), -0.5, "<f4").tobytes(),
        endings=endings,
    )


def texts(group: DeliverGroupMessage) -> list[list[int]]:
    return [np.frombuffer(r.token_ids, "<i4").tolist() for r in group.responses]


async def join(made: Shell, trainer: Peer) -> Peer:
    """Bring a trainer and a ready agent up to where work flows."""
    await trainer.say(TrainerHello(SCHEMA, "job", "boot"))
    await trainer.hear(TrainerWelcome)
    await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
    agent = made.agent()
    await agent.say(hello())
    await agent.hear(Welcome)
    await agent.hear(SleepMessage)  # until a step is asked for, the GPU is the trainer's
    await agent.say(SleptMessage())
    return agent


async def begin_step(agent: Peer, trainer: Peer) -> list[int]:
    await trainer.say(request())
    await agent.hear(WakeMessage)
    await agent.say(InstanceReadyMessage(0))
    return [item.assignment for item in (await agent.hear(AssignMessage)).items]


async def test_a_step_flows_from_request_to_delivery_and_lease(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(frame(0, [(a, 0, [1, 2]), (b, 0, [5])]))
        assert (await agent.hear(Ack)).seq == 0
        await agent.say(
            frame(1, [(a, 2, [9]), (b, 1, [6, 7, 8])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "length"))
        )
        group = await trainer.hear(DeliverGroupMessage)
        assert [np.frombuffer(r.token_ids, "<i4").tolist() for r in group.responses] == [
            [1, 2, 9],
            [5, 6, 7, 8],
        ]
        assert [r.finish_reason for r in group.responses] == ["stop", "length"]
        assert [s.instance for r in group.responses for s in r.segments] == ["reserved-0/0"] * 2
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        assert (await trainer.hear(GrantLeaseMessage)).step == 0
        metrics = {"loss": 1.0, "handover_s": 2.5, "minibatches_not_finite": 2.0}
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 7, 0.5, metrics))
        await asyncio.sleep(0.05)
        (warned,) = [event.text for event in made.ledger.events() if event.kind == "warning"]
        assert warned.startswith("warning grad_not_finite: Gradient not finite in 2 updates")
        assert [each.code for each in made.trainer.health.active] == ["grad_not_finite"]
        assert [row.tokens for row in made.ledger.steps()] == [7]
        trained = [each for each in read_events(made.driver.run.events) if isinstance(each, StepTrained)]
        assert [each.handover_s for each in trained] == [2.5], "the brain hears what the trainer measured"


async def test_a_frame_is_accepted_at_once_unless_it_follows_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "GATHER_S", 1.0)
    monkeypatch.setattr(ingest_module, "SHARE", 1e-9)
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await asyncio.sleep(1.0)
        began = time.monotonic()
        await agent.say(frame(0, [(a, 0, [1, 2]), (b, 0, [5])]))
        assert (await agent.hear(Ack)).seq == 0
        await agent.say(frame(1, [(a, 2, [3])]))
        assert (await agent.hear(Ack)).seq == 1
        assert time.monotonic() - began < 0.5, "each is alone"
        accept = Ingest._accept_batch
        monkeypatch.setattr(Ingest, "_accept_batch", lambda self: accept(self) + 1)  # as if another had come
        await agent.say(frame(2, [(a, 3, [4])]))
        assert (await agent.hear(Ack)).seq == 2
        began = time.monotonic()
        await agent.say(frame(3, [(a, 4, [9])]))
        assert (await agent.hear(Ack)).seq == 3
        assert time.monotonic() - began >= 0.9, "what follows gathers"


async def test_an_event_that_cannot_be_logged_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response's end is applied in a callback, whose errors nobody sees: its step would never be over."""
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        append = made.driver.events.append

        def full(event: Any) -> None:
            if isinstance(event, Finished):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(event)

        monkeypatch.setattr(made.driver.events, "append", full)
        await agent.say(frame(0, [(a, 0, [1, 2]), (b, 0, [5])], AssignmentEnd(a, "stop")))
        async with asyncio.timeout(5):
            with pytest.raises(OSError, match="No space left on device"):
                await made.driver.broken()
        monkeypatch.undo()  # there is room again, and what was lost stays lost
        with pytest.raises(OSError, match="No space left on device"):
            made.driver.apply(LeaseReturned(made.driver.now()))


async def test_a_step_whose_start_the_log_has_lost_is_in_the_books_once(tmp_path: Path) -> None:
    """After a power cut the trainer's checkpoint may be ahead of the event log."""
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await begin_step(agent, trainer)
        for _ in range(2):
            await trainer.say(StepTrainedMessage(1, 0.0, 3.0, 9, 0.25, {"step_s": 4.0}))
        await asyncio.sleep(0.05)
        (row,) = made.ledger.steps()
        assert (row.step, row.tokens, row.reward_mean) == (1, 9, 0.25)
        assert row.ended_ns - row.started_ns == pytest.approx(4e9, rel=1e-3)
        assert not [each for each in read_events(made.driver.run.events) if isinstance(each, StepTrained)]
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 7, 0.5, {}))  # the open one: never trained here
        await asyncio.sleep(0.05)
        assert [row.step for row in made.ledger.steps()] == [0, 1]


async def test_tokens_stay_until_the_steps_checkpoint_is_durable(tmp_path: Path) -> None:
    async with shell(tmp_path, keep_journal=False) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await trainer.say(Checkpointed(0))  # of a step that is being trained: it means nothing yet
        await agent.say(
            frame(0, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        await trainer.hear(DeliverGroupMessage)
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 2, 0.5, {}, checkpointed=False))
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        await trainer.say(request(step=1))  # the next step begins while the checkpoint is written
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        await agent.hear(AssignMessage)
        assert [path.name for path in segments(tmp_path)] == ["step-000000.seg", "step-000001.seg"]
        await trainer.say(Checkpointed(0))
        await asyncio.sleep(0.3)
        assert [path.name for path in segments(tmp_path)] == ["step-000001.seg"]


async def test_a_trainer_that_lost_its_last_checkpoint_is_given_that_step_again(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(
            frame(0, [(a, 0, [4, 9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        await trainer.hear(DeliverGroupMessage)
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        await trainer.say(request(step=1))  # ahead: step 0 is trained meanwhile
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        c, _ = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        await agent.say(frame(1, [(c, 0, [1, 2])]))
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 3, 0.5, {}, checkpointed=False))
        assert (await agent.hear(Ack)).seq >= 0
        await asyncio.sleep(0.1)
        assert [row.step for row in made.ledger.steps()] == [0]
        await trainer.hang_up()

        again = made.trainers()
        await again.say(TrainerHello(SCHEMA, "job", "another boot"))
        await again.say(request())  # nothing is generated for it: the journal has it all
        assert texts(await again.hear(DeliverGroupMessage)) == [[4, 9], [9]]
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        await again.say(request(step=1))
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        one, other = (await agent.hear(AssignMessage)).items
        assert sorted([one.offset, other.offset]) == [0, 2], "it goes on from what was generated ahead"
        half = one if one.offset else other
        whole = other if one.offset else one
        await agent.say(
            frame(2, [(half.assignment, 2, [9]), (whole.assignment, 0, [9])],
                  AssignmentEnd(half.assignment, "stop"), AssignmentEnd(whole.assignment, "stop"))
        )  # fmt: skip
        assert texts(await again.hear(DeliverGroupMessage)) == [[1, 2, 9], [9]]
        await again.say(StepTrainedMessage(1, 0.0, 0.1, 3, 0.5, {}))
        await asyncio.sleep(0.1)
    found = audit(RunFolder(tmp_path))
    assert found.problems == []
    assert [step.step for step in found.steps] == [0, 1]
    assert found.carried_to


async def test_a_restarted_trainer_is_not_given_what_was_decided_for_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It requests the same step and would take the GPU while that request wakes the engines."""
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(
            frame(0, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        await trainer.hear(DeliverGroupMessage)
        await agent.hear(SleepMessage)
        await trainer.hang_up()

        again = made.trainers()
        await again.say(TrainerHello(SCHEMA, "job", "another boot"))
        await again.hear(TrainerWelcome)
        await again.say(VersionPublishedMessage(1, "digest", 1, 0.0))
        writing = asyncio.Event()
        flushed = made.driver.journal.flushed

        async def slowly() -> None:
            await writing.wait()
            await flushed()

        monkeypatch.setattr(made.driver.journal, "flushed", slowly)
        await again.say(request(version=1))
        await agent.say(SleptMessage())  # of the first request: the core grants the GPU
        await asyncio.sleep(0.1)
        assert made.driver.core.lease is LeaseState.TRAINER
        assert again.end.inbox.empty(), "the second request is not open yet"
        writing.set()
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(1))
        a, b = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        assert again.end.inbox.empty()
        await agent.say(
            frame(
                1, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"), version=1
            )
        )
        await again.hear(DeliverGroupMessage)
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        assert (await again.hear(GrantLeaseMessage)).step == 0


@pytest.mark.parametrize("snapshot_every", [2, snapshot.EVERY_EVENTS])
async def test_what_was_acknowledged_survives_a_restart_and_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_every: int
) -> None:
    monkeypatch.setattr(snapshot, "EVERY_EVENTS", snapshot_every)
    monkeypatch.setattr(snapshot, "PAUSE_SHARE", 0)
    monkeypatch.setattr(snapshot, "QUICK_S", math.inf)
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(frame(0, [(a, 0, [1, 2]), (b, 0, [5, 9])], AssignmentEnd(b, "stop")))
        await agent.hear(Ack)
        digest = made.driver.totals.commands_digest
        num_events = made.driver.totals.num_events
    async with shell(tmp_path) as made:  # a new process would do the same: nothing but the folder is shared
        assert made.driver.repairs == []
        assert (made.num_replayed < num_events) == (snapshot_every == 2)
        assert made.driver.totals.commands_digest == digest
        agent = made.agent()
        await agent.say(hello())
        assert not (await agent.hear(Welcome)).resumed
        await agent.say(InstanceReadyMessage(0))
        (item,) = (await agent.hear(AssignMessage)).items
        assert np.frombuffer(item.token_ids, "<i4").tolist() == [0, 1, 2, 1, 2]
        assert (item.offset, item.max_new_tokens) == (2, 2)
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "boot"))
        await trainer.say(request())
        await agent.say(frame(0, [(item.assignment, 2, [3, 9])], AssignmentEnd(item.assignment, "stop")))
        group = await trainer.hear(DeliverGroupMessage)
        assert texts(group) == [[1, 2, 3, 9], [5, 9]]
    core, *_ = recover(tmp_path / "events.log")
    assert core.step is not None
    assert core.step.num_finished == 2


@pytest.mark.parametrize(("source", "is_assumed"), [(TIMELESS_NOTICE, True), ("notice.json", False)])
async def test_a_notice_that_gives_no_time_is_recorded_as_such(
    tmp_path: Path, source: str, is_assumed: bool
) -> None:
    async with shell(tmp_path) as made:
        agent = await join(made, made.trainers())
        await agent.say(NoticeReceivedMessage(30.0, source))
        await agent.hang_up()
    log = (tmp_path / "events.log").read_text(encoding="utf-8")
    (notice,) = [line for line in log.splitlines() if '"NoticeReceived"' in line]
    assert f'"is_assumed":{str(is_assumed).lower()}' in notice


async def test_an_agent_resumes_after_a_restart_and_resends_without_doubling(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(frame(0, [(a, 0, [1])]))
        await agent.hear(Ack)
        epoch = made.driver.core.instances["reserved-0/0"].epoch
    async with shell(tmp_path) as made:
        agent = made.agent()
        await agent.say(hello(epoch=epoch, assignments=(a, b)))
        assert (await agent.hear(Welcome)).resumed
        await agent.say(frame(0, [(a, 0, [1])]))  # its acknowledgement may have been lost
        await agent.say(
            frame(1, [(a, 1, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        assert (await agent.hear(Ack)).seq >= 0
        await until(lambda: bool(made.driver.core.complete_groups()))
        assert made.driver.core.complete_groups() == [0]
        assert made.agents.ingest.tokens_duplicate == 1
        made.driver.store.check()


async def test_a_finish_in_the_journal_that_the_core_never_heard_of_is_made_good(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(
            frame(0, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        await trainer.hear(DeliverGroupMessage)
    events = (tmp_path / "events.log").read_bytes().splitlines(keepends=True)
    first_finish = next(i for i, line in enumerate(events) if b"Finished" in line)
    (tmp_path / "events.log").write_bytes(b"".join(events[:first_finish]) + b'{"torn')
    async with shell(tmp_path) as made:
        await made.driver.journal.flushed()
        assert made.driver.core.complete_groups() == [0]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be within five seconds")


class HeldDisk(SystemDisk):
    """A disk whose syncs wait while it is held."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def sync(self, fd: int) -> None:
        self.free.wait(10)
        super().sync(fd)


async def test_a_response_is_finished_only_once_its_tokens_are_on_the_disk(tmp_path: Path) -> None:
    disk = HeldDisk()
    async with shell(tmp_path, disk) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await made.driver.journal.flushed()
        disk.free.clear()
        ends = AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop")
        await agent.say(frame(0, [(a, 0, [9]), (b, 0, [9])], *ends))
        await until(lambda: made.driver.store.length(0) == 1)
        again = made.agent()  # the same instance begins a new life: its work goes to the next one, itself
        await again.say(hello())
        await again.hear(Welcome)
        await again.say(InstanceReadyMessage(0))
        await until(lambda: made.driver.totals.assigned[0] == 2)
        await asyncio.sleep(0.05)
        assert made.driver.core.complete_groups() == [], "finished before the journal was synced"
        disk.free.set()
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[9], [9]]


async def finish_step(folder: Path) -> bytes:
    """Have a coordinator finish step 0 as [1, 2, 9], [5, 9]; return its event log before the finishes."""
    async with shell(folder) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        events = (folder / "events.log").read_bytes()
        await agent.say(frame(0, [(a, 0, [1, 2]), (b, 0, [5])]))
        await agent.hear(Ack)
        made.driver.apply(Tick(made.driver.now()))  # the journal's next record knows of one more event
        ends = AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop")
        await agent.say(frame(1, [(a, 2, [9]), (b, 1, [9])], *ends))
        await trainer.hear(DeliverGroupMessage)
    return events


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


async def work(agent: Peer) -> None:
    """Answer every order; each response begins anew and becomes [7, 7, 9]."""
    await agent.hear(Welcome)
    await agent.say(InstanceReadyMessage(0))
    seq = 0
    while True:
        match await agent.hear(object):
            case SleepMessage():
                await agent.say(SleptMessage())
            case WakeMessage():
                await agent.say(InstanceReadyMessage(0))
            case AssignMessage(items=items):
                for item in items:
                    assert item.offset == 0
                    end = AssignmentEnd(item.assignment, "stop")
                    await agent.say(frame(seq, [(item.assignment, 0, [7, 7, 9])], end))
                    seq += 1


FLIPS = int(os.environ.get("RLBOOST_FLIPS", "8"))

DAMAGES: dict[str, Any] = {
    "a byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "a byte of the header flipped": lambda path: flip(path, 20),
    "150 bytes off the end": lambda path: os.truncate(path, path.stat().st_size - 150),
    "the last record's end zeroed": lambda path: path.write_bytes(path.read_bytes()[:-40] + bytes(40)),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_finished_response_that_the_journal_lost_is_generated_again(
    tmp_path: Path, damage: str
) -> None:
    await finish_step(tmp_path)
    DAMAGES[damage](segments(tmp_path)[0])
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        await trainer.say(request())
        agent = made.agent()
        await agent.say(hello())
        working = asyncio.create_task(work(agent))
        whole = await trainer.hear(DeliverGroupMessage)
        assert set(map(tuple, texts(whole))) <= {(7, 7, 9), (5, 9), (1, 2, 9)}
        assert [7, 7, 9] in texts(whole)
        assert any("generated again" in text for text in made.driver.repairs)
        digest = made.driver.totals.commands_digest
        made.driver.core.check()
        working.cancel()
    assert recover(tmp_path / "events.log").totals.commands_digest == digest
    assert audit(RunFolder(tmp_path)).problems == []


@pytest.mark.parametrize("name", ["journal/step-000000.seg", "events.log"])
async def test_no_damage_of_journal_or_event_log_has_wrong_tokens_trained(tmp_path: Path, name: str) -> None:
    """Seeded; FLIPS tries per file (`make soak-corruption`)."""
    intact = tmp_path / "intact" / "job"
    intact.mkdir(parents=True)
    await finish_step(intact)
    rng, said = random.Random(23), 0
    for i in range(FLIPS):
        folder = tmp_path / str(i) / "job"
        shutil.copytree(intact, folder)
        spoil(folder / name, rng)
        async with shell(folder) as made:
            trainer = made.trainers()
            await trainer.say(TrainerHello(SCHEMA, "job", "again"))
            await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
            await trainer.say(request())
            agent = made.agent()
            await agent.say(hello())
            working = asyncio.create_task(work(agent))
            found = texts(await trainer.hear(DeliverGroupMessage))
            working.cancel()
            assert found[0] in ([1, 2, 9], [7, 7, 9])
            assert found[1] in ([5, 9], [7, 7, 9])
            if name.startswith("journal"):  # a damage that cost nothing needs no word: a torn last write
                assert made.driver.repairs or found == [[1, 2, 9], [5, 9]]
            said += bool(made.driver.repairs)
            made.driver.core.check()
    assert said > FLIPS // 2
    print(json.dumps({"pass": True, "file": name, "flips": FLIPS, "repaired": said}))


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
async def test_an_event_log_that_lost_its_end_gives_no_number_out_twice(tmp_path: Path, damage: str) -> None:
    before = await finish_step(tmp_path)
    log = tmp_path / "events.log"
    last = recover(log)
    if damage == "cut":  # as after a power cut: the journal is synced, the event log is not
        log.write_bytes(before)
    elif damage == "flipped":
        flip(log, before.index(b"StepStarted") + 20)
    else:
        log.unlink()
    async with shell(tmp_path) as made:
        assert made.driver.repairs
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        if damage != "cut":
            await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
        agent = made.agent()
        await agent.say(hello(epoch=last.totals.next_epoch - 1, assignments=(0, 1)))
        assert not (await agent.hear(Welcome)).resumed, "what it holds may have another number by now"
        await trainer.say(request())
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[1, 2, 9], [5, 9]], "the journal has it"
        assert made.driver.totals.next_epoch > last.totals.next_epoch
        assert made.driver.totals.next_response >= 2
    found = audit(RunFolder(tmp_path))
    assert [problem for problem in found.problems if "responses requested" not in problem] == []


async def test_the_event_log_is_on_stable_storage_once_the_run_has_ended(tmp_path: Path) -> None:
    class Recording(SystemDisk):
        def __init__(self) -> None:
            self.opened: dict[int, Path] = {}
            self.synced: list[str] = []

        def append(self, path: Path) -> int:
            fd = super().append(path)
            self.opened[fd] = path
            return fd

        def sync(self, fd: int) -> None:
            super().sync(fd)
            self.synced.append(self.opened[fd].name)

    disk = Recording()
    async with shell(tmp_path, disk) as made:
        assert "events.log" not in disk.synced, "while it runs, the journal's marks tell what is missing"
        await made.driver.close()
        assert disk.synced[-1] == "events.log"


async def test_a_restored_run_has_all_instances_register_anew_once(tmp_path: Path) -> None:
    """Also where nothing shows that the log lost its end: the lost head may have given out later numbers."""
    await finish_step(tmp_path)
    run, last = RunFolder(tmp_path), recover(tmp_path / "events.log")
    write_json(run.restored, {"url": "s3://bucket/out/r", "at": 1_000_000_000.0, "taken": False})
    async with shell(tmp_path) as made:
        assert "continues from its copy at s3://bucket/out/r, as of 2001-09-09" in made.driver.repairs[0]
        assert made.driver.totals.next_epoch > last.totals.next_epoch
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        agent = made.agent()
        await agent.say(hello(epoch=last.totals.next_epoch - 1, assignments=(0, 1)))
        assert not (await agent.hear(Welcome)).resumed
        await trainer.say(request())
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[1, 2, 9], [5, 9]]
    async with shell(tmp_path) as made:
        assert made.driver.repairs == []
    assert audit(run).problems == []


async def test_a_coordinator_killed_while_it_opens_a_step_goes_on(tmp_path: Path) -> None:
    """The header of a step is on disk before the core hears of the step, whatever the disk does."""

    class StuckDisk(SystemDisk):
        def write(self, fd: int, data: bytes) -> None:
            if b"StepStarted" in data:
                (tmp_path / "header_first").write_bytes(b"".join(p.read_bytes() for p in segments(tmp_path)))
            super().write(fd, data)

    async with shell(tmp_path, StuckDisk()) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await begin_step(agent, trainer)
    assert b"StepRequest" in (tmp_path / "header_first").read_bytes()

    events = (tmp_path / "events.log").read_bytes().splitlines(keepends=True)
    started = next(i for i, line in enumerate(events) if b"StepStarted" in line)
    (tmp_path / "events.log").write_bytes(b"".join(events[:started]))  # killed between header and event
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(
            frame(0, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[9], [9]]


async def test_a_step_under_a_new_version_that_was_cut_short_is_asked_for_again(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await begin_step(agent, trainer)
        events = (tmp_path / "events.log").read_bytes()
        await trainer.say(VersionPublishedMessage(1, "digest", 1, 0.0))
        await trainer.say(request(version=1))
        await agent.hear(AbortMessage)
    (tmp_path / "events.log").write_bytes(events)  # the new opening's header is on disk, its event is not
    async with shell(tmp_path) as made:
        assert made.driver.step is None
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        await trainer.say(VersionPublishedMessage(1, "digest", 1, 0.0))
        await trainer.say(request(version=1))
        agent = made.agent()
        await agent.say(hello())
        await agent.hear(Welcome)
        await agent.say(InstanceReadyMessage(1))
        a, b = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        await agent.say(
            frame(
                0, [(a, 0, [9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"), version=1
            )
        )
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[9], [9]]


async def test_a_step_asked_for_at_the_end_does_not_hide_the_last_one_from_a_resumed_run(
    tmp_path: Path,
) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(
            frame(0, [(a, 0, [1, 9]), (b, 0, [9])], AssignmentEnd(a, "stop"), AssignmentEnd(b, "stop"))
        )
        await trainer.hear(DeliverGroupMessage)
        await agent.hear(SleepMessage)
        await agent.say(SleptMessage())
        await trainer.hear(GrantLeaseMessage)
        await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 7, 0.5, {}))  # and not in a checkpoint
        await trainer.say(VersionPublishedMessage(1, "digest", 1, 0.0))
        made.driver.apply(RunEnding(made.driver.now(), "it was told to stop"))
        await trainer.say(request(step=1, version=1))
        await trainer.hang_up()
        assert made.driver.step is not None
        assert made.driver.step.request.step == 0
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "again"))
        await trainer.say(request())
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[1, 9], [9]]


async def test_a_step_without_groups_is_trained_like_any_other_also_after_a_restart(tmp_path: Path) -> None:
    """sft rolls nothing out: the lease comes at once, and numbers of responses go on behind it."""
    for boot, step in (("first", 0), ("again", 1)):
        async with shell(tmp_path) as made:
            trainer = made.trainers()
            await trainer.say(TrainerHello(SCHEMA, "job", boot))
            await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
            await trainer.say(StepStartedMessage(step, 0, (), 2, 4))
            assert (await trainer.hear(GrantLeaseMessage)).step == step
            await trainer.say(StepTrainedMessage(step, 0.0, 0.1, 7, None, {}, checkpointed=False))
            await trainer.hang_up()
            assert made.driver.core.step is not None
            assert made.driver.core.step.trained
    async with shell(tmp_path) as made:
        assert made.driver.totals.trained_step == 1
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "evaluates"))
        await trainer.say(request(step=2))
        await trainer.hang_up()
        assert made.driver.step is not None
        assert made.driver.step.all_responses().start == 0


@pytest.mark.parametrize(
    "bad",
    [
        StepStartedMessage(0, 0, (PromptSpec(1, b"\0" * 4),), 2, 4),
        StepStartedMessage(0, 0, (PromptSpec(0, b""),), 2, 4),
        StepStartedMessage(0, 0, (PromptSpec(0, b"\0" * 4),), 0, 4),
        StepStartedMessage(0, 7, (PromptSpec(0, b"\0" * 4),), 2, 4),
    ],
)
async def test_an_impossible_step_is_refused_and_leaves_no_trace(
    tmp_path: Path, bad: StepStartedMessage
) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "boot"))
        await trainer.say(VersionPublishedMessage(0, "digest", 1, 0.0))
        await trainer.say(bad)
        assert "cannot be rolled out" in (await trainer.hear(Refused)).problem
    assert b"StepStarted" not in (tmp_path / "events.log").read_bytes()


async def test_strangers_are_refused_in_words(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        for change, word in [
            ({"run": "other"}, "other"),
            ({"schema": (9, 0)}, "schema"),
            ({"schema": (1, 0)}, "schema"),
            ({"machine": "spot-7", "pool": "spot"}, "spot-7"),
            ({"instance": "spot-7/0"}, "not for instance spot-7/0"),
        ]:
            agent = made.agent()
            await agent.say(hello(**change))
            refused = await agent.hear(Refused)
            assert word in refused.problem
            assert not refused.retry


async def test_a_credential_is_for_its_own_machine(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        theirs, ours = pipe()
        task = asyncio.create_task(made.agents.serve(ours, "spot-3"))
        agent = Peer(theirs, agent_command_decoder, task)
        await agent.say(hello())
        assert "not for instance reserved-0/0" in (await agent.hear(Refused)).problem
        assert not made.agents.links


async def test_tokens_for_anothers_assignment_cost_the_sender_its_connection(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, _ = await begin_step(agent, trainer)
        thief = made.agent()
        await thief.say(hello(instance="reserved-0/1"))
        await thief.say(frame(0, [(a, 0, [1])]))
        await asyncio.wait_for(thief.task, 5)
        assert made.driver.store.length(made.driver.step.first_response) == 0
        await agent.say(frame(0, [(a, 0, [1])]))
        await agent.hear(Ack)
        assert made.driver.store.length(made.driver.step.first_response) == 1


async def test_a_contradictory_frame_costs_the_sender_its_connection_only(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, _ = await begin_step(agent, trainer)
        await agent.say(frame(0, [(a, 0, [1]), (a, 0, [1])]))
        await asyncio.wait_for(agent.task, 5)
        assert made.driver.store.length(made.driver.step.first_response) == 0
        assert "reserved-0/0" not in made.driver.core.instances  # resumed, it would say the same again
        again = made.agent()
        await again.say(hello())
        assert not (await again.hear(Welcome)).resumed


async def test_a_finished_response_comes_before_its_group_to_a_trainer_that_wants_it(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(request(), wants_responses=True)
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await trainer.say(wanted)
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        a, b = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        await agent.say(frame(0, [(b, 0, [5, 9])], AssignmentEnd(b, "stop")))
        early = await trainer.hear(DeliverResponseMessage)
        assert (early.step, early.group, early.place) == (0, 0, 1)
        assert np.frombuffer(early.response.token_ids, "<i4").tolist() == [5, 9]

        again = made.trainers()  # it was killed, and asks for the same
        await again.say(TrainerHello(SCHEMA, "job", "boot2"))
        await again.hear(TrainerWelcome)
        await again.say(wanted)
        assert (await again.hear(DeliverResponseMessage)).response == early.response
        await agent.say(frame(1, [(a, 0, [1, 9])], AssignmentEnd(a, "stop")))
        group = await again.hear(DeliverGroupMessage)
        assert texts(group) == [[1, 9], [5, 9]]
        assert group.responses[1] == early.response

        plain = made.trainers()  # one that wants groups alone is not the other's heir
        await plain.say(TrainerHello(SCHEMA, "job", "boot3"))
        await plain.hear(TrainerWelcome)
        await plain.say(request())
        assert texts(await plain.hear(DeliverGroupMessage)) == [[1, 9], [5, 9]]
        assert made.driver.step is not None
        assert not made.driver.step.request.wants_responses, "the step is the same for both"


async def test_a_trainer_that_wants_groups_alone_gets_no_single_response(tmp_path: Path) -> None:
    async with shell(tmp_path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        await agent.say(frame(0, [(b, 0, [5, 9])], AssignmentEnd(b, "stop")))
        with pytest.raises(TimeoutError):
            await trainer.hear(DeliverResponseMessage, timeout_s=0.3)
        await agent.say(frame(1, [(a, 0, [1, 9])], AssignmentEnd(a, "stop")))
        assert texts(await trainer.hear(DeliverGroupMessage)) == [[1, 9], [5, 9]]
