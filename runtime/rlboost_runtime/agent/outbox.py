"""What an agent still owes the coordinator: tokens and endings not yet acknowledged.

Pure. Guarantees: laid end to end, the frames of one process give for each assignment exactly the tokens that
its engine gave, each once, offsets without a gap, the ending last; a frame carries one policy version, stays
until it is acknowledged, and is resent in its order.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlboost_runtime.core.messages import FinishReason, ReleaseReason
from rlboost_runtime.engines.base import Output
from rlboost_runtime.wire import Ending, Frame

MAX_TOKENS = 1_000_000
"""Tokens kept for a silent coordinator before the engine is held: 8 MB, minutes of a fast engine."""

_REASONS: dict[str, FinishReason | ReleaseReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "aborted": ReleaseReason.ABORTED,
    "failed": ReleaseReason.RESPONSE_FAILED,
}


@dataclass(slots=True)
class _Open:
    """An assignment under way. `offset`: index in the response of its next token."""

    offset: int
    policy_version: int


@dataclass(slots=True)
class _Section:
    """What will be one frame."""

    policy_version: int
    tokens: dict[int, array[int]] = field(default_factory=dict)
    logprobs: dict[int, array[float]] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)


class Outbox:
    """Collects outputs, cuts them into frames, keeps frames until they are acknowledged."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._open: dict[int, _Open] = {}
        self._pending: deque[_Section] = deque()
        self._unacked: deque[tuple[Frame, int]] = deque()
        self._num_tokens = 0
        self._next_seq = 0

    @property
    def next_seq(self) -> int:
        """Number of the next frame."""
        return self._next_seq

    @property
    def is_full(self) -> bool:
        """Whether the engine should wait for acknowledgements."""
        return self._num_tokens >= self._max_tokens

    @property
    def is_clear(self) -> bool:
        """Whether everything that was added has been acknowledged."""
        return not self._pending and not self._unacked

    @property
    def has_pending(self) -> bool:
        """Whether `cut` would return something."""
        return bool(self._pending)

    @property
    def open(self) -> tuple[int, ...]:
        """Assignments that have not ended."""
        return tuple(self._open)

    @property
    def held(self) -> tuple[int, ...]:
        """Assignments that have not ended, or whose ending is not acknowledged yet."""
        unheard = [ending.assignment for section in self._pending for ending in section.endings]
        unheard += [ending.assignment for frame, _ in self._unacked for ending in frame.endings]
        return tuple(dict.fromkeys([*self._open, *unheard]))

    def begin(self, assignment: int, offset: int, policy_version: int) -> None:
        """An assignment starts; its next token is number `offset` of the response."""
        self._open[assignment] = _Open(offset, policy_version)

    def add(self, outputs: Iterable[Output]) -> None:
        """Take what the engine gave; words about assignments that are not open are dropped."""
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            if output.token_ids:
                self._append(entry, output)
            if output.finished is not None:
                self.end(output.request_id, _REASONS[output.finished], output.problem)

    def end(self, assignment: int, reason: FinishReason | ReleaseReason, problem: str = "") -> None:
        """End an open assignment after the tokens that it has; one that is not open is left alone."""
        entry = self._open.pop(assignment, None)
        if entry is not None:
            self._section(entry.policy_version).endings.append(Ending(assignment, reason, problem))

    def refuse(self, assignment: int, policy_version: int, problem: str) -> None:
        """End an assignment that never began: the engine does not serve its version."""
        ending = Ending(assignment, ReleaseReason.ENGINE_FAILED, problem)
        self._section(policy_version).endings.append(ending)

    def cut(self) -> list[Frame]:
        """Turn what is pending into frames, to be sent now and kept until acknowledged."""
        frames = []
        while self._pending:
            section = self._pending.popleft()
            frame = _frame(self._next_seq, section)
            self._next_seq += 1
            self._unacked.append((frame, sum(map(len, section.tokens.values()))))
            frames.append(frame)
        return frames

    def ack(self, seq: int) -> None:
        """All frames up to `seq` are journalled."""
        while self._unacked and self._unacked[0][0].seq <= seq:
            _, num_tokens = self._unacked.popleft()
            self._num_tokens -= num_tokens

    def unacked(self) -> list[Frame]:
        """Frames to send again after a reconnect, in order."""
        return [frame for frame, _ in self._unacked]

    def void(self) -> None:
        """Forget everything: the coordinator has given it to others. Numbering goes on."""
        self._open.clear()
        self._pending.clear()
        self._unacked.clear()
        self._num_tokens = 0

    def _append(self, entry: _Open, output: Output) -> None:
        section = self._section(output.policy_version)
        assignment = output.request_id
        if assignment not in section.tokens:
            section.tokens[assignment] = array("i")
            section.logprobs[assignment] = array("f")
            section.offsets[assignment] = entry.offset
        section.tokens[assignment].extend(output.token_ids)
        section.logprobs[assignment].extend(output.logprobs)
        entry.offset += len(output.token_ids)
        entry.policy_version = output.policy_version
        self._num_tokens += len(output.token_ids)

    def _section(self, policy_version: int) -> _Section:
        """The last section if it is of this version, else a new one: order between versions is kept."""
        if not self._pending or self._pending[-1].policy_version != policy_version:
            self._pending.append(_Section(policy_version))
        return self._pending[-1]


MAX_COUNT = 0xFFFF
"""Counts travel as u16: a longer delta takes several entries."""


def _frame(seq: int, section: _Section) -> Frame:
    assignments: list[int] = []
    offsets: list[int] = []
    counts: list[int] = []
    for assignment, tokens in section.tokens.items():
        for start in range(0, len(tokens), MAX_COUNT):
            assignments.append(assignment)
            offsets.append(section.offsets[assignment] + start)
            counts.append(min(MAX_COUNT, len(tokens) - start))
    return Frame(
        seq=seq,
        policy_version=section.policy_version,
        assignments=struct.pack(f"<{len(assignments)}I", *assignments),
        offsets=struct.pack(f"<{len(offsets)}I", *offsets),
        counts=struct.pack(f"<{len(counts)}H", *counts),
        token_ids=b"".join(_little_endian(tokens) for tokens in section.tokens.values()),
        logprobs=b"".join(_little_endian(logprobs) for logprobs in section.logprobs.values()),
        endings=tuple(section.endings),
    )


def _little_endian(values: array[int] | array[float]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)
