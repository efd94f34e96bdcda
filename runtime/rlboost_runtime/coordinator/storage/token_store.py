"""The tokens of the open steps' responses: a store per step, and all of them behind one frame.

Guarantees (design.md section 4, promises 2 and 5):

- the tokens of a response form one gap-free sequence, and token k is accepted once, whatever is lost, sent
  again, sent late or sent by an instance that no longer has the response;
- nothing is ever added to a response that is complete (before `forget`), and none exceeds its token limit;
- `restore` of all records, in order, gives what the records' store held.

A frame costs a handful of numpy calls however many responses it moves: ids and logprobs lie in two matrices
of one row per response, and a frame is one scatter into each. No input or output, one thread.

Shape legend: N deltas, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlboost_runtime.coordinator.storage.columns import (
    U16,
    U32,
    AssignmentTable,
    Dtyped,
    Ints,
    JournalRecord,
    TokenDeltas,
    TokenMatrix,
    decode_record,
    frame_deltas,
    frame_owners,
    record_deltas,
    spans,
    split_frame,
)
from rlboost_runtime.core.base.messages import FinishReason, ReleaseReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire

_FINISHES = {FinishReason.STOP.value: FinishReason.STOP, FinishReason.LENGTH.value: FinishReason.LENGTH}
_RELEASES = {reason.value for reason in ReleaseReason}
_NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class EndedAssignment:
    """A current assignment that ended. `num_tokens`: tokens that its response has now.

    `reason` is a FinishReason or ReleaseReason value. Where an agent claims a finish without having sent all
    tokens before it, it is `engine_failed` instead, and `problem` states that.
    """

    assignment: int
    response: int
    reason: str
    problem: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a frame changed. `record` is None where there is nothing to journal; the counts are in tokens and
    add up to the frame's. `full`: responses that reached the limit in this frame without a finish in
    `endings`; they are complete (`is_complete` gives the reason) and their assignments are over."""

    record: bytes | None
    num_accepted: int
    num_dropped: int
    num_duplicate: int
    endings: tuple[EndedAssignment, ...]
    full: tuple[int, ...]
    openings: tuple[tuple[int, int, str], ...] = ()
    """(response, offset, instance) where an instance's first tokens of a response, or under another version,
    begin."""


class TokenStore:
    """Tokens, logprobs and segments of one step's responses, and which assignment may add to them."""

    def __init__(self) -> None:
        self._matrix = TokenMatrix()
        self.open_step(0, (), (), ())

    def open_step(
        self,
        step: int,
        responses: Sequence[int],
        limits: Sequence[int],
        stop_token_ids: tuple[int, ...],
        vocabulary: int = 2**31,
    ) -> None:
        """Forget the former step and hold `responses` (consecutive numbers), each of at most so many tokens
        as `limits` says, with token ids below `vocabulary`."""
        num_rows = len(responses)
        first = responses[0] if num_rows else 0
        if num_rows and list(responses) != list(range(first, first + num_rows)):
            raise ValueError(
                f"responses of step {step} are not consecutive numbers: {list(responses)[:10]}..."
            )
        if len(limits) != num_rows or not all(0 < limit < 2**31 for limit in limits):
            raise ValueError(f"limits of step {step} are {list(limits)[:10]}... for {num_rows} responses")
        longest = max(limits, default=1)
        self._step = step
        self._first = first
        self._num_rows = num_rows
        self._least_limit = min(limits, default=1)
        self._limits: NDArray[np.uint32] = np.array([*limits, longest], U32)
        self._vocabulary = vocabulary
        self._stop_token_ids = frozenset(stop_token_ids)
        self._matrix.reshape(num_rows, longest)
        # One row more than there are responses: that of all assignments that are not current.
        self._assignments = AssignmentTable(nowhere=num_rows)
        self._lengths: NDArray[np.uint32] = np.zeros(num_rows + 1, U32)
        self._open_versions: Ints = np.full(
            num_rows + 1, _NO_VERSION, np.int64
        )  # of the segment that may go on
        self._segments: dict[int, list[tuple[int, str, int]]] = {}  # row -> (start, instance, policy version)
        self._finished: dict[int, FinishReason] = {}  # row -> reason
        self._current: dict[int, tuple[int, str]] = {}  # row -> assignment and its instance
        self._instances: dict[str, int] = {}  # instance -> its number in `_holders`
        self._holders: Ints = np.zeros(num_rows + 1, np.int64)  # who had the row's last assignment
        self._mute: dict[int, int] = {}  # assignment that may only end -> row
        self._owed: dict[int, int] = {}  # assignment -> end of the furthest delta that left a gap

    def extend(self, limits: Sequence[int]) -> None:
        """Hold further responses, behind the others, each of at most so many tokens."""
        if not all(0 < limit < 2**31 for limit in limits):
            raise ValueError(f"limits of further responses of step {self._step} are {list(limits)[:10]}...")
        former, self._num_rows = self._num_rows, self._num_rows + len(limits)
        longest = max(int(self._limits[former]), max(limits, default=1))
        self._matrix.extend(self._num_rows, longest, self._lengths[:former])
        self._limits = np.array([*self._limits[:former].tolist(), *limits, longest], U32)
        self._least_limit = int(self._limits.min())
        more = (0, len(limits))
        self._lengths = np.pad(self._lengths, more)
        self._open_versions = np.pad(self._open_versions, more, constant_values=_NO_VERSION)
        self._holders = np.pad(self._holders, more)
        self._assignments.move_nowhere(self._num_rows)

    @property
    def step(self) -> int:
        """The step."""
        return self._step

    def holds_response(self, response: int) -> bool:
        """Return True if `response` is one of the step's."""
        return 0 <= response - self._first < self._num_rows

    def knows(self, assignment: int) -> bool:
        """Return True if `assignment` is a current one of the step's."""
        return self._row_of(assignment) != self._assignments.nowhere

    def assign(self, assignment: int, response: int, instance: str) -> int:
        """Let `assignment` alone add to `response`; return how many tokens are kept (its first offset).

        Under an assignment of a complete response no token is accepted; ask `is_complete` before.
        Raises KeyError for a response of another step, ValueError for an assignment of another response.
        """
        row = self._row(response)
        if self._row_of(assignment) not in (row, self._assignments.nowhere):
            raise ValueError(f"assignment {assignment} already belongs to another response than {response}")
        length = int(self._lengths[row])
        if row in self._finished:
            return length
        self._release(row)
        self._current[row] = (assignment, instance)
        self._holders[row] = self._instances.setdefault(instance, len(self._instances) + 1)
        if self.is_complete(response):
            self._mute[assignment] = row
        else:
            self._assignments.set(assignment, row)
        _, last_instance, last_version = self._segments.get(row, [(0, "", _NO_VERSION)])[-1]
        self._open_versions[row] = last_version if last_instance == instance else _NO_VERSION
        return length

    def unassign(self, assignment: int) -> None:
        """Accept nothing more under `assignment`; idempotent."""
        row = self._row_of(assignment)
        if row != self._assignments.nowhere:
            self._release(row)

    def is_foreign(self, frame: wire.Frame, instance: str) -> bool:
        """Return True if `frame` holds a current assignment of another than `instance`."""
        rows_N = self._assignments.rows(frame_owners(frame))
        ended = np.array([self._row_of(ending.assignment) for ending in frame.endings], np.int64)
        rows_N = np.concatenate([rows_N, ended]) if len(ended) else rows_N
        strange_N = self._holders[rows_N] != self._instances.get(instance, 0)
        return bool(np.any(strange_N & (rows_N != self._assignments.nowhere)))

    def accept(self, frame: wire.Frame) -> Accepted:
        """Add what `frame` brings under current assignments: first its tokens, then its endings.

        Raises `ProtocolError`, and changes nothing, when the frame contradicts itself.
        """
        deltas = self.refuse_unfit(frame)
        rows_N = self._assignments.rows(deltas.owners_N)
        num_duplicate = num_dropped = 0
        lengths_N = _ends(deltas)
        if not self._fits(rows_N, deltas, lengths_N):
            rows_N, deltas, num_duplicate, num_dropped = self._trim(rows_N, deltas)
            lengths_N = _ends(deltas)
        openings = self._open_segments(rows_N, deltas, frame.policy_version)
        any_full = self._append(rows_N, deltas, lengths_N)
        endings = self._end(frame.endings) if frame.endings else ()
        full = self._finish_full(rows_N) if any_full else ()
        finishes = tuple((ending.response, ending.reason) for ending in endings if ending.reason in _FINISHES)
        record: bytes | None = None
        if len(rows_N) or finishes:
            record = self._record(frame.policy_version, rows_N, deltas, openings, finishes)
        return Accepted(record, len(deltas.token_ids_T), num_dropped, num_duplicate, endings, full, openings)

    def refuse_unfit(self, frame: wire.Frame) -> TokenDeltas:
        """Return the tokens of `frame`. Raises `ProtocolError` when it contradicts itself."""
        deltas = frame_deltas(frame)
        ids_T = deltas.token_ids_T
        if len(ids_T) and (highest := ids_T[ids_T.argmax()]) >= self._vocabulary:
            raise ProtocolError(
                f"frame {frame.seq}: token id {highest} is not of a vocabulary of {self._vocabulary}",
                "deploy its sender again",
            )
        if frame.endings:
            _check_endings(frame)
        return deltas

    def length(self, response: int) -> int:
        """Return how many tokens `response` has."""
        return int(self._lengths[self._row(response)])

    def is_complete(self, response: int) -> FinishReason | None:
        """Return why nothing may be added to `response`, or None. A stop token as its last one counts as a
        stop although the engine's ending has not arrived: a finished response is never resumed."""
        row = self._row(response)
        return self._finished.get(row) or (FinishReason.STOP if self._ends_in_stop_token(row) else None)

    def token_ids(self, response: int) -> bytes:
        """Return the tokens of `response`, i32."""
        row = self._row(response)
        return self._matrix.token_ids(row, int(self._lengths[row])).tobytes()

    def logprobs(self, response: int) -> bytes:
        """Return the logprobs of `response`, f32, one per token."""
        row = self._row(response)
        return self._matrix.logprobs(row, int(self._lengths[row])).tobytes()

    def segments(self, response: int) -> tuple[wire.Segment, ...]:
        """Return who made the tokens of `response` under which policy version; they add up to its length."""
        row = self._row(response)
        opened = self._segments.get(row)
        if opened is None:
            return ()
        ends = [start for start, _, _ in opened[1:]] + [int(self._lengths[row])]
        return tuple(
            wire.Segment(instance, version, end - start)
            for (start, instance, version), end in zip(opened, ends, strict=True)
        )

    def restore(self, record: bytes) -> list[tuple[int, FinishReason]]:
        """Apply a journal record of the open step; return the responses that it completed and why.

        A record that was applied before changes nothing. Raises `ProtocolError` where it does not fit.
        """
        try:
            return self._restore(decode_record(record))
        except (KeyError, OverflowError) as exc:
            raise _unfit(str(exc)) from exc

    def _restore(self, parts: JournalRecord) -> list[tuple[int, FinishReason]]:
        if parts.step != self._step:
            raise _unfit(f"it belongs to step {parts.step}, open is step {self._step}")
        deltas = record_deltas(parts)
        rows_N = self._record_rows(deltas.owners_N)
        openings = [(self._row(response), offset, instance) for response, offset, instance in parts.openings]
        endings = [(self._row(response), _finish_reason(reason)) for response, reason in parts.endings]
        if not self._fits(rows_N, deltas, _ends(deltas)):
            rows_N, deltas = self._trim_restored(rows_N, deltas)
        new = [opening for opening in openings if opening[1] >= self._lengths[opening[0]]]
        self._refuse_segments(new, set(rows_N.tolist()))
        for row, offset, instance in new:
            self._open_segment(row, offset, instance, parts.policy_version)
        any_full = self._append(rows_N, deltas, _ends(deltas))
        finishes = self._restore_finishes(endings)
        full = self._finish_full(rows_N) if any_full else ()
        return finishes + [(response, self._finished[response - self._first]) for response in full]

    def holds(self, response: int, num_tokens: int, reason: FinishReason) -> bool:
        """Return True if `response` is complete with so many tokens, for that reason."""
        found, length = self.is_complete(response), self.length(response)
        is_full = reason is FinishReason.LENGTH and length == self._limits[self._row(response)]
        return length == num_tokens and found is not None and (found is reason or is_full)

    def forget(self, response: int) -> None:
        """Drop all tokens of `response`, finished or not; whoever had an assignment for it has none now."""
        row = self._row(response)
        self._release(row)
        self._finished.pop(row, None)
        self._segments.pop(row, None)
        self._lengths[row] = 0
        self._open_versions[row] = _NO_VERSION

    def check(self) -> None:
        """Assert every invariant."""
        assert self._lengths[self._num_rows] == 0, "tokens were accepted for no response"
        assert self._assignments.num_current() + len(self._mute) == len(self._current)
        for row, (assignment, _) in self._current.items():
            assert self._row_of(assignment) == row, f"row {row}"
            assert row not in self._finished, f"row {row} is finished and assigned"
            assert assignment not in self._mute or self._ends_in_stop_token(row), f"row {row}"
        for row in range(self._num_rows):
            self._check_row(row)

    # --- tokens ------------------------------------------------------------------------------------------

    def _fits(self, rows_N: Ints, deltas: TokenDeltas, lengths_N: NDArray[np.uint32]) -> bool:
        """Return whether all of `deltas` can be added as they are, giving `lengths_N`: the usual case."""
        if not len(rows_N):
            return True
        if rows_N[rows_N.argmax()] == self._assignments.nowhere:
            return False
        if self._lengths.take(rows_N).tobytes() != deltas.offsets_N.tobytes():
            return False
        is_short = lengths_N[lengths_N.argmax()] <= self._least_limit  # quick, and true of most frames
        return bool(is_short or (lengths_N <= self._limits.take(rows_N)).all())

    def _trim(self, rows_N: Ints, deltas: TokenDeltas) -> tuple[Ints, TokenDeltas, int, int]:
        """Keep what may be added; return it with the number of duplicate and of dropped tokens.

        A delta that starts before the end of its response is a resend: only its new tail is kept. One beyond
        it would leave a gap; how far it went is remembered: no finish is believed before it is filled.
        """
        offsets_N = deltas.offsets_N.astype(np.int64)
        ends_N = offsets_N + deltas.counts_N
        lengths_N = self._lengths[rows_N].astype(np.int64)
        current_N = rows_N != self._assignments.nowhere
        gap_N = current_N & (offsets_N > lengths_N)
        for assignment, end in zip(deltas.owners_N[gap_N].tolist(), ends_N[gap_N].tolist(), strict=True):
            self._owed[assignment] = max(end, self._owed.get(assignment, 0))
        usable_N = current_N & ~gap_N
        firsts_N = np.maximum(offsets_N, lengths_N)
        taken_N = np.where(usable_N, np.minimum(ends_N, self._limits[rows_N]) - firsts_N, 0).clip(0)
        num_duplicate = int(np.where(usable_N, np.minimum(ends_N, lengths_N) - offsets_N, 0).sum())
        num_dropped = len(deltas.token_ids_T) - num_duplicate - int(taken_N.sum())
        kept_N = taken_N > 0
        return rows_N[kept_N], _part(deltas, kept_N, firsts_N, taken_N), num_duplicate, num_dropped

    def _append(self, rows_N: Ints, deltas: TokenDeltas, lengths_N: NDArray[np.uint32]) -> bool:
        """Add `deltas`, which fit, to distinct rows; return whether one of them is full now."""
        if not len(rows_N):
            return False
        self._matrix.scatter(rows_N, deltas)
        self._lengths[rows_N] = lengths_N  # of the same dtype: numpy is slow at assigning with a cast
        if lengths_N[lengths_N.argmax()] < self._least_limit:
            return False
        return bool((lengths_N == self._limits.take(rows_N)).any())

    def _open_segments(
        self, rows_N: Ints, deltas: TokenDeltas, policy_version: int
    ) -> tuple[tuple[int, int, str], ...]:
        """Open a segment where a delta does not continue the last; return (response, offset, instance)."""
        if not len(rows_N):
            return ()
        others_N = self._open_versions.take(rows_N) != policy_version
        if not others_N[others_N.argmax()]:
            return ()
        openings: list[tuple[int, int, str]] = []
        for row, offset in zip(rows_N[others_N].tolist(), deltas.offsets_N[others_N].tolist(), strict=True):
            _, instance = self._current[row]
            self._open_segment(row, offset, instance, policy_version)
            openings.append((row + self._first, offset, instance))
        return tuple(openings)

    def _open_segment(self, row: int, offset: int, instance: str, policy_version: int) -> None:
        self._segments.setdefault(row, []).append((offset, instance, policy_version))
        self._open_versions[row] = policy_version

    # --- endings -----------------------------------------------------------------------------------------

    def _end(self, endings: tuple[wire.AssignmentEnd, ...]) -> tuple[EndedAssignment, ...]:
        """End the current ones among the assignments; endings of others are late and ignored."""
        ended: list[EndedAssignment] = []
        for ending in endings:
            row = self._row_of(ending.assignment)
            if row == self._assignments.nowhere:
                continue
            length = int(self._lengths[row])
            reason, problem = ending.reason, ending.problem
            missing = min(self._owed.get(ending.assignment, 0), int(self._limits[row])) - length
            if reason in _FINISHES and missing > 0:
                problem = f"ends by {reason}, but {missing} tokens from {length} on never arrived"
                reason = ReleaseReason.ENGINE_FAILED.value
            if reason in _FINISHES:
                self._finish(row, _FINISHES[reason])
            else:
                self._release(row)
            ended.append(EndedAssignment(ending.assignment, row + self._first, reason, problem, length))
        return tuple(ended)

    def _finish_full(self, rows_N: Ints) -> tuple[int, ...]:
        """Finish those of the rows that have reached the token limit, and return their responses."""
        full = [
            row
            for row in rows_N[self._lengths[rows_N] == self._limits[rows_N]].tolist()
            if row not in self._finished
        ]
        for row in full:
            self._finish(row, FinishReason.STOP if self._ends_in_stop_token(row) else FinishReason.LENGTH)
        return tuple(row + self._first for row in full)

    def _finish(self, row: int, reason: FinishReason) -> None:
        self._finished[row] = reason
        self._release(row)

    def _release(self, row: int) -> None:
        assignment, _ = self._current.pop(row, (None, ""))
        if assignment is not None:
            self._assignments.unset(assignment)
            self._mute.pop(assignment, None)
            self._owed.pop(assignment, None)

    def _ends_in_stop_token(self, row: int) -> bool:
        length = int(self._lengths[row])
        return length > 0 and self._matrix.last_token_id(row, length) in self._stop_token_ids

    def _row(self, response: int) -> int:
        row = response - self._first
        if not 0 <= row < self._num_rows:
            raise KeyError(f"response {response} is not one of step {self._step}")
        return row

    def _row_of(self, assignment: int) -> int:
        """Return the row of a current assignment, also of one that may only end."""
        return self._mute.get(assignment, self._assignments.row(assignment))

    # --- journal records ---------------------------------------------------------------------------------

    def _record(
        self,
        policy_version: int,
        rows_N: Ints,
        deltas: TokenDeltas,
        openings: tuple[tuple[int, int, str], ...],
        finishes: tuple[tuple[int, str], ...],
    ) -> bytes:
        return msgspec.msgpack.encode(
            JournalRecord(
                self._step,
                policy_version,
                (rows_N + self._first).astype(U32).tobytes(),
                deltas.offsets_N.tobytes(),
                deltas.counts_N.astype(U16).tobytes(),
                deltas.token_ids_T.tobytes(),
                deltas.logprobs_T.tobytes(),
                openings,
                finishes,
            )
        )

    def _record_rows(self, responses_N: Dtyped) -> Ints:
        rows_N = responses_N.astype(np.int64) - self._first
        if ((rows_N < 0) | (rows_N >= self._num_rows)).any():
            raise _unfit(f"it has responses outside {self._first}..{self._first + self._num_rows - 1}")
        return rows_N

    def _trim_restored(self, rows_N: Ints, deltas: TokenDeltas) -> tuple[Ints, TokenDeltas]:
        """Keep what is new of a record. Raises `ProtocolError` for what could not have been accepted."""
        lengths_N = self._lengths[rows_N].astype(np.int64)
        ends_N = deltas.offsets_N.astype(np.int64) + deltas.counts_N
        bad_N = (deltas.offsets_N > lengths_N) | (ends_N > self._limits[rows_N])
        if bad_N.any():
            at = int(bad_N.argmax())
            found = f"tokens {deltas.offsets_N[at]}..{ends_N[at] - 1} of response {deltas.owners_N[at]}"
            raise _unfit(f"{found} come after {lengths_N[at]} (limit {self._limits[rows_N[at]]})")
        kept_N = ends_N > lengths_N
        return rows_N[kept_N], _part(deltas, kept_N, lengths_N, ends_N - lengths_N)

    def _refuse_segments(self, new: list[tuple[int, int, str]], rows: set[int]) -> None:
        """Refuse segments that begin elsewhere than at the end of `rows`, which get tokens, and first tokens
        without one."""
        for row, offset, _ in new:
            if offset != self._lengths[row] or row not in rows:
                raise _unfit(
                    f"a segment of response {row + self._first} begins at {offset}, where no token is"
                )
        if nameless := rows - self._segments.keys() - {row for row, _, _ in new}:
            raise _unfit(f"no instance is named for the tokens of response {min(nameless) + self._first}")

    def _restore_finishes(self, endings: list[tuple[int, FinishReason]]) -> list[tuple[int, FinishReason]]:
        finishes: list[tuple[int, FinishReason]] = []
        for row, reason in endings:
            if row not in self._finished:
                self._finish(row, reason)
                finishes.append((row + self._first, reason))
        return finishes

    def _check_row(self, row: int) -> None:
        response = row + self._first
        length = int(self._lengths[row])
        segments = self.segments(response)
        assert sum(segment.num_tokens for segment in segments) == length, f"response {response}"
        assert all(segment.num_tokens > 0 for segment in segments), f"response {response}"
        for before, after in itertools.pairwise(segments):
            assert (before.instance, before.policy_version) != (after.instance, after.policy_version)
        assert length < self._limits[row] or row in self._finished, f"response {response} is full"


@dataclass(frozen=True, slots=True)
class AcceptedOfSteps:
    """What a frame changed, in all steps together; see `Accepted`. `records`: (step, journal record)."""

    records: tuple[tuple[int, bytes], ...]
    num_accepted: int
    num_dropped: int
    num_duplicate: int
    endings: tuple[EndedAssignment, ...]
    full: tuple[int, ...]
    openings: tuple[tuple[int, int, str], ...]


class StepStores:
    """Stores by step, oldest first. What names a response goes to the store that holds it; one that none
    holds raises `KeyError`."""

    def __init__(self) -> None:
        self._stores: dict[int, TokenStore] = {}

    def add(self, step: int, store: TokenStore) -> None:
        """Hold the tokens of one more step, or of that step anew."""
        self._stores[step] = store
        self._stores = dict(sorted(self._stores.items()))

    def keep(self, steps: Collection[int]) -> None:
        """Forget the tokens of all other steps."""
        self._stores = {step: store for step, store in self._stores.items() if step in steps}

    def of(self, step: int) -> TokenStore:
        """Return a step's own store."""
        return self._stores[step]

    def __iter__(self) -> Iterator[TokenStore]:
        """Iterate over the stores, oldest step first."""
        return iter(self._stores.values())

    def holding(self, response: int) -> TokenStore:
        """Return the store of a response."""
        for store in self:
            if store.holds_response(response):
                return store
        raise KeyError(response)

    def assign(self, assignment: int, response: int, instance: str) -> int:
        """As `TokenStore.assign`."""
        return self.holding(response).assign(assignment, response, instance)

    def unassign(self, assignment: int) -> None:
        """As `TokenStore.unassign`."""
        for store in self:
            store.unassign(assignment)

    def is_foreign(self, frame: wire.Frame, instance: str) -> bool:
        """Return True if `frame` holds a current assignment of another than `instance`."""
        return any(store.is_foreign(frame, instance) for store in self)

    def length(self, response: int) -> int:
        """Return how many tokens `response` has."""
        return self.holding(response).length(response)

    def is_complete(self, response: int) -> FinishReason | None:
        """As `TokenStore.is_complete`."""
        return self.holding(response).is_complete(response)

    def token_ids(self, response: int) -> bytes:
        """Return the tokens of `response`, i32."""
        return self.holding(response).token_ids(response)

    def logprobs(self, response: int) -> bytes:
        """Return the logprobs of `response`, f32, one per token."""
        return self.holding(response).logprobs(response)

    def segments(self, response: int) -> tuple[wire.Segment, ...]:
        """Return who made the tokens of `response` under which policy version."""
        return self.holding(response).segments(response)

    def holds(self, response: int, num_tokens: int, reason: FinishReason) -> bool:
        """As `TokenStore.holds`."""
        return self.holding(response).holds(response, num_tokens, reason)

    def forget(self, response: int) -> None:
        """As `TokenStore.forget`."""
        self.holding(response).forget(response)

    def check(self) -> None:
        """Assert every invariant."""
        for store in self:
            store.check()

    def accept(self, frame: wire.Frame) -> AcceptedOfSteps:
        """Add what `frame` brings, each step its own. Raises `ProtocolError`, and changes nothing then."""
        parts = self._parts(frame) if len(self._stores) != 1 else [(next(iter(self)), frame)]
        for store, part in parts if len(parts) > 1 else ():
            store.refuse_unfit(part)
        found = [(store.step, store.accept(part)) for store, part in parts]
        return _together(found)

    def _parts(self, frame: wire.Frame) -> list[tuple[TokenStore, wire.Frame]]:
        """Return each step's part of a frame. What belongs to none goes to the newest, which drops it."""
        *earlier, newest = self._stores.values() or (TokenStore(),)
        parts: list[tuple[TokenStore, wire.Frame]] = []
        for store in earlier:
            frame, own = split_frame(frame, store.knows)
            if own is not None:
                parts.append((store, own))
        return [*parts, (newest, frame)]


def _together(found: list[tuple[int, Accepted]]) -> AcceptedOfSteps:
    return AcceptedOfSteps(
        records=tuple((step, each.record) for step, each in found if each.record is not None),
        num_accepted=sum(each.num_accepted for _, each in found),
        num_dropped=sum(each.num_dropped for _, each in found),
        num_duplicate=sum(each.num_duplicate for _, each in found),
        endings=tuple(ending for _, each in found for ending in each.endings),
        full=tuple(response for _, each in found for response in each.full),
        openings=tuple(opening for _, each in found for opening in each.openings),
    )


def _ends(deltas: TokenDeltas) -> NDArray[np.uint32]:
    """Return the index after the last token of each delta; wraps around for offsets that fit nowhere."""
    return deltas.offsets_N + deltas.counts_N.astype(U32)


def _part(deltas: TokenDeltas, kept_N: NDArray[np.bool_], firsts_N: Ints, taken_N: Ints) -> TokenDeltas:
    """Return, of the deltas in `kept_N`, the `taken_N` tokens from index `firsts_N` of the response on."""
    starts_N = deltas.ends_N - deltas.counts_N + firsts_N - deltas.offsets_N
    counts_N = taken_N[kept_N]
    ends_N: Ints = np.add.accumulate(counts_N)
    source_T = spans(starts_N[kept_N], counts_N, ends_N)
    return TokenDeltas(
        owners_N=deltas.owners_N[kept_N],
        offsets_N=firsts_N[kept_N].astype(U32),
        counts_N=counts_N,
        ends_N=ends_N,
        token_ids_T=deltas.token_ids_T[source_T],
        logprobs_T=deltas.logprobs_T[source_T],
    )


def _finish_reason(reason: str) -> FinishReason:
    try:
        return _FINISHES[reason]
    except KeyError:
        raise _unfit(f"it ends a response with the reason {reason!r}") from None


def _check_endings(frame: wire.Frame) -> None:
    seen: set[int] = set()
    for ending in frame.endings:
        if ending.assignment in seen:
            raise _unfit_frame(frame, f"assignment {ending.assignment} ends twice")
        if ending.reason not in _FINISHES and ending.reason not in _RELEASES:
            raise _unfit_frame(frame, f"assignment {ending.assignment} ends by {ending.reason!r}")
        seen.add(ending.assignment)


def _unfit_frame(frame: wire.Frame, problem: str) -> ProtocolError:
    return ProtocolError(f"frame {frame.seq}: {problem}", "re-deploy its sender with this version of rlboost")


def _unfit(problem: str) -> ProtocolError:
    return ProtocolError(
        f"a journal record does not fit: {problem}",
        "the journal folder is damaged: resume from the last checkpoint",
    )
