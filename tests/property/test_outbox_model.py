"""Whatever happens to the connection, the frames that arrive add up to what the engine gave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlboost_runtime.agent.outbox import Outbox
from rlboost_runtime.engines.base import EngineOutput
from rlboost_runtime.protocol.messages import Frame

pytestmark = pytest.mark.property

MAX_COUNT = 3


class Receiver:
    """Journals each frame number once, as the coordinator does; checks what a frame promises."""

    def __init__(self) -> None:
        self.next_seq = 0
        self.tokens: dict[int, list[tuple[int, float, int]]] = {}
        self.ended: dict[int, str] = {}

    def take(self, frame: Frame, starts: dict[int, int]) -> None:
        assert frame.seq <= self.next_seq, "a frame is missing"
        if frame.seq < self.next_seq:
            return  # a resend
        self.next_seq += 1
        ids = np.frombuffer(frame.token_ids, "<i4")
        logprobs = np.frombuffer(frame.logprobs, "<f4")
        counts = np.frombuffer(frame.counts, "<u2")
        assert counts.sum() == len(ids) == len(logprobs)
        assert (counts > 0).all()
        assert len(set(np.frombuffer(frame.assignments, "<u4"))) == len(counts), "an assignment comes twice"
        assert (counts <= MAX_COUNT).all()
        at = 0
        rows = zip(
            np.frombuffer(frame.assignments, "<u4"), np.frombuffer(frame.offsets, "<u4"), counts, strict=True
        )
        for assignment, offset, count in rows:
            got = self.tokens.setdefault(int(assignment), [])
            assert assignment not in self.ended
            assert offset == starts[int(assignment)] + len(got)
            got += [
                (int(i), float(x), frame.policy_version)
                for i, x in zip(ids[at : at + count], logprobs[at : at + count], strict=True)
            ]
            at += count
        for ending in frame.endings:
            assert ending.assignment not in self.ended
            self.ended[ending.assignment] = ending.reason


class OutboxMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.outbox = Outbox(max_count=MAX_COUNT)
        self.receiver = Receiver()
        self.starts: dict[int, int] = {}
        self.given: dict[int, list[tuple[int, float, int]]] = {}
        self.ended: dict[int, str] = {}
        self.version = 0
        self.in_flight: list[Frame] = []

    @rule(offset=st.integers(0, 100))
    def begin(self, offset: int) -> None:
        assignment = len(self.starts)
        self.starts[assignment] = offset
        self.given[assignment] = []
        self.outbox.begin(assignment, offset, self.version)

    @rule()
    def new_version(self) -> None:
        self.version += 1

    @rule(
        data=st.data(),
        num=st.integers(0, 4),
        finished=st.sampled_from([None, None, "stop", "aborted", "failed"]),
    )
    def output(self, data: st.DataObject, num: int, finished: str | None) -> None:
        assignment = data.draw(st.integers(0, len(self.starts)))  # one of them is unknown
        tokens = [(data.draw(st.integers(0, 2**31 - 1)), -float(i), self.version) for i in range(num)]
        ids, logprobs = [t[0] for t in tokens], [t[1] for t in tokens]
        output = EngineOutput(self.version)
        output.add(assignment, ids, logprobs)
        if finished is not None:
            output.end(assignment, finished)
        self.outbox.add(output)
        if assignment in self.starts and assignment not in self.ended:
            self.given[assignment] += tokens
            if finished is not None:
                self.ended[assignment] = {"failed": "response_failed"}.get(finished, finished)

    @rule()
    def refuse(self) -> None:
        assignment = len(self.starts)
        self.starts[assignment] = 0
        self.given[assignment] = []
        self.ended[assignment] = "engine_failed"
        self.outbox.refuse(assignment, self.version, "not served")

    @rule()
    def flush(self) -> None:
        self.in_flight += self.outbox.cut()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def arrive_and_acknowledge(self, data: st.DataObject) -> None:
        num = data.draw(st.integers(1, len(self.in_flight)))
        for frame in self.in_flight[:num]:
            self.receiver.take(frame, self.starts)
        del self.in_flight[:num]
        if data.draw(st.booleans()):  # else the acknowledgement is lost
            self.outbox.ack(self.receiver.next_seq - 1)

    @rule(acked=st.booleans())
    def reconnect(self, acked: bool) -> None:
        if acked:
            self.outbox.ack(self.receiver.next_seq - 1)
        self.in_flight = self.outbox.unacked()

    @rule()
    def all_arrives(self) -> None:
        for frame in [*self.outbox.unacked(), *self.outbox.cut()]:
            self.receiver.take(frame, self.starts)
        self.in_flight = []
        self.outbox.ack(self.receiver.next_seq - 1)
        assert self.outbox.is_clear
        assert {a: self.receiver.tokens.get(a, []) for a in self.given} == self.given
        assert self.receiver.ended == self.ended
        assert set(self.outbox.held) == set(self.given) - set(self.ended)

    @invariant()
    def nothing_is_ahead_of_the_engine(self) -> None:
        for assignment, got in getattr(self, "receiver", Receiver()).tokens.items():
            assert got == self.given[assignment][: len(got)]

    @invariant()
    def what_is_not_heard_is_held(self) -> None:
        if hasattr(self, "outbox"):
            assert set(self.given) - set(self.receiver.ended) <= set(self.outbox.held)


OutboxMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOutbox = OutboxMachine.TestCase
