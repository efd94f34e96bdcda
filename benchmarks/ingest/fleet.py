"""Load by a large fleet: 1,000 agents with 10,000 responses at once on one coordinator, beside 100 and 10.

    python -m benchmarks.ingest.fleet [--agents 10 100 1000] [--seconds 10] --out fleet.json

Each agent decodes ten responses at once, at `TOKENS_PER_S` each, of a step that has three times as many, so
that an ended one is followed by another all the time. `dispatch` is the time from the event that let the core
assign a response until the message was handed to its connection, `begin` the same for the first responses,
which all come as the agents prove their version. The last line is one JSON object with `pass`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit
from benchmarks.ingest.__main__ import LoadProcesses, Server
from benchmarks.ingest.emulated import ACKED_TOKENS, FULL_WINDOWS, WORKING
from rlboost_runtime.coordinator.links.agents import Timing
from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.run.folder import RunFolder

PER_AGENT, WAITING_SHARE = 10, 3
TOKENS_PER_S, MAX_TOKENS = 20.0, 400
LIMIT_P99_MS = 50.0
WARM_UP_S = 3.0


def measure(agents: int, seconds: float) -> dict[str, Any]:
    """Run one server under the load of so many agents."""
    running = agents * PER_AGENT
    with tempfile.TemporaryDirectory(prefix="rlboost-fleet-") as folder, contextlib.ExitStack() as stack:
        run = RunFolder(Path(folder) / "fleet")
        run.path.mkdir()
        server = Server(run, MAX_TOKENS, False, WAITING_SHARE * running, agents)
        stack.callback(server.end)
        flush_s = Timing.of(CoreConfig(agents, reserved_instances=0)).flush_s
        shape = {
            "flush_s": flush_s,
            "responses_per_agent": PER_AGENT,
            "tokens_per_s": TOKENS_PER_S,
            "spread": True,
        }
        load = LoadProcesses(server, 1, False, agents, **shape)
        stack.callback(load.end)
        load.wait_until_working(running)
        begin = server.status()["dispatch"]
        load.start()
        time.sleep(WARM_UP_S)
        server.status()
        before, cpu_s, began = load.counts(), server.cpu_s(), time.monotonic()
        time.sleep(seconds)
        after, took_s = load.counts(), time.monotonic() - began
        status = server.status()
        cores = (server.cpu_s() - cpu_s) / took_s
        return {
            "agents": agents,
            "responses_at_once": running,
            "flush_s": flush_s,
            "begin": _rounded(begin),
            "dispatch": _rounded(status["dispatch"]),
            "loop_lag": _rounded(status["loop_lag"]),
            "tokens_per_s": round(int(after[ACKED_TOKENS] - before[ACKED_TOKENS]) / took_s),
            "offered_tokens_per_s": round(running * TOKENS_PER_S),
            "assigned": int(after[WORKING] - before[WORKING]),
            "full_windows": int(after[FULL_WINDOWS] - before[FULL_WINDOWS]),
            "refused_tokens": status["refused_tokens"],
            "server_cores": round(cores, 2),
            "rss_mb": round(server.rss_mb()),
        }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


def main() -> int:
    """Measure each size; 1 if the largest is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for agents in options.agents:
        rows.append(measure(agents, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    passed = all(row["dispatch"]["p99_ms"] <= LIMIT_P99_MS and not row["refused_tokens"] for row in rows)
    summary = {"commit": commit(), "rows": rows, "pass": passed}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(
        json.dumps(
            {"sizes": options.agents, "dispatch_p99_ms": rows[-1]["dispatch"]["p99_ms"], "pass": passed}
        )
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
