"""`rlboost` as a user types it, for tests of whole runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import UNFINISHED, RunFolder

START_TIMEOUT_S = 180.0
PATIENCE = 3.0
"""Waits are written for a quiet machine; each is given so many times as long before it counts as a hang."""

_PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
DOCUMENTED = set(re.findall(r"^\| `([^`/]+)/?`", _PAGE.partition("## All files")[2], re.M))
"""What a run's folder may hold."""

TINY_JOB: dict[str, Any] = {
    "model": {"init": "tiny", "warmup": None},
    "data": {
        "reasoning_gym": ["spell_backward"],
        "size": 64,
        "config": {"min_word_len": 3, "max_word_len": 8},
    },
    "algorithm": {
        "group_size": 4,
        "prompts_per_step": 6,
        "steps": 3,
        "learning_rate": 1.0e-4,
        "max_prompt_tokens": 128,
        "max_response_tokens": 24,
        "micro_batch_responses": 4,
    },
    "trainer": {"price_usd_per_hour": 10.47, "local_engines": 1},
    "rollout": {
        "engine_args": {"max_running": 4, "tokens_per_s_per_response": 12},
        "seeding_initial_s": 1.0,
        "spot": {"max_instances": 2, "any_of": [{"infra": "local", "price_usd_per_hour": 2.66}]},
    },
    "evidence": {"keep_journal": True, "count_tokens": True},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, key by key."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def varied_model(folder: Path, length: int) -> Path:
    """Write a random model whose likeliest tokens vary, for contexts of `length` tokens; the tiny one, whose
    embeddings are tied, soon repeats one token, and so would hide a repetition or a gap."""
    import torch

    from rlboost_runtime.job import TinyModel
    from rlboost_runtime.trainer.models import tiny

    model = tiny.make_model(TinyModel(init="tiny"), length)
    model.config.tie_word_embeddings = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        for weight in model.model.layers.parameters():
            if weight.ndim > 1:
                weight *= 5.0
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


class Cli:
    """`rlboost` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "RLBOOST_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def job(self, name: str, **changes: Any) -> Path:
        """Write a small job file and return its path."""
        path = self.home / f"{name}.yaml"
        with path.open("w") as file:
            YAML().dump({"name": name, **merged(TINY_JOB, changes)}, file)
        return path

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command without waiting for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "rlboost_cli.main", *map(str, arguments)],
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def __call__(
        self, *arguments: str | Path, expect: int = 0, timeout_s: float = START_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and check its exit code."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE * timeout_s)
        assert process.returncode == expect, (
            f"{arguments}: exit {process.returncode}\n{out}\n{err}\n{self.tails()}"
        )
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def json(self, *arguments: str) -> Any:
        """Run a command with --json and return what it printed."""
        return json.loads(self(*arguments, "--json").stdout)

    def run_folder(self, name: str) -> RunFolder:
        """Return a run's folder."""
        return RunFolder(self.home / "runs" / name)

    def wait(
        self, name: str, ready: Callable[[dict[str, Any]], Any], timeout_s: float, poll_s: float = 0.1
    ) -> dict[str, Any]:
        """Poll the status file until `ready(status)`; return that status."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                status = json.loads(self.run_folder(name).status.read_bytes())
            except FileNotFoundError:
                status = {}
            if status and ready(status):
                return status
            time.sleep(poll_s)
        raise AssertionError(
            f"not reached in {PATIENCE * timeout_s} s; last status:\n"
            f"{json.dumps(status, indent=1)}\n{self.tails()}"
        )

    def wait_outcome(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Wait for the run's end and return its outcome."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        while time.monotonic() < deadline:
            if self.run_folder(name).outcome.exists():
                found: dict[str, Any] = json.loads(self.run_folder(name).outcome.read_bytes())
                return found
            time.sleep(0.2)
        raise AssertionError(
            f"no outcome in {PATIENCE * timeout_s} s\n{self.status_text(name)}\n{self.tails()}"
        )

    def status_text(self, name: str) -> str:
        """Return the last status as text."""
        path = self.run_folder(name).status
        return path.read_text() if path.exists() else "no status"

    def tails(self) -> str:
        """Return the ends of all logs, for a failure's message."""
        logs = sorted(self.home.glob("runs/*/logs/**/*.log"))
        return "\n".join(
            f"--- {log.relative_to(self.home)}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )

    def processes(self, name: str, command: str = "") -> list[psutil.Process]:
        """Return every living process of the run whose command line has `command` in it."""
        tag = str(self.run_folder(name).path)
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("RLBOOST_RUN") == tag
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, " ".join(process.cmdline())))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process, typed in found if command in typed]

    def assert_gone(self, name: str, within_s: float = 60.0) -> None:
        """Fail if a process of the ended run is left: its supervisor goes last, moments after the outcome."""
        deadline = time.monotonic() + within_s
        while left := self.processes(name):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        if not self.run_folder(name).outcome.exists():
            return  # it was killed: what it was writing is still there
        kept = {path.name for path in self.run_folder(name).path.iterdir()}
        kept -= {name for name in kept if UNFINISHED.fullmatch(name)}  # of a process that was killed
        strange = {re.sub("-(wal|shm)$|[.]damaged$", "", each) for each in kept} - DOCUMENTED
        assert not strange, f"docs/run-folder.md does not have {strange}"

    def process(self, name: str, role: str) -> psutil.Process:
        """Return the process of a role on the head."""
        identity = json.loads((self.run_folder(name).processes / f"{role}.json").read_bytes())
        return psutil.Process(identity["pid"])


@contextmanager
def cli_of_its_own(folder: Path) -> Iterator[Cli]:
    """The command line with a new home below `folder`; every process of its runs is ended at last."""
    home = folder / "home"
    home.mkdir()
    tool = Cli(home)
    try:
        yield tool
    finally:
        for run in (home / "runs").glob("*"):
            kill_tagged(run)
        in_memory.sweep()
