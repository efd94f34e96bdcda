"""Kill the coordinator of one local run at random moments; then replay a simulated day of events.

    python -m benchmarks.restarts --kills 50 --out restarts.json

Prints a line per kill: `flow_s` is the time from the coordinator's death until a new record of tokens is on
disk in the journal, that is, until tokens that an agent sent are accepted and acknowledged. Moments are
random among those at which tokens flow, as otherwise a restart is not what is waited for. The last line is
one JSON object with `pass`: p99 within `LIMIT_S`, the run done, its audit clean, and the replay of the day
within `REPLAY_LIMIT_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from benchmarks.checkout import commit
from benchmarks.paper.static import constant_trace
from rlboost_runtime.audit.run import audit
from rlboost_runtime.coordinator.driver.core_driver import TOKENS
from rlboost_runtime.coordinator.driver.totals import recover, snapshot_code
from rlboost_runtime.coordinator.storage.journal import EventLog, LogPlace, SegmentReader
from rlboost_runtime.coordinator.storage.snapshot import EVERY_EVENTS, SnapshotWriter
from rlboost_runtime.core.base.messages import Command, Event
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.seams import SystemClock, SystemDisk
from rlboost_runtime.sim import agents, presets
from rlboost_runtime.sim.policies import Switches, policy_setup
from rlboost_runtime.sim.world import World

LIMIT_S, REPLAY_LIMIT_S = 5.0, 5.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
FLOWS_WITHIN_S = 0.5
"""Tokens flow if a record of them came within this time."""
GAP_S = (0.3, 5.0)
"""Between the return of tokens and the next kill."""
DEADLINE_S = 120.0
STEP_DEADLINE_S = 1_800.0


class Run:
    """One run with a home of its own."""

    def __init__(self, home: Path, steps: int) -> None:
        self._environment = {**os.environ, "RLBOOST_HOME": str(home), "OMP_NUM_THREADS": "1"}
        os.environ["RLBOOST_HOME"] = str(home)
        job = YAML(typ="safe").load(EXAMPLE)
        job["name"] = "restarts"
        job["model"] = {"init": "tiny", "warmup": None}
        job["algorithm"] |= {"steps": steps, "max_staleness": 1, "minibatches_per_step": 1}
        job["rollout"]["spot"]["any_of"] = [{"infra": "local", "preload": True, "price_usd_per_hour": 2.66}]
        job["evidence"] = {"keep_journal": True, "count_tokens": True}
        path = home / "restarts.yaml"
        YAML().dump(job, path)
        self.rlboost("launch", str(path), "--detach", "--yes")
        self.folder = RunFolder.named("restarts")

    def rlboost(self, *arguments: str) -> str:
        """Run a command."""
        command = [sys.executable, "-m", "rlboost_cli", *arguments]
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=600, env=self._environment
        ).stdout

    def num_records(self) -> int:
        """Return the records of tokens in the newest segments of the journal."""
        newest = sorted(self.folder.journal.glob("step-*.seg"))[-2:]
        later = 1_000_000 * int(newest[-1].stem.removeprefix("step-")) if newest else 0
        return later + sum(record.startswith(TOKENS) for path in newest for record in SegmentReader(path))

    def has_ended(self) -> bool:
        """Return True if the run has ended."""
        return read_json(self.folder.outcome) is not None

    def wait_for_tokens(self, known: int, deadline_s: float = DEADLINE_S) -> float | None:
        """Return the seconds until there are more records than `known`; None if the run ended before."""
        began = time.monotonic()
        while self.num_records() <= known:
            if self.has_ended():
                return None
            if time.monotonic() - began > deadline_s:
                raise TimeoutError(f"no tokens within {deadline_s:g} s")
            time.sleep(0.01)
        return time.monotonic() - began

    def kill_coordinator(self) -> None:
        """Kill it and wait until it is gone."""
        pid = int((read_json(self.folder.path / "processes" / "coordinator.json") or {})["pid"])
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.001)


def kills(run: Run, number: int, rng: random.Random) -> list[float]:
    """Kill the coordinator so many times; return the seconds until tokens flowed again, each time."""
    seconds: list[float] = []
    while len(seconds) < number:
        if run.wait_for_tokens(run.num_records()) is None:
            break
        time.sleep(rng.uniform(*GAP_S))
        try:
            if run.wait_for_tokens(run.num_records(), FLOWS_WITHIN_S) is None:
                break
        except TimeoutError:
            continue
        run.kill_coordinator()
        took = run.wait_for_tokens(run.num_records())
        if took is None:
            break
        seconds.append(took)
        print(json.dumps({"kill": len(seconds), "flow_s": round(took, 2)}), flush=True)
    return seconds


def result(run: Run, wanted: int, seconds: list[float]) -> dict[str, Any]:
    """Wait for the run's end and return what came of it."""
    began = time.monotonic()
    while not run.has_ended() and time.monotonic() - began < STEP_DEADLINE_S:
        time.sleep(1.0)
    found = audit(run.folder)
    rank = sorted(seconds)
    return {
        "kills": len(seconds),
        "kills_wanted": wanted,
        "flow_p50_s": round(median(rank), 2),
        "flow_p99_s": round(rank[min(len(rank) - 1, int(0.99 * len(rank)))], 2),
        "state": (read_json(run.folder.outcome) or {}).get("state"),
        "audit_problems": found.problems,
        "responses": [found.requested, found.finished],
        "tokens": found.tokens_accepted,
    }


def day(folder: Path, hours: float, machines: int) -> dict[str, Any]:
    """Simulate a run of 8B under the policy of live runs with heartbeats each second, as live; return how
    long its event log takes to replay, from the oldest snapshot that there may be and without one."""
    agents.BEAT_S = 1.0
    preset = replace(presets()["paper-8b"], max_spot_instances=machines)
    log = EventLog(folder / "events.log", SystemDisk())
    places = deque[LogPlace](maxlen=EVERY_EVENTS + 1)

    def watch(event: Event, commands: list[Command]) -> None:
        log.append(event)
        places.append(log.place)

    setup = policy_setup("rlboost", preset, Switches())
    world = World(preset, constant_trace(machines), setup, seed=0, watch=watch)
    world.run(hours * 3600)
    whole, whole_s = _timed(folder / "events.log", None)
    cut = places[0]
    with open(folder / "events.log", "rb") as file, open(folder / "before.log", "wb") as before:
        before.write(file.read(cut.num_bytes))
    known = recover(folder / "before.log")
    clock, snapshot = SystemClock(), folder / "events.snapshot"
    writer = SnapshotWriter(snapshot, snapshot_code(), clock, 0)
    began = clock.now()
    writer.write((known.core, known.totals), cut)
    writing_s = clock.now() - began
    writer.join()
    found, snapshot_s = _timed(folder / "events.log", snapshot)
    return {
        "hours": hours,
        "instances": len(whole.core.instances),
        "events": whole.totals.num_events,
        "log_mb": round(log.size / 1e6),
        "replayed_events": found.num_replayed,
        "whole_log_s": round(whole_s, 2),
        "from_snapshot_s": round(snapshot_s, 2),
        "snapshot_mb": round(snapshot.stat().st_size / 1e6, 1),
        "loop_held_up_ms": round(1e3 * writing_s),
        "same_commands": found.totals.commands_digest == whole.totals.commands_digest,
    }


def _timed(log: Path, snapshot: Path | None) -> tuple[Any, float]:
    began = time.monotonic()
    return recover(log, snapshot), time.monotonic() - began


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        simulated = day(Path(folder), options.hours, 8)
    print(json.dumps({"simulated_day": simulated}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options.steps)
        measured = result(run, options.kills, kills(run, options.kills, random.Random(options.seed)))
    passed = (
        measured["kills"] == options.kills
        and measured["flow_p99_s"] <= LIMIT_S
        and measured["state"] == "done"
        and not measured["audit_problems"]
        and simulated["same_commands"]
        and simulated["from_snapshot_s"] <= REPLAY_LIMIT_S
    )
    summary = {"commit": commit(), "simulated_day": simulated, **measured, "pass": passed}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
