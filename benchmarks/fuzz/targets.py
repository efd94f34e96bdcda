"""What a coverage-guided fuzzer calls: one input each, into the readers of frames, journals and event logs.

A target returns on anything that recovery or a connection expects, and lets everything else through: that is
what the fuzzer looks for. Inputs of `records` and `events` get right checksums, so that the fuzzer comes to
what is behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlboost_runtime.coordinator.storage.journal import (
    EventReader,
    SegmentReader,
    checked_line,
    encode_event,
)
from rlboost_runtime.coordinator.storage.token_store import Accepted, TokenStore
from rlboost_runtime.core.base.messages import Finished, FinishReason, Tick
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire

LIMIT, VOCABULARY, STOP_TOKEN = 8, 1_000, 9
Target = Callable[[bytes], None]


def frame(entries: list[tuple[int, int, list[int]]], *endings: wire.AssignmentEnd) -> bytes:
    """Return a message of (assignment, offset, token ids)."""
    ids = [token for _, _, tokens in entries for token in tokens]
    assignments = np.array([entry[0] for entry in entries], "<u4").tobytes()
    offsets = np.array([entry[1] for entry in entries], "<u4").tobytes()
    counts = np.array([len(entry[2]) for entry in entries], "<u2").tobytes()
    logprobs = np.full(len(ids), -1.0, "<f4").tobytes()
    token_ids = np.array(ids, "<i4").tobytes()
    return wire.encode(wire.Frame(1, 0, assignments, offsets, counts, token_ids, logprobs, endings))


def store() -> TokenStore:
    """Return a store of three responses; assignments 1 and 2 may add to the first two."""
    made = TokenStore()
    made.open_step(0, range(3), [LIMIT] * 3, (STOP_TOKEN,), VOCABULARY)
    for assignment in (1, 2):
        made.assign(assignment, assignment - 1, "spot-0/0")
    return made


class Targets:
    """The targets by name; `seeds` are inputs to begin with."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "input"
        self.all: dict[str, Target] = {
            "wire": self.wire,
            "records": self.records,
            "segment": self.segment,
            "events": self.events,
        }

    def seeds(self, name: str) -> list[bytes]:
        """Return whole inputs of a target."""
        frames = [
            frame([(1, 0, [5, 6]), (2, 0, [7])]),
            frame([(1, 0, [STOP_TOKEN])], wire.AssignmentEnd(1, "stop")),
            frame([(1, 0, list(range(LIMIT)))], wire.AssignmentEnd(2, "aborted", "why")),
        ]
        if name == "wire":
            return [
                *frames,
                wire.encode(wire.HeartbeatMessage(1, 1, 0, 1.0)),
                wire.encode(wire.Goodbye("bye")),
            ]
        if name == "events":
            events = (Tick(1.0), Finished(2.0, 1, 3, FinishReason.STOP))
            return [b"\n".join(encode_event(event).rstrip(b"\n") for event in events)]
        records = [accepted.record for accepted in map(self._accepted, frames) if accepted.record]
        return records if name == "records" else [b"".join(records)]

    def wire(self, data: bytes) -> None:
        """A message of an agent, and what a frame adds to the store."""
        try:
            message = wire.agent_message_decoder.decode(data)
        except wire.UNREADABLE:
            return
        if isinstance(message, wire.Frame):
            held = store()
            with contextlib.suppress(ProtocolError):
                held.is_foreign(message, "spot-0/0")
                held.accept(message)
            held.check()

    def records(self, data: bytes) -> None:
        """The content of a journal record, as a restart reads it."""
        held = store()
        with contextlib.suppress(ProtocolError):
            held.restore(data)
        held.check()

    def segment(self, data: bytes) -> None:
        """A file of the journal."""
        self._path.write_bytes(data)
        list(SegmentReader(self._path))

    def events(self, data: bytes) -> None:
        """Lines of an event log."""
        log = b""
        for line in data.splitlines():
            log += checked_line(line + b"\n", len(log)) if line.startswith(b"{") else line + b"\n"
        self._path.write_bytes(log)
        list(EventReader(self._path))

    def _accepted(self, message: bytes) -> Accepted:
        decoded = wire.agent_message_decoder.decode(message)
        assert isinstance(decoded, wire.Frame)
        return store().accept(decoded)
