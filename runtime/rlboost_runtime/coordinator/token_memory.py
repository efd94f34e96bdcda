"""Where the open step's tokens lie, and which assignment means which row of it.

Guarantees: looking up a frame's assignments and writing its tokens take a fixed number of numpy calls, and
memory for tokens that have not arrived costs nothing.

Shape legend: N deltas, T tokens.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from rlboost_runtime.coordinator.token_columns import Deltas, Ints, spans

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

    def scatter(self, rows_N: Ints, deltas: Deltas) -> None:
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
