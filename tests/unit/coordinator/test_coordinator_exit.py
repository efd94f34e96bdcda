"""How the coordinator's process ends: what it says, and what the supervisor makes of its exit status."""

from __future__ import annotations

import errno
import json
import logging
import sqlite3

import pytest

from rlboost_runtime.coordinator import __main__ as coordinator
from rlboost_runtime.errors import ConfigError, RuntimeFault


@pytest.fixture
def exit_status(tmp_path, monkeypatch):
    """Let a coordinator's service end with an error; return its exit status and the last line of its log."""
    said: list[dict] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(getattr(record, "fields", {}))

    keep = Keep()
    monkeypatch.setattr(coordinator, "setup", lambda role: None)
    monkeypatch.setattr("sys.argv", ["coordinator", str(tmp_path)])
    coordinator.log.addHandler(keep)

    def end_with(error: Exception) -> tuple[int, dict]:
        async def serve(run: object) -> None:
            raise error

        monkeypatch.setattr(coordinator, "_serve", serve)
        return coordinator.main(), said[-1]

    yield end_with
    coordinator.log.removeHandler(keep)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EIO, "Input/output error"),
        sqlite3.OperationalError("database or disk is full"),
    ],
    ids=lambda error: str(error),
)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_disk_that_refuses_is_to_be_tried_again(exit_status, error, depth):
    for _ in range(depth):
        error = ExceptionGroup("unhandled errors in a TaskGroup", [error])
    status, said = exit_status(error)
    assert status == 75
    assert "the disk refuses" in said["problem"]
    assert json.dumps(said)


@pytest.mark.parametrize(
    ("error", "status", "exit_code"), [(ConfigError("a", "b"), 78, 2), (RuntimeFault("a", "b"), 1, 1)]
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_can_be_explained_is_one_line_however_deep_it_lies(exit_status, error, status, exit_code, depth):
    for _ in range(depth):
        error = ExceptionGroup("unhandled errors in a TaskGroup", [error])
    assert exit_status(error) == (status, {"problem": "a", "remedy": "b", "exit_code": exit_code})


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EADDRINUSE, "Address already in use"),
        ExceptionGroup("two", [RuntimeFault("a", "b"), RuntimeFault("c", "d")]),
        ExceptionGroup("a bug", [ValueError("x")]),
        ValueError("x"),
    ],
    ids=repr,
)
def test_what_nobody_can_explain_keeps_its_traceback(exit_status, error):
    with pytest.raises(type(error)):
        exit_status(error)
