"""The token store against a model of plain Python dicts, under whatever agents may do."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.protocol import messages as wire

pytestmark = pytest.mark.property

MAX_TOKENS = 9
STOP = 2
RESPONSES = range(40, 45)
INSTANCES = ("i-a", "i-b")


@dataclass
class Model:
    """One entry per token, straight from the rules."""

    tokens: dict[int, list[tuple[int, float, str, int]]] = field(
        default_factory=lambda: {response: [] for response in RESPONSES}
    )
    assignments: dict[int, tuple[int, str, bool]] = field(default_factory=dict)  # -> response, instance, open
    finished: dict[int, str] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)  # assignment -> furthest end in a gap

    def is_complete(self, response: int) -> str | None:
        tokens = self.tokens[response]
        return self.finished.get(response) or ("stop" if tokens and tokens[-1][0] == STOP else None)

    def assign(self, assignment: int, response: int, instance: str) -> int:
        if response not in self.finished:
            for other in [a for a, (r, _, _) in self.assignments.items() if r == response]:
                del self.assignments[other]
            self.assignments[assignment] = (response, instance, self.is_complete(response) is None)
        return len(self.tokens[response])

    def accept(self, version, deltas, endings):
        accepted = dropped = duplicate = 0
        touched = []
        for assignment, offset, tokens in deltas:
            response, instance, open_ = self.assignments.get(assignment, (0, "", False))
            if not open_:
                dropped += len(tokens)
                continue
            have = self.tokens[response]
            if offset > len(have):
                dropped += len(tokens)
                self.seen[assignment] = max(self.seen.get(assignment, 0), offset + len(tokens))
                continue
            known = len(have)
            for index, (token, logprob) in enumerate(tokens, start=offset):
                if index < known:
                    duplicate += 1
                elif index >= MAX_TOKENS:
                    dropped += 1
                else:
                    have.append((token, logprob, instance, version))
                    accepted += 1
                    touched.append(response)
        ended = []
        for assignment, reason in endings:
            if assignment not in self.assignments:
                continue
            response, _, _ = self.assignments.pop(assignment)
            length = len(self.tokens[response])
            if reason in ("stop", "length"):
                if min(self.seen.get(assignment, 0), MAX_TOKENS) > length:
                    reason = "engine_failed"
                else:
                    self.finished[response] = reason
            ended.append((assignment, response, reason, length))
        full = []
        for response in dict.fromkeys(touched):
            if len(self.tokens[response]) == MAX_TOKENS and response not in self.finished:
                full.append(response)
                self.finished[response] = "stop" if self.tokens[response][-1][0] == STOP else "length"
                self.assignments = {a: v for a, v in self.assignments.items() if v[0] != response}
        return (accepted, dropped, duplicate), ended, full


class StoreMatchesModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = self.fresh()
        self.model = Model()
        self.next_assignment = 1000
        self.records: list[bytes] = []
        self.restored = self.fresh()
        self.restored_finishes: dict[int, str] = {}

    @staticmethod
    def fresh() -> TokenStore:
        store = TokenStore()
        store.open_step(1, RESPONSES, [MAX_TOKENS] * len(RESPONSES), (STOP,))
        return store

    @rule(num=st.integers(1, 2))
    def extend(self, num):
        first = RESPONSES.start + len(self.model.tokens)
        for store in (self.store, self.restored):
            store.extend([MAX_TOKENS] * num)
        self.model.tokens |= {response: [] for response in range(first, first + num)}

    @rule(data=st.data(), instance=st.sampled_from(INSTANCES), skip=st.integers(1, 3))
    def assign(self, data, instance, skip):
        response = data.draw(st.sampled_from(sorted(self.model.tokens)))
        self.next_assignment += skip
        kept = self.store.assign(self.next_assignment, response, instance)
        assert kept == self.model.assign(self.next_assignment, response, instance)

    @rule(back=st.integers(0, 8))
    def unassign(self, back):
        self.store.unassign(self.next_assignment - back)
        self.model.assignments.pop(self.next_assignment - back, None)

    @rule(data=st.data(), version=st.integers(0, 2))
    def accept(self, data, version):
        recent = st.integers(self.next_assignment - 8, self.next_assignment + 1)
        deltas = []
        for assignment in data.draw(st.lists(recent, unique=True, max_size=5)):
            held = self.model.assignments.get(assignment)
            expected = len(self.model.tokens[held[0]]) if held else 0
            offset = max(0, expected + data.draw(st.sampled_from([0, 0, 0, 0, -1, -2, -9, 1, 2])))
            tokens = data.draw(
                st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0, width=32)), min_size=1, max_size=4)
            )
            deltas.append((assignment, offset, tokens))
        reasons = st.sampled_from(["stop", "length", "aborted", "engine_failed"])
        endings = [(a, data.draw(reasons)) for a in data.draw(st.lists(recent, unique=True, max_size=2))]
        flat = [token for _, _, tokens in deltas for token in tokens]
        frame = wire.Frame(
            seq=1,
            policy_version=version,
            assignments=np.array([d[0] for d in deltas], "<u4").tobytes(),
            offsets=np.array([d[1] for d in deltas], "<u4").tobytes(),
            counts=np.array([len(d[2]) for d in deltas], "<u2").tobytes(),
            token_ids=np.array([t for t, _ in flat], "<i4").tobytes(),
            logprobs=np.array([p for _, p in flat], "<f4").tobytes(),
            endings=tuple(wire.AssignmentEnd(a, reason) for a, reason in endings),
        )
        before = {response: len(tokens) for response, tokens in self.model.tokens.items()}
        counts, ended, full = self.model.accept(version, deltas, endings)
        accepted = self.store.accept(frame)
        assert (accepted.num_accepted, accepted.num_dropped, accepted.num_duplicate) == counts
        assert [(e.assignment, e.response, e.reason, e.num_tokens) for e in accepted.endings] == ended
        assert sorted(accepted.full) == sorted(full)
        changed = before != {response: len(tokens) for response, tokens in self.model.tokens.items()}
        finishes = any(reason in ("stop", "length") for _, _, reason, _ in ended)
        assert (accepted.record is not None) == (changed or finishes)
        if accepted.record is not None:
            self.records.append(accepted.record)
            for response, reason in self.restored.restore(accepted.record):
                assert response not in self.restored_finishes
                self.restored_finishes[response] = reason

    @rule()
    def restart(self):
        """The coordinator restarts: the journal is replayed, then the current assignments go on."""
        store = self.fresh()
        store.extend([MAX_TOKENS] * (len(self.model.tokens) - len(RESPONSES)))
        for record in self.records + self.records[-1:]:
            store.restore(record)
        for assignment in reversed(self.model.assignments):  # in whatever order
            response, instance, _ = self.model.assignments[assignment]
            store.assign(assignment, response, instance)
            open_ = self.model.is_complete(response) is None
            self.model.assignments[assignment] = (response, instance, open_)
        self.model.seen.clear()
        self.store = store

    @invariant()
    def stores_hold_what_the_model_holds(self):
        assert self.restored_finishes == self.model.finished
        for store in (self.store, self.restored):
            store.check()
            for response, tokens in self.model.tokens.items():
                assert store.length(response) == len(tokens)
                assert np.frombuffer(store.token_ids(response), "<i4").tolist() == [t[0] for t in tokens]
                assert np.frombuffer(store.logprobs(response), "<f4").tolist() == [t[1] for t in tokens]
                made_by = [
                    (segment.instance, segment.policy_version)
                    for segment in store.segments(response)
                    for _ in range(segment.num_tokens)
                ]
                assert made_by == [t[2:] for t in tokens]
                assert store.is_complete(response) == self.model.is_complete(response)


StoreMatchesModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMatchesModel = StoreMatchesModel.TestCase
