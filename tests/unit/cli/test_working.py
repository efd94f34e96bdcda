from __future__ import annotations

import io
import threading
import time

import pytest

from rlboost_cli.terminal import working
from rlboost_cli.terminal.working import Working


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_TICK_S", 0.01), ("SHOWN_AFTER_S", 0.05), ("PLAIN_AFTER_S", 0.05)):
        monkeypatch.setattr(working, name, seconds)
    monkeypatch.setattr(working, "PLAIN_EVERY_S", 0.1)


def wait_for(out: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.005)


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "SHOWN_AFTER_S", 60.0)
    monkeypatch.setattr(working, "PLAIN_AFTER_S", 60.0)
    for can_redraw in (True, False):
        out = io.StringIO()
        with Working(out, "fetching", can_redraw=can_redraw):
            time.sleep(0.05)
        assert out.getvalue() == ""


def test_a_terminal_gets_one_line_that_is_gone_at_the_end() -> None:
    out = io.StringIO()
    with Working(out, "fetching", can_redraw=True) as say:
        wait_for(out, "fetching, 0 s")
        say("waiting for a machine")
        wait_for(out, "waiting for a machine")
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_line_never_wraps() -> None:
    out = io.StringIO()
    with Working(out, "x" * 200, can_redraw=True, width=40):
        wait_for(out, "x")
    assert all(len(part.replace("\x1b[K", "")) < 40 for part in out.getvalue().split("\r"))


def test_a_file_gets_plain_lines_now_and_then() -> None:
    out = io.StringIO()
    with Working(out, "fetching", can_redraw=False):
        wait_for(out, "so far")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["fetching", "fetching, 0 s so far"]
    assert "\x1b" not in out.getvalue()


def test_the_thread_ends_with_the_block_also_by_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), Working(io.StringIO(), "fetching", can_redraw=True):
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name == "working"]


def test_other_lines_are_printed_on_a_line_of_their_own() -> None:
    out = io.StringIO()
    with Working(out, "fetching", can_redraw=True) as say:
        wait_for(out, "fetching")
        with say.aside():
            before = out.getvalue()
            time.sleep(0.05)
            assert out.getvalue() == before, "nothing is painted meanwhile"
        assert before.endswith("\r\x1b[K")
