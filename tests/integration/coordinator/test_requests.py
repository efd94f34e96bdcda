"""Requests outside a step, through the coordinator's shell: journalled, moved, recovered, handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost_runtime.audit.turns import SampledTurns
from rlboost_runtime.coordinator.driver import requests as desk_module
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.ingest import Ingest
from rlboost_runtime.coordinator.driver.totals import recover
from rlboost_runtime.coordinator.links.requests import serve_requests
from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    CoreConfig,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LossCause,
    Pool,
    Released,
    VersionPublished,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    AssignmentEnd,
    EndpointHello,
    EndpointWelcome,
    Frame,
    GenerateMessage,
    Sampling,
    WithdrawMessage,
    WorkItem,
    encode,
    endpoint_command_decoder,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.seams import SystemClock, SystemDisk

pytestmark = pytest.mark.integration

PROMPT = np.arange(3, dtype="<i4").tobytes()


class Head:
    """Core, journals and ingest of a run, with the test as its agents."""

    def __init__(self, folder: Path, *, keep_journal: bool = True) -> None:
        self.work_items: list[tuple[str, WorkItem]] = []
        self.aborts: list[int] = []
        config = CoreConfig(max_spot_instances=0, reserved_instances=0)
        self.driver = CoreDriver(
            RunFolder(folder), recover(folder / "events.log"), SystemClock(), SystemDisk(), self,
            keep_journal=keep_journal,
        )  # fmt: skip
        self.ingest = Ingest(self.driver)
        self.driver.journal.start(asyncio.get_running_loop())
        self.driver.begin(config)

    def to_agent(self, command: Any) -> None:
        if isinstance(command, Abort):
            self.aborts.append(command.assignment)

    def work(self, command: Assign, item: WorkItem) -> None:
        self.work_items.append((command.instance, item))

    def deliver(self, group: Any) -> None: ...

    def lease(self, command: Any) -> None: ...

    def fleet(self, command: Any) -> None: ...

    def join(self, name: str, version: int = 0) -> None:
        now, epoch = self.driver.now(), self.driver.totals.next_epoch
        self.driver.apply(InstanceJoined(now, name, f"by-hand-{name}", Pool.SPOT, epoch, 4, 10_000))
        self.driver.apply(InstanceReady(now, name, epoch, version))

    def lose(self, name: str) -> None:
        epoch = self.driver.core.instances[name].epoch
        self.driver.apply(InstanceLeft(self.driver.now(), name, epoch, LossCause.NOTICED))

    async def tell(
        self, name: str, item: WorkItem, offset: int, ids: list[int], ending: str = "", version: int = 0
    ) -> None:
        """Have an agent send tokens, and wait until they are acknowledged."""
        sender = Sender(name)
        endings = (AssignmentEnd(item.assignment, ending),) if ending else ()
        self.ingest.take(sender, frame([(item.assignment, offset, ids)], *endings, version=version))
        async with asyncio.timeout(5):
            await sender.acked.wait()


class Sender:
    def __init__(self, instance: str) -> None:
        self.instance, self.acked = instance, asyncio.Event()
        self.problem: ProtocolError | None = None

    def ack(self, seq: int) -> None:
        self.acked.set()

    def fail(self, problem: ProtocolError) -> None:
        self.problem = problem
        self.acked.set()


def frame(entries: list[tuple[int, int, list[int]]], *endings: AssignmentEnd, version: int = 0) -> Frame:
    tokens = [token for _, _, ids in entries for token in ids]
    return Frame(
        seq=0,
        policy_version=version,
        assignments=np.array([e[0] for e in entries if e[2]], "<u4").tobytes(),
        offsets=np.array([e[1] for e in entries if e[2]], "<u4").tobytes(),
        counts=np.array([len(e[2]) for e in entries if e[2]], "<u2").tobytes(),
        token_ids=np.array(tokens, "<i4").tobytes(),
        logprobs=(-np.array(tokens, "<f4")).tobytes(),
        endings=endings,
    )


@asynccontextmanager
async def head(folder: Path, *, keep_journal: bool = True) -> AsyncIterator[Head]:
    folder.joinpath("journal").mkdir(exist_ok=True)
    made = Head(folder, keep_journal=keep_journal)
    try:
        yield made
    finally:
        await made.driver.close()


def ask(name: str = "r", limit: int = 8, offset: int = 0, **sampling: Any) -> GenerateMessage:
    return GenerateMessage(name, PROMPT, limit, Sampling(stop_token_ids=(9,), **sampling), offset)


def ids_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


class Pipe:
    """An endpoint's connection, in memory."""

    def __init__(self, made: Head) -> None:
        self._down: asyncio.Queue[bytes] = asyncio.Queue()
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.task = asyncio.create_task(serve_requests(made.driver, self))

    async def send(self, message: bytes) -> None:
        self._down.put_nowait(message)

    async def receive(self) -> bytes:
        message = await self._up.get()
        if message is None:
            raise ConnectionError("closed")
        return message

    async def close(self) -> None: ...

    def say(self, message: Any) -> None:
        self._up.put_nowait(encode(message))

    async def hear(self) -> Any:
        async with asyncio.timeout(5):
            return endpoint_command_decoder.decode(await self._down.get())

    async def hang_up(self) -> None:
        self._up.put_nowait(None)
        await self.task


async def endpoint(made: Head) -> Pipe:
    pipe = Pipe(made)
    pipe.say(EndpointHello(SCHEMA, made.driver.run.name))
    assert isinstance(await pipe.hear(), EndpointWelcome)
    return pipe


async def test_tokens_of_a_request_are_shown_once_they_are_durable(tmp_path: Path) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 3))
        made.join("a", 3)
        client = await endpoint(made)
        client.say(ask(temperature=0.5))
        await asyncio.sleep(0.1)
        ((name, item),) = made.work_items
        assert (name, item.offset, item.max_new_tokens, item.policy_version) == ("a", 0, 8, 3)
        assert item.sampling == Sampling(temperature=0.5, stop_token_ids=(9,))
        assert item.token_ids == PROMPT
        await made.tell("a", item, 0, [1, 2], version=3)
        told = await client.hear()
        assert (told.offset, ids_of(told.token_ids), told.versions) == (0, [1, 2], ((3, 2),))
        assert np.frombuffer(told.logprobs, "<f4").tolist() == [-1.0, -2.0]
        await made.tell("a", item, 2, [9], "stop", version=3)
        told = await client.hear()
        assert (told.offset, ids_of(told.token_ids), told.finish_reason) == (2, [9], "stop")
        assert not made.driver.core.open_requests
        client.say(WithdrawMessage("r"))
        await asyncio.sleep(0.05)
        assert not made.driver.requests.open
        assert made.aborts == []
        await client.hang_up()


async def test_a_request_goes_on_from_its_journalled_tokens_on_another_machine(tmp_path: Path) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        await made.driver.requests.take(ask())
        first = made.work_items[0][1]
        await made.tell("a", first, 0, [1, 2])
        made.join("b")
        made.lose("a")
        name, second = made.work_items[1]
        assert (name, second.offset, second.max_new_tokens) == ("b", 2, 6)
        assert ids_of(second.token_ids) == [0, 1, 2, 1, 2]
        await made.tell("a", first, 2, [7, 7])  # late: not its any more
        await made.tell("b", second, 2, [3, 4])
        tokens = made.driver.requests.known("r")
        assert tokens is not None
        assert list(tokens.ids) == [1, 2, 3, 4]
        assert [(start, instance) for start, instance, _ in tokens.segments] == [(0, "a"), (2, "b")]


async def test_a_coordinator_that_died_goes_on_and_its_client_misses_nothing(tmp_path: Path) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        for name in ("r", "gone", "done"):
            await made.driver.requests.take(ask(name))
        items = [item for _, item in made.work_items]
        await made.tell("a", items[0], 0, [1, 2])
        await made.tell("a", items[2], 0, [5, 9], "stop")
        made.driver.requests.withdraw("gone")
        assert made.aborts == [items[1].assignment]
    async with head(tmp_path) as made:
        assert made.driver.core.open_requests.keys() == {FIRST_REQUEST}
        await made.tell("a", items[0], 2, [3])  # it never noticed: its assignment is still its own
        client = await endpoint(made)
        client.say(ask(offset=1))
        told = await client.hear()
        assert (told.offset, ids_of(told.token_ids)) == (1, [2, 3])
        client.say(ask("done"))
        told = await client.hear()
        assert (ids_of(told.token_ids), told.finish_reason) == ([5, 9], "stop")
        fresh = await made.driver.requests.take(ask("gone"))
        assert fresh.response == FIRST_REQUEST + 3, "no number is used twice"
        await client.hang_up()
    core = Core()
    for event in read_events(tmp_path / "events.log"):
        core.handle(event)
    assert core.open_requests.keys() == {FIRST_REQUEST, FIRST_REQUEST + 3}


async def test_a_request_whose_event_was_lost_is_not(tmp_path: Path) -> None:
    """It was journalled, and the coordinator died before the core learnt of it."""
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        await made.driver.requests.take(ask())
    log = tmp_path / "events.log"
    lines = log.read_bytes().splitlines(keepends=True)
    assert b"RequestArrived" in lines[-1]
    log.write_bytes(b"".join(lines[:-1]))
    async with head(tmp_path) as made:
        assert made.driver.core.open_requests.keys() == {FIRST_REQUEST}
        made.join("a")
        assert made.work_items[0][1].token_ids == PROMPT


async def test_a_request_whose_tokens_are_lost_ends_with_a_problem(tmp_path: Path) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        await made.driver.requests.take(ask())
        await made.tell("a", made.work_items[0][1], 0, [1, 2])
    (segment,) = (tmp_path / "requests").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    async with head(tmp_path) as made:
        client = await endpoint(made)
        client.say(ask(offset=2))
        told = await client.hear()
        assert "2 tokens of it were delivered, 0 are known" in told.problem
        await client.hang_up()


async def test_a_name_means_one_request(tmp_path: Path) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        one, two = await asyncio.gather(made.driver.requests.take(ask()), made.driver.requests.take(ask()))
        assert one is two
        with pytest.raises(ProtocolError, match="asks for something else"):
            await made.driver.requests.take(ask(limit=9))
        made.driver.requests.refuse_all("the run has ended: done")
        client = await endpoint(made)
        client.say(ask("new"))
        assert (await client.hear()).problem == "the run has ended: done"
        await client.hang_up()


async def test_what_nobody_wants_is_forgotten_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        client = await endpoint(made)
        client.say(ask())
        async with asyncio.timeout(10):
            while not made.work_items:  # noqa: ASYNC110 - the core gives no event
                await asyncio.sleep(0.01)
        made.driver.requests.drop_unwanted()
        assert made.driver.requests.known("r")
        await client.hang_up()
        made.driver.requests.drop_unwanted()
        assert made.driver.requests.known("r"), "its client may come back"
        monkeypatch.setattr(desk_module, "KEEP_S", 0.0)
        made.driver.requests.drop_unwanted()
        assert not made.driver.requests.known("r")
        assert made.aborts == [made.work_items[0][1].assignment]


async def test_a_connection_that_ends_late_takes_no_request_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "KEEP_S", 0.0)
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        old, new = await endpoint(made), await endpoint(made)
        for client in (old, new):
            client.say(ask())
            await asyncio.sleep(0.1)
        await old.hang_up()
        made.driver.requests.drop_unwanted()
        assert made.driver.requests.known("r")
        await new.hang_up()
        made.driver.requests.drop_unwanted()
        assert not made.driver.requests.known("r")


async def test_a_full_segment_is_replaced_by_what_is_open_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "ROTATE_BYTES", 400)
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        await made.driver.requests.take(ask(limit=100))
        item = made.work_items[0][1]
        for at in range(20):
            await made.tell("a", item, at, [at % 7])
            await made.driver.requests.take(ask(f"other {at}"))
            made.driver.requests.withdraw(f"other {at}")
    segments = sorted((tmp_path / "requests").glob("*.seg"))
    assert len(segments) == 1
    assert segments[0].name > "step-000003.seg"
    async with head(tmp_path) as made:
        (tokens,) = made.driver.requests.open.values()
        assert list(tokens.ids) == [at % 7 for at in range(20)]
    kept = SampledTurns.read(tmp_path / "requests")
    assert len(kept.requests) == 21, "what is over stays for the audit"
    assert list(kept.requests[FIRST_REQUEST].ids) == [at % 7 for at in range(20)]


async def test_without_evidence_nothing_is_kept_of_what_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "ROTATE_BYTES", 400)
    async with head(tmp_path, keep_journal=False) as made:
        for at in range(20):
            await made.driver.requests.take(ask(f"other {at}"))
            made.driver.requests.withdraw(f"other {at}")
    assert len(list((tmp_path / "requests").rglob("*.seg"))) == 1


async def test_frames_with_tokens_of_both_are_divided(tmp_path: Path) -> None:
    """What belongs to nobody any more is dropped; another's assignment costs the sender its connection."""
    async with head(tmp_path) as made:
        made.driver.apply(VersionPublished(0.0, 0))
        made.join("a")
        await made.driver.requests.take(ask("one", limit=2))
        await made.driver.requests.take(ask("two"))
        one, two = (item.assignment for _, item in made.work_items)
        sender = Sender("a")
        made.ingest.take(sender, frame([(one, 0, [1, 2]), (99, 0, [3]), (two, 1, [4])]))
        await asyncio.wait_for(sender.acked.wait(), 5)
        known = {name: list(made.driver.requests.known(name).ids) for name in ("one", "two")}
        assert known == {"one": [1, 2], "two": []}, "a gap is not filled by what comes after it"
        assert made.driver.requests.known("one").reason == "length"
        assert made.ingest.tokens_dropped == 1
        made.ingest.take(sender, frame([], AssignmentEnd(two, "stop")))
        await asyncio.sleep(0.1)
        made.join("c")  # the other one is paused
        assert made.work_items[-1][0] == "c", "a finish without its tokens is a failed engine"
        assert [e.reason for e in read_events(tmp_path / "events.log") if isinstance(e, Released)]
        thief = Sender("b")
        made.ingest.take(thief, frame([(made.work_items[-1][1].assignment, 0, [8])]))
        await asyncio.wait_for(thief.acked.wait(), 5)
        assert thief.problem is not None
