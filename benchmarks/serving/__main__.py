"""An hour of load on a served model whose spot machines a trace kills, in less time.

    python -m benchmarks.serving --compression 6 --out serving.json

A run serves a random model with one engine that stays (the on-demand floor) and up to `MACHINES` spot
machines of this computer, which a market preempts by SIGKILL as the generated trace says; once, all of them
are taken together for `GAP_S`. `REQUESTS` requests arrive at random, at a rate that swings, as in an hour;
trace, load, prices and `idle_s` are compressed in time by the same factor, so that dollars are those of the
hour. Each request is a stream of the unmodified openai client without retries. Its token ids are compared
with those of the same request to a quiet run: one engine, no market. Measured, on this machine's CPUs, with
illustrative prices; the trace is generated. The last line is one JSON object with `pass`: no request failed,
no token is wrong, and the market did kill machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import openai

from benchmarks.checkout import commit
from benchmarks.serving.fleet import IDS, client, job, prompts, serve
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.traces import Trace
from rlboost_runtime.traces.generate import PROFILES, generate_trace
from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

HOUR_S, REQUESTS, MACHINES = 3_600.0, 1_500, 3
PROFILE, FROM_S, NODES = "generated-p3", 3_600.0, 4
"""The trace, from when on, and how many of its nodes are there at a time."""
LEAST_STAY_S, ABSENCE_S = 120.0, 30.0
"""Seconds of the hour: nodes that go sooner are left out; until the next one comes."""
GAP_AT, GAP_S = 0.55, 25.0
"""When all spot machines are taken, as a share of the hour; for how many real seconds."""
RESERVED_USD, SPOT_USD = 10.47, 2.66
"""Per hour, as in the templates. Illustrative."""
TOKENS_PER_S = 20.0
"""Pace of an engine per response."""
QUIET_AT_ONCE = 8


Stay = tuple[str, float, float]
"""A node, from when, until when."""


@dataclass(slots=True)
class Answer:
    """What a client got."""

    ids: list[int]
    reason: str | None = None
    problem: str = ""
    first_s: float = 0.0
    """Until the first token."""
    took_s: float = 0.0
    longest_pause_s: float = 0.0


async def ask(api: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> Answer:
    """Stream one response."""
    answer, began = Answer([]), time.monotonic()
    last = began
    try:
        stream = await api.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=IDS
        )
        async for chunk in stream:
            now = time.monotonic()
            answer.first_s = answer.first_s or now - began
            answer.longest_pause_s, last = max(answer.longest_pause_s, now - last), now
            answer.ids += chunk.choices[0].model_extra["token_ids"]  # type: ignore[index] # ours
            answer.reason = chunk.choices[0].finish_reason or answer.reason
    except openai.OpenAIError as problem:
        answer.problem = f"{type(problem).__name__}: {problem}"
    answer.took_s = time.monotonic() - began
    return answer


def arrivals(number: int, span_s: float, seed: int) -> list[float]:
    """Return when requests arrive: at random, at a rate that swings by 80 % three times within the span."""
    random, found = Random(seed), list[float]()
    while len(found) < number:
        at = random.uniform(0.0, span_s)
        if random.random() * 1.8 < 1.0 + 0.8 * math.sin(6.0 * math.pi * at / span_s):
            found.append(at)
    return sorted(found)


def market_file(path: Path, span_s: float, seed: int) -> int:
    """Write the compressed hour of the trace, with the moment without machines; return its removals.

    The fleet is small: of the trace's nodes it has `NODES` at a time, each as long as the trace has it, and
    then the one that goes next.
    """
    hour = generate_trace(PROFILES[PROFILE], seed).window(FROM_S, FROM_S + HOUR_S)
    factor, rows = span_s / HOUR_S, list[tuple[int, str, str]]()
    for node, start, end in _without_gap(_stays(hour, factor), GAP_AT * span_s):
        rows.append((round(1000 * start), "add", node))
        rows += [(round(1000 * end), "remove", node)] if end < span_s else []
    rows.sort()
    path.write_text("".join(f"{at},{kind},{node}\n" for at, kind, node in rows))
    return sum(kind == "remove" for _, kind, _ in rows)


def _stays(hour: Trace, factor: float) -> list[Stay]:
    """Return the compressed stays of nodes."""
    came = {event.node: event.at_s for event in hour.events if event.kind == "add"}
    went = {event.node: event.at_s for event in hour.events if event.kind == "remove"}
    free = sorted((went.get(node, HOUR_S), node) for node in came)
    found = list[Stay]()
    for _ in range(NODES):
        at = 0.0
        while at < HOUR_S:
            end, node = next((e, n) for e, n in free if came[n] <= at < e - LEAST_STAY_S or e == HOUR_S)
            free.remove((end, node))
            found.append((node, at * factor, end * factor))
            at = end + ABSENCE_S
    return found


def _without_gap(stays: list[Stay], gap: float) -> list[Stay]:
    """Return what is left of stays where all machines are taken from `gap` on for `GAP_S`."""
    found = []
    for node, start, end in stays:
        before, after = (start, min(end, gap)), (max(start, gap + GAP_S), end)
        found += [(node, *stay) for stay in (before, after) if stay[1] - stay[0] > 1.0]
    return found


async def quiet_answers(run: RunFolder, asked: list[tuple[str, int]]) -> list[list[int]]:
    """Return the token ids of each request from a run that nothing happens to."""
    turn = asyncio.Semaphore(QUIET_AT_ONCE)

    async def one(api: openai.AsyncOpenAI, prompt: str, tokens: int) -> list[int]:
        async with turn:
            answer = await ask(api, run.name, prompt, tokens)
            assert not answer.problem, answer.problem
            return answer.ids

    async with client(run) as api:
        return list(await asyncio.gather(*(one(api, *each) for each in asked)))


async def load(run: RunFolder, asked: list[tuple[str, int]], when: list[float]) -> list[Answer]:
    """Send each request at its time; return the answers."""
    began = time.monotonic()
    num_done = 0

    async def one(api: openai.AsyncOpenAI, at: float, prompt: str, tokens: int) -> Answer:
        nonlocal num_done
        await asyncio.sleep(max(0.0, at - (time.monotonic() - began)))
        answer = await ask(api, run.name, prompt, tokens)
        num_done += 1
        if num_done % 100 == 0 or answer.problem:
            print(json.dumps({"answered": num_done, "problem": answer.problem}), flush=True)
        return answer

    async with client(run) as api:
        return list(
            await asyncio.gather(*(one(api, at, *each) for at, each in zip(when, asked, strict=True)))
        )


def measure(cli: Cli, compression: float, number: int, seed: int) -> dict[str, Any]:
    """Serve a quiet run, then one on the market; return what was found."""
    model, span_s = varied_model(cli.home / "model", 256), HOUR_S / compression
    random = Random(seed)
    asked = [(prompt, random.randint(24, 96)) for prompt in prompts(number, seed)]
    quiet = serve(cli, "quiet", model, job({}, {"max_instances": 0}))
    wanted = asyncio.run(quiet_answers(quiet, asked))
    cli("down", "quiet", "--yes")
    print(json.dumps({"quiet_answers": len(wanted)}), flush=True)
    removals = market_file(cli.home / "trace.csv", span_s, seed)
    made = job(
        {"price_usd_per_hour": SPOT_USD * compression, "market": {"trace": "trace.csv"}},
        {"max_instances": MACHINES},
        endpoint={"scaling": {"idle_s": 300.0 / compression}},
        trainer={"price_usd_per_hour": RESERVED_USD * compression},
        engine_args={"tokens_per_s_per_response": TOKENS_PER_S},
    )
    run = serve(cli, "served", model, made)
    answers = asyncio.run(load(run, asked, arrivals(number, span_s, seed)))
    status, cost = cli.json("status", "served"), cli.json("cost", "served")
    cli("down", "served", "--yes")
    cli.assert_gone("served")
    return {
        "machine": "local CPUs, shared",
        "trace": f"{PROFILE}, its second hour, {NODES} nodes at a time, and a moment without machines",
        "compression": compression,
        "requests": number,
        "removals_in_trace": removals,
        **judged(answers, wanted),
        "kills": status["preemptions"],
        "spot_machines_launched": sum(m["pool"] == "spot" for m in cost["machines"] if m["started_at"]),
        "responses_migrated": status["responses"]["migrated"],
        "total_usd": cost["total_usd"],
        "tokens_served": cost["tokens_served"],
        "usd_per_million_tokens": cost["usd_per_million_tokens"],
    }


def judged(answers: list[Answer], wanted: list[list[int]]) -> dict[str, Any]:
    """Return how many failed or are wrong, and how long clients waited."""
    failed = [each for each in answers if each.problem or each.reason != "length"]
    wrong = sum(
        len(known)
        - sum(a == b for a, b in zip(each.ids, known, strict=False))
        + max(0, len(each.ids) - len(known))
        for each, known in zip(answers, wanted, strict=True)
        if not each.problem
    )
    firsts, pauses = sorted(a.first_s for a in answers), sorted(a.longest_pause_s for a in answers)
    return {
        "failed_requests": len(failed),
        "problems": sorted({each.problem or f"finish_reason {each.reason}" for each in failed})[:5],
        "wrong_tokens": wrong,
        "tokens_compared": sum(map(len, wanted)),
        "distinct_tokens": len({token for ids in wanted for token in ids}),
        "first_token_p50_s": round(quantiles(firsts, n=100)[49], 2),
        "first_token_p99_s": round(quantiles(firsts, n=100)[98], 2),
        "longest_pause_s": round(pauses[-1], 2),
    }


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compression", type=float, default=6.0)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cli_of_its_own(Path(folder)) as cli:
        found = measure(cli, options.compression, options.requests, options.seed)
    passed = (
        found["failed_requests"] == found["wrong_tokens"] == 0
        and sum(found["kills"].values()) > 0
        and found["distinct_tokens"] > 50
    )
    summary = {"commit": commit(), **found, "pass": passed}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
