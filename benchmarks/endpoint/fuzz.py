"""Random requests against the endpoint's application, with a tokenizer of its own and a played coordinator.

    python -m benchmarks.endpoint.fuzz --requests 100000 --seed 0 --out fuzz.json

Real are the routes, the checks of bodies, the tokenizer and its chat template, streams and errors; the
coordinator is played, its responses are a hash of their prompts. The last line is one JSON object with
`pass`: no status of 500 or above, no logged error, every error in OpenAI's shape, every stream ended by
`[DONE]` with a finish reason for each choice or by an error line, and whoever has no key gets the same 401
whatever was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.checkout import commit
from benchmarks.endpoint.requests import MODEL, SentRequest, made_request
from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.model import EndpointModel
from rlboost_runtime.inference.reasoning import tags_of
from rlboost_runtime.inference.server import Keys, make_app
from rlboost_runtime.inference.service import Service
from rlboost_runtime.seams import SystemClock
from tests.unit.inference import played_coordinator as played

KEY, AT_ONCE = "sk-fuzz", 8
SHOWN = 5
"""Findings that the report has."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and a chat template with tools and reasoning."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")  # type: ignore[no-untyped-call] # transformers'
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class LoggedErrors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(self.format(record))


class Findings:
    """What was answered, and what was wrong with it."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.num_streams = 0
        self.problems: list[str] = []
        self._denials: set[bytes] = set()

    def check(self, number: int, sent: SentRequest, answer: httpx.Response) -> None:
        """Take in one answer."""
        self.statuses[answer.status_code] += 1
        problem = self._problem(sent, answer)
        if problem:
            self.problems.append(
                f"request {number}, {sent.method} {sent.path}: {problem}: {sent.body[:300]!r}"
            )

    def _problem(self, sent: SentRequest, answer: httpx.Response) -> str:
        status = answer.status_code
        if sent.path == "/health" and sent.method == "GET":
            return "" if status == 200 else f"status {status}"
        if not sent.has_key:
            self._denials.add(answer.content)
            return "" if status == 401 and len(self._denials) == 1 else f"status {status} without a key"
        if status >= 500 or status in (401, 422):
            return f"status {status}"
        if status >= 400:
            error = answer.json().get("error")
            return "" if error and error["message"] and error["type"] else "an error without a message"
        if "text/event-stream" in answer.headers["content-type"]:
            self.num_streams += 1
            return _stream_problem(answer.text)
        return "" if isinstance(answer.json(), dict) else "no object"


def _stream_problem(text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    if not lines:
        return "an empty stream"
    if lines[-1] != "[DONE]":
        return "" if "error" in json.loads(lines[-1]) else "a stream that ends silently"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    ended = Counter(choice["index"] for choice in choices if choice["finish_reason"])
    return (
        ""
        if {c["index"] for c in choices} == set(ended) and set(ended.values()) == {1}
        else "no finish reason"
    )


async def fuzzed(folder: Path, num_requests: int, seed: int, minutes: float = 60.0) -> Findings:
    """Send them, or as many as `minutes` have room for; return what was found."""
    deadline = time.monotonic() + minutes * 60
    keys, errors, findings = folder / "api_keys", LoggedErrors(), Findings()
    keys.write_text(KEY + "\n")
    coordinator, tokenizer = played.Coordinator(), byte_tokenizer()
    fleet = Fleet("run", coordinator.dial, SystemClock())
    model = replace(played.MODEL, name=MODEL, tokenizer=tokenizer, reasoning=tags_of(tokenizer))

    def load() -> EndpointModel:
        return model

    linked = asyncio.create_task(fleet.run())
    app = make_app(Service(fleet, load, 256), Keys(keys))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    numbers = iter(range(num_requests))
    logging.getLogger().addHandler(errors)
    async with httpx.AsyncClient(transport=transport, base_url="http://head") as client:
        while not fleet.is_up:  # noqa: ASYNC110 - two turns of the loop
            await asyncio.sleep(0)

        async def work() -> None:
            for number in numbers:
                if time.monotonic() > deadline:
                    return
                if number and number % 10_000 == 0:
                    print(f"{number} requests, {len(findings.problems)} problems", file=sys.stderr)
                sent = made_request(seed, number, KEY)
                headers = [(k.encode(), v.encode()) for k, v in sent.headers.items()]
                async with asyncio.timeout(60):
                    answer = await client.request(sent.method, sent.path, content=sent.body, headers=headers)
                findings.check(number, sent, answer)
                coordinator.asked.clear()
                coordinator.withdrawn.clear()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    logging.getLogger().removeHandler(errors)
    linked.cancel()
    findings.problems += [f"logged: {record[-600:]}" for record in errors.records]
    return findings


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings = asyncio.run(fuzzed(Path(folder), options.requests, options.seed, options.minutes))
    summary: dict[str, Any] = {
        "commit": commit(),
        "seed": options.seed,
        "requests": findings.statuses.total(),
        "wanted_requests": options.requests,
        "seconds": round(time.monotonic() - began),
        "statuses": dict(sorted(findings.statuses.items())),
        "streams": findings.num_streams,
        "problems": len(findings.problems),
        "first_problems": findings.problems[:SHOWN],
        "pass": not findings.problems and findings.statuses.total() == options.requests,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if summary["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
