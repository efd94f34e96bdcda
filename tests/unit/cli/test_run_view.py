from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.runs.run_status import RunStatus, run_status
from rlboost_cli.terminal.screen import ASCII, UNICODE, Glyphs, Size
from rlboost_cli.views.fleet_table import fleet_rows, fleet_table
from rlboost_cli.views.run_view import PHASES, boot_times, live_lines, status_lines
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.protocol.status import read_status
from rlboost_runtime.run.folder import RunFolder, write_json

STATUS: dict[str, Any] = {
    "run": "demo",
    "state": "rollout",
    "phase": "rollout on reserved and spot engines, 21 of 32 responses finished",
    "step": 4,
    "steps": 12,
    "step_responses": {"finished": 21, "requested": 32},
    "policy_version": 4,
    "reward_mean": 0.31,
    "reward_history": [0.1, 0.2, 0.25, 0.31],
    "tokens_per_s": 1234.4,
    "tokens": {"generated": 5000, "lost_estimate": 4},
    "responses": {"requested": 160, "finished": 149, "migrated": 8},
    "preemptions": {"noticed": 1, "silent": 0, "reset": 2},
    "machines": [{"id": "reserved-0", "pool": "reserved", "state": "running"}],
    "instances": [
        {
            "id": "reserved-0/0",
            "machine": "reserved-0",
            "pool": "reserved",
            "state": "ready",
            "policy_version": 4,
            "in_flight": 8,
            "tokens_per_s": 96.4,
            "uptime_s": 100.0,
        }
    ],
    "cost": {
        "spent_usd": 1.5,
        "rate_usd_per_hour": 18.0,
        "budget_usd": 10.0,
        "counterfactual": {
            "usd_per_million_tokens": 36.2,
            "saving_fraction": 0.4,
            "basis": "computed, not run: the tokens trained at the rate measured",
        },
    },
    "started_at": 1000.0,
    "at": 1090.0,
    "events": [{"at": 1080.0, "kind": "preempted", "text": "spot-1 was preempted without notice"}],
}


def found(has_ended: bool = False, problem: str | None = None, **changes: Any) -> RunStatus:
    return RunStatus(
        {**STATUS, **changes}, is_live=problem is None, has_ended=has_ended, age_s=12.0, problem=problem
    )


def instances(count: int, name: str = "spot-{}", **fields: Any) -> list[dict[str, Any]]:
    base = {"pool": "spot", "state": "ready", "policy_version": 4, "in_flight": 8, "uptime_s": 9e3}
    names = [name.format(n) for n in range(count)]
    return [{**base, "id": f"{each}/0", "machine": each, "tokens_per_s": 54321.0, **fields} for each in names]


def shown(status: RunStatus, width: int = 80, height: int = 24, glyphs: Glyphs = UNICODE) -> list[str]:
    lines = [line.text for line in live_lines(status, Size(width, height), glyphs)]
    assert len(lines) < height, "the cursor needs a line"
    assert all(len(line) < width for line in lines), max(lines, key=len)
    return lines


def test_the_view_shows_all_that_was_promised() -> None:
    text = "\n".join(shown(found()))
    for piece in (
        "demo: rollout, 90 s",
        "4/12",
        "policy version 4",
        "21/32",
        "rollout on reserved and spot engines",
        "0.310",
        "▁▄▆█",
        "1,234 tokens/s",
        "3 preemptions survived: 8 responses migrated, about 4 tokens lost",
        "$1.50 of $10.00 so far, $18.00 per hour",
        "reserved-0/0  reserved  ready        4          8     96  2m",
        "spot-1 was preempted without notice",
        "Ctrl-C detaches; the run continues",
    ):
        assert piece in text, f"{piece} is not in\n{text}"


def test_the_prompts_that_a_curriculum_passes_over_are_counted() -> None:
    curriculum = {"resting_solved": 1200, "resting_unsolved": 7, "passed_over": 3}
    text = "\n".join(shown(found(curriculum=curriculum)))
    assert "prompts  passed over for a while: 1,200 solved, 7 unsolved" in text
    assert "passed over" not in "\n".join(shown(found()))


def test_what_migrated_when_seeding_ended_is_no_preemption() -> None:
    changes = {"preemptions": {"total": 0}, "responses": {"migrated": 24}, "tokens": {"generated": 9}}
    text = "\n".join(shown(found(**changes)))
    assert "24 responses migrated; no preemption so far" in text
    assert "survived" not in text


def test_the_comparison_is_of_prices_per_token_and_waits_for_enough_steps() -> None:
    text = "\n".join(shown(found(step=10)))
    assert "per million: $21.72 in steps, $36.20 on demand (computed): 40% saved" in text
    for step, steps in ((9, 12), (5, 6)):
        assert "on demand" not in "\n".join(shown(found(step=step, steps=steps)))
    assert "on demand" in "\n".join(shown(found(step=6, steps=6)))


def test_the_time_and_cost_that_are_left_follow_the_pace_of_recent_steps() -> None:
    events = [{"at": 1000.0 + 10 * n, "kind": "step", "text": f"step {n} trained"} for n in range(4)]
    lines = shown(found(events=events, at=1035.0, started_at=500.0))
    assert lines[0].endswith(", about 75 s left"), "8 steps of 10 s, 5 s of them are gone"
    assert "$18.00 per hour, about $1.88 at the end" in "\n".join(lines)
    assert " left" not in shown(found(events=events[:2], at=1015.0))[0], "two steps are no pace"


def test_boots_fit_eighty_columns() -> None:
    boot = dict.fromkeys(PHASES, 1234.5)
    machine = {"id": "spot-100", "pool": "spot", "state": "running", "boot_s": boot}
    lines = boot_times(read_status({"machines": [machine]}))
    assert all(len(line) <= 80 for line in lines), lines


def test_dearer_than_on_demand_is_said_as_it_is() -> None:
    cost = {**STATUS["cost"]["counterfactual"], "saving_fraction": -0.5}
    text = "\n".join(shown(found(step=10, cost={**STATUS["cost"], "counterfactual": cost})))
    assert "per million: $54.30 in steps, $36.20 on demand (computed): 50% more" in text


def test_no_comparison_without_its_figures() -> None:
    unknown = {"usd_per_million_tokens": None, "saving_fraction": None, "basis": "not known: no step"}
    text = "\n".join(shown(found(step=10, cost={**STATUS["cost"], "counterfactual": unknown})))
    assert "on demand" not in text
    assert "on demand" not in "\n".join(shown(found(cost={"spent_usd": 0.1})))


def test_twenty_instances_are_cut_and_the_rest_is_counted() -> None:
    rows = [*instances(23), *instances(2, "spot-9{}", state="loading")]
    lines = shown(found(instances=rows))
    (more,) = [line for line in lines if line.startswith("+ ")]
    visible = sum(line.startswith("spot-") for line in lines)
    assert visible >= 3
    hidden = 26 - visible - 1  # the reserved machine comes first
    assert more == f"+ {hidden} more: {hidden - 2} ready, 2 loading"
    assert any("was preempted" in line for line in lines), "events are not squeezed out"
    everything = status_lines(found(instances=rows), UNICODE)
    assert sum(line.startswith("spot-") for line in everything) == 25
    assert not any(line.startswith("+ ") for line in everything)


def test_instances_are_sorted_by_pool_and_number() -> None:
    rows = [*instances(12), *STATUS["instances"]]
    lines = shown(found(instances=rows), height=40)
    order = [line.split("/")[0] for line in lines if "/0 " in line]
    assert order == ["reserved-0", *(f"spot-{n}" for n in range(12))]


@pytest.mark.parametrize("height", [2, 5, 8, 10, 12, 16, 20, 24, 60])
@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_any_size_holds_the_view(width: int, height: int) -> None:
    rows = instances(30, "spot-with-a-long-name-{}", state="disconnected")
    events = [{"at": 1.0 * n, "kind": "lost", "text": f"spot-{n} {'x' * 200}"} for n in range(9)]
    lines = shown(
        found(instances=rows, events=events, problem="the coordinator is silent " * 9), width, height
    )
    assert lines[0].startswith("demo: rollout")
    if height >= 12:
        assert any(line.startswith(("+ ", "31 instances", "spot-with")) for line in lines)
        assert sum(line.startswith("spot-with") for line in lines) in (30, *range(height - 9))


def test_narrow_terminals_lose_columns_not_rows() -> None:
    header = next(line for line in shown(found(), width=60) if line.startswith("instance"))
    assert header.split()[:3] == ["instance", "state", "version"] or "machine" not in header
    assert "in flight" in header


def test_a_machine_is_a_column_only_where_it_is_more_than_its_instances_name() -> None:
    rows = fleet_rows(read_status({"instances": instances(2)}))
    assert "machine" not in fleet_table(rows, 9, 120)[0].text
    rows[0]["machine"] = "node-7"
    assert "machine" in fleet_table(rows, 9, 120)[0].text


def test_ascii_is_all_that_a_plain_terminal_gets() -> None:
    lines = shown(found(phase="x" * 300), glyphs=ASCII)
    assert all(line.isascii() for line in lines)
    assert any(
        line.endswith("...") for line in shown(found(events=[{"at": 1, "text": "y" * 99}]), glyphs=ASCII)
    )
    assert any("#" in line and "." in line for line in lines), "bars are drawn in ASCII"


def test_machines_on_their_way_are_rows_too() -> None:
    machines = [
        {"id": "spot-1", "pool": "spot", "state": "intended"},
        {"id": "spot-2", "pool": "spot", "state": "running", "billed_s": 40, "joined": False},
        {"id": "spot-3", "pool": "spot", "state": "running", "billed_s": 70, "joined": True},
        {"id": "spot-4", "pool": "spot", "state": "gone", "joined": True},
    ]
    text = "\n".join(shown(found(machines=machines, instances=[])))
    assert [line.split()[2] for line in text.splitlines() if line.startswith("spot-")] == [
        "launching",
        "booting",
        "no",
    ]


def test_before_the_first_step_the_preparation_is_shown_with_its_progress() -> None:
    preparing = {"doing": "fetching the model a/b", "done": 1.5e9, "of": 6e9, "unit": "B", "since": 1060.0}
    status = found(
        state="provisioning",
        phase="fetching the model a/b",
        preparing=preparing,
        step=0,
        step_responses=None,
        reward_mean=None,
        tokens={},
        responses={},
    )
    lines = shown(status)
    at = next(i for i, line in enumerate(lines) if line.startswith("phase"))
    assert lines[at] == "phase    fetching the model a/b, 30 s so far"
    assert lines[at + 1].split("  ")[-1] == "1.5 GB of 6.0 GB"
    assert not any(line.startswith(("reward", "rollout")) for line in lines)


def test_silence_is_said_calmly_and_the_last_known_stays() -> None:
    lines = shown(found(problem="the coordinator of demo is not answering: connection refused"))
    assert "the coordinator does not answer and is being restarted; status 12 s old" in lines
    assert lines[0].startswith("demo: rollout")
    styles = {line.style for line in live_lines(found(problem="silence"), Size(80, 24), UNICODE)}
    assert styles <= {"", "title", "header", "good", "warn", "dim"}


def test_an_ended_run_needs_no_detaching_and_costs_nothing_more() -> None:
    text = "\n".join(shown(found(has_ended=True, state="done")))
    assert "Ctrl-C" not in text
    assert "$1.50 of $10.00 in all" in text
    stopped = {**STATUS["cost"], "rate_usd_per_hour": 0.0}
    text = "\n".join(shown(found(has_ended=True, state="done", cost=stopped)))
    assert "$36.20 on demand (computed): 40% saved" in text


def test_a_status_of_nothing_but_a_name_can_be_shown() -> None:
    status = RunStatus({"run": "r", "state": "provisioning"}, is_live=False, has_ended=False, age_s=0.0)
    assert status_lines(status, ASCII)[:2] == ["r: provisioning", "step     0/?"]
    nothing = dict.fromkeys(STATUS)
    assert status_lines(RunStatus({**nothing, "run": "r"}, True, False, 0.0), ASCII)[0] == "r: unknown"


def test_a_warning_about_the_journal_is_not_overlooked() -> None:
    assert any("disk full" in x for x in shown(found(journal_problem="disk full")))


def test_sparklines_span_their_own_range() -> None:
    assert UNICODE.sparkline([0.0, 0.5, 1.0, None]) == "▁▅█"
    assert UNICODE.sparkline([0.3, 0.3]) == "▁▁"
    assert UNICODE.sparkline([]) == ""
    assert len(UNICODE.sparkline(list(range(100)))) == 40
    assert ASCII.sparkline([0, 1]) == "_@"


def test_bars_are_full_only_at_the_end() -> None:
    assert ASCII.bar(0.999, 10) == "#########."
    assert ASCII.bar(1.0, 10) == "##########"
    assert ASCII.bar(7.0, 4) == "####"
    assert ASCII.bar(-1.0, 4) == "...."


def test_cutting_counts_columns_not_letters() -> None:
    assert UNICODE.cut("漢字漢字", 5) == "漢字…"
    assert UNICODE.cut("a\nb", 5) == "a b"
    assert ASCII.cut("abcdefgh", 6) == "abc..."


def test_a_row_shows_how_far_the_next_version_is() -> None:
    pulling = {"version": 12, "done_bytes": 430, "total_bytes": 1000}
    rows = fleet_rows(read_status({"instances": [{"id": "a", "policy_version": 11, "pulling": pulling}]}))
    assert rows[0]["version"] == "11, 12 at 43%"
    for nothing in (None, {**pulling, "total_bytes": 0}):
        rows = fleet_rows(read_status({"instances": [{"id": "a", "policy_version": 11, "pulling": nothing}]}))
        assert rows[0]["version"] == "11"


def test_status_says_what_starts_and_weights_took() -> None:
    instance = STATUS["instances"][0]
    started = {"start_s": {"imports": 12.04, "load": 2.0, "first_token": 0.31}, "pull_s": 0.2, "load_s": 0.05}
    other = {"start_s": {"imports": 14.04, "load": 4.0, "first_token": 0.33}, "load_s": 0.07, "pause_s": 0.02}
    lines = status_lines(found(instances=[instance, {**instance, **started}, {**instance, **other}]), ASCII)
    assert "engine start imports 13.0 s, load 3.0 s, first token 320 ms (median of 2)" in lines
    assert "new weights  pull 100 ms, load 60 ms, pause 10 ms (median of 2)" in lines
    assert not any(line.startswith(("engine start", "new weights")) for line in status_lines(found(), ASCII))


def test_status_says_how_machines_came_into_service() -> None:
    served = {"request": 3.2, "boot": 61.0, "install": 15.1, "dial_in": 1.9, "wait": 0.0, "weights": 0.1}
    served |= {"engine": 9.7, "first_token": 0.4}
    machines = [
        {"id": "reserved-0", "pool": "reserved", "state": "running", "boot_s": {}},
        {"id": "spot-0", "pool": "spot", "state": "running", "boot_s": served},
        {"id": "spot-1", "pool": "spot", "state": "running", "boot_s": {"request": 2.5}},
    ]
    lines = status_lines(found(machines=machines), ASCII)
    head = next(i for i, line in enumerate(lines) if line.startswith("boot (s)"))
    assert lines[head].split()[-1] == "all"
    assert re.sub(" +", " ", lines[head + 1]) == "spot-0 3.2 61.0 15.1 1.9 0.0 0.1 9.7 0.4 91.4"
    assert lines[head + 2].split() == ["spot-1", "2.5", *"--------"]
    many = [{**machines[1], "id": f"spot-{i}"} for i in range(11)]
    lines = status_lines(found(machines=many), ASCII)
    assert "+ 3 earlier machines" in lines
    assert "+ 1 earlier machine" in status_lines(found(machines=many[:9]), ASCII)
    assert any(line.startswith("spot-10 ") for line in lines)


def test_an_ended_run_has_spent_what_its_books_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator was killed, so that its last status is older than the bill that `down` closed."""
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    run = RunFolder.named("cut")
    run.path.mkdir(parents=True)
    write_json(run.job_json, {"name": "cut"})
    write_json(run.status, {"run": "cut", "state": "rollout", "cost": {"spent_usd": 0.33}})
    with closing(Ledger(run.ledger)) as ledger:
        ledger.intend(MachineRecord("spot-1", "local", "here", "cpu", 3_600_000_000, "job", 1000.0))
        ledger.launched("spot-1", 1000.0)
        ledger.ended("spot-1", 1002.0)
    write_json(run.outcome, {"state": "stopped"})
    assert run_status(run).data["cost"]["spent_usd"] == 2.0
    run.ledger.unlink()
    assert run_status(run).data["cost"]["spent_usd"] == 0.33
