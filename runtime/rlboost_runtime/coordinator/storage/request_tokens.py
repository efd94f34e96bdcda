"""The tokens of one request outside a step: what `token_store` is for a step's responses.

Guarantees: its tokens form one gap-free sequence; token k is accepted once, from whoever has its current
assignment; nothing is added once it is complete, and never more than it may have; `restore` of all records,
in order, gives what the records' owner held.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from rlboost_runtime.core.base.messages import FinishReason, ReleaseReason
from rlboost_runtime.protocol.messages import GenerateMessage


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a frame added to one request: tokens from `offset` on, ids i32 and logprobs f32."""

    response: int
    offset: int
    instance: str
    policy_version: int
    token_ids: bytes
    logprobs: bytes
    reason: str = ""
    """FinishReason, if it is complete with them."""


@dataclass(slots=True)
class RequestTokens:
    """One request, its tokens so far, and who may add to them."""

    response: int
    request: GenerateMessage
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    segments: list[tuple[int, str, int]] = field(default_factory=list)
    """(start, instance, policy version)."""
    reason: FinishReason | None = None
    assignment: int | None = None
    instance: str = ""
    durable: int = 0
    """Tokens that are on stable storage."""
    is_over: bool = False
    """Complete, and that is on stable storage."""
    problem: str = ""
    """Why it will not be completed."""
    _owed: int = 0  # end of the furthest delta that left a gap

    @property
    def complete(self) -> FinishReason | None:
        """Why nothing may be added; None: more may come."""
        if self.reason is None and self.ids and self.ids[-1] in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return self.reason

    def assign(self, assignment: int, instance: str) -> int:
        """Let `assignment` alone add to it; return how many tokens are kept."""
        self.assignment, self.instance, self._owed = assignment, instance, 0
        return len(self.ids)

    def accept(
        self, offset: int, ids: array[int], logprobs: array[float], version: int
    ) -> RequestRecord | None:
        """Add what is new of a delta of the current assignment; return what to journal."""
        length = len(self.ids)
        if offset > length:
            self._owed = max(self._owed, offset + len(ids))
            return None
        stop = min(len(ids), self.request.max_tokens - offset)
        new = slice(length - offset, stop)
        if self.complete is not None or not ids[new]:
            return None
        self._add(length, ids[new], logprobs[new], self.instance, version)
        if len(self.ids) == self.request.max_tokens:
            self.reason = self.complete or FinishReason.LENGTH
        return self._record(length, version)

    def end(self, reason: str) -> tuple[str, RequestRecord | None]:
        """End the current assignment; return why, and what to journal. A finish before all tokens have
        arrived is none: the engine failed."""
        self.assignment = None
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return reason, None
        if min(self._owed, self.request.max_tokens) > len(self.ids):
            return ReleaseReason.ENGINE_FAILED, None
        self.reason = FinishReason(reason)
        return reason, self._record(len(self.ids), 0)

    def complete_with(self, reason: FinishReason) -> RequestRecord:
        """Complete it with what there is; return what to journal."""
        self.assignment, self.reason = None, reason
        return self._record(len(self.ids), 0)

    def restore(self, record: RequestRecord) -> None:
        """Apply a record; one that was applied before changes nothing. One behind a gap ends it."""
        length, ids, logprobs = len(self.ids), array("i", record.token_ids), array("f", record.logprobs)
        if record.offset > length:
            self.problem = f"tokens {length} to {record.offset - 1} of it are not in the journal"
            return
        new = slice(length - record.offset, None)
        if ids[new]:
            self._add(length, ids[new], logprobs[new], record.instance, record.policy_version)
        if record.reason:
            self.reason = FinishReason(record.reason)
        self.durable, self.is_over = len(self.ids), self.reason is not None

    def records(self) -> list[RequestRecord]:
        """Return records that restore all of it."""
        records = []
        for start, end, instance, version in self._spans():
            ids, logprobs = self.ids[start:end].tobytes(), self.logprobs[start:end].tobytes()
            records.append(RequestRecord(self.response, start, instance, version, ids, logprobs))
        if self.reason is not None:
            records.append(self._record(len(self.ids), 0))
        return records

    def versions(self, start: int) -> tuple[tuple[int, int], ...]:
        """Return (policy version, number of tokens) of the durable tokens from `start` on, in order."""
        spans = (
            (version, min(end, self.durable) - max(first, start)) for first, end, _, version in self._spans()
        )
        return tuple((version, count) for version, count in spans if count > 0)

    def _spans(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield (start, end, instance, policy version) of each segment."""
        ends = [start for start, _, _ in self.segments[1:]] + [len(self.ids)]
        for (start, instance, version), end in zip(self.segments, ends, strict=False):
            yield start, end, instance, version

    def _add(self, at: int, ids: array[int], logprobs: array[float], instance: str, version: int) -> None:
        if not self.segments or self.segments[-1][1:] != (instance, version):
            self.segments.append((at, instance, version))
        self.ids += ids
        self.logprobs += logprobs

    def _record(self, start: int, version: int) -> RequestRecord:
        return RequestRecord(
            self.response,
            start,
            self.instance,
            version,
            self.ids[start:].tobytes(),
            self.logprobs[start:].tobytes(),
            self.reason or "",
        )
