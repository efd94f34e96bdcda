"""An engine that generates for a measurement: the same requests for either kind."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from rlboost_runtime.engines.base import Engine, EngineSpec, Request, VllmOptions
from rlboost_runtime.protocol.messages import Sampling

RUNNING = {"0.6B": 64, "tiny": 4}
PROMPT = 64
NEW = {"0.6B": 128, "tiny": 8}


def spec(kind: str, size: str, log: Path, threads: int, vllm: VllmOptions) -> EngineSpec:
    """Return what to start."""
    return EngineSpec(
        kind=kind, sampling=Sampling(), max_context_tokens=2 * (PROMPT + NEW[size]),
        max_running=RUNNING[size], dtype="bfloat16", seed=0, threads=threads, vllm=vllm, log=log,
    )  # fmt: skip


async def tokens_per_s(engine: Engine, size: str, first: int) -> float:
    """Let the engine fill all its slots at once; return new tokens per second, prefill included."""
    draw = np.random.default_rng(first)
    requests = [
        Request(first + i, draw.integers(0, 256, PROMPT).tolist(), NEW[size]) for i in range(RUNNING[size])
    ]
    started, tokens, num_open = time.perf_counter(), 0, len(requests)
    engine.submit(requests)
    outputs = engine.outputs()
    async for output in outputs:
        tokens += len(output.token_ids)
        num_open -= len(output.ended)
        if failed := [end.problem for end in output.ended if end.reason not in ("length", "stop")]:
            raise RuntimeError(f"a request failed: {failed[0]}")
        if num_open == 0:
            break
    await outputs.aclose()  # type: ignore[attr-defined] # an async generator
    return round(tokens / (time.perf_counter() - started), 1)
