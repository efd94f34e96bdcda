"""The trainer's stream against a scripted coordinator: reconnects, nothing twice, leases and recalls."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.protocol import session
from rlboost_runtime.protocol.messages import (
    Checkpointed,
    DeliverGroupMessage,
    DeliverResponseMessage,
    FinishedResponse,
    GrantLeaseMessage,
    LeaseReturnedMessage,
    Message,
    PromptSpec,
    RecallLeaseMessage,
    Refused,
    RunFailed,
    RunFinished,
    StepStartedMessage,
    StepTrainedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    encode,
    trainer_message_decoder,
)
from rlboost_runtime.trainer.rollout.step_stream import StepStream

PATIENCE_S = 10.0
NOTHING_KNOWN = TrainerWelcome(None)


class Connection:
    """One accepted connection, seen from the coordinator's side; also the stream's `Transport`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._up: queue.Queue[Message] = queue.Queue()
        self.closed = threading.Event()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._loop.call_soon_threadsafe(self._down.put_nowait, encode(message))

    def drop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._down.put_nowait, None)
        self.closed.set()

    def hear(self) -> Message:
        return self._up.get(timeout=PATIENCE_S)

    def silent(self) -> bool:
        time.sleep(0.05)
        return self._up.empty()

    async def send(self, message: bytes) -> None:
        if self.closed.is_set():
            raise ConnectionError("gone")
        self._up.put(trainer_message_decoder.decode(message))

    async def receive(self) -> bytes:
        message = await self._down.get()
        if message is None:
            raise ConnectionError("gone")
        return message

    async def close(self) -> None:
        self.closed.set()


class Coordinator:
    """Accepts connections; the test script holds the other end."""

    def __init__(self) -> None:
        self._accepted: queue.Queue[Connection] = queue.Queue()
        self.refuse_dials = 0
        self.dials: list[str] = []

    async def connect(self, url: str, token: str, certificate_pem: str, *, timeout_s: float) -> Connection:
        self.dials.append(url)
        if self.refuse_dials:
            self.refuse_dials -= 1
            raise ConnectionError("nobody listens")
        connection = Connection(asyncio.get_running_loop())
        self._accepted.put(connection)
        return connection

    def accept(self, welcome: Message = NOTHING_KNOWN) -> tuple[Connection, TrainerHello]:
        connection = self._accepted.get(timeout=PATIENCE_S)
        hello = connection.hear()
        assert isinstance(hello, TrainerHello)
        connection.say(welcome)
        return connection, hello


@pytest.fixture
def coordinator(monkeypatch):
    monkeypatch.setattr(session, "FIRST_PAUSE_S", 0.01)
    return Coordinator()


@pytest.fixture
def stream(coordinator):
    with StepStream("r", "t", "pem", lambda: "https://x/v1/trainer", connect=coordinator.connect) as stream:
        yield stream


def group(number: int, step: int = 0, size: int = 2) -> DeliverGroupMessage:
    return DeliverGroupMessage(
        step, number, tuple(FinishedResponse(i, b"", b"", (), "stop") for i in range(size))
    )


def request(stream: StepStream, step: int = 0, groups: int = 3) -> None:
    prompts = [PromptSpec(i, b"\0\0\0\0") for i in range(groups)]
    stream.request_step(step, step, prompts, group_size=2, max_response_tokens=4)


def numbers(groups: list[DeliverGroupMessage]) -> list[int]:
    return [g.group for g in groups]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_step_from_request_to_trained(coordinator, stream):
    connection, hello = coordinator.accept()
    assert (hello.run, hello.holds_lease) == ("r", False)
    stream.publish(VersionPublishedMessage(0, "d", 1, 0.1))
    request(stream)
    assert isinstance(connection.hear(), VersionPublishedMessage)
    assert isinstance(connection.hear(), StepStartedMessage)
    connection.say(group(2))
    assert numbers(stream.next_groups(min_responses=1)) == [2]
    connection.say(group(0), group(1), GrantLeaseMessage(0))
    assert numbers(stream.next_groups(min_responses=99)) == [0, 1]
    assert stream.next_groups() == []
    stream.hold_lease()
    assert stream.holds_lease
    stream.trained(StepTrainedMessage(0, 0, 0, 1, 0.5, {}))
    assert isinstance(connection.hear(), StepTrainedMessage)
    request(stream, step=1)
    assert not stream.holds_lease
    assert stream.finished("m")
    assert [type(connection.hear()) for _ in range(2)] == [StepStartedMessage, RunFinished]


def test_groups_come_once_also_over_reconnects(coordinator, stream):
    first, _ = coordinator.accept()
    request(stream)
    asked = first.hear()
    first.say(group(1), group(1))
    assert numbers(stream.next_groups()) == [1]
    coordinator.refuse_dials = 2
    first.drop()
    second, _ = coordinator.accept()
    assert second.hear() == asked
    second.say(group(1), group(0, step=7), group(0), group(2), group(0))
    assert sorted(numbers(stream.next_groups(99))) == [0, 2]
    assert stream.next_groups() == []


def test_after_a_reconnect_everything_unconfirmed_is_said_again_in_order(coordinator, stream):
    stream.publish(VersionPublishedMessage(3, "d", 1, 0.1))
    first, _ = coordinator.accept(TrainerWelcome(2))
    assert first.hear().version == 3
    request(stream, step=4)
    stream.trained(StepTrainedMessage(4, 0, 0, 1, 0.5, {}, checkpointed=False))
    stream.publish(VersionPublishedMessage(4, "e", 1, 0.1))
    request(stream, step=5)
    stream.checkpointed(4)
    first.drop()
    second, _ = coordinator.accept(TrainerWelcome(3))
    heard = [second.hear() for _ in range(4)]
    assert [type(m) for m in heard] == [
        VersionPublishedMessage,
        StepTrainedMessage,
        Checkpointed,
        StepStartedMessage,
    ]
    assert (heard[0].version, heard[1].step, heard[2].step, heard[3].step) == (4, 4, 4, 5)
    second.say(group(0, step=5))  # so the coordinator has seen the end of step 4
    stream.next_groups()
    second.drop()
    third, _ = coordinator.accept(TrainerWelcome(4))
    assert [type(third.hear()) for _ in range(2)] == [Checkpointed, StepStartedMessage]
    assert third.silent()


def test_a_step_under_a_version_on_its_way_is_asked_for_once_that_is_published(coordinator, stream):
    first, _ = coordinator.accept()
    stream.publish(VersionPublishedMessage(0, "d", 1, 0.1))
    request(stream)
    first.say(GrantLeaseMessage(0), group(0), group(1), group(2))
    assert numbers(stream.next_groups(6)) == [0, 1, 2]
    stream.hold_lease()
    ahead = [PromptSpec(0, b"\0\0\0\0")]
    stream.request_step(
        1, 1, ahead, group_size=2, max_response_tokens=8, keep_lease=True, once_published=True
    )
    assert stream.next_groups(0) == []
    first.drop()  # what is said again is what was said, and not what has to wait
    second, hello = coordinator.accept(TrainerWelcome(0))
    assert hello.holds_lease
    assert second.hear().step == 0
    assert second.silent()
    stream.publish(VersionPublishedMessage(1, "e", 1, 0.1))
    assert second.hear().version == 1
    asked = second.hear()
    assert (asked.step, asked.policy_version, asked.keeps_lease) == (1, 1, True)
    second.say(group(0, step=1))
    assert numbers(stream.next_groups(2)) == [0]


def test_a_lease_that_was_given_back_meanwhile_is_not_kept(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream)
    connection.say(GrantLeaseMessage(0), group(0), group(1), group(2))
    stream.next_groups(6)
    stream.hold_lease()
    stream.request_step(1, 1, [], group_size=2, max_response_tokens=8, keep_lease=True, once_published=True)
    connection.say(RecallLeaseMessage(0))
    eventually(lambda: stream.answer_recall() or not stream.holds_lease)
    stream.publish(VersionPublishedMessage(1, "e", 1, 0.1))
    assert [type(connection.hear()) for _ in range(3)] == [
        StepStartedMessage,
        LeaseReturnedMessage,
        VersionPublishedMessage,
    ]
    assert connection.hear().keeps_lease is False


def trained_step(step: int) -> StepTrainedMessage:
    return StepTrainedMessage(step, 0, 0, 1, 0.5, {})


def test_the_report_of_a_step_survives_groups_of_the_step_that_was_requested_ahead(coordinator, stream):
    """They say that the request arrived, not what was said after it."""
    connection, _ = coordinator.accept()
    request(stream, 0)
    request(stream, 1)
    stream.trained(trained_step(0))
    connection.say(group(0, step=1))
    assert len(stream.next_groups(1)) == 1
    connection.drop()
    connection, _ = coordinator.accept()
    assert connection.hear() == trained_step(0)
    assert connection.hear().step == 1


def test_no_report_is_lost_while_the_coordinator_is_away(coordinator, stream):
    """A trainer that works ahead trains two steps without it."""
    connection, _ = coordinator.accept()
    request(stream, 0)
    request(stream, 1)
    connection.drop()
    for step in (0, 1):
        stream.trained(trained_step(step))
    connection, _ = coordinator.accept()
    assert [connection.hear(), connection.hear()] == [trained_step(0), trained_step(1)]
    request(stream, 2)
    assert connection.hear().step == 2
    connection.say(group(0, step=2))
    assert len(stream.next_groups(1)) == 1
    connection.drop()
    connection, _ = coordinator.accept()
    assert connection.hear().step == 2, "what was said before the request has arrived"


def test_a_step_that_was_trained_is_not_asked_for_again(coordinator, stream):
    first, _ = coordinator.accept()
    request(stream)
    stream.trained(StepTrainedMessage(0, 0, 0, 1, 0.5, {}))
    first.drop()
    second, _ = coordinator.accept()
    assert isinstance(second.hear(), StepTrainedMessage)
    assert second.silent()


def test_a_recall_is_answered_while_waiting_and_training_stops_until_granted_again(coordinator, stream):
    freed = []
    stream.on_recall(lambda: freed.append(threading.current_thread() is threading.main_thread()))
    connection, _ = coordinator.accept()
    request(stream)
    connection.hear()
    connection.say(GrantLeaseMessage(0))
    stream.hold_lease()
    stream.answer_recall()
    assert freed == []
    connection.say(RecallLeaseMessage(0))
    helper = threading.Thread(
        target=lambda: (connection.hear(), connection.say(GrantLeaseMessage(0), group(0)))
    )
    helper.start()  # hears LeaseReleased, then grants again
    eventually(lambda: stream._recalled)
    stream.hold_lease()
    helper.join()
    assert freed == [True]
    assert stream.holds_lease
    assert numbers(stream.next_groups()) == [0]


def test_a_recall_during_a_wait_for_groups_is_answered(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream)
    connection.hear()
    connection.say(GrantLeaseMessage(0))
    stream.hold_lease()
    heard = []

    def script() -> None:
        connection.say(RecallLeaseMessage(0))
        heard.append(connection.hear())
        connection.say(group(0))

    helper = threading.Thread(target=script)
    helper.start()
    assert numbers(stream.next_groups()) == [0]
    helper.join()
    assert heard == [LeaseReturnedMessage()]
    assert not stream.holds_lease


def test_a_lost_connection_keeps_the_lease_and_the_hello_says_so(coordinator, stream):
    first, _ = coordinator.accept()
    request(stream)
    first.hear()
    first.say(GrantLeaseMessage(0))
    stream.hold_lease()
    first.drop()
    second, hello = coordinator.accept()
    assert hello.holds_lease
    second.say(RecallLeaseMessage(0))
    eventually(lambda: stream._recalled)
    stream.answer_recall()
    assert [type(second.hear()) for _ in range(2)] == [StepStartedMessage, LeaseReturnedMessage]


def test_leases_of_another_step_are_ignored(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream, step=1)
    connection.say(GrantLeaseMessage(0), RecallLeaseMessage(1), group(0, step=1))
    stream.next_groups()
    assert not stream.holds_lease


def test_a_grant_that_crosses_a_request_for_more_prompts_is_ignored(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream, groups=1)
    connection.hear()
    connection.say(group(0))
    stream.next_groups()
    stream.request_more([PromptSpec(1, b"\0\0\0\0")])
    asked = connection.hear()
    assert (len(asked.prompts), asked.keeps_lease) == (2, False)
    connection.say(GrantLeaseMessage(0, 1), group(1))  # what it holds the engines have again
    assert numbers(stream.next_groups()) == [1]
    assert not stream.holds_lease
    connection.say(GrantLeaseMessage(0, 2))
    stream.hold_lease()


def test_a_request_for_more_prompts_keeps_the_lease_until_a_recall_is_answered(coordinator, stream):
    first, _ = coordinator.accept()
    request(stream, groups=1)
    first.hear()
    first.say(GrantLeaseMessage(0, 1), group(0))
    stream.next_groups()
    stream.request_more([PromptSpec(1, b"\0\0\0\0")])
    assert first.hear().keeps_lease
    assert stream.holds_lease
    first.say(RecallLeaseMessage(0))
    eventually(lambda: stream._recalled)
    first.drop()
    stream.answer_recall()
    second, hello = coordinator.accept()
    assert not hello.holds_lease
    assert not second.hear().keeps_lease, "or the coordinator waits for an answer for ever"


def test_waits_are_timed_with_and_without_the_lease(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream)

    def script() -> None:
        time.sleep(0.2)
        connection.say(GrantLeaseMessage(0))
        time.sleep(0.1)
        connection.say(group(0))

    helper = threading.Thread(target=script)
    helper.start()
    stream.next_groups()
    helper.join()
    assert stream.waits.without_lease_s >= 0.15
    assert stream.waits.with_lease_s >= 0.08
    assert stream.waits.for_lease_s == 0
    request(stream, step=1)
    assert stream.waits.with_lease_s == 0


def test_groups_are_handed_on_as_they_arrive_without_the_training_thread(coordinator, stream):
    arrived: queue.Queue[int] = queue.Queue()
    made = stream.on_group(lambda g: arrived.put(g.group) or -g.group)
    connection, _ = coordinator.accept()
    request(stream)
    connection.say(group(2), group(2), group(0))
    assert [arrived.get(timeout=PATIENCE_S) for _ in range(2)] == [2, 0]
    assert made.next_groups(3) == [-2, 0]
    assert arrived.empty()


@pytest.mark.parametrize("answer", [Refused("schema 9"), Refused("later", retry=True)])
def test_refusals(coordinator, stream, answer):
    coordinator.accept(answer)
    if answer.retry:
        coordinator.accept()
        request(stream)
    else:
        with pytest.raises(ProtocolError, match="schema 9"):
            stream.hold_lease()
        assert not stream.failed("p", "r")


def test_a_group_that_breaks_the_callback_is_raised_in_the_training_thread(coordinator, stream):
    def broken(_: DeliverGroupMessage) -> None:
        raise ProtocolError("no such prompt", "look")

    stream.on_group(broken)
    connection, _ = coordinator.accept()
    request(stream)
    connection.say(group(0))
    with pytest.raises(ProtocolError, match="no such prompt"):
        stream.next_groups()


def test_any_other_break_is_a_fault_that_names_it(coordinator, stream):
    stream.on_group(lambda _: 1 / 0)
    connection, _ = coordinator.accept()
    request(stream)
    connection.say(group(0))
    with pytest.raises(RuntimeFault, match="ZeroDivisionError"):
        stream.next_groups()


def test_a_failure_is_said_even_if_the_coordinator_comes_late(coordinator, stream):
    coordinator.refuse_dials = 3
    heard = []
    helper = threading.Thread(target=lambda: heard.append(coordinator.accept()[0].hear()))
    helper.start()
    assert stream.failed("bad", "good")
    helper.join()
    assert heard == [RunFailed("bad", "good")]


def test_without_a_coordinator_saying_failure_gives_up(coordinator, stream):
    coordinator.refuse_dials = 10**6
    assert not stream.failed("bad", "good", timeout_s=0.1)


def test_garbage_from_the_coordinator_only_costs_the_connection(coordinator, stream):
    first, _ = coordinator.accept()
    request(stream)
    first.hear()
    first._loop.call_soon_threadsafe(first._down.put_nowait, b"\xc1garbage")
    second, _ = coordinator.accept()
    assert isinstance(second.hear(), StepStartedMessage)


def test_no_url_yet(coordinator):
    urls: list[str | None] = [None, None, "https://later"]
    with StepStream("r", "t", "pem", lambda: urls.pop(0) if len(urls) > 1 else urls[0],
                    connect=coordinator.connect) as stream:  # fmt: skip
        request(stream)
        coordinator.accept()
    assert coordinator.dials == ["https://later"]


def test_closing_twice_and_using_a_closed_stream(coordinator):
    with StepStream("r", "t", "pem", lambda: None, connect=coordinator.connect) as stream:
        request(stream)
    stream.close()
    with pytest.raises(RuntimeFault, match="closed"):
        stream.hold_lease()


def test_closing_does_not_wait_for_a_coordinator_that_says_nothing(coordinator):
    with StepStream("r", "t", "pem", lambda: "https://x", connect=coordinator.connect):
        connection = coordinator._accepted.get(timeout=PATIENCE_S)
        assert isinstance(connection.hear(), TrainerHello)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    assert connection.closed.is_set()


def test_run_failed_is_the_last_word(coordinator, stream):
    connection, _ = coordinator.accept()
    assert stream.failed("bad", "good")
    assert connection.hear() == RunFailed("bad", "good")


def ask_early(stream: StepStream, step: int, since: int, groups: int = 2) -> None:
    prompts = [PromptSpec(i, b"\0\0\0\0") for i in range(groups)]
    stream.request_step(
        step, 0, prompts, group_size=2, max_response_tokens=4, keep_lease=True, in_flight_updates=True,
        open_from=since,
    )  # fmt: skip


def test_groups_of_an_earlier_open_step_still_come(coordinator, stream):
    connection, _ = coordinator.accept()
    ask_early(stream, 0, 0)
    ask_early(stream, 1, 0)
    connection.say(group(0, step=1), group(0), group(1, step=1))
    eventually(lambda: len(stream._groups) == 3)
    found = stream.next_groups(2, 0)
    assert [(each.step, each.group) for each in found] == [(1, 0), (0, 0), (1, 1)]
    connection.say(group(0), group(1))
    assert [(each.step, each.group) for each in stream.next_groups(99, 0)] == [(0, 1)]
    assert stream.next_groups(1, 0) == []


def test_a_step_that_is_trained_or_not_kept_open_gets_no_more_groups(coordinator, stream):
    connection, _ = coordinator.accept()
    ask_early(stream, 0, 0)
    ask_early(stream, 1, 0)
    stream.trained(StepTrainedMessage(0, 0, 0, 1, 0.5, {}))
    ask_early(stream, 2, 1)
    connection.say(group(0), group(0, step=1), group(0, step=2))
    eventually(lambda: len(stream._groups) == 2)
    assert [each.step for each in stream.next_groups(2, 1)] == [1, 2]
    ask_early(stream, 3, 3)
    connection.say(group(1, step=1), group(1, step=2), group(0, step=3))
    eventually(lambda: len(stream._groups) == 1)
    assert [each.step for each in stream.next_groups(2, 3)] == [3]


def test_all_open_steps_are_requested_again_with_the_lease_as_it_is(coordinator, stream):
    first, _ = coordinator.accept()
    ask_early(stream, 0, 0)
    ask_early(stream, 1, 0)
    assert [first.hear().keeps_lease for _ in range(2)] == [False, False]
    first.say(GrantLeaseMessage(1))
    eventually(lambda: stream.holds_lease)
    first.drop()
    second, hello = coordinator.accept()
    assert hello.holds_lease
    heard = [second.hear() for _ in range(2)]
    assert [(m.step, m.open_from, m.keeps_lease) for m in heard] == [(0, 0, True), (1, 0, True)]


def test_responses_come_before_their_group_to_who_wants_them(coordinator, stream):
    early = []
    stream.on_response(early.append)
    connection, _ = coordinator.accept()
    request(stream)
    assert connection.hear().wants_responses
    one = DeliverResponseMessage(0, 1, 0, group(1).responses[0])
    connection.say(msgspec.structs.replace(one, step=4), one)  # that step is not open
    eventually(lambda: early == [one])
    connection.say(GrantLeaseMessage(0))
    stream.hold_lease()
    assert stream.next_groups(6, or_once=lambda: bool(early)) == []
    connection.say(group(1))
    assert numbers(stream.next_groups(2)) == [1]
    connection.say(one, group(0), group(2))  # its group is here
    assert numbers(stream.next_groups(99)) == [0, 2]
    assert early == [one]


def test_without_the_gpu_nothing_else_is_to_be_done(coordinator, stream):
    stream.on_response(lambda _: None)
    connection, _ = coordinator.accept()
    request(stream)
    asked = []
    connection.say(DeliverResponseMessage(0, 0, 0, group(0).responses[0]), group(1))
    assert numbers(stream.next_groups(2, or_once=lambda: asked.append(1) or True)) == [1]
    assert asked == [], "the lease is not ours"


def test_who_wants_groups_alone_is_sent_no_responses(coordinator, stream):
    connection, _ = coordinator.accept()
    request(stream)
    assert not connection.hear().wants_responses
    connection.say(DeliverResponseMessage(0, 0, 0, group(0).responses[0]), group(0))
    assert numbers(stream.next_groups(1)) == [0]
