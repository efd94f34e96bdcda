"""What five viewers of the page that a head serves cost its coordinator, and how late the page is.

    python -m benchmarks.dashboard --out dashboard.json

Measured on a live local run, in windows with and without viewers in turn, so that both see the same machine.
CPU is that of the processes, so other work on the machine changes it little. Lateness is the time from a
step's line in `metrics.jsonl` until each viewer's stream has it. The last line is one JSON object with
`pass`: the coordinator's share of a core rises by less than 0.02, and no update is later than 2 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.checkout import commit
from rlboost_runtime.run.folder import RunFolder, read_json
from tests.e2e.e2e_rig import Cli, cli_of_its_own

VIEWERS, WINDOW_S = 5, 15.0
LIMIT_SHARE, LIMIT_LATE_S = 0.02, 2.0


class Viewer(threading.Thread):
    """One open page: notes when each step reaches it."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, _, self._key = address.partition("?key=")
        self.seen: dict[int, float] = {}
        self.is_closed = False

    def run(self) -> None:
        """Read the stream until it is closed."""
        request = urllib.request.Request(f"{self._address}events", headers={"Cookie": f"rlboost={self._key}"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            while not self.is_closed and (line := stream.readline()):
                if line.startswith(b"data: "):
                    for step in json.loads(line[6:]).get("metrics", {}).get("steps", []):
                        self.seen.setdefault(step, time.time())


def share_of_core(process: psutil.Process, seconds: float) -> float:
    """Return the CPU time that the process takes within `seconds`, per second."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return float(sum(process.cpu_times()[:2]) - before) / seconds


def process_of(run: RunFolder, role: str) -> psutil.Process:
    """Return a process of the run."""
    return psutil.Process(int((read_json(run.processes / f"{role}.json") or {})["pid"]))


def watch_steps(run: RunFolder, written: dict[int, float]) -> None:
    """Note when lines of steps appear."""
    while True:
        known = run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0
        for step in range(1, known + 1):
            written.setdefault(step, time.time())
        time.sleep(0.02)


def measure(cli: Cli, rounds: int) -> dict[str, Any]:
    """Run a job and look at it; return what was found."""
    cli("launch", cli.job("seen", algorithm={"steps": 1000}, dashboard={}), "--yes", "--detach")
    cli.wait("seen", lambda status: status["step"] >= 2, 180)
    run, written = cli.run_folder("seen"), dict[int, float]()
    threading.Thread(target=watch_steps, args=(run, written), daemon=True).start()
    address = cli("dashboard", "seen", "--link").stdout.strip()
    coordinator, page = process_of(run, "coordinator"), process_of(run, "dashboard")
    alone, watched, pages, late = [], [], [], list[float]()
    for _ in range(rounds):
        alone.append(share_of_core(coordinator, WINDOW_S))
        viewers = [Viewer(address) for _ in range(VIEWERS)]
        for viewer in viewers:
            viewer.start()
        time.sleep(2.0)
        known = set(written)
        page_before = sum(page.cpu_times()[:2])
        watched.append(share_of_core(coordinator, WINDOW_S))
        pages.append((sum(page.cpu_times()[:2]) - page_before) / WINDOW_S)
        time.sleep(2 * LIMIT_LATE_S)
        now = time.time()
        fresh = {step: at for step, at in written.items() if step not in known and at < now - LIMIT_LATE_S}
        late += [viewer.seen.get(step, now) - at for viewer in viewers for step, at in fresh.items()]
        for viewer in viewers:
            viewer.is_closed = True
    return {
        "coordinator_share_alone": round(fmean(alone), 4),
        "coordinator_share_watched": round(fmean(watched), 4),
        "rise": round(fmean(watched) - fmean(alone), 4),
        "page_share": round(fmean(pages), 4),
        "page_rss_mb": round(page.memory_info().rss / 1e6),
        "updates": len(late),
        "latest_s": round(max(late), 2),
    }


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlboost-dashboard-") as home, cli_of_its_own(Path(home)) as cli:
        found = measure(cli, options.rounds)
        cli("down", "seen", "--yes")
    is_good = found["rise"] < LIMIT_SHARE and found["updates"] > 0 and found["latest_s"] < LIMIT_LATE_S
    result = {**found, "viewers": VIEWERS, "commit": commit(), "cpus": psutil.cpu_count(), "pass": is_good}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
