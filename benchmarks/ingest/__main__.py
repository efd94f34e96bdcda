"""Measure token ingest: 20,000 responses, 64 agents, TLS, ids and logprobs, journalled before acknowledged.

Two runs against a fresh server process each:

- paced: every response grows by 50 tokens/s, each agent sends a frame every 50 ms: 1,000,000 tokens/s
  offered. What counts is the share of a core that the server process needs.
- flood: frames of the same shape, as fast as acknowledgements come. What counts is tokens per CPU-second of
  the server process (kernel time included), since the load generator shares the machine with it.

    python -m benchmarks.ingest [--paced-s 12] [--flood-s 8] [--profile]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.ingest.emulated import (
    ACKED_FRAMES,
    ACKED_TOKENS,
    FULL_WINDOWS,
    NUM_COUNTERS,
    SENT_TOKENS,
    WORKING,
    Load,
    run_load,
)
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.security import client_context, read_token

NUM_RESPONSES = 20_000
NUM_AGENTS = 64
TOKENS_PER_S = 50.0
FLUSH_S = 0.05
WINDOW = 24
WARM_UP_S = 3.0

MAX_PACED_CORES = 0.4
MIN_PACED_TOKENS_PER_S = 980_000
MIN_FLOOD_TOKENS_PER_CPU_S = 5_000_000
MAX_LAG_P99_MS = 50.0
MAX_TOKENS_PER_FRAME = 1.1 * NUM_RESPONSES * TOKENS_PER_S * FLUSH_S / NUM_AGENTS
"""Larger paced frames mean that the load generator got too little CPU: not the load that we claim."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. CPU in cores: CPU-seconds (user and kernel) per second of wall time."""

    seconds: float
    tokens_per_s: float
    offered_tokens_per_s: float
    tokens_per_frame: float
    server_cores: float
    tokens_per_cpu_s: float
    cpu_s_per_million_tokens: float
    load_cores: float
    machine_busy_cores: float
    full_windows: int
    loop_lag: dict[str, float]
    ack_p50_ms: float
    ack_p99_ms: float
    max_pending_mb: float
    journal_mb_per_s: float
    refused_tokens: int
    limited_by: str


class Server:
    """The server process and what we can ask it."""

    def __init__(
        self,
        run: RunFolder,
        max_tokens: int,
        profile: bool,
        num_responses: int = NUM_RESPONSES,
        num_agents: int = NUM_AGENTS,
    ) -> None:
        self.run = run
        command = [
            sys.executable,
            "-m",
            "benchmarks.ingest.server",
            str(run.path),
            f"--responses={num_responses}",
        ]
        command += [f"--agents={num_agents}", f"--max-tokens={max_tokens}"] + ["--profile"] * profile
        self._child = subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._process = psutil.Process(self._child.pid)
        self.url = self._wait_for_url()
        self._context = client_context(run.certificate.read_text())

    def rss_mb(self) -> float:
        """Return its resident memory in MB."""
        return float(self._process.memory_info().rss) / 1e6

    def cpu_s(self) -> float:
        """Return the CPU-seconds that it has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def status(self) -> dict[str, Any]:
        """Return loop lag since the last call, and counts."""
        request = urllib.request.Request(
            self.url + "/v1/status", headers={"Authorization": f"Bearer {read_token(self.run)}"}
        )
        with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)
            return status

    def end(self) -> None:
        """End it and wait for it."""
        self._child.terminate()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._child.poll() is None:
            endpoint = read_json(self.run.endpoint)
            if endpoint is not None:
                return str(endpoint["url"])
            time.sleep(0.05)
        raise RuntimeError("the server did not start; its words are above")


class LoadProcesses:
    """The emulated agents, spread over a few processes."""

    def __init__(
        self, server: Server, num_processes: int, flood: bool, num_agents: int = NUM_AGENTS, **shape: Any
    ) -> None:
        """`shape`: fields of `Load` that differ from the benchmark's."""
        context = multiprocessing.get_context("spawn")
        self._go, self._end = context.Event(), context.Event()
        self._counters: list[SynchronizedArray[int]] = [
            context.Array("q", NUM_COUNTERS) for _ in range(num_processes)
        ]
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._results = []
        for index, agents in enumerate(np.array_split(np.arange(num_agents), num_processes)):
            load = Load(
                url=server.url,
                token=read_token(server.run),
                certificate=server.run.certificate.read_text(),
                run=server.run.name,
                first_agent=int(agents[0]),
                num_agents=len(agents),
                responses_per_agent=-(-NUM_RESPONSES // NUM_AGENTS),
                tokens_per_s=TOKENS_PER_S,
                flush_s=FLUSH_S,
                window=WINDOW,
                flood=flood,
            )
            load = replace(load, **shape)
            receiver, sender = context.Pipe(duplex=False)
            args = (load, self._counters[index], self._go, self._end, sender)
            process = context.Process(target=run_load, args=args, name=f"load-{index}")
            process.start()
            sender.close()
            self._processes.append(process)
            self._results.append(receiver)

    def wait_until_working(self, num_responses: int = NUM_RESPONSES) -> None:
        """Return once so many responses have been assigned."""
        deadline = time.monotonic() + 60
        while self.counts()[WORKING] < num_responses:
            if time.monotonic() > deadline or not all(process.is_alive() for process in self._processes):
                raise RuntimeError(f"{self.counts()[WORKING]} of {num_responses} responses were assigned")
            time.sleep(0.05)

    def start(self) -> None:
        """Let them generate."""
        self._go.set()

    def counts(self) -> Any:  # an array of NUM_COUNTERS
        """Return the counters' sums."""
        return np.sum([np.array(array[:], np.int64) for array in self._counters], axis=0)

    def cpu_s(self) -> float:
        """Return the CPU-seconds that they have used."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return float(sum(time.user + time.system for time in times))

    def end(self) -> list[float]:
        """End them; return the delays of acknowledgements in seconds."""
        self._go.set()
        self._end.set()
        delays: list[float] = []
        for receiver in self._results:
            with contextlib.suppress(EOFError):
                delays += receiver.recv()
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
        return delays


def measure(flood: bool, seconds: float, num_processes: int, profile: bool) -> Measured:
    """Run one server under one load."""
    max_tokens = 16_384 if flood else 4_096
    with tempfile.TemporaryDirectory(prefix="rlboost-ingest-") as folder:
        run = RunFolder(Path(folder) / "ingest")
        run.path.mkdir()
        with contextlib.ExitStack() as stack:
            server = Server(run, max_tokens, profile)
            stack.callback(server.end)
            load = LoadProcesses(server, num_processes, flood)
            delays: list[float] = []
            stack.callback(lambda: delays.extend(load.end()))
            load.wait_until_working()
            load.start()
            time.sleep(WARM_UP_S)
            server.status()
            before = _Sample.take(server, load)
            time.sleep(seconds)
            after = _Sample.take(server, load)
            status = server.status()
        return _measured(before, after, status, delays, flood)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    counts: Any  # an array of NUM_COUNTERS
    server_cpu_s: float
    load_cpu_s: float
    machine_busy_s: float
    journal_bytes: int

    @classmethod
    def take(cls, server: Server, load: LoadProcesses) -> _Sample:
        machine = psutil.cpu_times()
        return cls(
            at=time.monotonic(),
            counts=load.counts(),
            server_cpu_s=server.cpu_s(),
            load_cpu_s=load.cpu_s(),
            machine_busy_s=sum(machine) - machine.idle - getattr(machine, "iowait", 0.0),
            journal_bytes=sum(path.stat().st_size for path in server.run.journal.glob("*.seg")),
        )


def _measured(
    before: _Sample, after: _Sample, status: dict[str, Any], delays: list[float], flood: bool
) -> Measured:
    seconds = after.at - before.at
    counts = [int(count) for count in after.counts - before.counts]
    server_cpu_s = after.server_cpu_s - before.server_cpu_s
    ack_p50, ack_p99 = np.percentile(delays or [0.0], [50, 99])
    server_cores = server_cpu_s / seconds
    busy_cores = (after.machine_busy_s - before.machine_busy_s) / seconds
    return Measured(
        seconds=seconds,
        tokens_per_s=counts[ACKED_TOKENS] / seconds,
        offered_tokens_per_s=counts[SENT_TOKENS] / seconds if flood else NUM_RESPONSES * TOKENS_PER_S,
        tokens_per_frame=counts[ACKED_TOKENS] / max(1, counts[ACKED_FRAMES]),
        server_cores=server_cores,
        tokens_per_cpu_s=counts[ACKED_TOKENS] / server_cpu_s,
        cpu_s_per_million_tokens=1e6 * server_cpu_s / max(1, counts[ACKED_TOKENS]),
        load_cores=(after.load_cpu_s - before.load_cpu_s) / seconds,
        machine_busy_cores=busy_cores,
        full_windows=int(counts[FULL_WINDOWS]),
        loop_lag=status["loop_lag"],
        ack_p50_ms=1e3 * float(ack_p50),
        ack_p99_ms=1e3 * float(ack_p99),
        max_pending_mb=status["max_pending_bytes"] / 1e6,
        journal_mb_per_s=(after.journal_bytes - before.journal_bytes) / seconds / 1e6,
        refused_tokens=status["refused_tokens"],
        limited_by=_limit(server_cores, busy_cores, flood),
    )


def _limit(server_cores: float, busy_cores: float, flood: bool) -> str:
    if not flood:
        return "the offered rate"
    if server_cores > 0.9:
        return "the server's core"
    if busy_cores > 0.9 * (os.cpu_count() or 1):
        return "the machine: the load generator (and others) take the rest of its cores"
    return "acknowledgements: frames wait for the journal's disk"


def main() -> None:
    """Run both measurements and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--paced-s", type=float, default=12.0)
    parser.add_argument("--flood-s", type=float, default=8.0)
    parser.add_argument("--load-processes", type=int, default=2)
    parser.add_argument(
        "--profile", action="store_true", help="profile the server (its figures then mean nothing)"
    )
    args = parser.parse_args()
    paced = measure(False, args.paced_s, args.load_processes, args.profile)
    print("paced:", json.dumps(asdict(paced)), file=sys.stderr)
    flood = measure(True, args.flood_s, args.load_processes, args.profile)
    print("flood:", json.dumps(asdict(flood)), file=sys.stderr)
    print(json.dumps(_result(paced, flood)))


def _result(paced: Measured, flood: Measured) -> dict[str, Any]:
    verdicts = {
        "paced_cores": paced.server_cores <= MAX_PACED_CORES,
        "paced_tokens_per_s": paced.tokens_per_s >= MIN_PACED_TOKENS_PER_S,
        "paced_frames_as_claimed": paced.tokens_per_frame <= MAX_TOKENS_PER_FRAME,
        "paced_lag_p99": paced.loop_lag["p99_ms"] <= MAX_LAG_P99_MS,
        "flood_tokens_per_cpu_s": flood.tokens_per_cpu_s >= MIN_FLOOD_TOKENS_PER_CPU_S,
        "flood_lag_p99": flood.loop_lag["p99_ms"] <= MAX_LAG_P99_MS,
        "nothing_refused": paced.refused_tokens == flood.refused_tokens == 0,
    }
    return {
        "name": "ingest",
        "value": round(paced.server_cores, 3),
        "unit": "cores at 1,000,000 tokens/s",
        "target": (
            f"<= {MAX_PACED_CORES} core at >= {MIN_PACED_TOKENS_PER_S} tokens/s; flood >= "
            f"{MIN_FLOOD_TOKENS_PER_CPU_S} tokens per CPU-second; loop lag p99 <= {MAX_LAG_P99_MS:g} ms"
        ),
        "pass": all(verdicts.values()),
        "detail": {
            "verdicts": verdicts,
            "paced": asdict(paced),
            "flood": asdict(flood),
            "responses": NUM_RESPONSES,
            "agents": NUM_AGENTS,
            "window_frames": WINDOW,
            "load_average": os.getloadavg(),
            "machine": f"{os.cpu_count()} cores ({platform.machine()}), load generator included",
        },
    }


if __name__ == "__main__":
    main()
