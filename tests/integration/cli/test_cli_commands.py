"""Commands as a user types them, on run folders as they are found in life: stale, dead, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlboost_cli.main import app
from rlboost_cli.runs.supervision import bring_up
from rlboost_cli.views.live import follow, outcome_of
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.processes import run_environment, tagged
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

pytestmark = pytest.mark.integration

HEAVY = (
    *("torch", "numpy", "fastapi", "uvicorn", "pydantic"),
    *("msgspec", "psutil", "rich", "cryptography", "sqlite3"),
)
JOB = """\
name: demo
model: {init: tiny}
data: {reasoning_gym: [basic_arithmetic]}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    (tmp_path / "job.yaml").write_text(
        "name: demo\nmodel: {init: tiny}\ndata: {reasoning_gym: [basic_arithmetic]}\n"
    )
    fields = {"name": "demo", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["basic_arithmetic"]}}
    return prepare_run(tmp_path / "job.yaml", Job.model_validate(fields)).run


@pytest.fixture
def sleeper(run: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=run_environment(run.path)
    )
    yield process
    process.kill()
    process.wait()


def rlboost(*arguments: str, code: int = 0) -> Result:
    """Run the command in this process: starting Python for each would take longer than all the rest."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


def spend(run: RunFolder, machine: str = "head") -> None:
    books = Ledger(run.ledger)
    books.intend(
        MachineRecord(
            machine,
            pool="reserved",
            provider="local",
            zone="here",
            accelerator="cpu",
            price_micro_usd_per_hour=3_600_000_000,
            price_source="job file",
            intended_at=time.time() - 100,
        )
    )
    books.launched(machine, time.time() - 10)
    books.close()


def test_help_loads_nothing_heavy_and_costs_little_more_than_typer() -> None:
    code = (
        "import sys; sys.argv = ['rlboost', '--help']\n"
        "from rlboost_cli.main import run\n"
        "try: run()\n"
        f"finally: print('loaded:', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )

    def cpu_s(code: str) -> tuple[float, str]:
        before = os.times()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=30
        )
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return used, done.stderr

    ours = [cpu_s(code) for _ in range(4)]
    assert all("loaded: []" in err for _, err in ours)
    least_typer = min(cpu_s("import typer")[0] for _ in range(4))
    assert min(used for used, _ in ours) < 2.5 * least_typer


def test_check_prints_the_resolved_job(run: RunFolder, tmp_path: Path) -> None:
    resolved = json.loads(rlboost("check", str(tmp_path / "job.yaml"), "--json").stdout)
    assert (resolved["name"], resolved["algorithm"]["steps"]) == ("demo", 200)
    assert "group_size: 8" in rlboost("check", str(tmp_path / "job.yaml")).stdout


def test_check_names_each_mistake_on_a_line(tmp_path: Path) -> None:
    job = tmp_path / "bad.yaml"
    job.write_text(
        "name: demo\nmodel: {init: tiny}\ndata: {reasoning_gym: [basic_arithmetic]}\nbuget: {}\nreward: 3\n"
    )
    done = rlboost("check", str(job), code=2)
    lines = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["buget", "reward"]
    assert all(line.startswith(f"{job}:") for line in lines)
    assert done.stdout == ""


def test_status_of_a_dead_coordinator_says_so_and_how_old_it_is(run: RunFolder) -> None:
    write_json(run.status, {"run": "demo", "state": "rollout", "step": 3, "steps": 9})
    os.utime(run.status, (time.time() - 600, time.time() - 600))
    done = rlboost("status", "demo")
    assert "demo: rollout" in done.stdout
    assert "not answering" in done.stderr
    assert "10 min old" in done.stderr
    assert "rlboost launch demo" in done.stderr
    data = json.loads(rlboost("status", "demo", "--json").stdout)
    assert (data["step"], data["live"]) == (3, False)
    assert 590 < data["age_s"] < 700


def test_a_status_has_its_keys_before_there_is_anything_to_tell(run: RunFolder) -> None:
    data = json.loads(rlboost("status", "demo", "--json").stdout)
    assert (data["state"], data["step"], data["steps"]) == ("provisioning", 0, 200)
    assert (data["tokens"]["trained"], data["responses"]["in_flight"], data["machines"]) == (0, 0, [])
    assert data["cost"] == {"spent_usd": 0.0, "rate_usd_per_hour": 0.0, "budget_usd": None}


def test_the_list_of_runs_shows_what_does_not_run(run: RunFolder) -> None:
    write_json(run.status, {"run": "demo", "state": "rollout", "step": 3, "steps": 9, "reward_mean": 0.5})
    (row,) = json.loads(rlboost("status", "--json").stdout)["runs"]
    assert (row["run"], row["state"], row["running"], row["step"], row["spent_usd"]) == (
        "demo",
        "rollout",
        False,
        3,
        None,
    )
    assert "rollout (not running)" in rlboost("status").stdout


@pytest.mark.parametrize("damage", ["job.json", "ledger.sqlite"])
def test_a_damaged_run_hides_no_other(run: RunFolder, tmp_path: Path, damage: str) -> None:
    other = prepare_run(tmp_path / "job.yaml", load_job(tmp_path / "job.yaml")).run
    (other.path / damage).write_text("{" if damage.endswith("json") else "no ledger")
    rows = {row["run"]: row["state"] for row in json.loads(rlboost("status", "--json").stdout)["runs"]}
    assert rows == {run.name: "provisioning", other.name: "damaged"}
    assert "damaged" in rlboost("status").stdout


@pytest.mark.parametrize("damage", ["status.json", "outcome.json"])
def test_a_run_whose_state_is_damaged_is_open(run: RunFolder, damage: str) -> None:
    (run.path / damage).write_text("{")
    [row] = json.loads(rlboost("status", "--json").stdout)["runs"]
    assert row["state"] == "provisioning", "its coordinator writes the file anew"
    assert (run.path / f"{damage}.damaged").exists()


def test_a_run_that_is_done_is_not_resumed_for_nothing(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "done", "exit_code": 0})
    write_json(run.status, {"run": "demo", "state": "done", "step": 200, "steps": 200})
    for words in (["demo"], ["demo", "--resume"]):
        done = rlboost("launch", *words, "--yes", code=0)
        assert "demo is done: all of its 200 steps are trained" in done.stderr
        assert "raise algorithm.steps in its job file" in done.stderr
        assert "demo is done: 200 of 200 steps" in done.stdout
        assert run.outcome.exists()


def test_an_argument_that_no_file_can_be_called_is_no_run(run: RunFolder) -> None:
    assert "no run aaa" in rlboost("launch", "a" * 300, code=3).stderr


def test_cost_works_before_during_and_in_each_format(run: RunFolder) -> None:
    assert json.loads(rlboost("cost", "demo", "--json").stdout)["total_usd"] == 0
    spend(run)
    report = json.loads(rlboost("cost", "demo", "--json").stdout)
    assert report["total_usd"] == report["machines"][0]["cost_usd"] >= 10
    lines = rlboost("cost", "demo", "--csv").stdout.splitlines()
    assert lines[0].startswith("kind,id,pool,")
    assert [line.split(",")[:2] for line in lines[1:]] == [
        ["machine", "head"],
        ["other", "egress"],
        ["other", "storage"],
        ["outside", "before"],
        ["outside", "restarts"],
        ["outside", "after"],
    ]
    assert "so far" in rlboost("cost", "demo").stdout
    assert rlboost("cost", "demo", "--csv", "--json", code=2).stdout == ""


def test_logs_of_processes_and_of_machines_that_are_gone(run: RunFolder) -> None:
    machine = run.logs / "machines" / "spot-1"
    machine.mkdir(parents=True)
    (run.logs / "coordinator.log").write_text("one\ntwo\nthree\n")
    (machine / "agent-0.log").write_text("first agent\n")
    (machine / "agent-1.log").write_text("second agent\n")

    def raw(*arguments: str) -> str:
        return rlboost("logs", "demo", "--json", *arguments).stdout

    assert raw() == "one\ntwo\nthree\n"
    assert raw("coordinator", "-n", "1") == "three\n"
    assert raw("spot-1") == "first agent\nsecond agent\n"
    assert raw("spot-1/1") == "second agent\n"
    assert rlboost("logs", "demo", "spot-1/1").stdout == "         spot-1/agent-1  second agent\n"
    assert "coordinator, spot-1" in rlboost("logs", "demo", "spot-7", code=3).stderr


def test_samples_count_steps_from_1_as_all_commands_do(run: RunFolder) -> None:
    sample = {"step": 24.0, "prompt": "p", "response": "r", "reward": 1.0, "tokens": 3.0}
    sample["finish_reason"] = "stop"
    run.samples.write_text(json.dumps(sample) + "\n")
    printed = rlboost("samples", "demo", "--json").stdout
    assert json.loads(printed)["samples"][0]["step"] == json.loads(printed)["step"] == 25
    assert ".0" not in printed.replace('"reward": 1.0', "")
    assert "step 25  prompt" in rlboost("samples", "demo").stdout


def test_following_logs_ends_with_the_run(run: RunFolder) -> None:
    (run.logs / "coordinator.log").write_text("one\n")
    write_json(run.outcome, {"state": "done"})
    assert rlboost("logs", "demo", "-f", "--json").stdout == "one\n"


def test_down_ends_what_a_dead_coordinator_left_and_closes_the_books(
    run: RunFolder, sleeper: subprocess.Popen[bytes]
) -> None:
    spend(run)
    done = rlboost("down", "demo")
    assert tagged(run.path) == []
    sleeper.wait(5)
    assert "nothing of demo is still running" in done.stderr
    assert "in total" in done.stdout
    assert read_json(run.outcome)["state"] == "stopped"
    first = json.loads(rlboost("cost", "demo", "--json").stdout)
    assert (first["machines"][0]["state"], first["rate_usd_per_hour"]) == ("gone", 0)
    rlboost("down", "demo", "--yes")  # again: changes nothing
    assert json.loads(rlboost("cost", "demo", "--json").stdout)["total_usd"] == first["total_usd"]


def test_a_supervisor_that_cannot_start_is_explained_by_its_log(run: RunFolder) -> None:
    run.job_json.write_text("{}")
    began = time.monotonic()
    with pytest.raises(RuntimeFault) as error:
        bring_up(run, lambda words: None)
    assert "supervisor of demo ended with code" in error.value.problem
    assert "ValidationError" in error.value.problem  # the log's last lines
    assert "supervisor.log" in error.value.remedy
    assert time.monotonic() - began < 50
    assert tagged(run.path) == []


def test_a_run_that_nobody_runs_is_not_watched_forever(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost_cli.views.live.ABANDONED_S", 0.0)
    with pytest.raises(RuntimeFault, match="its processes are gone"):
        list(follow(run, every_s=0.01))


def test_watching_ends_with_the_run(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "failed", "problem": "p", "remedy": "r", "exit_code": 4})
    (last,) = follow(run)
    assert last.has_ended
    assert last.data["state"] == "failed"
    assert outcome_of(run).exit_code == 4


def test_an_ended_run_is_launched_only_on_purpose(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "stopped", "exit_code": 0})
    done = rlboost("launch", "demo", code=2)
    assert "has ended: stopped" in done.stderr
    assert "--resume" in done.stderr
    assert "has ended" in rlboost("preempt", "demo", "spot-1", code=3).stderr


def test_preempt_without_a_coordinator_says_what_to_type(run: RunFolder) -> None:
    assert "rlboost launch demo" in rlboost("preempt", "demo", "spot-1", code=1).stderr


@pytest.mark.parametrize("command", [("launch",), ("up",), ("plan", "--probe")])
def test_what_costs_money_is_shown_and_asked_about_before_anything_is_made(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "x")
    job = str(tmp_path / "job.yaml")
    rlboost("init", job, "--template", "aws")
    Path(job).write_text(Path(job).read_text().replace("my-bucket", "acme-runs"))
    said = rlboost(*command, job, code=2)
    assert "per hour each" in said.stderr
    assert "there is no terminal to confirm it on" in said.stderr
    assert "add --yes" in said.stderr
    assert not list((tmp_path / "home").glob("runs/*"))


def test_a_run_without_logs_says_so(run: RunFolder) -> None:
    assert "run demo has no logs yet" in rlboost("logs", "demo").stderr
    run.logs.mkdir(exist_ok=True)
    (run.logs / "reward.log").touch()
    assert "reward of run demo has logged nothing" in rlboost("logs", "demo", "reward").stderr


def test_prices_of_now_of_a_cloud_that_is_not_asked_are_the_offline_ones(run: RunFolder) -> None:
    said = rlboost("prices", "--live", "--infra", "gcp")
    assert "note: offline: the table shipped with rlboost" in said.stderr
    assert "has no price of any GPU at nosuch" in rlboost("prices", "--infra", "nosuch", code=2).stderr
