"""Traces under Hypothesis: windows, samples, files and generated markets agree with capacity over time, and
no file, however broken, gives any error but the one that is explained."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces import (
    PROFILES,
    Trace,
    TraceEvent,
    generate_trace,
    load_trace,
    sample_nodes,
    trace_rows,
    trace_statistics,
)

pytestmark = pytest.mark.property

MOVES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7), st.booleans()), max_size=60)


def trace_from(moves: list[tuple[int, int, bool]]) -> Trace:
    """A legal trace: each move lets its node come, be noticed, or leave, whichever is possible then."""
    events: list[TraceEvent] = []
    there: dict[int, bool] = {}
    now = 0
    for wait, node, wants_notice in moves:
        now += wait
        if node not in there:
            kind, there[node] = "add", False
        elif wants_notice and not there[node]:
            kind, there[node] = "notice", True
        else:
            kind = "remove"
            del there[node]
        events.append(TraceEvent(float(now), f"n{node}", kind, f"z{node % 3}"))
    return Trace("t", "made here", tuple(events), float(now + 10))


TRACES = MOVES.map(trace_from)


def loaded(text: str | bytes) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_trace(path)


def capacity_at(trace: Trace, at_s: float) -> int:
    """Return the number of nodes that are there once everything at `at_s` has happened."""
    return next((count for since_s, count in reversed(trace.capacity_steps) if since_s <= at_s), 0)


@given(TRACES, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_window_has_the_capacity_that_the_trace_has_then(
    trace: Trace, a: float, b: float, at: float
) -> None:
    start, end = sorted(round(share * trace.duration_s) for share in (a, b))
    if start == end:
        return
    window = trace.window(start, end)
    at_s = min(end - start - 1, int(at * (end - start)))
    assert capacity_at(window, at_s) == capacity_at(trace, start + at_s)
    assert window.duration_s == end - start


@given(TRACES, st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 1000))
def test_a_window_of_a_window_is_a_window(trace: Trace, start: int, skip: int, length: int) -> None:
    end = start + skip + length
    if end > trace.duration_s:
        return
    assert trace.window(start, end).window(skip, skip + length) == trace.window(start + skip, end)


@given(TRACES, st.floats(0, 1), st.integers(0, 5))
def test_a_sample_and_its_rest_are_the_trace(trace: Trace, fraction: float, seed: int) -> None:
    kept = sample_nodes(trace, fraction, seed)
    assert len(kept.nodes) == round(fraction * len(trace.nodes))
    rest = [event for event in trace.events if event.node not in kept.nodes]
    assert Counter([*kept.events, *rest]) == Counter(trace.events)
    assert [event for event in trace.events if event.node in kept.nodes] == list(kept.events)
    assert sample_nodes(trace, 1.0, seed) == trace


@given(TRACES)
def test_a_written_trace_is_read_back_the_same(trace: Trace) -> None:
    if not trace.events:
        with pytest.raises(ConfigError, match="no rows"):
            loaded("\n".join(trace_rows(trace)))
        return
    assert loaded("\n".join(trace_rows(trace))) == trace


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50), st.integers(1, 1000))
def test_counts_come_out_as_they_went_in_whatever_the_format(counts: list[int], gap: int) -> None:
    series = loaded(f'{{"metadata": {{"gap_seconds": {gap}}}, "data": {counts}}}')
    rows = loaded(
        f"# duration_s: {gap * len(counts)}\n" + "".join(f"{k * gap},{n}\n" for k, n in enumerate(counts))
    )
    assert [capacity_at(series, k * gap) for k in range(len(counts))] == counts
    assert rows.events == series.events
    assert rows.duration_s == series.duration_s


def read_or_refused(text: str | bytes) -> bool:
    """Whether the file is a trace, or is refused with its name and something to do. Other errors fly."""
    try:
        return loaded(text).duration_s > 0
    except ConfigError as told:
        return "t.csv" in told.problem and bool(told.remedy)


GOOD = (
    "0,add,a\n60000,add,b\n120000,remove,a,30\n",
    "0,3\n60,4\n",
    "2021-12-11, 11:11:30, 55\n2021-12-11, 11:13:10, 5\n",
    "at_s,kind,node,zone\n0,add,a,z\n5,notice,a,\n9,remove,a,\n",
    '{"metadata": {"gap_seconds": 30}, "data": [1, 2, 0]}',
)
PIECES = [
    "",
    ",",
    "\n",
    "-",
    "nan",
    "0",
    "9" * 400,
    "add",
    "remove",
    "a",
    '"',
    "{",
    "[",
    "]",
    ":",
    "\x00",
    "\ud7ff",
    "#",
    " ",
]


@settings(max_examples=300)
@given(
    st.sampled_from(GOOD),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9), st.sampled_from(PIECES)), max_size=4),
)
def test_a_damaged_file_is_read_or_refused_in_words(good: str, damages: list[tuple[int, int, str]]) -> None:
    text = good
    for at, length, piece in damages:
        text = text[:at] + piece + text[at + length :]
    assert read_or_refused(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_words(data: bytes) -> None:
    assert read_or_refused(data)


# --- generated markets -------------------------------------------------------------------------------------

MATCHED = {"generated-p3": 0.06, "generated-a100": 0.15}
"""Relative distance allowed between the mean over seeds and the recorded trace. The A100 market is wilder:
one reclaim of 36 nodes in 27 hours."""


@pytest.mark.parametrize("name", PROFILES)
def test_generated_markets_have_the_recorded_statistics(name: str) -> None:
    profile = PROFILES[name]
    seeds = [asdict(trace_statistics(generate_trace(profile, seed))) for seed in range(60)]
    means = {field: fmean(s[field] for s in seeds) for field in profile.recorded}
    far = {
        field: (means[field], want)
        for field, want in profile.recorded.items()
        if abs(means[field] / want - 1) > MATCHED[name]
    }
    assert far == {}
    assert all(s["zones"] == len(profile.zones) for s in seeds)


@pytest.mark.parametrize("name", PROFILES)
def test_a_mass_reclaim_takes_nodes_of_one_zone(name: str) -> None:
    trace = generate_trace(PROFILES[name], 1)
    zones: dict[float, set[str]] = {}
    for event in trace.events:
        if event.kind == "remove":
            zones.setdefault(event.at_s, set()).add(event.zone)
    assert len(zones) > 20
    assert all(len(each) == 1 for each in zones.values())


@given(st.sampled_from(sorted(PROFILES)), st.integers(0, 10_000))
@settings(max_examples=30)
def test_generated_markets_repeat_by_seed_and_keep_their_bounds(name: str, seed: int) -> None:
    profile = PROFILES[name]
    trace = generate_trace(profile, seed, hours=2.0)
    assert generate_trace(profile, seed, hours=2.0) == trace
    assert trace.duration_s == 7200
    assert capacity_at(trace, 0) == profile.at_start
    assert max(count for _, count in trace.capacity_steps) <= profile.target
    assert "generated" in trace.source
