"""Bringing a run up: a supervisor that only ends a run's former life is followed by a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlboost_cli.runs import supervision
from rlboost_runtime.run.folder import RunFolder


def test_a_run_that_is_resumed_while_its_last_supervisor_ends_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "again")
    run.processes.mkdir(parents=True)
    looks = iter([True, True, True])
    started: list[subprocess.Popen[bytes]] = []

    def start(run: RunFolder) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    def status(run: RunFolder) -> dict[str, str]:
        if not started:
            raise supervision.client.NotAnswering("nobody answers", "wait")
        return {"state": "provisioning"}

    monkeypatch.setattr(supervision, "START_DEADLINE_S", 5.0)
    monkeypatch.setattr(supervision, "is_supervised", lambda run: next(looks, False))
    monkeypatch.setattr(supervision, "_start", start)
    monkeypatch.setattr(supervision.client, "get_status", status)
    assert supervision.bring_up(run, lambda words: None) == {"state": "provisioning"}
    (child,) = started
    child.communicate(b"\n", timeout=10)
