"""One run through the product: `rlboost launch` in a home of its own, followed to its end, kept as a record.

A record is written only once its run has ended; whoever comes again finds it and does not repeat the run. A
run that was cut off half-way is thrown away and made anew, since its clock stood still meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.conditions import Planned
from benchmarks.learning.evidence import RunRecord, record
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

RUN_TIMEOUT_S = 2400.0
POLL_S = 15.0

Say = Callable[[str], None]


class Failed(Exception):
    """A run did not end as it should; says where its traces lie."""


@dataclass(frozen=True, slots=True)
class Laboratory:
    """Where runs and records are kept, and what they are made with."""

    folder: Path
    commit: str

    @property
    def _home(self) -> Path:
        return self.folder / "home"

    def stored(self, planned: Planned) -> RunRecord | None:
        """Return the record of the run, if it was made already. Raises `Failed` for one of another job."""
        path = self._record_file(planned)
        data = read_json(path)
        if data is None:
            return None
        found = RunRecord(**data)
        if (found.job_digest, found.commit) != (planned.digest, self.commit):
            raise Failed(
                f"{path} was made by another job or commit ({found.commit}, now {self.commit}):"
                f" give another --out, or remove {self.folder}"
            )
        return found

    def make(self, planned: Planned, say: Say) -> RunRecord:
        """Launch the run, follow it to its end, keep and return its record. Raises `Failed`."""
        self._home.mkdir(parents=True, exist_ok=True)
        run = RunFolder(self._home / "runs" / planned.name)
        self._clear(run)
        started = time.monotonic()
        with (self.folder / f"{planned.name}.out").open("w") as output:
            launch = self._cli(
                "launch", str(planned.write(self.folder)), "--yes", stdout=output, stderr=output
            )
            try:
                code = self._follow(launch, planned, started, say)
            finally:
                kill_tagged(run.path)
                launch.kill()
                launch.wait()
        if code != 0:
            raise Failed(
                f"{planned.name}: rlboost launch exited with {code}; see {output.name} and {run.logs}"
            )
        made = record(
            run, self._status(planned), condition=planned.condition, seed=planned.seed,
            digest=planned.digest, commit=self.commit, seconds=time.monotonic() - started,
        )  # fmt: skip
        write_json(self._record_file(planned), asdict(made))
        return made

    def set_aside(self, planned: Planned) -> None:
        """Keep the run's record under another name: it will be made again."""
        path = self._record_file(planned)
        number = len(list(self.folder.glob(f"{planned.name}.void-*.json"))) + 1
        path.rename(path.with_suffix(f".void-{number}.json"))

    def void(self) -> list[RunRecord]:
        """Return the records that were set aside."""
        return [
            RunRecord(**json.loads(path.read_bytes())) for path in sorted(self.folder.glob("*.void-*.json"))
        ]

    def _follow(self, launch: subprocess.Popen[bytes], planned: Planned, started: float, say: Say) -> int:
        while True:
            try:
                return launch.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - started
                if seconds > RUN_TIMEOUT_S:
                    raise Failed(f"{planned.name} has not ended in {RUN_TIMEOUT_S:.0f} s") from None
                say(f"{planned.name}: {seconds:.0f} s, {_in_words(self._status(planned))}")

    def _status(self, planned: Planned) -> dict[str, Any]:
        asked = self._cli("status", planned.name, "--json", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out, _ = asked.communicate(timeout=60)
        return json.loads(out) if asked.returncode == 0 else {}

    def _cli(self, *arguments: str, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:  # as for Popen
        environment = {**os.environ, "RLBOOST_HOME": str(self._home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "rlboost_cli.main", *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        )  # fmt: skip

    def _clear(self, run: RunFolder) -> None:
        if run.path.exists():
            kill_tagged(run.path)
            shutil.rmtree(run.path)

    def _record_file(self, planned: Planned) -> Path:
        return self.folder / f"{planned.name}.json"


def _in_words(status: dict[str, Any]) -> str:
    rewards, lost = status.get("reward_history") or [], status.get("preemptions") or {}
    recent = sum(rewards[-5:]) / len(rewards[-5:]) if rewards else 0.0
    return (
        f"step {status.get('step', 0)} of {status.get('steps', '?')}, reward {recent:.3f} (last five),"
        f" {sum(lost.values())} preemptions, {(status.get('responses') or {}).get('migrated', 0)} migrated"
    )
