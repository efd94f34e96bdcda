from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from rlboost_runtime.coordinator.driver.totals import Recovered, recover, snapshot_code
from rlboost_runtime.coordinator.storage import snapshot as snapshots
from rlboost_runtime.coordinator.storage.journal import EventLog, LogPlace
from rlboost_runtime.coordinator.storage.snapshot import SnapshotWriter
from rlboost_runtime.core.base.messages import RLBOOST, Command, Event, RunStarted
from rlboost_runtime.core.core import Core
from rlboost_runtime.seams import SystemClock, SystemDisk
from rlboost_runtime.sim.faults import run_with_faults

SEEDS = int(os.environ.get("RLBOOST_SNAPSHOT_SEEDS", "2"))


@cache
def history(seed: int) -> list[tuple[Event, list[Command]]]:
    """Return the events of a random life with random faults, and what the core ordered then."""
    for number in itertools.count(1000 * seed):
        seen: list[tuple[Event, list[Command]]] = []
        run_with_faults(number, "rlboost", lambda event, commands: seen.append((event, list(commands))))  # noqa: B023
        started = seen[0][0]
        if isinstance(started, RunStarted) and started.config.policy == RLBOOST:
            return seen  # under the rules that live runs have
    raise AssertionError


def written(path: Path, events: list[Event]) -> list[LogPlace]:
    """Write an event log; return the place after each event."""
    log = EventLog(path, SystemDisk())
    places = [log.append(event) or log.place for event in events]
    log.close()
    return places


def store(path: Path, state: Recovered, place: LogPlace, code: str = "") -> None:
    writer = SnapshotWriter(path, code or snapshot_code(), SystemClock(), 0)
    writer.write((state.core, state.totals), place)
    writer.join()


def assert_same(one: Recovered, other: Recovered) -> None:
    one.core.check()
    assert one.totals == other.totals, "with the digest of all commands"
    assert one.core.next_deadline() == other.core.next_deadline()
    assert one.core.counters == other.core.counters
    assert (one.log.place, one.log.problem) == (other.log.place, other.log.problem)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_core_that_is_restored_at_every_position_orders_the_same(seed: int) -> None:
    core = Core()
    for event, commands in history(seed):
        assert core.handle(event) == commands
        core = pickle.loads(pickle.dumps(core))
    core.check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_snapshot_and_the_rest_of_the_log_lead_where_the_whole_log_leads(tmp_path: Path, seed: int) -> None:
    log, path, part = tmp_path / "events.log", tmp_path / "events.snapshot", tmp_path / "part.log"
    places = written(log, [event for event, _ in history(seed)])
    whole = recover(log)
    for number in sorted(Random(seed).sample(range(len(places)), 8)):
        part.write_bytes(log.read_bytes()[: places[number].num_bytes])
        store(path, recover(part), places[number])
        found = recover(log, path)
        assert (found.problem, found.num_replayed) == ("", len(places) - number - 1)
        assert_same(found, whole)


def flipped(path: Path, log: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path, log: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def of_other_code(path: Path, log: Path) -> None:
    state = recover(log, path)
    store(path, state, state.log.place, "0" * 32)


def newer_than_the_log(path: Path, log: Path) -> None:
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:100]))


def of_another_log(path: Path, log: Path) -> None:
    """As after the log was cut and went on differently."""
    lines = log.read_bytes().splitlines(keepends=True)
    lines[90] = b"x" * (len(lines[90]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flipped, "it is damaged"),
        (cut, "it is damaged"),
        (of_other_code, "another version"),
        (newer_than_the_log, "shorter"),
        (of_another_log, "not the one that it was made from"),
    ],
)
def test_a_snapshot_that_may_not_be_used_is_named_and_the_whole_log_replayed(
    tmp_path: Path, spoil: Callable[[Path, Path], None], said: str
) -> None:
    log, path = tmp_path / "events.log", tmp_path / "events.snapshot"
    places = written(log, [event for event, _ in history(1)])
    store(path, recover(log), places[-1])
    spoil(path, log)
    found = recover(log, path)
    assert said in found.problem
    assert str(path) in found.problem
    assert_same(found, recover(log))
    assert found.num_replayed == found.totals.num_events


def test_snapshots_are_written_now_and_then_and_a_failure_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "EVERY_EVENTS", 100)
    monkeypatch.setattr(snapshots, "PAUSE_SHARE", 0)
    monkeypatch.setattr(snapshots, "LATEST_EVENTS", 300)
    monkeypatch.setattr(snapshots, "QUICK_S", 5.0)
    log, path = tmp_path / "events.log", tmp_path / "events.snapshot"
    places = written(log, [event for event, _ in history(1)])
    state = recover(log)
    writer = SnapshotWriter(path, snapshot_code(), SystemClock(), 30)
    for number, place in enumerate(places[:200]):
        writer.after_event((state.core, state.totals), place, is_quiet=number >= 75)
        writer.join()
        assert path.exists() == (number >= 75), "what was replayed counts; the first waits for a step to end"
    path.unlink()
    monkeypatch.setattr(snapshots, "QUICK_S", -1.0)
    for number, place in enumerate(places[200:600]):
        writer.after_event((state.core, state.totals), place, is_quiet=False)
        writer.join()
        assert path.exists() == (number >= 300 - 25), "where it takes long only after many events"
    path.unlink()
    path.mkdir()
    writer.write((state.core, state.totals), places[-1])
    writer.join()
    assert list(path.iterdir()) == []
    assert {each.name for each in tmp_path.iterdir()} == {log.name, path.name}, "nothing half-written is left"
    path.rmdir()
    assert recover(log, path).problem == "", "none is no problem"


def test_a_day_of_events_is_replayed_from_its_last_snapshot(tmp_path: Path) -> None:
    """What a restart takes does not grow with the log, but for a checksum of it."""
    log, path = tmp_path / "events.log", tmp_path / "events.snapshot"
    life = [event for event, _ in history(1)]
    written(log, [*life, *itertools.repeat(life[-1], 20_000)])
    whole = recover(log)
    store(path, whole, whole.log.place)
    began = time.process_time()
    found = recover(log, path)
    assert time.process_time() - began < 1.0
    assert found.num_replayed == 0
    assert_same(found, whole)
