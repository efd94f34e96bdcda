"""What tests of bad input share: the command as a person types it, and disks really full or read-only.

A small disk is a tmpfs that the test mounts: it refuses as any full disk does, with ENOSPC, in whatever
process writes to it. Mounting takes root, or a namespace of one's own (`unshare -rm make test`). Where
neither is to be had the test fails in CI, and elsewhere is skipped with these words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlboost_runtime.processes import kill_tagged, tagged
from rlboost_runtime.run.folder import RunFolder, read_json

_NO_MOUNT = "a small disk cannot be mounted here ({}): run as root, or with `unshare -rm`"

REWARDS = """\
import time

def fine(response):
    return len(set(response))

def raises(prompt, response, row):
    return row["no such field"]

def hangs(prompt):
    time.sleep(1000)

def nan(response):
    return float("nan")
"""
JOB = """\
name: {name}
model: {{init: tiny, hidden_size: 32, num_layers: 1, warmup: null}}
data: {{source: prompts.jsonl}}
reward: rewards.py:{reward}
reward_timeout_s: 0.5
algorithm:
  group_size: 4
  prompts_per_step: 4
  steps: {steps}
  max_prompt_tokens: 64
  max_response_tokens: 12
  micro_batch_responses: 8
trainer: {{price_usd_per_hour: 10.0}}
rollout:
  engine_args: {{max_running: 16}}
  seeding_initial_s: 0.2
  spot: {{max_instances: 0}}
"""


class Said:
    """What a command printed, and how it ended."""

    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- out\n{self.out}\n--- err\n{self.err}"


class Typist:
    """Types `rlboost` in a folder with a job's files, with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (folder / "rewards.py").write_text(REWARDS)
        prompts = "".join(json.dumps({"prompt": f"spell {n}:"}) + "\n" for n in range(20))
        (folder / "prompts.jsonl").write_text(prompts)

    def job(self, name: str = "demo", *, reward: str = "fine", steps: int = 2) -> Path:
        """Write a small, correct job file and return its path."""
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, reward=reward, steps=steps))
        return path

    def run(self, name: str = "demo") -> RunFolder:
        return RunFolder(self.home / "runs" / name)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Type a command and leave it running, as the leader of a group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "rlboost_cli", *map(str, words)],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *words: str | Path, timeout_s: float = 100.0) -> Said:
        """Type a command and wait for its end. What a person reads never holds a traceback."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"{words} did not end in {timeout_s} s\n{out}\n{err}\n{self.tails()}")
        said = Said(subprocess.CompletedProcess(words, process.returncode, out, err))
        assert "Traceback" not in out + err, said
        return said

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([p for p in sys.path if p])
        extra = {"RLBOOST_HOME": str(self.home), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return {**os.environ, **extra}

    def tails(self) -> str:
        """Return the ends of all logs, for a failure's message."""
        logs = sorted(self.home.glob("runs/*/logs/**/*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def status(self, name: str = "demo") -> dict[str, object]:
        return json.loads(self("status", name, "--json").out)

    def outcome(self, name: str = "demo") -> dict[str, object]:
        found = read_json(self.run(name).outcome)
        assert isinstance(found, dict), self.tails()
        return found

    def assert_nothing_left(self, name: str = "demo") -> None:
        """No process of the run lives; no folder in the making is left."""
        deadline = time.monotonic() + 5.0
        while (left := tagged(self.run(name).path)) and time.monotonic() < deadline:
            time.sleep(0.05)  # a supervisor is still leaving
        assert left == []
        assert [p.name for p in (self.home / "runs").glob(".*")] == []


@pytest.fixture
def rlboost(tmp_path: Path) -> Iterator[Typist]:
    typist = Typist(tmp_path)
    yield typist
    for folder in (typist.home / "runs").glob("*"):
        kill_tagged(folder)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a disk of so many KiB, read-only if wanted, and takes it away at the end."""
    mounted: list[Path] = []

    def _mount(at: Path, kib: int = 1024, *, read_only: bool = False) -> Path:
        at.mkdir(parents=True, exist_ok=True)
        options = f"size={kib}k" + (",ro" if read_only else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "rlboost-test", str(at)], capture_output=True, text=True
        )
        if done.returncode:
            told = _NO_MOUNT.format(done.stderr.strip())
            pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
        mounted.append(at)
        return at

    yield _mount
    for at in reversed(mounted):
        for folder in (at / "runs").glob("*"):
            kill_tagged(folder)
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.fixture
def fill() -> Callable[..., Path]:
    """Fills a mounted disk."""
    return _fill


def _fill(disk: Path, *, leave: int = 0) -> Path:
    """Write to `disk` until it takes no more, then free `leave` bytes; return the file that fills it."""
    path = disk / "fill"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break
    if leave:
        os.truncate(path, path.stat().st_size - leave)
    return path
