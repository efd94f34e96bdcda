"""Trace files: what is read, what is refused and where, what a window, a sample and the statistics are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces import (
    Trace,
    TraceEvent,
    load_trace,
    sample_nodes,
    trace_rows,
    trace_statistics,
)
from rlboost_runtime.traces.catalogue import KNOWN

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(os.environ.get("RLBOOST_RECORDED_TRACES", ROOT.parent / "shared" / "data" / "traces"))

EVENTS = "0,add,a\n0,add,b\n60000,remove,a\n60000,add,c\n120000,remove,c\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "market.csv"


def loaded(file: Path, text: str) -> Trace:
    file.write_text(text, encoding="utf-8")
    return load_trace(file)


def short(trace: Trace) -> list[tuple[float, str, str]]:
    return [(event.at_s, event.kind, event.node) for event in trace.events]


def counts(trace: Trace) -> list[tuple[float, int]]:
    return list(trace.capacity_steps)


# --- what is read ------------------------------------------------------------------------------------------


def test_event_rows_are_milliseconds_from_the_first_row(file: Path) -> None:
    trace = loaded(file, "5000,add,a\r\n5000,add,b\r\n65000,remove,a\r\n")
    assert short(trace) == [(0, "add", "a"), (0, "add", "b"), (60, "remove", "a")]
    assert (trace.name, trace.duration_s, trace.nodes) == ("market", 60, ("a", "b"))


def test_a_notice_told_by_its_removal_comes_before_it_but_not_before_the_node(file: Path) -> None:
    trace = loaded(file, "0,add,a\n60000,add,b\n90000,remove,a,30\n100000,remove,b,120\n")
    assert short(trace) == [
        (0, "add", "a"),
        (60, "add", "b"),
        (60, "notice", "a"),
        (60, "notice", "b"),
        (90, "remove", "a"),
        (100, "remove", "b"),
    ]


def test_count_rows_with_dates_become_nodes_that_come_and_go(file: Path) -> None:
    trace = loaded(file, "2021-12-11, 23:59:00, 2\n2021-12-12, 00:01:00, 3\n2021-12-12, 00:02:00, 1\n")
    assert counts(trace) == [(0, 2), (120, 3), (180, 1)]
    assert loaded(file, file.read_text()).events == trace.events  # drawn, and always the same


def test_a_step_curve_may_change_twice_at_one_time(file: Path) -> None:
    assert counts(loaded(file, "0,0\n100,0\n100,4\n250.5,2\n")) == [(0, 0), (100, 4), (250.5, 2)]


def test_a_skypilot_series_lasts_to_the_end_of_its_last_tick(file: Path) -> None:
    trace = loaded(file, '{"metadata": {"gap_seconds": 300}, "data": [0, 4, 4, 1], "prices": [1, 1, 1, 1]}')
    assert counts(trace) == [(0, 0), (300, 4), (900, 1)]
    assert trace.duration_s == 1200


def test_a_header_names_the_columns_in_any_order_and_unit(file: Path) -> None:
    trace = loaded(file, "zone,node,kind,at_s\nz1,a,add,10\nz1,a,notice,20\n,a,remove,50\n")
    assert trace.events == (
        TraceEvent(10, "a", "add", "z1"),
        TraceEvent(20, "a", "notice", "z1"),
        TraceEvent(50, "a", "remove", "z1"),
    )
    assert counts(loaded(file, "count,time_ms\n1,7000\n2,8000\n")) == [(0, 1), (1, 2)]


def test_comments_name_a_trace_and_lengthen_it(file: Path) -> None:
    trace = loaded(file, f"# name: quiet\n# source: me\n# duration_s: 7200\n\n{EVENTS}# end\n")
    assert (trace.name, trace.source, trace.duration_s) == ("quiet", "me", 7200)


def test_what_is_written_is_read_back(file: Path) -> None:
    trace = loaded(file, "0,add,a\n12345,remove,a,3\n20001,add,b\n30000,add,a\n")
    again = loaded(file, "\n".join(trace_rows(trace)))
    assert again == trace


# --- what is refused ---------------------------------------------------------------------------------------

BAD_ROWS = {
    "time goes back": ("0,add,a\n5000,add,b\n4000,remove,a\n", 3, "time goes back from 5 to 4 s"),
    "time goes back among counts": ("0,4\n100,5\n60,4\n", 3, "time goes back"),
    "unknown column": ("at_s,kind,node,price\n0,add,a,1\n", 1, "unknown column `price`"),
    "no time": ("kind,node\nadd,a\n", 1, "0 columns of time"),
    "two times": ("at_s,time_ms,count\n0,0,1\n", 1, "2 columns of time"),
    "column twice": ("at_s,count,count\n0,0,1\n", 1, "stands twice"),
    "neither events nor counts": ("at_s,node\n0,a\n", 1, "neither events nor counts"),
    "header only": ("at_s,count\n", 1, "no rows"),
    "never came": ("0,add,a\n1000,remove,b\n", 2, "`b` is removed but never came"),
    "gone already": ("0,add,a\n1,remove,a\n2,remove,a\n", 3, "is not there at that time"),
    "there already": ("0,add,a\n1,add,a\n", 2, "is there already"),
    "notice of nobody": ("0,add,a\n1,notice,b\n", 2, "never came"),
    "noticed twice": ("0,add,a\n1,notice,a\n2,notice,a\n", 3, "noticed twice"),
    "notice in an add": ("0,add,a\n1,add,b,30\n", 2, "notice_s in a row that says `add`"),
    "negative notice": ("0,add,a\n1000,remove,a,-5\n", 2, "notice_s -5 is negative"),
    "unknown kind": ("0,add,a\n1,explode,a\n", 2, "unknown kind `explode`"),
    "no node": ("0,add,a\n1,add,\n", 2, "without a node"),
    "negative count": ("# x\n0,4\n60,-1\n", 3, "count -1 is negative"),
    "half a node": ("0,4\n60,1.5\n", 2, "not a whole number"),
    "too many nodes": ("0,4\n60,1e12\n", 2, "more than 100,000 nodes"),
    "count is no number": ("0,4\n60,many\n", 2, "count `many` is not a number"),
    "not a number": ("0,4\nnan,4\n", 2, "time_s `nan` is not a number"),
    "infinite": ("0,4\n1e999,4\n", 2, "not a number"),
    "underscores are no digits": ("0,4\n1_0,4\n", 2, "not a number"),
    "too few columns": ("0,add,a\n5,add\n", 2, "2 columns"),
    "too many columns": ("0,4\n5,4,4\n", 2, "3 columns"),
    "no known row": ("1,2,3\n", 1, "no known kind of row"),
    "single cell": ("17\n", 1, "no known kind of row"),
    "impossible date": ("2021-12-11,11:00:00,4\n2021-13-11,11:00:00,4\n", 2, "not a date and a time"),
    "broken quotes": ('0,add,a\n0,add,"b\n', 2, "unexpected end of data"),
    "not JSON": ('{"metadata":\n {"gap_seconds": 300},\n "data": [1, 2\n', 4, "not JSON"),
    "a JSON list": ("\n[1, 2]", 2, "a JSON list"),
    "no gap": ('{"metadata": {}, "data": [1]}', 1, "metadata.gap_seconds is missing"),
    "no data": ('{"metadata": {"gap_seconds": 300}}', 1, "data is missing"),
    "empty data": ('{"metadata": {"gap_seconds": 300}, "data": []}', 1, "data is empty"),
    "impossible gap": ('{"metadata": {"gap_seconds": 0}, "data": [1]}', 1, "gap_seconds is 0"),
    "true is no number": ('{"metadata": {"gap_seconds": 300}, "data": [1, true]}', 1, "data[1]: true is not"),
    "negative tick": ('{"metadata": {"gap_seconds": 3},\n"data":\n[1,\n2,\n -3, 4]}', 5, "data[2]: count -3"),
    "nan tick": ('{"metadata": {"gap_seconds": 3}, "data": [1, NaN]}', 1, "data[1]: count `nan`"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_trace_is_told_by_file_and_line(case: str, file: Path) -> None:
    text, line, found = BAD_ROWS[case]
    with pytest.raises(ConfigError) as told:
        loaded(file, text)
    assert told.value.problem.startswith(f"{file}:{line}: "), told.value.problem
    assert found in told.value.problem
    assert told.value.remedy
    assert told.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "holds no rows"),
        ("# nothing\n\n", "holds no rows"),
        ("0,add,a\n", "everything happens at one time"),
        ("# duration_s: soon\n0,4\n9,4\n", "duration_s `soon` is not a number"),
        ("[" * 100_000, "cannot be used"),
    ],
)
def test_a_trace_that_is_wrong_as_a_whole_is_told_by_file(text: str, found: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=found) as told:
        loaded(file, text)
    assert told.value.problem.startswith(f"{file}: ")


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    for path, found in (("gone.csv", "no such file"), ("", "cannot be read"), ("binary", "is not text")):
        with pytest.raises(ConfigError, match=found):
            load_trace(tmp_path / path)


def test_a_trace_that_cannot_have_happened_is_never_made() -> None:
    for events in (
        [TraceEvent(0, "a", "remove")],
        [TraceEvent(0, "a", "add"), TraceEvent(0, "a", "add")],
        [TraceEvent(5, "a", "add"), TraceEvent(4, "b", "add")],
        [TraceEvent(11, "a", "add")],
        [TraceEvent(0, "a", "add"), TraceEvent(1, "a", "notice"), TraceEvent(2, "a", "notice")],
    ):
        with pytest.raises(ValueError, match="TraceEvent"):
            Trace("t", "made here", tuple(events), 10.0)


# --- windows, samples, statistics --------------------------------------------------------------------------


def test_a_window_begins_with_the_nodes_that_are_there(file: Path) -> None:
    trace = loaded(file, "0,add,a\n0,add,b\n10000,notice,a\n20000,remove,b\n30000,remove,a\n40000,add,b\n")
    window = trace.window(15, 40)
    assert short(window) == [
        (0, "add", "a"),
        (0, "notice", "a"),
        (0, "add", "b"),
        (5, "remove", "b"),
        (15, "remove", "a"),
    ]
    assert window.duration_s == 25
    assert short(trace.window(20, 30)) == [(0, "add", "a"), (0, "notice", "a")]
    for wrong in ((-1, 5), (5, 5), (0, 41)):
        with pytest.raises(ValueError, match="no window"):
            trace.window(*wrong)


def test_a_sample_keeps_the_share_and_each_nodes_own_events(file: Path) -> None:
    trace = loaded(
        file, "".join(f"0,add,n{k}\n" for k in range(9)) + "".join(f"{k}000,remove,n{k}\n" for k in range(9))
    )
    half = sample_nodes(trace, 0.5, seed=3)
    assert len(half.nodes) == 4
    assert [e for e in trace.events if e.node in half.nodes] == list(half.events)
    assert sample_nodes(trace, 0.5, seed=3) == half
    assert {sample_nodes(trace, 0.5, seed=s).nodes for s in range(8)} != {half.nodes}
    with pytest.raises(ValueError, match=r"between 0 and 1"):
        sample_nodes(trace, 1.5, seed=0)


def test_statistics_of_a_small_trace_by_hand(file: Path) -> None:
    s = trace_statistics(
        loaded(
            file, f"# duration_s: 240\n{EVENTS}180000,add,d\n200000,add,e\n200000,remove,b\n200000,remove,d\n"
        )
    )
    assert (s.adds, s.removes, s.nodes) == (5, 4, 5)
    assert s.mean_capacity == pytest.approx((2 * 60 + 2 * 60 + 1 * 60 + 2 * 20 + 1 * 40) / 240)
    assert (s.min_capacity, s.max_capacity) == (1, 2)
    assert s.median_lifetime_s == 60
    assert s.mean_gap_s == 70
    assert (s.mean_removes_per_tick, s.max_removes_per_tick, s.mass_share) == (4 / 3, 2, 0.5)
    assert s.mean_adds_per_tick == 1


@pytest.mark.skipif(not RECORDED.is_dir(), reason="recorded traces are not on this machine")
@pytest.mark.parametrize(
    ("name", "file_name"), [("bamboo-p3", "bamboo-p3.csv"), ("gcp-a100", "gcp-a100x1-east1b.txt")]
)
def test_what_is_said_of_public_traces_is_true_of_the_files(name: str, file_name: str) -> None:
    known, path = KNOWN[name], RECORDED / file_name
    s = trace_statistics(load_trace(path))
    assert path.stat().st_size == known.size_bytes
    assert s.hours == pytest.approx(known.hours, abs=0.01)
    assert s.mean_capacity == pytest.approx(known.mean_capacity, abs=0.01)
    assert (s.max_capacity, s.removes) == (known.max_capacity, known.removes)


def test_numbers_of_a_json_series_are_told_by_position_even_on_one_line(file: Path) -> None:
    series = json.dumps({"metadata": {"gap_seconds": 1}, "data": [*range(50), "x,y"]})
    with pytest.raises(ConfigError, match=r':1: data\[50\]: "x,y" is not a number'):
        loaded(file, series)
