"""Time to the first token of conversations whose environments sleep, most of the time.

    python -m benchmarks.sessions --sessions 1000 --seconds 120 --out sessions.json

A run serves; its one machine has an engine without a model, which gives a token a millisecond after it was
asked (emulated). So many sessions are open at once. Each asks for `NUM_TOKENS` tokens by a stream, sleeps as
an environment does (`SLEEP_S` on average, at random), and asks again with all of it so far, until its context
is full and it begins anew. Measured: seconds from the request to the first line with a token, which is what
the endpoint, the coordinator and the agent add to the engine's own millisecond; whether every token is right;
and what the head's processes hold in main memory. Clients, engine and head share this machine. The client is
plain HTTP over connections that it keeps: the openai client's own work, where a thousand share a process, is
no part of what is measured; `--client openai` takes that one. The last line is one JSON object with `pass`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any, Protocol

import httpx2
import openai

from benchmarks.checkout import commit, python_path
from benchmarks.serving.fleet import IDS, client, emulated_job, serve
from rlboost_runtime.agent.engine_host import ENGINE
from rlboost_runtime.engines.emulated import VOCABULARY, emulated_response
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder
from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

LIMIT_P99_S = 0.05
SLEEP_S, NUM_TOKENS, OBSERVED = 45.0, 16, 12
"""An environment's answer on average; tokens of a turn, and of what the environment says."""
CONTEXT = 512
KEPT_S = 60.0
"""The plain client keeps an idle connection for so long."""
NAME = "sessions"


@dataclass(slots=True)
class Found:
    """What the clients saw."""

    first_s: list[float] = field(default_factory=list)
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    counts: bool = False
    """Turns count from now on."""


Ask = Callable[[str, list[int]], AsyncIterator[list[int]]]
"""Given a session and a prompt, yields tokens as they come."""


class Client(Protocol):
    """How a session asks."""

    def ask(self, session: str, ids: list[int]) -> AsyncIterator[list[int]]:
        """Yield tokens as they come."""


class OpenAIClient:
    """The unmodified openai client."""

    def __init__(self, run: RunFolder) -> None:
        self._api = client(run)

    async def ask(self, session: str, ids: list[int]) -> AsyncIterator[list[int]]:
        """Yield tokens as they come."""
        stream = await self._api.completions.create(
            model=NAME, prompt=ids, max_tokens=NUM_TOKENS, stream=True, extra_body=IDS,
            extra_headers={"X-Session-ID": session},
        )  # fmt: skip
        async for chunk in stream:
            yield chunk.choices[0].model_extra["token_ids"]  # type: ignore[index] # ours


class PlainClient:
    """HTTP and lines, and nothing else."""

    def __init__(self, run: RunFolder) -> None:
        self._url = json.loads(run.api_endpoint.read_bytes())["url"] + "/v1/completions"
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEPT_S)
        context = ssl.create_default_context(cafile=str(run.certificate))
        self._http = httpx2.AsyncClient(verify=context, limits=limits, timeout=900.0, trust_env=False)
        self._headers = {"Authorization": f"Bearer {run.api_keys.read_text().split()[0]}"}

    async def ask(self, session: str, ids: list[int]) -> AsyncIterator[list[int]]:
        """Yield tokens as they come."""
        body = {"model": NAME, "prompt": ids, "max_tokens": NUM_TOKENS, "stream": True, **IDS}
        headers = self._headers | {"X-Session-ID": session}
        async with self._http.stream("POST", self._url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]


CLIENTS: dict[str, Callable[[RunFolder], Client]] = {"plain": PlainClient, "openai": OpenAIClient}


async def converse(ask: Ask, number: int, found: Found) -> None:
    """Hold one conversation after the other."""
    random = Random(number)
    await asyncio.sleep(random.uniform(0, SLEEP_S))
    while True:
        ids = [random.randrange(VOCABULARY) for _ in range(64)]
        while len(ids) + NUM_TOKENS <= CONTEXT:
            ids += await turn(ask, f"session {number}", ids, found)
            ids += [random.randrange(VOCABULARY) for _ in range(OBSERVED)]
            await asyncio.sleep(random.expovariate(1 / SLEEP_S))


async def turn(ask: Ask, session: str, ids: list[int], found: Found) -> list[int]:
    """Return what the model says."""
    began, first_s = time.monotonic(), 0.0
    said: list[int] = []
    try:
        async for tokens in ask(session, ids):
            said += tokens
            first_s = first_s or time.monotonic() - began
    except (openai.OpenAIError, httpx2.HTTPError) as problem:
        found.problems.append(f"{type(problem).__name__}: {problem}"[:200])
        return []
    found.wrong += said != emulated_response(ids, NUM_TOKENS, Sampling())[0]
    if found.counts:
        found.first_s.append(first_s)
    return said


async def load(cli: Cli, sessions: int, seconds: float, kind: str) -> tuple[Found, dict[str, float]]:
    """Open all sessions, and measure once each has had the time to ask."""
    found = Found()
    ask = CLIENTS[kind](cli.run_folder(NAME)).ask
    talks = [asyncio.create_task(converse(ask, number, found)) for number in range(sessions)]
    await asyncio.sleep(SLEEP_S + 5)
    gc.freeze()  # the clients' own pauses are not measured
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


def measure(cli: Cli, sessions: int, seconds: float, kind: str) -> dict[str, Any]:
    """Serve a run, load it, and return what was found."""
    model = varied_model(cli.home / "model", 2 * CONTEXT)
    serve(cli, NAME, model, emulated_job(CONTEXT))
    found, memory = asyncio.run(load(cli, sessions, seconds, kind))
    cli("down", NAME, "--yes")
    cuts = quantiles(found.first_s, n=100)
    return {
        "client": kind, "sessions": sessions, "turns": len(found.first_s),
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
    parser.add_argument("--client", choices=CLIENTS, default="plain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {
        ENGINE: "benchmarks.sessions.engine:ProbedEngine",
        "PYTHONPATH": python_path(),
    }
    with tempfile.TemporaryDirectory() as folder, cli_of_its_own(Path(folder)) as cli:
        found = measure(cli, options.sessions, options.seconds, options.client)
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
