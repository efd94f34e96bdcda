"""Requests outside a step: taken in, journalled, continued after a restart, and handed over token by token.

The core decides where they run; here are their prompts and tokens. Guarantees:

- a request is on stable storage before the core learns of it, and a token before anybody is shown it;
- a request that is known by its name continues, also in a later coordinator;
- a request is kept until it is withdrawn, or for `KEEP_S` without anybody who wants it.

Their journal is one of its own, in `requests/`: a step's segment is replaced when the step is requested
again. When a segment has `ROTATE_BYTES`, the open requests are written to a new one, and it is deleted, or
moved to `past/` where the journal is kept as evidence.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rlboost_runtime.coordinator.storage.columns import U16, U32, frame_deltas, split_frame
from rlboost_runtime.coordinator.storage.journal import Journal, SegmentReader
from rlboost_runtime.coordinator.storage.request_tokens import RequestRecord, RequestTokens
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Event,
    Finished,
    FinishReason,
    Released,
    ReleaseReason,
    RequestArrived,
    RequestWithdrawn,
    ResponseRequest,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol.messages import Frame, GenerateMessage, WorkItem

ROTATE_BYTES = 16 * 1024 * 1024
"""Bytes of records after which a segment is replaced by what is still open of it."""
PAST = "past"
"""In the journal's folder: segments that are kept although nothing in them is open."""
KEEP_S = 600.0
"""How long a request is kept that nobody asks for: the endpoint restarts in seconds, its clients retry."""

_REQUEST, _TOKENS, _GONE = b"R", b"T", b"G"
_token_decoder = msgspec.msgpack.Decoder(list[RequestRecord])
_REASONS = {*map(str, FinishReason), *map(str, ReleaseReason)} - {str(FinishReason.QUARANTINED)}

Listener = Callable[[RequestTokens], None]


def past_and_open_segments(folder: Path) -> list[Path]:
    """Return the segments of a journal of requests, in the order in which they were written."""
    return [*sorted((folder / PAST).glob("step-*.seg")), *sorted(folder.glob("step-*.seg"))]


def request_record(number: int, request: GenerateMessage) -> bytes:
    """Return what is journalled of a request."""
    return _REQUEST + msgspec.msgpack.encode((number, request))


def tokens_record(records: list[RequestRecord]) -> bytes:
    """Return what is journalled of tokens."""
    return _TOKENS + msgspec.msgpack.encode(records)


def records_of(
    segment: Iterable[bytes],
) -> Iterator[tuple[int, GenerateMessage | None, list[RequestRecord]]]:
    """Yield what a segment's records tell: a request and its number; or tokens; or, with neither, the number
    of a request that is gone."""
    for record in segment:
        kind, body = record[:1], record[1:]
        if kind == _REQUEST:
            number, request = msgspec.msgpack.decode(body, type=tuple[int, GenerateMessage])
            yield number, request, []
        elif kind == _TOKENS:
            yield 0, None, _token_decoder.decode(body)
        else:
            for number in msgspec.msgpack.decode(body, type=list[int]):
                yield number, None, []


@dataclass(slots=True)
class OwnTokens:
    """What a frame brought of requests outside a step."""

    num_accepted: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    shown: list[tuple[RequestTokens, int, bool]] = field(default_factory=list)
    """Requests, how many tokens they have with the records, and whether they are complete then."""
    events: list[Callable[[float], Event]] = field(default_factory=list)
    """Makers, by time, of the events that follow once the records are on stable storage."""

    def add(self, tokens: RequestTokens, record: RequestRecord) -> None:
        """Note what is to be journalled of a request."""
        self.records.append(record)
        self.shown.append((tokens, len(tokens.ids), tokens.reason is not None))
        if tokens.reason not in (None, FinishReason.QUARANTINED):
            self.events.append(partial(_finished, tokens.response, len(tokens.ids), tokens.reason))


class RequestDesk:
    """The open requests outside a step."""

    def __init__(
        self, folder: Path, make_journal: Callable[[Path], Journal], *, keeps_past: bool = False
    ) -> None:
        """`keeps_past`: what is over stays on disk, in `past/`, for an audit."""
        self.open: dict[int, RequestTokens] = {}
        self.listeners: set[Listener] = set()
        """Called with a request of which more is on stable storage, or which is over."""
        self.problem = ""
        """Why no request is taken; "" while they are."""
        self._folder = folder
        self._make_journal = make_journal
        self._keeps_past = keeps_past
        self._journal: Journal | None = None
        self._by_name: dict[str, int] = {}
        self._by_assignment: dict[int, RequestTokens] = {}
        self._apply: Callable[[Event], None]
        self._now: Callable[[], float]
        self._next = FIRST_REQUEST
        self._segment = self._num_bytes = 0
        self._reader_of: dict[int, Listener | None] = {}
        self._unwanted_since: dict[int, float] = {}

    # --- what clients ask for -----------------------------------------------------------------------------

    def known(self, name: str) -> RequestTokens | None:
        """Return the open request of that name."""
        number = self._by_name.get(name)
        return None if number is None else self.open[number]

    async def take(self, request: GenerateMessage, reader: Listener | None = None) -> RequestTokens:
        """Return the request of that name, taken in if it is new; `reader` waits for it. Raises
        `ProtocolError` if it is another one of the same name, or if none is taken."""
        request = msgspec.structs.replace(request, offset=0)
        known = self.known(request.request_id)
        if known is not None:
            if known.request != request:
                raise ProtocolError(
                    f"request {request.request_id} is known and asks for something else",
                    "give each request an id of its own",
                )
            self._unwanted_since.pop(known.response, None)
            self._reader_of[known.response] = reader
            return known
        if self.problem:
            raise ProtocolError(self.problem, "try again later")
        number, self._next = self._next, self._next + 1
        tokens = self._add(number, request)
        self._reader_of[number] = reader
        self._append(request_record(number, request))
        await self._started().flushed()
        if number in self.open:  # else it was withdrawn meanwhile
            self._apply(RequestArrived(self._now(), _asked(tokens)))
        return tokens

    def withdraw(self, name: str) -> None:
        """Forget a request; whoever generates it stops. Idempotent."""
        number = self._by_name.get(name)
        if number is not None:
            self._forget(number)

    def unwanted(self, name: str, reader: Listener) -> None:
        """Note that `reader` waits for a request no more, unless another has asked for it since."""
        number = self._by_name.get(name)
        if number is not None and self._reader_of.get(number) == reader:
            self._unwanted_since.setdefault(number, self._now())

    def drop_unwanted(self) -> None:
        """Forget what nobody has asked for in `KEEP_S`."""
        due = self._now() - KEEP_S
        for number in [n for n, since in self._unwanted_since.items() if since <= due]:
            self._forget(number)

    def refuse_all(self, problem: str) -> None:
        """End every request with `problem`, and take none any more."""
        self.problem = problem
        for tokens in list(self.open.values()):
            tokens.problem = tokens.problem or problem
            self._tell(tokens)

    # --- what the core orders -----------------------------------------------------------------------------

    def assign(self, assignment: int, response: int, instance: str, version: int) -> WorkItem | None:
        """Let the instance add to a request; return its work, None if it is complete."""
        tokens = self.open.get(response)
        if tokens is None or tokens.complete is not None:
            return None
        self._let_go(tokens)
        offset = tokens.assign(assignment, instance)
        self._by_assignment[assignment] = tokens
        request = tokens.request
        return WorkItem(
            assignment=assignment,
            token_ids=request.token_ids + tokens.ids.tobytes(),
            offset=offset,
            max_new_tokens=request.max_tokens - offset,
            policy_version=version,
            sampling=request.sampling,
        )

    def complete(self, response: int, reason: FinishReason | None = None) -> None:
        """End a request whose last token is there although nobody said so, or for another `reason`."""
        tokens = self.open.get(response)
        if tokens is not None and not tokens.is_over:
            found = OwnTokens()
            found.add(tokens, tokens.complete_with(reason or tokens.complete or FinishReason.STOP))
            self.journal(found, lambda: self._follow(found))

    def _follow(self, found: OwnTokens) -> None:
        for make in found.events:
            self._apply(make(self._now()))

    def length(self, response: int) -> int:
        """Return how many tokens a request has; 0 for one that is gone."""
        tokens = self.open.get(response)
        return 0 if tokens is None else len(tokens.ids)

    # --- frames -------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """True once there was a request, in this process."""
        return self._journal is not None

    def holds_foreign(self, frame: Frame, instance: str) -> bool:
        """Return True if `frame` holds the current assignment of a request that another instance has."""
        if not self._by_assignment:
            return False
        ended = [ending.assignment for ending in frame.endings]
        owners = [*frame_deltas(frame).owners_N.tolist(), *ended]
        return any(a in self._by_assignment and self._by_assignment[a].instance != instance for a in owners)

    def split(self, frame: Frame) -> tuple[Frame, Frame | None]:
        """Return what of a frame is the step's, and what belongs to requests. Raises `ProtocolError`."""
        if not self._by_assignment:
            return frame, None
        rest, own = split_frame(frame, self._by_assignment.__contains__)
        for ending in () if own is None else own.endings:
            if ending.reason not in _REASONS:
                raise ProtocolError(
                    f"frame {frame.seq}: assignment {ending.assignment} ends by {ending.reason!r}",
                    "re-deploy its sender with this version of rlboost",
                )
        return rest, own

    def accept(self, frame: Frame) -> OwnTokens:
        """Add what the part of a frame that is the requests' brings."""
        found = OwnTokens()
        ids, logprobs, at = array("i", frame.token_ids), array("f", frame.logprobs), 0
        columns = zip(
            np.frombuffer(frame.assignments, U32).tolist(),
            np.frombuffer(frame.offsets, U32).tolist(),
            np.frombuffer(frame.counts, U16).tolist(),
            strict=True,
        )
        for assignment, offset, count in columns:
            tokens, end = self._by_assignment[assignment], at + count
            record = tokens.accept(offset, ids[at:end], logprobs[at:end], frame.policy_version)
            at = end
            if record is None:
                continue
            found.add(tokens, record)
            found.num_accepted += len(record.token_ids) // 4
            if tokens.reason is not None:  # it is as long as it may be; an ending of it tells nothing new
                self._let_go(tokens)
        for ending in frame.endings:
            self._end(ending.assignment, ending.reason, found)
        return found

    def _end(self, assignment: int, reason: str, found: OwnTokens) -> None:
        tokens = self._by_assignment.pop(assignment, None)
        if tokens is None:
            return
        reason, record = tokens.end(reason)
        if record is not None:
            found.add(tokens, record)
            return
        why = ReleaseReason(reason)
        found.events.append(partial(_released, tokens.instance, assignment, len(tokens.ids), why))

    def journal(self, found: OwnTokens, on_commit: Callable[[], None]) -> None:
        """Write what was accepted; then show it to those who wait for it, and call `on_commit`."""

        def committed() -> None:
            on_commit()
            for tokens, length, is_over in found.shown:
                tokens.durable, tokens.is_over = max(tokens.durable, length), tokens.is_over or is_over
                self._tell(tokens)

        record = tokens_record(found.records) if found.records else b""
        self._append(record, committed)

    # --- restart ------------------------------------------------------------------------------------------

    def recover(self, core: Core, next_request: int, *, resumes: bool) -> list[Event]:
        """Read the journal; return what the core has to know. `resumes`: assignments go on, too."""
        self._next = next_request
        for path in sorted(self._folder.glob("step-*.seg")):
            self._segment = int(path.stem.split("-")[1])
            for number, request, records in records_of(SegmentReader(path)):
                self._restore(number, request, records)
        self._next = max(self._next, *(number + 1 for number in self.open), FIRST_REQUEST)
        late: list[Event] = []
        for number in core.open_requests:
            tokens = self.open.get(number)
            if tokens is None or tokens.problem:
                late.append(RequestWithdrawn(0.0, number))
            elif tokens.reason is not None:
                late.append(_finished(number, len(tokens.ids), tokens.reason, 0.0))
        late += [
            RequestArrived(0.0, _asked(tokens))
            for number, tokens in self.open.items()
            if number not in core.open_requests and not tokens.problem and tokens.reason is None
        ]
        for assignment, number, instance in core.assignments() if resumes else ():
            if number in self.open and self.open[number].reason is None:
                self.open[number].assign(assignment, instance)
                self._by_assignment[assignment] = self.open[number]
        return late

    def begin(self, apply: Callable[[Event], None], now: Callable[[], float]) -> None:
        """Start; what was recovered waits for whoever asked for it."""
        self._apply, self._now = apply, now
        for number in self.open:
            self._unwanted_since[number] = now()
        if self._segment:
            self._rotate()

    async def close(self) -> None:
        """Write what is queued."""
        if self._journal is not None:
            await self._journal.close()

    def _restore(self, number: int, request: GenerateMessage | None, records: list[RequestRecord]) -> None:
        if request is not None:
            if number not in self.open:
                self._add(number, request)
        elif records:
            for each in records:
                if each.response in self.open:
                    self.open[each.response].restore(each)
        else:
            gone = self.open.pop(number, None)
            if gone is not None:
                del self._by_name[gone.request.request_id]

    # --- helpers ------------------------------------------------------------------------------------------

    def _add(self, number: int, request: GenerateMessage) -> RequestTokens:
        tokens = RequestTokens(number, request)
        self.open[number], self._by_name[request.request_id] = tokens, number
        return tokens

    def _forget(self, number: int) -> None:
        tokens = self.open.pop(number)
        del self._by_name[tokens.request.request_id]
        self._reader_of.pop(number, None)
        self._unwanted_since.pop(number, None)
        self._let_go(tokens)
        self._append(_GONE + msgspec.msgpack.encode([number]))
        if tokens.reason is None:
            self._apply(RequestWithdrawn(self._now(), number, len(tokens.ids)))

    def _let_go(self, tokens: RequestTokens) -> None:
        if tokens.assignment is not None:
            self._by_assignment.pop(tokens.assignment, None)
        tokens.assignment = None

    def _tell(self, tokens: RequestTokens) -> None:
        for listener in tuple(self.listeners):
            listener(tokens)

    def _started(self) -> Journal:
        if self._journal is None:
            self._journal = self._make_journal(self._folder)
            self._journal.start(asyncio.get_running_loop())
            self._segment += 1
            self._journal.open_step(self._segment, fresh=True)
        return self._journal

    def _append(self, record: bytes, on_commit: Callable[[], None] | None = None) -> None:
        self._started().append(record, on_commit)
        self._num_bytes += len(record)
        if self._num_bytes > ROTATE_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        """Write what is open to a new segment; drop the earlier ones once it is there."""
        journal, self._num_bytes = self._started(), 0
        self._segment += 1
        journal.open_step(self._segment, fresh=True)
        for number, tokens in self.open.items():
            journal.append(request_record(number, tokens.request))
            if records := tokens.records():
                journal.append(tokens_record(records))
        before = self._segment
        journal.append(b"", lambda: self._drop_before(journal, before))

    def _drop_before(self, journal: Journal, before: int) -> None:
        if self._keeps_past:
            past = self._folder / PAST
            past.mkdir(mode=0o700, exist_ok=True)
            for path in self._folder.glob("step-*.seg"):
                if int(path.stem.split("-")[1]) < before:
                    path.rename(past / path.name)
        journal.drop_before(before)


def _asked(tokens: RequestTokens) -> ResponseRequest:
    number, request = tokens.response, tokens.request
    group = FIRST_REQUEST + zlib.crc32(request.session.encode()) if request.session else number
    return ResponseRequest(number, group, len(request.token_ids) // 4, request.max_tokens, request.episode)


def _finished(response: int, num_tokens: int, reason: FinishReason, at: float) -> Event:
    return Finished(at, response, num_tokens, reason)


def _released(instance: str, assignment: int, num_tokens: int, reason: ReleaseReason, at: float) -> Event:
    return Released(at, instance, assignment, num_tokens, reason)
