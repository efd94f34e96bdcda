"""Time to the first token of conversations whose environments sleep, most of the time.

    python -m benchmarks.sessions --sessions 1000 --seconds 120 --out sessions.json

A run serves; its one machine has an engine without a model, which gives a token a millisecond after it was
asked (emulated). So many sessions are open at once. Each asks for `NUM_TOKENS` tokens by a stream of the
unmodified openai client, sleeps as an environment does (`SLEEP_S` on average, at random), and asks again with
all of it so far, until its context is full and it begins anew. Measured: seconds from the request to the
first line with a token, which is what the endpoint, the coordinator and the agent add to the engine's own
millisecond; whether every token is right; and what the head's processes hold in main memory. Clients, engine
and head share this machine. The last line is one JSON object with `pass`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import openai

from benchmarks.checkout import REPOSITORY, commit
from benchmarks.serving.fleet import IDS, client, job, serve
from rlboost_runtime.agent.engine_host import ENGINE
from rlboost_runtime.engines.emulated import VOCABULARY, emulated_response
from rlboost_runtime.protocol.messages import Sampling
from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

LIMIT_P99_S = 0.05
SLEEP_S, NUM_TOKENS, OBSERVED = 45.0, 16, 12
"""An environment's answer on average; tokens of a turn, and of what the environment says."""
CONTEXT = 512
NAME = "sessions"


@dataclass(slots=True)
class Found:
    """What the clients saw."""

    first_s: list[float] = field(default_factory=list)
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    counts: bool = False
    """Turns count from now on."""


async def converse(api: openai.AsyncOpenAI, number: int, found: Found) -> None:
    """Hold one conversation after the other."""
    random = Random(number)
    await asyncio.sleep(random.uniform(0, SLEEP_S))
    while True:
        ids = [random.randrange(VOCABULARY) for _ in range(64)]
        while len(ids) + NUM_TOKENS <= CONTEXT:
            ids += await turn(api, f"session {number}", ids, found)
            ids += [random.randrange(VOCABULARY) for _ in range(OBSERVED)]
            await asyncio.sleep(random.expovariate(1 / SLEEP_S))


async def turn(api: openai.AsyncOpenAI, session: str, ids: list[int], found: Found) -> list[int]:
    """Return what the model says."""
    began, first_s = time.monotonic(), 0.0
    said: list[int] = []
    try:
        stream = await api.completions.create(
            model=NAME, prompt=ids, max_tokens=NUM_TOKENS, stream=True, extra_body=IDS,
            extra_headers={"X-Session-ID": session},
        )  # fmt: skip
        async for chunk in stream:
            said += chunk.choices[0].model_extra["token_ids"]  # type: ignore[index] # ours
            first_s = first_s or time.monotonic() - began
    except openai.OpenAIError as problem:
        found.problems.append(f"{type(problem).__name__}: {problem}"[:200])
        return []
    found.wrong += said != emulated_response(ids, NUM_TOKENS, Sampling())[0]
    if found.counts:
        found.first_s.append(first_s)
    return said


async def load(cli: Cli, sessions: int, seconds: float) -> tuple[Found, dict[str, float]]:
    """Open all sessions, and measure once each has had the time to ask."""
    found = Found()
    async with client(cli.run_folder(NAME)) as api:
        talks = [asyncio.create_task(converse(api, number, found)) for number in range(sessions)]
        await asyncio.sleep(SLEEP_S + 5)
        found.counts = True
        await asyncio.sleep(seconds)
        memory = {
            path.stem: round(cli.process(NAME, path.stem).memory_info().rss / 1e6, 1)
            for path in sorted(cli.run_folder(NAME).processes.glob("*.json"))
        }
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
    return found, memory


def measure(cli: Cli, sessions: int, seconds: float) -> dict[str, Any]:
    """Serve a run, load it, and return what was found."""
    model = varied_model(cli.home / "model", 2 * CONTEXT)
    made = job(
        {"price_usd_per_hour": 2.66}, {"min_instances": 1, "max_instances": 1}, trainer={"local_engines": 0},
        engine_args={"max_running": 256, "tokens_per_s_per_response": 1_000},
    )  # fmt: skip
    made["algorithm"] |= {"temperature": 1.0, "max_prompt_tokens": CONTEXT, "max_response_tokens": CONTEXT}
    serve(cli, NAME, model, made)
    found, memory = asyncio.run(load(cli, sessions, seconds))
    cli("down", NAME, "--yes")
    cuts = quantiles(found.first_s, n=100)
    return {
        "sessions": sessions, "turns": len(found.first_s),
        "turns_per_s": round(len(found.first_s) / seconds, 1),
        "first_token_s": {"p50": round(cuts[49], 4), "p90": round(cuts[89], 4), "p99": round(cuts[98], 4),
                          "max": round(max(found.first_s), 4)},
        "wrong": found.wrong, "problems": len(found.problems), "first_problem": found.problems[:1],
        "head_memory_mb": memory,
    }  # fmt: skip


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    paths = [str(REPOSITORY), *(str(REPOSITORY / name) for name in ("runtime", "providers", "templates"))]
    os.environ |= {
        ENGINE: "benchmarks.sessions.engine:ProbedEngine",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder, cli_of_its_own(Path(folder)) as cli:
        found = measure(cli, options.sessions, options.seconds)
    passed = not found["wrong"] and not found["problems"] and found["first_token_s"]["p99"] <= LIMIT_P99_S
    summary = {
        "commit": commit(), "machine": platform.platform(), "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0], "engine": "emulated", **found, "limit_p99_s": LIMIT_P99_S,
        "pass": passed,
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
