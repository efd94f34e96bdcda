"""The columns that carry tokens: read from an agent's frame, written to and read from a journal record.

Guarantees: whoever holds a `TokenDeltas` holds columns that agree with one another, because both readers
refuse everything else with a `ProtocolError` that names what was found. A record is keyed by response, never
by assignment, so it means the same to a coordinator that has restarted.

The open step's tokens lie in a `TokenMatrix`; an `AssignmentTable` maps assignments to its rows. Looking up a
frame's assignments and writing its tokens take a fixed number of numpy calls, and memory for tokens that have
not arrived costs nothing.

Shape legend: N deltas, T tokens (the sum of their counts), F frames.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire

Ints = NDArray[np.int64]
Dtyped = np.ndarray[Any, np.dtype[Any]]  # the dtype is an argument

U16 = np.dtype("<u2")
U32 = np.dtype("<u4")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")

MAX_POLICY_VERSION = 2**31 - 1
"""Largest policy version that a frame may name; versions grow by one per step."""

MAX_LOGPROB = 0.1
"""A logprob is 0 at most; this is more than any rounding."""


@dataclass(slots=True)  # not frozen: one per frame, and a frozen one takes a microsecond longer to make
class TokenDeltas:
    """New tokens of N responses. `owners_N`: assignments in a frame, responses in a record;
    `offsets_N`: index in the response of each first token; `ends_N`: running sum of the counts;
    `token_ids_T`, `logprobs_T`: end to end."""

    owners_N: NDArray[np.uint32]
    offsets_N: NDArray[np.uint32]
    counts_N: Ints
    ends_N: Ints
    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]


class JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """What one frame added to a step.

    `openings`: (response, offset, instance) where a segment begins, that is where the instance or the policy
    version is another than that of the token before. `endings`: (response, FinishReason) of those that the
    frame finished.
    """

    step: int
    policy_version: int
    responses: bytes
    offsets: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    openings: tuple[tuple[int, int, str], ...]
    endings: tuple[tuple[int, str], ...]


_record_decoder = msgspec.msgpack.Decoder(JournalRecord)


def decode_record(data: bytes) -> JournalRecord:
    """Return the record in `data`. Raises `ProtocolError` when it is none."""
    try:
        return _record_decoder.decode(data)
    except wire.UNREADABLE as exc:
        raise _malformed(f"journal record of {len(data)} bytes: {exc}") from exc


def renumbered(data: bytes, shift: int) -> bytes:
    """Return a journal record with `shift` added to the numbers of its responses."""
    record = decode_record(data)
    responses = np.frombuffer(record.responses, U32) + np.uint32(shift % 2**32)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            record,
            responses=responses.tobytes(),
            openings=tuple((response + shift, offset, name) for response, offset, name in record.openings),
            endings=tuple((response + shift, reason) for response, reason in record.endings),
        )
    )


def frame_deltas(frame: wire.Frame) -> TokenDeltas:
    """Return the columns of an agent's frame. Raises `ProtocolError` where they do not agree."""
    what = f"frame {frame.seq}"
    if frame.seq < 0:
        raise _malformed(f"{what}: its number is negative")
    if not 0 <= frame.policy_version <= MAX_POLICY_VERSION:
        raise _malformed(f"{what}: policy version {frame.policy_version} is not in 0..{MAX_POLICY_VERSION}")
    deltas = _deltas(what, frame.assignments, frame.offsets, frame.counts, frame.token_ids, frame.logprobs)
    if len(logprobs_T := deltas.logprobs_T):
        highest = logprobs_T[logprobs_T.argmax()]  # NaN if there is one
        if not highest <= MAX_LOGPROB or not logprobs_T[logprobs_T.argmin()] > -np.inf:
            raise _malformed(f"{what}: a logprob is not a number, infinite or above {MAX_LOGPROB:g}")
    return deltas


def frame_owners(frame: wire.Frame) -> Dtyped:
    """Return the assignments of an agent's frame, of which no more is looked at. Raises `ProtocolError`."""
    return _column(f"frame {frame.seq}", "owners", frame.assignments, U32)


def merge_frames(frames: Sequence[wire.Frame]) -> wire.Frame | None:
    """Return one frame with the contents of all `frames`, of one policy version; None where one of them has
    columns that do not agree, so that merging would hide whose they are."""
    for frame in frames:
        num_deltas, num_tokens = len(frame.counts) // 2, len(frame.token_ids) // 4
        if not (
            len(frame.counts) == 2 * num_deltas
            and len(frame.assignments) == len(frame.offsets) == 4 * num_deltas
            and len(frame.token_ids) == len(frame.logprobs) == 4 * num_tokens
        ):
            return None
    counts_N = np.frombuffer(b"".join([frame.counts for frame in frames]), U16)
    ends_N = np.concatenate(([0], np.add.accumulate(counts_N, dtype=np.int64)))
    deltas_to_F = np.add.accumulate([len(frame.counts) // 2 for frame in frames])
    tokens_to_F = np.add.accumulate([len(frame.token_ids) // 4 for frame in frames])
    if (ends_N[deltas_to_F] != tokens_to_F).any():
        return None
    return wire.Frame(
        seq=max(frame.seq for frame in frames),
        policy_version=frames[0].policy_version,
        assignments=b"".join([frame.assignments for frame in frames]),
        offsets=b"".join([frame.offsets for frame in frames]),
        counts=counts_N.tobytes(),
        token_ids=b"".join([frame.token_ids for frame in frames]),
        logprobs=b"".join([frame.logprobs for frame in frames]),
        endings=tuple(ending for frame in frames for ending in frame.endings),
    )


def split_frame(frame: wire.Frame, is_own: Callable[[int], bool]) -> tuple[wire.Frame, wire.Frame | None]:
    """Return what of a frame is not `is_own`, by assignment, and what is; None: nothing. Raises
    `ProtocolError` for a frame that contradicts itself."""
    deltas = frame_deltas(frame)
    own_N = np.array([is_own(assignment) for assignment in deltas.owners_N.tolist()], bool)
    endings = tuple(ending for ending in frame.endings if is_own(ending.assignment))
    if not own_N.any() and not endings:
        return frame, None

    def part(kept_N: NDArray[np.bool_], its_own: bool) -> wire.Frame:
        kept_T = kept_N.repeat(deltas.counts_N)
        return msgspec.structs.replace(
            frame,
            assignments=deltas.owners_N[kept_N].tobytes(),
            offsets=deltas.offsets_N[kept_N].tobytes(),
            counts=deltas.counts_N[kept_N].astype(U16).tobytes(),
            token_ids=deltas.token_ids_T[kept_T].tobytes(),
            logprobs=deltas.logprobs_T[kept_T].tobytes(),
            endings=endings if its_own else tuple(each for each in frame.endings if each not in endings),
        )

    return part(~own_N, False), part(own_N, True)


def record_deltas(record: JournalRecord) -> TokenDeltas:
    """Return the columns of a journal record. Raises `ProtocolError` where they do not agree."""
    what = f"journal record of step {record.step}"
    return _deltas(what, record.responses, record.offsets, record.counts, record.token_ids, record.logprobs)


def spans(starts_N: Ints, counts_N: Ints, ends_N: Ints) -> Ints:
    """Return the T indices of N spans: `counts_N[i]` in a row from `starts_N[i]`; `ends_N` adds them up."""
    if not len(ends_N):
        return ends_N
    starts_N = starts_N - ends_N
    starts_N += counts_N
    indices_T: Ints = starts_N.repeat(counts_N)
    indices_T += _counting(len(indices_T))
    return indices_T


def _deltas(
    what: str, owners: bytes, offsets: bytes, counts: bytes, token_ids: bytes, logprobs: bytes
) -> TokenDeltas:
    # Once per frame, so it counts microseconds: `argmin` takes a third of the time of `min` or `any`.
    owners_N = _column(what, "owners", owners, U32)
    offsets_N = _column(what, "offsets", offsets, U32)
    counts_N: Ints = _column(what, "counts", counts, U16).astype(np.int64)
    token_ids_T = _column(what, "token_ids", token_ids, I32)
    logprobs_T = _column(what, "logprobs", logprobs, F32)
    if not len(owners_N) == len(offsets_N) == len(counts_N):
        raise _malformed(f"{what}: {len(owners_N)} owners, {len(offsets_N)} offsets, {len(counts_N)} counts")
    ends_N: Ints = np.add.accumulate(counts_N)
    total = int(ends_N[-1]) if len(ends_N) else 0
    if not total == len(token_ids_T) == len(logprobs_T):
        found = f"{len(token_ids_T)} token ids and {len(logprobs_T)} logprobs"
        raise _malformed(f"{what}: the counts add up to {total}, there are {found}")
    if len(counts_N) and not counts_N[at := counts_N.argmin()]:
        raise _malformed(f"{what}: the count of owner {owners_N[at]} is 0")
    if total and token_ids_T[at := token_ids_T.argmin()] < 0:
        raise _malformed(f"{what}: token id {token_ids_T[at]} is negative")
    _refuse_twice(what, owners_N)
    return TokenDeltas(owners_N, offsets_N, counts_N, ends_N, token_ids_T, logprobs_T)


def _column(what: str, name: str, data: bytes, dtype: np.dtype[Any]) -> Dtyped:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as exc:
        found = f"{len(data)} bytes, not a multiple of {dtype.itemsize}"
        raise _malformed(f"{what}: {name} has {found}") from exc


def _refuse_twice(what: str, owners_N: Dtyped) -> None:
    if len(owners_N) < 2:
        return
    grows_N = owners_N[1:] > owners_N[:-1]
    if grows_N[grows_N.argmin()]:
        return  # in ascending order, as usual: cheaper than sorting
    sorted_N = np.sort(owners_N)
    same_N = sorted_N[1:] == sorted_N[:-1]
    if same_N.any():
        raise _malformed(f"{what}: owner {sorted_N[1:][same_N][0]} occurs twice")


_counted: Ints = np.arange(4096)


def _counting(total: int) -> Ints:
    """Return 0..total-1, from one array that grows as needed; callers only read it."""
    global _counted
    if total > len(_counted):
        _counted = np.arange(2 * total)
    return _counted[:total]


def _malformed(problem: str) -> ProtocolError:
    return ProtocolError(problem, "re-deploy its sender with this version of rlboost")


_PAIR = np.dtype("<i8")  # token id and logprob of one token, 32 bits each, moved as one

BLOCK = 16
"""Tokens of a response that lie next to each other (a power of two): 128 bytes, two cache lines."""


class AssignmentTable:
    """Rows of the current assignments, looked up for a whole frame at once.

    Assignment numbers grow through a run and a step uses a range of them, so this is an array over that
    range. Its first and last entry belong to no assignment: what lies outside is clipped to them.
    """

    def __init__(self, nowhere: int) -> None:
        """`nowhere` is the row of all assignments that are not current."""
        self.nowhere = nowhere
        self._base = 0  # assignment of entry 1
        self._rows: Ints = np.full(2, nowhere, np.int64)

    def rows(self, assignments_N: NDArray[np.uint32]) -> Ints:
        """Return the row of each assignment."""
        # A number below the range wraps around and is clipped to the last entry.
        entries_N = assignments_N - np.uint32((self._base - 1) % 2**32)
        return self._rows.take(entries_N, mode="clip")

    def row(self, assignment: int) -> int:
        """Return the row of one assignment."""
        entry = assignment - self._base + 1
        return int(self._rows[entry]) if 0 < entry < len(self._rows) else self.nowhere

    def set(self, assignment: int, row: int) -> None:
        """Let `assignment` mean `row`."""
        self._make_room(assignment)
        self._rows[assignment - self._base + 1] = row

    def unset(self, assignment: int) -> None:
        """Let `assignment` mean nothing; idempotent."""
        if self.row(assignment) != self.nowhere:
            self.set(assignment, self.nowhere)

    def move_nowhere(self, nowhere: int) -> None:
        """Let `nowhere` be the row of all assignments that are not current."""
        self._rows[self._rows == self.nowhere] = nowhere
        self.nowhere = nowhere

    def num_current(self) -> int:
        """Return how many assignments are current."""
        return int((self._rows != self.nowhere).sum())

    def _make_room(self, assignment: int) -> None:
        if len(self._rows) == 2:
            self._base = assignment
        size = len(self._rows) - 2
        before = max(0, self._base - assignment)
        after = max(0, assignment - (self._base + size) + 1)
        if before or after:
            after = max(after, size, 1024) if after else 0  # double, so that growing is cheap on average
            before = min(max(before, size), self._base) if before else 0
            self._rows = np.pad(self._rows, (before, after), constant_values=self.nowhere)
            self._base -= before


class TokenMatrix:
    """One (token id, logprob) pair per token of each response, kept and reused from step to step: giving
    gigabytes back to the operating system would hold the event loop up.

    Blocks of `BLOCK` tokens lie side by side for all responses: those that are about as long write near one
    another, which keeps a frame's few tokens for each of hundreds of responses within a few pages.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._allocate(0)

    def reshape(self, num_rows: int, max_tokens: int) -> None:
        """Make room for `num_rows` rows of `max_tokens`; what they hold is undefined."""
        self._num_rows = num_rows
        needed = num_rows * -(-max_tokens // BLOCK) * BLOCK
        if not needed <= len(self._pairs) <= 4 * needed:
            self._allocate(needed)

    def extend(self, num_rows: int, max_tokens: int, lengths_R: NDArray[np.uint32]) -> None:
        """Make room for `num_rows` rows of `max_tokens`, more than before; the first ones keep what they
        hold, `lengths_R` tokens."""
        former, former_rows = self._pairs, self._num_rows
        self._num_rows = num_rows
        self._allocate(num_rows * -(-max_tokens // BLOCK) * BLOCK)
        for block in range(-(-int(lengths_R.max(initial=0)) // BLOCK)):
            rows_K = np.flatnonzero(lengths_R > block * BLOCK)
            start = block * former_rows * BLOCK
            held = former[start : start + former_rows * BLOCK].reshape(former_rows, BLOCK)
            start = block * num_rows * BLOCK
            self._pairs[start : start + num_rows * BLOCK].reshape(num_rows, BLOCK)[rows_K] = held[rows_K]

    def scatter(self, rows_N: Ints, deltas: TokenDeltas) -> None:
        """Write each delta into its row, from its offset on."""
        pairs_T2 = np.empty((len(deltas.token_ids_T), 2), np.int32)
        pairs_T2[:, 0] = deltas.token_ids_T
        pairs_T2[:, 1] = deltas.logprobs_T.view(np.int32)
        indices_T = spans(deltas.offsets_N.astype(np.int64), deltas.counts_N, deltas.ends_N)
        within_T = indices_T & (BLOCK - 1)
        indices_T -= within_T
        indices_T *= self._num_rows
        indices_T += within_T
        indices_T += (rows_N * BLOCK).repeat(deltas.counts_N)
        self._pairs[indices_T] = pairs_T2.view(_PAIR)[:, 0]

    def token_ids(self, row: int, length: int) -> NDArray[np.int32]:
        """Return the first `length` token ids of a row (a copy)."""
        return self._row(row, length)[:, 0]

    def logprobs(self, row: int, length: int) -> NDArray[np.float32]:
        """Return the first `length` logprobs of a row (a copy)."""
        return self._row(row, length)[:, 1].view(np.float32)

    def last_token_id(self, row: int, length: int) -> int:
        """Return the last of the first `length` (> 0) token ids of a row."""
        block, within = divmod(length - 1, BLOCK)
        pair = self._pairs[(block * self._num_rows + row) * BLOCK + within]
        return int(pair & 0xFFFFFFFF)

    def _row(self, row: int, length: int) -> NDArray[np.int32]:
        num_blocks = -(-length // BLOCK)
        blocks = self._pairs[: num_blocks * self._num_rows * BLOCK].reshape(-1, self._num_rows, BLOCK)
        pairs: Ints = np.ascontiguousarray(blocks[:, row]).reshape(-1)[:length]
        return pairs.view(np.int32).reshape(-1, 2)

    def _allocate(self, num_pairs: int) -> None:
        self._pairs: Ints = np.frombuffer(_untouched_pages(_PAIR.itemsize * num_pairs), _PAIR)


_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # the mmap module names it from Python 3.13 on


def _untouched_pages(num_bytes: int) -> mmap.mmap:
    """Return memory whose small pages cost nothing before they are written.

    Not `np.zeros`: numpy asks for huge pages, and one token would then take two megabytes.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
