"""Tokens and endings that the coordinator has not acknowledged yet.

Pure. Guarantees: laid end to end, the frames of one process give for each assignment exactly the tokens that
its engine gave, each once, offsets without a gap, the ending last; a frame carries one policy version and
each assignment once, stays until it is acknowledged, and is resent in its order.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from dataclasses import dataclass, field

from rlboost_runtime.core.base.messages import FinishReason, ReleaseReason
from rlboost_runtime.engines.base import EngineOutput
from rlboost_runtime.protocol.messages import AssignmentEnd, Frame

MAX_TOKENS = 1_000_000
"""Tokens kept for a silent coordinator before the engine is held: 8 MB, minutes of a fast engine."""
MAX_COUNT = 0xFFFF
"""Tokens of one assignment in a frame: counts travel as u16. The rest goes into the next frame."""

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
    endings: list[AssignmentEnd] = field(default_factory=list)


class Outbox:
    """Collects outputs, cuts them into frames, keeps frames until they are acknowledged."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_count: int = MAX_COUNT) -> None:
        self._max_tokens = max_tokens
        self._max_count = max_count
        self._open: dict[int, _Open] = {}
        self._pending: deque[_Section] = deque()
        self._unacked: deque[tuple[Frame, int]] = deque()
        self._num_tokens = 0
        self._next_seq = 0

    @property
    def is_full(self) -> bool:
        """True if the engine should wait for acknowledgements."""
        return self._num_tokens >= self._max_tokens

    @property
    def is_clear(self) -> bool:
        """True if everything that was added has been acknowledged."""
        return not self._pending and not self._unacked

    @property
    def open(self) -> tuple[int, ...]:
        """Assignments that have not ended."""
        return tuple(self._open)

    @property
    def held(self) -> tuple[int, ...]:
        """Assignments that have not ended, or whose ending is not acknowledged yet."""
        unacked = [ending.assignment for section in self._pending for ending in section.endings]
        unacked += [ending.assignment for frame, _ in self._unacked for ending in frame.endings]
        return tuple(dict.fromkeys([*self._open, *unacked]))

    def begin(self, assignment: int, offset: int, policy_version: int) -> None:
        """Start an assignment; its next token is number `offset` of the response."""
        self._open[assignment] = _Open(offset, policy_version)

    def add(self, output: EngineOutput) -> None:
        """Add an output; drop what concerns assignments that are not open."""
        for assignment, start, end in output.slices():
            if assignment in self._open:
                self._append(assignment, output, start, end)
        for ended in output.ended:
            self.end(ended.request_id, _REASONS[ended.reason], ended.problem)

    def end(self, assignment: int, reason: FinishReason | ReleaseReason, problem: str = "") -> None:
        """End an open assignment after the tokens that it has; one that is not open is left alone."""
        entry = self._open.pop(assignment, None)
        if entry is not None:
            self._section(entry.policy_version).endings.append(AssignmentEnd(assignment, reason, problem))

    def refuse(self, assignment: int, policy_version: int, problem: str) -> None:
        """End an assignment that never began: the engine does not serve its version."""
        ending = AssignmentEnd(assignment, ReleaseReason.ENGINE_FAILED, problem)
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
        """Drop all frames up to `seq`: the coordinator has journalled them."""
        while self._unacked and self._unacked[0][0].seq <= seq:
            _, num_tokens = self._unacked.popleft()
            self._num_tokens -= num_tokens

    def unacked(self) -> list[Frame]:
        """Return the frames to send again after a reconnect, in order."""
        return [frame for frame, _ in self._unacked]

    def void(self) -> None:
        """Forget everything: the coordinator has assigned it elsewhere. Numbering goes on."""
        self._open.clear()
        self._pending.clear()
        self._unacked.clear()
        self._num_tokens = 0

    def _append(self, assignment: int, output: EngineOutput, start: int, end: int) -> None:
        """Append the output's tokens [start, end), which are the assignment's."""
        entry, version = self._open[assignment], output.policy_version
        while start < end:
            section = self._section(version)
            tokens = section.tokens.get(assignment)
            if tokens is not None and len(tokens) >= self._max_count:
                section, tokens = self._new_section(version), None
            if tokens is None:
                tokens = section.tokens[assignment] = array("i")
                section.logprobs[assignment] = array("f")
                section.offsets[assignment] = entry.offset
            stop = min(end, start + self._max_count - len(tokens))
            tokens.extend(output.token_ids[start:stop])
            section.logprobs[assignment].extend(output.logprobs[start:stop])
            entry.offset += stop - start
            entry.policy_version = version
            self._num_tokens += stop - start
            start = stop

    def _section(self, policy_version: int) -> _Section:
        """Return the last section if it is of this version, else a new one: versions stay in order."""
        if not self._pending or self._pending[-1].policy_version != policy_version:
            return self._new_section(policy_version)
        return self._pending[-1]

    def _new_section(self, policy_version: int) -> _Section:
        self._pending.append(_Section(policy_version))
        return self._pending[-1]


def _frame(seq: int, section: _Section) -> Frame:
    num = len(section.tokens)
    return Frame(
        seq=seq,
        policy_version=section.policy_version,
        assignments=struct.pack(f"<{num}I", *section.tokens),
        offsets=struct.pack(f"<{num}I", *section.offsets.values()),
        counts=struct.pack(f"<{num}H", *map(len, section.tokens.values())),
        token_ids=b"".join(_little_endian(tokens) for tokens in section.tokens.values()),
        logprobs=b"".join(_little_endian(logprobs) for logprobs in section.logprobs.values()),
        endings=tuple(section.endings),
    )


def _little_endian(values: array[int] | array[float]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)
