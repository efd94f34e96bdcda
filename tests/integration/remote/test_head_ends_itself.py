"""The program that ends a bought head, as it runs there: on a folder here, with a harmless shutdown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.remote import watch

pytestmark = pytest.mark.integration
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("ended the fleet", flush=True), sys.exit()))
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def watching(folder: Path, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Run the program with a `shutdown` that only leaves a file."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "shutdown").write_text(f"#!/bin/sh\necho $* > {folder}/off\n")
    (tools / "shutdown").chmod(0o755)
    told = {"folder": str(folder), "cloud": "aws", "idle_s": 3.0, "done": "down", "failed": "down"}
    told |= {"ends_itself": True, "max_s": None}
    (folder / "watch.json").write_text(json.dumps({**told, **settings}))
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    program = [sys.executable, watch.__file__, str(folder / "watch.json")]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def supervisor_of(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that the run's files call its supervisor."""
    environment = {**os.environ, "RLBOOST_RUN": str(run)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (run / "processes").mkdir(parents=True)
            (run / "job.json").write_text("{}")
            (run / "processes/supervisor.json").write_text(json.dumps({"pid": process.pid}))
            yield process
        finally:
            process.kill()


def is_off_within(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (folder / "off").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_machine_on_which_nothing_ever_happened_ends(tmp_path: Path) -> None:
    with watching(tmp_path):
        assert is_off_within(tmp_path, 60)
    assert (tmp_path / "off").read_text() == "-h now\n"


def test_a_run_that_is_only_up_ends_its_machines_first(tmp_path: Path) -> None:
    run = tmp_path / "heads/me/runs/far"
    with supervisor_of(run) as supervisor, watching(tmp_path):
        assert is_off_within(tmp_path, 60)
        assert supervisor.wait(timeout=1) == 0, "it was given the time to end"
        assert supervisor.stdout is not None
        assert supervisor.stdout.read() == "ended the fleet\n"


def test_a_run_that_goes_on_keeps_the_machine_until_its_runtime_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "heads/me/runs/far"
    with supervisor_of(run) as supervisor:
        (run / "wanted.json").write_text('{"train": true}')
        with watching(tmp_path, idle_s=1.0):
            assert not is_off_within(tmp_path, 8)
            supervisor.kill()
            supervisor.wait()
            assert is_off_within(tmp_path, 60)


def test_where_a_shutdown_ends_nothing_the_machine_stays_and_only_its_run_is_ended(tmp_path: Path) -> None:
    run = tmp_path / "heads/me/runs/far"
    with supervisor_of(run) as supervisor, watching(tmp_path, ends_itself=False, idle_s=1.0):
        assert supervisor.wait(timeout=60) == 0
        assert not is_off_within(tmp_path, 5), "it would cost on, and nobody could fetch from it"
