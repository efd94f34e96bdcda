"""The live view in a real terminal: a shell on a pseudo-terminal, the real program, a screen that is read.

The run is a folder whose status the test writes, as one that is left while its coordinator is being started
again: the view is the same, and nothing has to be trained.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.processes import process_start, run_environment
from rlboost_runtime.run.folder import RunFolder, write_json

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[3]
PYTHON_PATH = os.pathsep.join(str(ROOT / part) for part in ("", "runtime", "providers", "templates"))
LIVE = f"{sys.executable} -m rlboost_cli status demo --watch"


def load_capture() -> Any:
    spec = importlib.util.spec_from_file_location("docs_capture", ROOT / "docs" / "capture_screens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CAPTURE = load_capture()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run with a supervisor: a process that sleeps, known by its tag."""
    run = RunFolder(tmp_path / "runs" / "demo")
    run.processes.mkdir(parents=True)
    write_json(run.job_json, {})
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(170)"], env=run_environment(run.path)
    ) as process:
        identity = {"pid": process.pid, "start": process_start(process.pid)}
        write_json(run.processes / "supervisor.json", identity)
        yield run
        process.kill()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []

    def make(width: int = 80, height: int = 24, **environment: str) -> Any:
        base = {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": PYTHON_PATH,
            "RLBOOST_HOME": str(tmp_path),
            "PS1": "$ ",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
        }
        opened.append(CAPTURE.Terminal({**base, **environment}, tmp_path, width, height))
        opened[-1].wait(lambda text: text.endswith("$"), 20)
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def status(step: int, **changes: Any) -> dict[str, Any]:
    instances = [
        {
            "id": f"spot-{n}/0",
            "machine": f"spot-{n}",
            "pool": "spot",
            "state": "ready",
            "policy_version": step,
            "in_flight": 4,
            "tokens_per_s": 1000.0 + n,
            "uptime_s": 300.0,
        }
        for n in range(25)
    ]
    return {
        "run": "demo",
        "state": "rollout",
        "phase": "rollout on reserved and spot engines, 3 of 8 responses finished",
        "step_responses": {"finished": 3, "requested": 8},
        "step": step,
        "steps": 9,
        "policy_version": step,
        "reward_mean": 0.5,
        "reward_history": [0.1, 0.2, 0.5],
        "tokens_per_s": 25_300.0,
        "tokens": {"generated": 10},
        "responses": {"requested": 8, "finished": 3},
        "instances": instances,
        "cost": {"spent_usd": 1.0, "rate_usd_per_hour": 9.0},
        "events": [{"at": 5.0, "kind": "migrated", "text": "4 responses of spot-9 migrated to spot-1"}],
        **changes,
    }


def test_the_view_is_painted_in_place_and_left_by_ctrl_c(
    run: RunFolder, terminal: Callable[..., Any]
) -> None:
    write_json(run.status, status(3))
    shell = terminal()
    shell.type(LIVE + "\n")
    shown = shell.wait(lambda text: "Ctrl-C detaches" in text, 60)
    lines = shown.splitlines()
    assert any(line.startswith("demo: rollout") for line in lines)
    assert any(line.startswith("+ ") and " ready" in line for line in lines), shown
    assert "▁▃█" in shown
    assert "4 responses of spot-9 migrated to spot-1" in shown
    assert "is being restarted" in shown, "the coordinator's silence is told calmly"

    def sent_while(seconds: float) -> int:
        before, until = shell.sent, time.monotonic() + seconds
        while time.monotonic() < until:
            shell.read(0.2)
        return int(shell.sent - before)

    quiet = sent_while(3.0)
    assert quiet < 250, f"{quiet} bytes in 3 s, though nothing but the age of the news changed"
    write_json(run.status, status(4))
    changed = shell.wait(lambda text: "step     4/9" in text, 30)
    assert changed.count("demo: rollout") == 1, "painted over, not below"

    shell.type("\x03")
    left = shell.wait(lambda text: text.endswith("$"), 30)
    assert "step     4/9" in left, "what was shown last stays"
    assert "Ctrl-C detaches" not in left
    shell.type("clear; echo code $?\n")
    shell.wait(lambda text: "code 0" in text, 10)


def test_the_end_of_the_run_ends_the_view(run: RunFolder, terminal: Callable[..., Any]) -> None:
    write_json(run.status, status(3))
    shell = terminal(width=60, height=12)
    shell.type(LIVE + "\n")
    shell.wait(lambda text: "demo: rollout" in text, 60)
    write_json(run.status, status(9, instances=[]))
    write_json(run.outcome, {"state": "done"})
    shown = shell.wait(lambda text: "demo: done" in text and text.endswith("$"), 60)
    assert shown.count("demo: ") == 1


@pytest.mark.parametrize(
    ("environment", "may_move"),
    [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)],
    ids=["no-color", "dumb"],
)
def test_colour_and_movement_are_only_for_those_who_can(
    run: RunFolder, terminal: Callable[..., Any], environment: dict[str, str], may_move: bool
) -> None:
    write_json(run.status, status(3))
    shell = terminal(**environment)
    raw = bytearray()
    feed = shell._stream.feed

    def keep(data: bytes) -> None:
        raw.extend(data)
        feed(data)

    shell._stream.feed = keep
    shell.type(LIVE + "\n")
    shell.wait(lambda text: "step 3/9" in text or "step     3/9" in text, 60)
    write_json(run.status, status(4))
    shell.wait(lambda text: "step 4/9" in text or "step     4/9" in text, 60)
    written = bytes(raw).partition(b"--watch")[2].replace(b"\x1b[?2004h", b"").replace(b"\x1b[?2004l", b"")
    assert b"m" not in {sequence[-1:] for sequence in sequences(written)}, "no colours"
    assert bool(sequences(written)) is may_move


def sequences(data: bytes) -> list[bytes]:
    import re

    return re.findall(rb"\x1b\[[0-9;?]*[A-Za-z]", data)
