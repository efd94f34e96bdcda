from __future__ import annotations

import inspect
import json
import os
import typing
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlboost_cli.commands.start import launch
from rlboost_cli.main import app
from rlboost_cli.terminal.errors import ERRORS_VARIABLE, explained, read_error, render
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    NotFound,
    ProviderError,
    RLBoostError,
    RuntimeFault,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run_raising(error: BaseException) -> int:
    @explained
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    return ended.value.exit_code


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RuntimeFault, 1),
        (ConfigError, 2),
        (NotFound, 3),
        (NoCapacity, 4),
        (CredentialsRejected, 6),
        (ProviderError, 7),
    ],
)
def test_each_failure_has_its_exit_code_problem_and_hint(kind, code: int, capsys) -> None:
    assert run_raising(kind("it broke", "mend it")) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: it broke\n\nhint: mend it\n")


def test_an_error_is_one_line_of_json_where_that_is_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setenv(ERRORS_VARIABLE, "json")
    assert run_raising(NoCapacity('nothing "there"\nat all', "wait")) == 4
    assert ERRORS_VARIABLE not in os.environ, "what the command starts does not inherit it"
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert '"class": "NoCapacity"' in printed
    error = read_error(f"note: something\n{printed}\nlast words")
    assert error is not None
    assert (error.problem, error.remedy, error.exit_code) == ('nothing "there"\nat all', "wait", 4)
    assert read_error("error: in words") is None


def test_a_command_with_json_fails_with_json(tmp_path: Path) -> None:
    def error_of(*typed: str) -> RLBoostError:
        result = CliRunner().invoke(app, [*typed, "--json"], prog_name="rlboost")
        error = read_error(result.stderr)
        assert result.stdout == ""
        assert error is not None, result.stderr
        assert error.exit_code == result.exit_code
        return error

    assert "no-such-run" in error_of("status", "no-such-run").problem
    assert error_of("status", "--runn").remedy == "rlboost status --help"
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nmodle: {init: tiny}\nsteps: x\n")
    result = CliRunner().invoke(app, ["check", str(job), "--json"], prog_name="rlboost")
    assert result.exit_code == 2
    assert any("modle" in line for line in json.loads(result.stderr)["error"]["lines"])


def test_ctrl_c_before_there_is_a_run_is_130(capsys) -> None:
    assert run_raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_unexpected_is_one_line_and_a_file_never_a_traceback(capsys, own_home: Path) -> None:
    assert run_raising(ZeroDivisionError("division by zero\nand more")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: division by zero\n")
    assert "Traceback" not in err
    (written,) = (own_home / "tracebacks").iterdir()
    assert str(written) in err
    assert "Traceback" in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600


def test_an_exit_passes_unchanged() -> None:
    assert run_raising(typer.Exit(5)) == 5


def test_several_mistakes_are_a_line_each() -> None:
    class Several(RLBoostError):
        lines: typing.ClassVar = ["job.yaml:1: a: wrong; right", "job.yaml:2: b: wrong; right"]

    assert render(Several("", "")) == "job.yaml:1: a: wrong; right\njob.yaml:2: b: wrong; right"


def test_wrapping_keeps_what_typer_reads() -> None:
    assert inspect.signature(explained(launch)) == inspect.signature(launch)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "nobody"], 3),
        (["cost", "nobody"], 3),
        (["logs", "nobody"], 3),
        (["down", "nobody"], 3),
        (["preempt", "nobody", "spot-1"], 3),
        (["launch", "nobody"], 3),
        (["check", "missing.yaml"], 2),
        (["launch", "missing.yaml"], 2),
        (["up", "missing.yaml"], 2),
        (["status", "--watch"], 2),
        (["status", "--no-such-option"], 2),
        (["no-such-command"], 2),
    ],
)
def test_exit_codes_of_commands_that_cannot_work(arguments: list[str], code: int) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr != ""


def test_status_without_runs_is_empty_and_fine() -> None:
    assert CliRunner().invoke(app, ["status", "--json"]).stdout.split() == ["{", '"runs":', "[]", "}"]
    assert CliRunner().invoke(app, ["status"]).exit_code == 0


@pytest.mark.parametrize("command", ["check", "up", "launch", "status", "logs", "cost", "preempt", "down"])
def test_help_is_a_sentence_and_an_example(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert f"Example: rlboost {command}" in text
    first = text.splitlines()[2].strip()
    assert first[0].isupper()
    assert not first.endswith(".")


def test_the_version_is_that_of_the_installed_distribution() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"rlboost {version('rlboost')}\n")
