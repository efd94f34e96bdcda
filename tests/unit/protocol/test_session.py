"""A session with the coordinator, over connections in memory and on a clock of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import pytest

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.protocol.session import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SETTLED_S,
    Conversation,
    CoordinatorSession,
    RunIsOver,
    accept,
)

HELLO = wire.TrainerHello(wire.SCHEMA, "run", "boot")
WELCOME = wire.TrainerWelcome(3)
GRANT = wire.GrantLeaseMessage(1)


class Wire:
    """A connection: what one sends is kept, what the other side says is put in beforehand."""

    def __init__(self, *received: wire.Message | bytes | Exception) -> None:
        self.sent: list[bytes] = []
        self.received: deque[wire.Message | bytes | Exception] = deque(received)
        self.is_closed = False
        self.is_stuck = False
        self._more = asyncio.Event()

    def say(self, message: wire.Message | Exception) -> None:
        self.received.append(message)
        self._more.set()

    async def send(self, message: bytes) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> bytes:
        while not self.received:
            self._more.clear()
            await self._more.wait()
        match self.received.popleft():
            case Exception() as problem:
                raise problem
            case bytes() as data:
                return data
            case message:
                return wire.encode(message)

    async def close(self) -> None:
        self.is_closed = True


class PlayedClock:
    """Sleeps take no time and are kept."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds
        await asyncio.sleep(0)


@dataclass
class Peer:
    """The owner of a session, and the connections that it will get."""

    wires: deque[Wire]
    repeats: Iterable[wire.Message] = ()
    received: list[wire.Message] = field(default_factory=list)
    welcomes: list[wire.TrainerWelcome] = field(default_factory=list)
    num_sent: int = 0
    num_lost: int = 0
    clock: PlayedClock = field(default_factory=PlayedClock)
    on_dial: Callable[[], None] = lambda: None

    def session(self, **limits: float) -> CoordinatorSession[wire.TrainerWelcome, wire.TrainerCommand]:
        def sent() -> None:
            self.num_sent += 1

        def lost() -> None:
            self.num_lost += 1

        def welcomed(welcome: wire.TrainerWelcome) -> Iterable[wire.Message]:
            self.welcomes.append(welcome)
            return self.repeats

        conversation = Conversation(
            wire.TrainerWelcome, wire.trainer_command_decoder, lambda: HELLO, welcomed,
            self.received.append, sent, lost,
        )  # fmt: skip
        return CoordinatorSession(self._dial, conversation, self.clock, **limits)

    async def _dial(self) -> Wire:
        self.on_dial()
        if not self.wires:
            await asyncio.Event().wait()
        return self.wires.popleft()


def decoded(one: Wire) -> list[wire.Message]:
    return [wire.trainer_message_decoder.decode(data) for data in one.sent]


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110 - of several tasks
            await asyncio.sleep(0)


async def ended(session: CoordinatorSession[wire.TrainerWelcome, wire.TrainerCommand]) -> BaseException:
    with pytest.raises(ProtocolError) as found:
        async with asyncio.timeout(5):
            await session.run()
    return found.value


async def test_hello_then_what_is_repeated_then_what_is_posted_in_order() -> None:
    one = Wire(WELCOME)
    peer = Peer(deque([one]), repeats=[wire.Checkpointed(1), wire.Checkpointed(2)])
    session = peer.session()
    session.post(wire.Checkpointed(9))  # before the welcome: dropped
    assert not session.is_up
    task = asyncio.create_task(session.run())
    await until(lambda: session.is_up)
    for step in (3, 4):
        session.post(wire.Checkpointed(step))
    assert await session.drain(5.0)
    assert decoded(one) == [HELLO, *(wire.Checkpointed(step) for step in (1, 2, 3, 4))]
    assert peer.num_sent == 4
    assert peer.welcomes == [WELCOME]
    peer.clock.at += 7.0
    one.say(GRANT)
    await until(lambda: peer.received == [GRANT])
    assert session.last_received_at == peer.clock.at
    assert not one.is_closed
    assert peer.num_lost == 0
    task.cancel()
    await asyncio.wait([task])
    assert one.is_closed


async def test_a_connection_that_ends_is_dialled_again_and_what_was_not_sent_is_dropped() -> None:
    first, second = Wire(WELCOME), Wire(WELCOME)
    peer = Peer(deque([first, second]))
    session = peer.session()
    task = asyncio.create_task(session.run())
    await until(lambda: session.is_up)
    first.is_stuck = True
    session.post(wire.Checkpointed(1))
    session.post(wire.Checkpointed(2))
    assert not await session.drain(0.01)
    first.say(ConnectionError("reset"))
    await until(lambda: peer.num_lost == 1)
    assert first.is_closed
    await until(lambda: session.is_up)
    session.post(wire.Checkpointed(3))
    assert await session.drain(5.0)
    assert decoded(second) == [HELLO, wire.Checkpointed(3)]
    task.cancel()


async def test_drain_is_false_where_the_connection_is_gone() -> None:
    first = Wire(WELCOME)
    session = Peer(deque([first])).session()
    task = asyncio.create_task(session.run())
    await until(lambda: session.is_up)
    assert await session.drain(5.0)
    first.say(ConnectionError("reset"))
    await until(lambda: not session.is_up)
    assert not await session.drain(5.0)
    task.cancel()


async def test_pauses_double_up_to_the_longest_and_start_over_after_a_settled_connection() -> None:
    refused = [Wire(ConnectionError("no")) for _ in range(9)]
    settled = Wire(WELCOME, ConnectionError("reset"))
    peer = Peer(deque([*refused, settled, Wire(ConnectionError("no"))]))

    def dialled() -> None:
        if not peer.wires or peer.wires[0] is settled:
            peer.clock.at += SETTLED_S

    peer.on_dial = dialled
    task = asyncio.create_task(peer.session().run())
    await until(lambda: len(peer.clock.slept) >= 11)
    task.cancel()
    slept = peer.clock.slept
    longest = [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**k) for k in range(9)]
    for pause_s, most_s in zip(slept, longest, strict=False):
        assert most_s / 2 <= pause_s <= most_s
    assert FIRST_PAUSE_S / 2 <= slept[9] <= FIRST_PAUSE_S, "it had lasted"
    assert FIRST_PAUSE_S <= slept[10] <= 2 * FIRST_PAUSE_S, "it had not"


@pytest.mark.parametrize(
    ("refusal", "kind", "said"),
    [
        (wire.Refused("version 2"), ProtocolError, "the coordinator refused us: version 2"),
        (wire.Refused("the run ends", is_run_over=True), RunIsOver, "the run ends"),
    ],
)
async def test_a_refusal_ends_the_session(refusal: wire.Refused, kind: type[Exception], said: str) -> None:
    one = Wire(refusal)
    problem = await ended(Peer(deque([one])).session())
    assert type(problem) is kind
    assert said in str(problem)
    assert one.is_closed


@pytest.mark.parametrize(
    "answer", [wire.Refused("restarting", retry=True), GRANT, b"no message", TimeoutError()]
)
async def test_an_answer_that_may_change_is_asked_for_again(answer: wire.Message | bytes | Exception) -> None:
    one, two = Wire(answer), Wire(WELCOME)
    session = Peer(deque([one, two])).session()
    task = asyncio.create_task(session.run())
    await until(lambda: session.is_up)
    assert one.is_closed
    assert decoded(two) == [HELLO]
    task.cancel()


async def test_a_coordinator_that_reads_or_says_nothing_counts_as_gone() -> None:
    silent, stuck, third = Wire(WELCOME), Wire(WELCOME), Wire(WELCOME)
    peer = Peer(deque([silent, stuck]))
    session = peer.session(quiet_s=0.05)
    task = asyncio.create_task(session.run())
    await until(lambda: silent.is_closed)
    task.cancel()
    peer = Peer(deque([stuck, third]))
    session = peer.session(send_timeout_s=0.05)
    task = asyncio.create_task(session.run())
    await until(lambda: session.is_up)
    stuck.is_stuck = True
    session.post(wire.Checkpointed(1))
    await until(lambda: stuck.is_closed)
    task.cancel()


async def test_what_makes_no_sense_ends_the_connection_and_what_contradicts_the_session() -> None:
    one, two = Wire(WELCOME, b"\xc1"), Wire(WELCOME)
    session = Peer(deque([one, two])).session()
    task = asyncio.create_task(session.run())
    await until(lambda: one.is_closed and session.is_up)
    task.cancel()
    peer = Peer(deque([Wire(WELCOME, GRANT)]))
    peer.received = Contradicted()
    assert "makes no sense" in str(await ended(peer.session()))


class Contradicted(list[wire.Message]):
    def append(self, message: wire.Message) -> None:
        raise ProtocolError(f"{type(message).__name__} makes no sense", "see the log")


# --- the coordinator's side ---------------------------------------------------------------------------------


async def accepted(one: Wire, refusal: wire.Refused | None = None) -> wire.TrainerHello | None:
    decoder = wire.trainer_message_decoder
    return await accept(one, decoder, wire.TrainerHello, "run", lambda _: refusal)


def refused(one: Wire) -> str:
    (data,) = one.sent
    answer = wire.trainer_command_decoder.decode(data)
    assert isinstance(answer, wire.Refused)
    return answer.problem


async def test_a_right_hello_is_accepted() -> None:
    one = Wire(HELLO)
    assert await accepted(one) == HELLO
    assert one.sent == []
    newer = msgspec.structs.replace(HELLO, schema=(wire.SCHEMA[0], wire.SCHEMA[1] + 1))
    assert await accepted(Wire(newer)) == newer, "a minor version may differ"


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (wire.Checkpointed(1), "the first message must be TrainerHello"),
        (msgspec.structs.replace(HELLO, schema=(wire.SCHEMA[0] + 1, 0)), "install one version"),
        (msgspec.structs.replace(HELLO, run="other"), "trainer belongs to run other, this is run"),
    ],
)
async def test_a_wrong_hello_is_refused_and_told_why(said: wire.Message, answer: str) -> None:
    one = Wire(said)
    assert await accepted(one) is None
    assert answer in refused(one)


async def test_what_the_owner_refuses_is_refused() -> None:
    one = Wire(HELLO)
    assert await accepted(one, wire.Refused("not today", retry=True)) is None
    assert refused(one) == "not today"


@pytest.mark.parametrize("said", [b"no message", ConnectionError("gone"), TimeoutError()])
async def test_a_connection_that_does_not_introduce_itself_gets_no_answer(said: bytes | Exception) -> None:
    one = Wire(said)
    assert await accepted(one) is None
    assert one.sent == []
