"""Frames and records as columns: merged, split, renumbered; and the matrix that holds them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rlboost_runtime.coordinator.storage.columns import (
    JournalRecord,
    TokenMatrix,
    decode_record,
    frame_deltas,
    merge_frames,
    renumbered,
    split_frame,
)
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire


def frame(*deltas: tuple[int, int, list[int]], seq: int = 0, ends: tuple[int, ...] = ()) -> wire.Frame:
    """A frame of (assignment, offset, token ids), and assignments that end."""
    ids = [token for _, _, tokens in deltas for token in tokens]
    return wire.Frame(
        seq,
        4,
        np.array([owner for owner, _, _ in deltas], "<u4").tobytes(),
        np.array([offset for _, offset, _ in deltas], "<u4").tobytes(),
        np.array([len(tokens) for _, _, tokens in deltas], "<u2").tobytes(),
        np.array(ids, "<i4").tobytes(),
        (-np.array(ids, "<f4")).tobytes(),
        tuple(wire.AssignmentEnd(owner, "stop") for owner in ends),
    )


ONE = frame((5, 0, [1, 2]), (6, 3, [3]), seq=7, ends=(5,))
TWO = frame((5, 2, [4]), (9, 0, [5, 6, 7]), seq=8, ends=(9,))


def test_merged_frames_hold_what_they_held_in_order() -> None:
    merged = merge_frames([ONE, TWO])
    assert merged == frame((5, 0, [1, 2]), (6, 3, [3]), (5, 2, [4]), (9, 0, [5, 6, 7]), seq=8, ends=(5, 9))
    assert merge_frames([TWO, ONE]) is not None
    assert msgspec.structs.replace(merge_frames([TWO, ONE]) or ONE).seq == 8, "the highest of them"
    assert merge_frames([ONE]) == ONE


COLUMNS = ("assignments", "offsets", "counts", "token_ids", "logprobs")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("spoil", [lambda it: it[:-1], lambda it: it[:-4], lambda it: it + bytes(4)])
@pytest.mark.parametrize("first", [True, False])
def test_frames_whose_columns_do_not_agree_are_not_merged(column: str, spoil, first: bool) -> None:
    spoilt = msgspec.structs.replace(ONE, **{column: spoil(getattr(ONE, column))})
    assert merge_frames([spoilt, TWO] if first else [TWO, spoilt]) is None


def test_frames_are_not_merged_where_only_their_sum_agrees() -> None:
    """Else tokens of one would become another's."""
    long = msgspec.structs.replace(
        ONE, token_ids=ONE.token_ids + b"\1\0\0\0", logprobs=ONE.logprobs + b"\0\0\0\0"
    )
    short = msgspec.structs.replace(TWO, token_ids=TWO.token_ids[:-4], logprobs=TWO.logprobs[:-4])
    assert merge_frames([long, short]) is None
    assert merge_frames([short, long]) is None


def test_a_frame_is_split_by_assignment() -> None:
    both = merge_frames([ONE, TWO])
    assert both is not None
    both = msgspec.structs.replace(both, assignments=np.array([5, 6, 8, 9], "<u4").tobytes())
    others, own = split_frame(both, lambda assignment: assignment in (6, 9))
    assert others == frame((5, 0, [1, 2]), (8, 2, [4]), seq=8, ends=(5,))
    assert own == frame((6, 3, [3]), (9, 0, [5, 6, 7]), seq=8, ends=(9,))
    assert split_frame(ONE, lambda assignment: False) == (ONE, None)
    others, own = split_frame(frame(ends=(5,)), lambda assignment: True)
    assert (others.endings, own and own.endings) == ((), frame(ends=(5,)).endings)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_that_is_cut_is_named(column: str) -> None:
    data, name = getattr(ONE, column), "owners" if column == "assignments" else column
    with pytest.raises(ProtocolError, match=f"frame 7.*{name}"):
        frame_deltas(msgspec.structs.replace(ONE, **{column: data[:-1]}))


def test_a_renumbered_record_is_the_same_of_other_responses() -> None:
    record = JournalRecord(
        step=3,
        policy_version=4,
        responses=np.array([10, 12], "<u4").tobytes(),
        offsets=np.array([0, 1], "<u4").tobytes(),
        counts=np.array([1, 1], "<u2").tobytes(),
        token_ids=np.array([8, 9], "<i4").tobytes(),
        logprobs=np.array([-1, -2], "<f4").tobytes(),
        openings=((10, 0, "a"), (12, 1, "b")),
        endings=((12, "stop"),),
    )
    moved = decode_record(renumbered(msgspec.msgpack.encode(record), 5))
    assert np.frombuffer(moved.responses, "<u4").tolist() == [15, 17]
    assert moved.openings == ((15, 0, "a"), (17, 1, "b"))
    assert moved.endings == ((17, "stop"),)
    back = decode_record(renumbered(msgspec.msgpack.encode(moved), -5))
    assert back == record


@pytest.mark.parametrize("more", [1, 40])
@pytest.mark.parametrize("longer", [0, 700])
def test_a_matrix_that_is_extended_keeps_what_it_held(more: int, longer: int) -> None:
    """Read across its blocks: rows of unlike lengths, some longer than a block."""
    lengths = [0, 1, 300, 512, 513, 1100]
    tokens = {row: list(range(1000 * row, 1000 * row + length)) for row, length in enumerate(lengths)}
    matrix = TokenMatrix()
    matrix.reshape(len(lengths), 1100)
    for row, ids in list(tokens.items())[1:]:
        matrix.scatter(np.array([row]), frame_deltas(frame((row, 0, ids))))
    matrix.extend(len(lengths) + more, 1100 + longer, np.array(lengths, "<u4"))
    for row, ids in tokens.items():
        assert matrix.token_ids(row, len(ids)).tolist() == ids
        assert matrix.logprobs(row, len(ids)).tolist() == [-float(each) for each in ids]
    last = len(lengths) + more - 1
    matrix.scatter(np.array([last]), frame_deltas(frame((last, 0, [3, 4, 5]))))
    assert matrix.token_ids(last, 3).tolist() == [3, 4, 5]
    assert matrix.last_token_id(last, 3) == 5
    assert matrix.token_ids(2, 300).tolist() == tokens[2]
