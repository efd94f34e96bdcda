"""`rlboost rm`: ended runs go, whole; what runs or may cost money stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_cli.runs import removal
from rlboost_runtime.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    return tmp_path


def made(name: str, *, ended: bool) -> RunFolder:
    run = RunFolder.named(name)
    run.path.mkdir(parents=True)
    run.job_json.write_text("{}")
    if ended:
        run.outcome.write_text('{"state": "done"}')
    return run


def test_ended_runs_are_deleted_and_an_open_one_keeps_all() -> None:
    done, running = made("done", ended=True), made("running", ended=False)
    refused = CliRunner().invoke(app, ["rm", "done", "running", "--yes"])
    assert (refused.exit_code, done.path.exists()) == (2, True)
    assert "running has not ended" in refused.stderr
    assert CliRunner().invoke(app, ["rm", "done", "--yes"]).exit_code == 0
    assert not done.path.exists()
    assert running.path.exists()


def test_without_a_terminal_it_wants_yes() -> None:
    run = made("done", ended=True)
    refused = CliRunner().invoke(app, ["rm", "done"])
    assert (refused.exit_code, run.path.exists()) == (2, True)
    assert "--yes" in refused.stderr


def test_a_run_with_processes_or_machines_left_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("done", ended=True)
    monkeypatch.setattr(removal, "tagged", lambda path: ["a process"])
    assert CliRunner().invoke(app, ["rm", "done", "--yes"]).exit_code == 2
    assert run.path.exists()


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    made("quickstart", ended=True)
    said = CliRunner().invoke(app, ["rm", "quickstrat", "--yes"])
    assert said.exit_code == 3
    assert "did you mean quickstart?" in said.stderr
