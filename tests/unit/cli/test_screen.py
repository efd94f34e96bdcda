"""Text that suits the stream it is written to."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_cli.terminal.screen import between_words, has_style
from rlboost_cli.views import screens
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import RunFolder, write_json

PATH = "/home/somebody/.rlboost/runs/a-run-with-a-long-name/logs/trainer.log"
TEXT = f"error: the trainer was killed 4 times in a row; its log is {PATH} and says why\n\nhint: look --there"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_whole_words_on_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = between_words(TEXT, Terminal()).split("\n")
    assert all(len(line) < 60 or PATH in line for line in lines)
    assert any(line.strip() == PATH for line in lines)
    assert lines[-2:] == ["", "hint: look --there"]
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())


def test_a_file_gets_lines_that_can_be_searched() -> None:
    assert between_words(TEXT, io.StringIO()) == TEXT


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with colours, and a home with one open run."""
    for name, value in {
        "TERM": "xterm",
        "COLUMNS": "60",
        "LINES": "10",
        "RLBOOST_HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = RunFolder(tmp_path / "runs" / "demo")
    run.path.mkdir(parents=True)
    write_json(run.job_json, {"algorithm": {"steps": 9}})
    monkeypatch.setattr(screens, "WATCH_ALL_EVERY_S", 0.0)
    return Terminal()


def watched(terminal: Terminal) -> str:
    """Return what `status --watch` painted of a run that trained a step between two looks."""
    looks, status = 0, RunFolder.named("demo").status
    write_json(status, {"run": "demo", "state": "rollout", "step": 3, "reward_mean": 0.25})

    def look(say: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            write_json(status, {"run": "demo", "state": "training", "step": 4, "reward_mean": 0.5})
        if looks == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(terminal):
        screens.watch_all(look)
    return terminal.getvalue()


def test_the_list_of_all_runs_is_painted_in_place(terminal: Terminal) -> None:
    painted = watched(terminal)
    first, second = painted.split("demo", 1)[1].split("\x1b[", 1)
    assert "rollout" in first
    assert "3/9" in first
    assert "training" in second
    assert "4/9" in second
    assert painted.count("demo") == 1, "only what changed is sent again"


def test_watching_all_runs_needs_a_terminal() -> None:
    refused = pytest.raises(ConfigError, match="needs a terminal")
    with refused as refusal, contextlib.redirect_stdout(io.StringIO()):
        screens.watch_all(lambda say: None)
    assert "name a run" in refusal.value.remedy


def test_a_list_longer_than_the_terminal_shows_the_newest_runs(terminal: Terminal, tmp_path: Path) -> None:
    for number in range(20):
        run = RunFolder(tmp_path / "runs" / f"run-{number:02}")
        run.path.mkdir(parents=True)
        write_json(run.job_json, {})
    painted = watched(terminal)
    assert "run-19" in painted
    assert "run-01" not in painted


def colours(text: str) -> list[str]:
    return re.findall(r"\x1b\[[0-9;]*m", text)


def test_colour_is_left_out_by_no_color_and_by_the_option(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_style(terminal)
    assert colours(watched(terminal)), "the header is bold"
    monkeypatch.setenv("NO_COLOR", "")  # the standard: set and not empty
    assert has_style(terminal)
    assert CliRunner().invoke(app, ["--no-color", "status"]).exit_code == 0
    assert not has_style(terminal)
    terminal.seek(0)
    terminal.truncate()
    painted = watched(terminal)
    assert not colours(painted)
    assert "\x1b[" in painted, "it is still painted in place"
