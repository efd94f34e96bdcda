from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rlboost_runtime.billing.accounts import BilledState, UsageKind, WasteKind
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.ledger_file import in_one_file
from rlboost_runtime.errors import NotFound, RuntimeFault
from rlboost_runtime.money import NS_PER_HOUR
from tests.fakes.books import bill_egress

T0 = 1_800_000_000.0


@pytest.fixture
def ledger(tmp_path: Path):
    books = Ledger(tmp_path / "ledger.sqlite")
    yield books
    books.close()


def intend(
    ledger: Ledger, machine: str, *, at: float = T0, price: int = 3_600_000_000, pool: str = "spot"
) -> None:
    ledger.intend(
        MachineRecord(
            machine,
            pool="spot",
            provider="local",
            zone="here",
            accelerator="cpu",
            price_micro_usd_per_hour=price,
            price_source="job file",
            intended_at=at,
        )
    )


def test_a_machine_is_billed_from_launch_to_end(ledger: Ledger) -> None:
    intend(ledger, "a")
    assert ledger.total_micro_usd(T0 + 100) == 0
    ledger.launched("a", T0 + 10)
    assert ledger.total_micro_usd(T0 + 12) == 2_000_000
    ledger.ended("a", T0 + 15)
    (bill,) = ledger.machines(T0 + 999)
    assert (bill.state, bill.billed_ns, bill.cost_micro_usd) == (
        BilledState.GONE,
        5_000_000_000,
        5_000_000,
    )


def test_saying_it_twice_changes_nothing(ledger: Ledger) -> None:
    for shift in (0, 7):
        intend(ledger, "a", at=T0 + shift, price=3_600_000_000 + shift)
    for shift in (0, 7):
        ledger.launched("a", T0 + 1 + shift)
    for shift in (0, 7):
        ledger.ended("a", T0 + 2 + shift, "first" if not shift else "second")
    ledger.launched("a", T0 + 1)
    ledger.failed("a", T0 + 51, "no")
    (bill,) = ledger.machines(T0 + 100)
    assert bill.cost_micro_usd == 1_000_000
    assert (bill.state, bill.detail) == (BilledState.GONE, "first")
    assert ledger.open_machines() == []


def test_a_failed_launch_costs_nothing_unless_the_machine_turns_up(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.failed("a", T0 + 1, "no capacity")
    assert ledger.open_machines() == []
    assert ledger.total_micro_usd(T0 + 9) == 0
    ledger.launched("a", T0 + 0.5)  # the provider lists it after all
    assert ledger.machines(T0 + 9)[0].state is BilledState.RUNNING
    assert ledger.open_machines() == ["a"]


def test_who_ended_is_told_once_and_anew_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ended.sqlite")
    for machine in "abcd":
        intend(ledger, machine)
    ledger.launched("a", T0 + 1)
    ledger.failed("a", T0 + 2, "it had been launched: it is left as it is")
    assert ledger.ended_since(0) == ([], 0)
    ledger.ended("a", T0 + 3)
    ledger.ended("a", T0 + 4)
    ledger.failed("b", T0 + 4, "no capacity")
    assert ledger.ended_since(0) == (["a", "b"], 2)
    ledger.ended("c", T0 + 1)
    assert ledger.ended_since(2) == (["c"], 3)
    ledger.close()
    again = Ledger(tmp_path / "ended.sqlite")
    assert sorted(again.ended_since(0)[0]) == ["a", "b", "c"]
    again.close()


def test_a_launch_heard_of_after_its_end_is_billed_without_reopening(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.ended("a", T0 + 4)
    assert ledger.total_micro_usd(T0 + 9) == 0
    ledger.launched("a", T0 + 1)
    assert ledger.total_micro_usd(T0 + 9) == 3_000_000
    assert ledger.open_machines() == []


def test_a_machine_used_again_is_billed_for_each_interval(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.launched("a", T0)
    ledger.ended("a", T0 + 3)
    intend(ledger, "a", at=T0 + 100)
    for _ in range(2):
        ledger.launched("a", T0 + 100)
    assert ledger.open_machines() == ["a"]
    assert ledger.total_micro_usd(T0 + 2) == 2_000_000
    assert ledger.total_micro_usd(T0 + 50) == 3_000_000
    assert ledger.total_micro_usd(T0 + 104) == 7_000_000
    ledger.ended("a", T0 + 105)
    (bill,) = ledger.machines(T0 + 999)
    assert (bill.launched_at, bill.cost_micro_usd) == (T0, 8_000_000)
    assert ledger.open_machines() == []


def test_an_end_before_the_launch_never_bills_less_than_nothing(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.launched("a", T0 + 5)
    ledger.ended("a", T0 + 4)
    assert ledger.total_micro_usd(T0 + 9) == 0


def test_open_machines_are_those_not_known_to_be_gone(ledger: Ledger) -> None:
    for machine, at in (("b", 2), ("a", 1), ("c", 3), ("d", 4)):
        intend(ledger, machine, at=T0 + at, price=1_000_000)
    ledger.launched("b", T0 + 5)
    ledger.failed("c", T0 + 5, "no")
    ledger.launched("d", T0 + 5)
    ledger.ended("d", T0 + 6)
    assert ledger.open_machines() == ["a", "b"]
    assert ledger.rate_micro_usd_per_hour() == 2_000_000


def test_disk_and_address_of_a_machine_are_billed_beside_it_for_as_long(ledger: Ledger) -> None:
    for machine, storage in (("a", 900_000), ("b", 0)):
        record = MachineRecord(machine, "x", "z", "cpu", 3_600_000, "test", T0)
        ledger.intend(replace(record, storage_micro_usd_per_hour=storage))
        ledger.launched(machine, T0)
    assert ledger.rate_micro_usd_per_hour() == 8_100_000
    assert ledger.spending().usage(T0 + 4)[UsageKind.STORAGE] == 1000
    assert ledger.total_micro_usd(T0 + 4) == 2 * 4000 + 1000
    ledger.ended("a", T0 + 8)
    bill_egress(ledger, 7, T0)
    assert ledger.spending().usage(T0 + 40) == {UsageKind.EGRESS: 7, UsageKind.STORAGE: 2000}
    for books in (ledger, ledger.spending()):
        assert books.total_micro_usd(T0 + 40) == 8000 + 40_000 + 2007
    assert ledger.spending().totals_micro_usd([T0 + 4, T0 + 40]) == [9007, 50_007]


def test_a_machine_whose_price_changes_is_billed_at_each_price_for_its_time(ledger: Ledger) -> None:
    intend(ledger, "a", price=3_600_000_000)
    ledger.repriced("a", 1, T0 - 5)  # nothing runs yet
    ledger.launched("a", T0)
    for _ in range(2):
        ledger.repriced("a", 7_200_000_000, T0 + 10)
    assert ledger.total_micro_usd(T0 + 5) == 5_000_000
    assert ledger.total_micro_usd(T0 + 11) == 12_000_000
    assert ledger.rate_micro_usd_per_hour() == 7_200_000_000
    ledger.repriced("a", 3_600_000_000, T0 + 9)  # a clock that was set back
    ledger.ended("a", T0 + 20)
    ledger.repriced("a", 1, T0 + 30)
    (bill,) = ledger.machines(T0 + 99)
    assert (bill.cost_micro_usd, bill.billed_ns, bill.num_lives) == (20_000_000, 20 * 10**9, 1)


def test_books_of_an_older_program_that_knew_one_price_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    older = Ledger(path)
    intend(older, "a")
    older.launched("a", T0)
    older.close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE former_prices")
        db.execute("DROP TABLE storage_prices")
        db.execute("DROP TABLE billing_minimums")
    db.close()
    reader = Ledger(path, read_only=True)
    assert reader.total_micro_usd(T0 + 2) == 2_000_000
    reader.close()


def test_a_machine_without_an_intent_is_refused(ledger: Ledger) -> None:
    for call in (
        lambda: ledger.launched("x", T0),
        lambda: ledger.failed("x", T0, "p"),
        lambda: ledger.ended("x", T0),
        lambda: ledger.add_wastes({(WasteKind.IDLE, "x"): 1.0}),
    ):
        with pytest.raises(NotFound):
            call()


def test_many_random_intervals_sum_to_the_micro_dollar(ledger: Ledger) -> None:
    rng = random.Random(7)
    exact = 0
    for number in range(150):
        price = rng.randrange(0, 100_000_000)
        start_us, length_us = rng.randrange(10**9), rng.randrange(1, 10**11)
        intend(ledger, f"m{number}", price=price)
        ledger.launched(f"m{number}", T0 + start_us / 1e6)
        ledger.ended(f"m{number}", T0 + (start_us + length_us) / 1e6)
        exact += int(Fraction(price * length_us * 1000, NS_PER_HOUR) + Fraction(1, 2))  # round half up
    bill_egress(ledger, 17, T0)
    bill_egress(ledger, 4, T0)
    end = T0 + 10**6
    assert ledger.total_micro_usd(end) == exact + 21
    assert sum(b.cost_micro_usd for b in ledger.machines(end)) == exact
    assert ledger.spending().usage(end) == {UsageKind.EGRESS: 21, UsageKind.STORAGE: 0}


def test_the_total_never_falls_over_time(ledger: Ledger) -> None:
    rng = random.Random(3)
    for number in range(10):
        intend(ledger, f"m{number}", price=rng.randrange(10**8))
        ledger.launched(f"m{number}", T0 + rng.random() * 100)
        ledger.ended(f"m{number}", T0 + 100 + rng.random() * 100)
    totals = [ledger.total_micro_usd(T0 + t) for t in range(0, 220, 3)]
    assert totals == sorted(totals)
    assert totals[0] == 0 < totals[-1]


def test_what_was_committed_survives_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = f"""
import os, signal, pathlib
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.launch_records import MachineRecord
books = Ledger(pathlib.Path({str(path)!r}))
books.intend(MachineRecord("a", "local", "z", "cpu", 1, "s", {T0}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", writer], env=environment, timeout=30).returncode == -9
    books = Ledger(path)
    assert books.open_machines() == ["a"]
    books.close()


def test_a_reader_sees_the_books_while_they_are_written_and_after(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(NotFound):
        Ledger(path, read_only=True)
    writer = Ledger(path)
    intend(writer, "a")
    reader = Ledger(path, read_only=True)
    assert reader.open_machines() == ["a"]
    writer.launched("a", T0)
    assert reader.total_micro_usd(T0 + 1) == 1_000_000
    reader.close()
    writer.close()
    late = Ledger(path, read_only=True)
    assert late.total_micro_usd(T0 + 1) == 1_000_000
    late.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_ledger_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("this is not a database, but long enough to look like one" * 30)
    with pytest.raises(RuntimeFault, match="is not a ledger"):
        Ledger(path)


def test_steps_and_events_are_kept_in_order(ledger: Ledger) -> None:
    ledger.record_step(
        1, started_at=T0 + 5, ended_at=T0 + 9, tokens=70, reward_mean=0.5, metrics={"loss": 0.1}
    )
    ledger.record_step(0, started_at=T0, ended_at=T0 + 5, tokens=50, reward_mean=None, metrics={})
    ledger.record_step(
        1, started_at=T0 + 7, ended_at=T0 + 12, tokens=71, reward_mean=0.6, metrics={"loss": 0.2}
    )
    assert [(s.step, s.tokens, s.reward_mean) for s in ledger.steps()] == [(0, 50, None), (1, 71, 0.6)]
    assert ledger.steps()[1].started_ns == round((T0 + 5) * 1e9)  # a step trained again keeps its first start
    for number in range(5):
        ledger.note(T0 + number, "machine.gone", f"machine {number}", machine=f"m{number}")
    assert [e.text for e in ledger.events(last=2)] == ["machine 3", "machine 4"]
    assert ledger.events()[0].data == {"machine": "m0"}
    assert ledger.events()[0].at == T0


def test_waste_is_machine_time(ledger: Ledger) -> None:
    intend(ledger, "a")
    intend(ledger, "b")
    ledger.add_wastes({(WasteKind.BOOT, "a"): 1.5})
    ledger.add_wastes({(WasteKind.BOOT, "a"): 0.5})
    ledger.add_wastes({(WasteKind.BOOT, "b"): 1.0})
    ledger.add_wastes({(WasteKind.LOST, "b"): 0.25})
    assert ledger.wasted_ns() == {
        "a": {WasteKind.BOOT: 2_000_000_000},
        "b": {WasteKind.BOOT: 1_000_000_000, WasteKind.LOST: 250_000_000},
    }


def test_a_bill_is_split_by_what_was_wasted_and_never_by_more(ledger: Ledger) -> None:
    intend(ledger, "a", price=3_600_000_000)  # $1 a second
    ledger.launched("a", T0)
    (bill,) = ledger.machines(T0 + 3)
    found = bill.parts({WasteKind.BOOT: 1_000_000_000, WasteKind.LOST: 500_000_000})
    assert found.useful == 1_500_000
    assert found.wasted == {
        WasteKind.BOOT: 1_000_000, WasteKind.IDLE: 0, WasteKind.LOST: 500_000, WasteKind.REDONE: 0,
    }  # fmt: skip
    more = bill.parts({WasteKind.REDONE: 2_000_000_000, WasteKind.IDLE: 2_500_000_000})
    assert (more.useful, more.wasted[WasteKind.IDLE], more.wasted[WasteKind.REDONE]) == (
        0,
        2_500_000,
        500_000,
    )


def test_a_bill_of_less_than_a_second_is_split_to_the_last_nanosecond(ledger: Ledger) -> None:
    intend(ledger, "a", price=3_600_000_000_000_000)  # $1,000,000 a second: a micro-dollar a picosecond
    ledger.launched("a", T0)
    (bill,) = ledger.machines(T0 + 1)
    found = bill.parts({WasteKind.REDONE: 1})
    assert found.wasted == {
        WasteKind.BOOT: 0, WasteKind.IDLE: 0, WasteKind.LOST: 0, WasteKind.REDONE: 1_000,
    }  # fmt: skip


def test_what_was_served_is_what_was_noted_last(ledger: Ledger) -> None:
    assert ledger.served() == (0, 0)
    ledger.note_served(3, 40)
    ledger.note_served(3, 40)
    ledger.note_served(5, 60)
    assert ledger.served() == (5, 60)


def test_what_happened_is_read_back_as_it_was_noted(ledger: Ledger) -> None:
    ledger.note(T0, "launched", "a launched", machine="a")
    ledger.note(T0 + 1, "ended", "a ended")
    first, second = ledger.events()
    assert (first.at, first.kind, first.text, first.data) == (T0, "launched", "a launched", {"machine": "a"})
    assert (second.at, second.kind, second.text, second.data) == (T0 + 1, "ended", "a ended", {})
    assert ledger.events(last=1) == [second]


def test_totals_at_moments_are_those_of_each_moment(ledger: Ledger) -> None:
    for number, (began, ended) in enumerate([(5, 9), (0, 3), (7, 30), (2, 4)]):
        intend(ledger, f"m{number}", price=3_600_000_000)
        ledger.launched(f"m{number}", T0 + began)
        ledger.ended(f"m{number}", T0 + ended)
    intend(ledger, "never")
    moments = [T0 + each for each in (0, 1, 2.5, 4, 6, 8, 12, 40)]
    spending = ledger.spending()
    assert spending.totals_micro_usd(moments) == [spending.total_micro_usd(each) for each in moments]
    assert spending.totals_micro_usd(moments)[-1] == (4 + 3 + 23 + 2) * 1_000_000


def test_the_ledger_in_one_file_is_a_whole_copy(ledger: Ledger, tmp_path: Path) -> None:
    intend(ledger, "a")
    ledger.launched("a", T0)
    path = tmp_path / "copy" / "ledger.sqlite"
    path.parent.mkdir()
    path.write_bytes(in_one_file(tmp_path / "ledger.sqlite"))
    copy = Ledger(path, read_only=True)
    try:
        assert copy.machines(T0 + 5) == ledger.machines(T0 + 5)
    finally:
        copy.close()
    assert sorted(each.name for each in path.parent.iterdir()) == ["ledger.sqlite"]


def test_a_failed_launch_that_turns_up_is_billed_until_it_ends(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.failed("a", T0 + 1, "no answer")
    ledger.launched("a", T0 + 0.5)
    assert ledger.total_micro_usd(T0 + 9.5) == 9_000_000
    ledger.ended("a", T0 + 10.5)
    assert ledger.total_micro_usd(T0 + 99) == 10_000_000


def test_bills_of_closed_machines_hold_whoever_writes_and_whenever_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    reader, writer = Ledger(path), Ledger(path)
    intend(writer, "a")
    writer.launched("a", T0)
    writer.ended("a", T0 + 5)
    assert reader.total_micro_usd(T0 + 9) == 5_000_000
    assert reader.total_micro_usd(T0 + 2) == 2_000_000  # before it was closed
    for books in (writer, reader):  # another life: by another connection, then by our own
        start = T0 + (10 if books is writer else 20)
        books.launched("a", start)
        books.ended("a", start + 1)
        assert reader.total_micro_usd(T0 + 99) == writer.total_micro_usd(T0 + 99)
    assert reader.total_micro_usd(T0 + 99) == 7_000_000
    intend(reader, "b", at=T0 - 1)
    assert [bill.machine for bill in reader.machines(T0 + 99)] == ["b", "a"]
    reader.close()
    writer.close()


def test_closed_machines_are_read_once(ledger: Ledger) -> None:
    for number in range(50):
        intend(ledger, f"m{number}")
        ledger.launched(f"m{number}", T0)
        ledger.ended(f"m{number}", T0 + 1)
    first = ledger.machines(T0 + 9)
    ledger.note(T0, "k", "a note")
    ledger.write_notes()
    ledger.add_wastes({(WasteKind.BOOT, "m0"): 1.0})
    assert all(a is b for a, b in zip(first, ledger.machines(T0 + 10), strict=True))


def test_spending_is_what_the_ledger_says_at_every_moment(ledger: Ledger) -> None:
    rng = random.Random(5)
    for number in range(12):
        intend(ledger, f"m{number}", price=rng.randrange(10**8))
        ledger.launched(f"m{number}", T0 + rng.random() * 50)
        if number % 3:
            ledger.ended(f"m{number}", T0 + 50 + rng.random() * 50)
        if number % 4 == 1:
            ledger.launched(f"m{number}", T0 + 120)
    bill_egress(ledger, 17, T0 + 60)
    spending = ledger.spending()
    for now in (T0 + t for t in range(-5, 150, 5)):
        assert spending.total_micro_usd(now) == ledger.total_micro_usd(now)
        assert spending.machines(now) == ledger.machines(now)
        assert spending.usage(now)[UsageKind.EGRESS] == (17 if now >= T0 + 60 else 0)
    moments = [T0 + t for t in (-5, 0, 3, 3, 55, 60, 80, 99, 119, 120, 150)]
    assert spending.totals_micro_usd(moments) == [spending.total_micro_usd(at) for at in moments]


def test_the_summary_of_steps_agrees_with_the_steps(ledger: Ledger) -> None:
    assert ledger.step_summary(5) == (0, 0, [])
    for step, reward in enumerate([0.5, None, 0.25]):
        ledger.record_step(
            step, started_at=T0, ended_at=T0 + 1, tokens=10 + step, reward_mean=reward, metrics={}
        )
    assert ledger.step_summary(2) == (3, 33, [None, 0.25])
    assert ledger.step_summary(0).num_steps == 3


def test_notes_wait_in_memory_and_are_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    books = Ledger(path)
    reader = Ledger(path, read_only=True)
    for number in range(3):
        books.note(T0, "kind", f"note {number}")
    assert reader.events() == []
    assert [e.text for e in books.events(last=2)] == ["note 1", "note 2"]
    books.write_notes()
    books.note(T0, "kind", "note 3")
    assert [e.text for e in reader.events()] == ["note 0", "note 1", "note 2"]
    assert [e.text for e in books.events(last=2)] == ["note 2", "note 3"]
    books.close()
    assert [e.text for e in reader.events()] == [f"note {number}" for number in range(4)]
    reader.close()


def test_notes_that_cannot_be_written_wait_on(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.note(T0, "kind", "kept")
    other = sqlite3.connect(tmp_path / "ledger.sqlite")
    other.execute("ALTER TABLE events RENAME TO away")
    with caplog.at_level("INFO"):
        ledger.write_notes()
    assert "notes.write_failed" in caplog.messages
    other.execute("ALTER TABLE away RENAME TO events")
    other.close()
    ledger.write_notes()
    assert [e.text for e in ledger.events()] == ["kept"]


def test_wastes_are_added_all_or_none(ledger: Ledger) -> None:
    intend(ledger, "a")
    with pytest.raises(NotFound):
        ledger.add_wastes({(WasteKind.BOOT, "a"): 1.0, (WasteKind.IDLE, "unknown"): 1.0})
    assert ledger.wasted_ns() == {}
    ledger.add_wastes({(WasteKind.BOOT, "a"): 1.0, (WasteKind.IDLE, "a"): 2.0})
    assert sum(ledger.wasted_ns()["a"].values()) == 3_000_000_000


def test_only_words_on_which_money_hangs_wait_for_the_disk(ledger: Ledger) -> None:
    def level() -> int:
        return int(ledger._db.execute("PRAGMA synchronous").fetchone()[0])

    intend(ledger, "a")
    assert level() == 2  # FULL
    ledger.add_wastes({(WasteKind.BOOT, "a"): 1.0})
    assert level() == 1  # NORMAL
    ledger.launched("a", T0)
    assert level() == 2


def test_a_machine_that_was_there_longer_is_billed_longer_and_never_shorter(ledger: Ledger) -> None:
    intend(ledger, "a")
    ledger.prolonged("a", T0 + 50)  # never launched
    assert ledger.total_micro_usd(T0 + 100) == 0
    ledger.launched("a", T0 + 10)
    ledger.prolonged("a", T0 + 11)  # open: it is billed anyway
    ledger.ended("a", T0 + 15)
    for until in (T0 + 20, T0 + 5):
        ledger.prolonged("a", until)
        assert ledger.total_micro_usd(T0 + 100) == 10_000_000
    with pytest.raises(NotFound):
        ledger.prolonged("nobody", T0)


def _filled(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        for name in ("a", "b"):
            intend(ledger, name, at=50.0)
            ledger.launched(name, 100.0)
        ledger.repriced("a", 7, 150.0)
        ledger.keep_boots({"a": "one"})
        ledger.keep_boots({"a": "two"})
        ledger.note(1.0, "kind", "text")
        ledger.ended("b", 200.0)


def test_a_changed_digit_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    with closing(Ledger(path, read_only=True)) as ledger:
        assert ledger.kept_boots() == {"a": "two"}
    with sqlite3.connect(path) as db:
        db.execute("UPDATE machines SET launched_at = launched_at + 1 WHERE machine = 'b'")
    for read_only in (True, False):
        with pytest.raises(RuntimeFault, match="row 2 of table machines is not as it was written"):
            Ledger(path, read_only=read_only)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE machines SET launched_at = launched_at - 1 WHERE machine = 'b'")
        db.execute("DELETE FROM former_prices")
    with pytest.raises(RuntimeFault, match="row 1 of table former_prices"):
        Ledger(path)


def test_any_damage_of_a_ledgers_file_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    good = path.read_bytes()
    with closing(Ledger(path, read_only=True)) as ledger:
        whole = ledger.machines(300.0), ledger.steps(), ledger.events()
    rng = random.Random(23)
    found = 0
    flips = int(os.environ.get("RLBOOST_FLIPS", "150"))
    for _ in range(flips):
        bad = bytearray(good)
        at = rng.randrange(len(bad))
        match rng.randrange(3):
            case 0:
                bad[at] ^= 1 << rng.randrange(8)
            case 1:
                bad[at : at + 6000] = rng.randbytes(min(6000, len(bad) - at))
            case 2:
                del bad[at:]
        path.write_bytes(bad)
        try:
            ledger = Ledger(path, read_only=True)
        except RuntimeFault:
            found += 1
            continue
        with closing(ledger):
            assert (ledger.machines(300.0), ledger.steps(), ledger.events()) == whole
    assert found > flips // 2


def test_a_ledger_that_lost_transactions_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    intend(ledger, "a", at=50.0)
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ledger.launched("a", 100.0)
    wal = path.with_name("ledger.sqlite-wal")
    flipped = bytearray(wal.read_bytes())
    flipped[40] ^= 0xFF  # the frame's salt, which is random: any fixed byte may be the one that is there
    for damaged in (b"", bytes(flipped)):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copy(path, copy)
        shutil.copy(path.with_suffix(".mark"), copy)
        (copy / wal.name).write_bytes(damaged)
        with pytest.raises(RuntimeFault, match="it has 1 transactions, 2 were committed"):
            Ledger(copy / path.name)
    (copy / path.name).unlink()
    (copy / wal.name).unlink(missing_ok=True)
    with pytest.raises(RuntimeFault, match="it has 0 transactions"):
        Ledger(copy / path.name)
    ledger.close()


def test_a_ledger_of_an_earlier_version_is_checked_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    path.with_suffix(".mark").unlink()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE checks")
    Ledger(path, read_only=True).close()
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE machines SET price_micro_usd_per_hour = 1")
    with pytest.raises(RuntimeFault, match="table machines"):
        Ledger(path)


def test_metrics_are_added_to_a_trained_step_once(ledger: Ledger, tmp_path: Path) -> None:
    ledger.record_step(3, started_at=T0, ended_at=T0 + 5, tokens=5, reward_mean=0.5, metrics={"loss": 1.0})
    assert ledger.add_metrics(3, {"eval_avg_at_4": 0.25})
    assert not ledger.add_metrics(3, {"eval_avg_at_4": 0.25}), "it is known"
    assert not ledger.add_metrics(4, {"eval_avg_at_4": 0.25}), "no such step"
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")  # checks every row's checksum
    (step,) = again.steps()
    again.close()
    assert (step.tokens, step.metrics) == (5, {"loss": 1.0, "eval_avg_at_4": 0.25})
