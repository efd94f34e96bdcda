"""Text that suits the stream it is written to."""

from __future__ import annotations

import io

import pytest

from rlboost_cli.terminal.screen import between_words

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
