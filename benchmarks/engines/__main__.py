"""Compare tokens/s of one vLLM server through our agent's path and through vLLM's own client.

Our path is the agent's: `VllmServerEngine`, the outbox, frames cut every 50 ms and packed for the wire.
Theirs is what `vllm bench serve` uses. Both ask the same server for the same numbers of tokens with logprobs,
in pairs whose order alternates, with prompts that no cache knows. What counts is the ratio within a pair.

    python -m benchmarks.engines [--pairs 10] [--streams 1,16,32,64] [--new-tokens 48]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.model import write_model
from rlboost_runtime.agent.outbox import Outbox
from rlboost_runtime.engines.base import EngineSpec, Request
from rlboost_runtime.engines.vllm.command import MODEL
from rlboost_runtime.engines.vllm.engine import VllmServerEngine
from rlboost_runtime.engines.vllm.server import VllmServer
from rlboost_runtime.protocol.messages import Sampling, encode
from rlboost_runtime.run.engine_python import find_engine_python

MIN_RATIO = 0.95
FLUSH_S = 0.05
PROMPT_TOKENS = 64
RESAMPLES = 2000
CLIENT = Path(__file__).with_name("vllm_client.py")


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one side."""

    tokens: int
    seconds: float
    cpu_s: float = 0.0
    """Of the agent's process; not known of the other side."""

    @property
    def tokens_per_s(self) -> float:
        """The rate."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """What pairs at one number of streams gave."""

    streams: int
    pairs: int
    ratio_median: float
    ratio_95: tuple[float, float]
    """Bootstrap interval of the median."""
    ours_tokens_per_s: float
    theirs_tokens_per_s: float
    agent_cpu_ms_per_1000_tokens: float


class Ours:
    """The agent's path."""

    def __init__(self, engine: VllmServerEngine) -> None:
        self._engine = engine
        self._outbox = Outbox()
        self._next = 0

    async def run(self, prompts: list[list[int]], num_new: int) -> Run:
        """Generate `num_new` tokens for each prompt, all at once."""
        numbers = range(self._next, self._next + len(prompts))
        self._next += len(prompts)
        wall, cpu = time.perf_counter(), time.process_time()
        for number in numbers:
            self._outbox.begin(number, 0, 0)
        self._engine.submit([Request(n, p, num_new) for n, p in zip(numbers, prompts, strict=True)])
        tokens = await self._collect(len(prompts))
        return Run(tokens, time.perf_counter() - wall, time.process_time() - cpu)

    async def _collect(self, num_open: int) -> int:
        tokens, next_cut = 0, time.perf_counter() + FLUSH_S
        outputs = self._engine.outputs()
        async for output in outputs:
            self._outbox.add(output)
            tokens += len(output.token_ids)
            failed = [end.problem for end in output.ended if end.reason != "length"]
            if failed:
                raise RuntimeError(f"a request failed: {failed[0]}")
            num_open -= len(output.ended)
            if num_open == 0 or time.perf_counter() >= next_cut:
                next_cut = time.perf_counter() + FLUSH_S
                for frame in self._outbox.cut():
                    encode(frame)
                    self._outbox.ack(frame.seq)
            if num_open == 0:
                break
        await outputs.aclose()  # type: ignore[attr-defined] # an async generator
        return tokens


class Theirs:
    """vLLM's own client, in a process of the engine's Python."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, server: VllmServer) -> Theirs:
        """Start the client against `server`."""
        socket, key = server.endpoint
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return cls(
            await asyncio.create_subprocess_exec(
                find_engine_python(None).path,
                str(CLIENT),
                str(socket),
                MODEL,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment | {"OPENAI_API_KEY": key, "OMP_NUM_THREADS": "1"},
            )
        )

    async def run(self, prompts: list[list[int]], num_new: int) -> Run:
        """Generate `num_new` tokens for each prompt, all at once."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}).encode() + b"\n")
        while line := await process.stdout.readline():
            if line.startswith(b"{"):
                break  # what vLLM prints while it is imported comes before
        result = json.loads(line or b'{"problems": ["the client ended"]}')
        if result["problems"]:
            raise RuntimeError(f"vLLM's client failed: {result['problems'][0]}")
        return Run(result["tokens"], result["seconds"])

    async def stop(self) -> None:
        """End the client."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def measure(pairs: int, streams: list[int], num_new: int) -> tuple[list[Row], int]:
    """Return a row for each number of streams, and the model's number of parameters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = write_model(folder / "model")
        engine = VllmServerEngine(_spec(folder, max(streams), num_new))
        print("starting the server", file=sys.stderr)
        await engine.start(60)
        try:
            await engine.load(0, folder / "model")
            assert engine.server is not None
            theirs = await Theirs.start(engine.server)
            try:
                rows = [await _compare(Ours(engine), theirs, pairs, n, num_new) for n in streams]
            finally:
                await theirs.stop()
        finally:
            await engine.stop()
    return rows, num_parameters


async def _compare(ours: Ours, theirs: Theirs, pairs: int, streams: int, num_new: int) -> Row:
    generator = random.Random(streams)
    kept: list[tuple[Run, Run]] = []
    for pair in range(-1, pairs):  # the first pair warms up
        sides = (ours, theirs) if pair % 2 else (theirs, ours)
        runs = {type(side): await side.run(_prompts(generator, streams), num_new) for side in sides}
        mine, other = runs[Ours], runs[Theirs]
        if pair >= 0:
            kept.append((mine, other))
        print(
            f"{streams} streams, pair {pair + 1} of {pairs}: {mine.tokens_per_s:.0f} ours,"
            f" {other.tokens_per_s:.0f} theirs (tokens/s)",
            file=sys.stderr,
        )
    ratios = [mine.tokens_per_s / other.tokens_per_s for mine, other in kept]
    tokens, cpu_s = sum(mine.tokens for mine, _ in kept), sum(mine.cpu_s for mine, _ in kept)
    return Row(
        streams,
        len(kept),
        round(median(ratios), 4),
        _interval(ratios),
        round(median(mine.tokens_per_s for mine, _ in kept), 1),
        round(median(other.tokens_per_s for _, other in kept), 1),
        round(1e6 * cpu_s / tokens, 2),
    )


def _interval(ratios: list[float]) -> tuple[float, float]:
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return round(medians[int(0.025 * RESAMPLES)], 4), round(medians[int(0.975 * RESAMPLES)], 4)


def _prompts(generator: random.Random, n: int) -> list[list[int]]:
    return [[generator.randrange(10, 30_000) for _ in range(PROMPT_TOKENS)] for _ in range(n)]


def _spec(folder: Path, max_running: int, num_new: int) -> EngineSpec:
    return EngineSpec(
        kind="vllm",
        sampling=Sampling(),
        max_context_tokens=PROMPT_TOKENS + num_new + 16,
        max_running=max_running,
        dtype="float32",
        seed=0,
        threads=1,
        log=folder / "engine.log",
    )


def main() -> None:
    """Run all pairs and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", default="1,16,32,64")
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    streams = [int(word) for word in args.streams.split(",")]
    rows, num_parameters = asyncio.run(measure(args.pairs, streams, args.new_tokens))
    print(json.dumps(_result(rows, num_parameters, args.new_tokens)))


def _result(rows: list[Row], num_parameters: int, num_new: int) -> dict[str, Any]:
    worst = min(row.ratio_median for row in rows)
    return {
        "name": "engines",
        "value": worst,
        "unit": "tokens/s of our agent's path over vLLM's own client (worst median)",
        "target": f">= {MIN_RATIO}",
        "pass": worst >= MIN_RATIO and all(row.pairs >= 10 for row in rows),
        "detail": {
            "rows": [asdict(row) for row in rows],
            "parameters": num_parameters,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": num_new,
            "load_average": os.getloadavg(),
            "machine": f"{os.cpu_count()} cores ({platform.machine()}), no GPU; client and server share them",
        },
    }


if __name__ == "__main__":
    main()
