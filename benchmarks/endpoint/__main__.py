"""The endpoint of a served run beside its engine alone; then one stream through SIGKILLs of its machines and
of the coordinator.

    python -m benchmarks.endpoint --kills 20 --coordinator-kills 3 --out endpoint.json

Measured, with a random model on this machine's CPUs. `engine` generates one token per request in this
process, without a fleet; `endpoint` does so through `/v1/completions` of a fleet of local machines. Between
them are HTTPS, two syncs of the journal and the agent's flush interval. The engine has no HTTP server, so
the difference is more than the overhead above one. The stream is greedy; its tokens are compared with those
of the engine alone. The last line is one JSON object with `pass`: so many kills, each token once and in
order, the median of the overhead within `LIMIT_S`.
"""

from __future__ import annotations

import argparse
import json
import signal
import ssl
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import openai
import torch

from benchmarks.checkout import commit
from rlboost_runtime.engines.base import EngineOutput, Request
from rlboost_runtime.engines.transformers import model_loading
from rlboost_runtime.engines.transformers.continuous_batch import ContinuousBatch
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder
from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

LIMIT_S = 0.25
PROMPT, NUM_TOKENS, TOKENS_PER_S = "spell: cab", 1_500, 15.0
JOB: dict[str, Any] = {
    "algorithm": {"temperature": 0.0, "max_prompt_tokens": 64, "max_response_tokens": NUM_TOKENS},
    "trainer": {"local_engines": 0},
    "endpoint": {"trains": False},
    "rollout": {
        "engine_args": {"max_running": 4, "tokens_per_s_per_response": TOKENS_PER_S},
        "spot": {
            "min_instances": 3,
            "max_instances": 3,
            "any_of": [{"infra": "local", "price_usd_per_hour": 2.66, "preload": True}],
        },
    },
}
IDS = {"return_token_ids": True, "ignore_eos": True}


def connect(run: RunFolder) -> openai.OpenAI:
    """Return a client of the run's endpoint."""
    context = ssl.create_default_context(cafile=str(run.certificate))
    return openai.OpenAI(
        base_url=json.loads(run.api_endpoint.read_bytes())["url"] + "/v1",
        api_key=run.api_keys.read_text().strip(),
        http_client=openai.DefaultHttpxClient(verify=context),
        timeout=600.0,
        max_retries=0,
    )


class Engine:
    """The run's engine in this process."""

    def __init__(self, folder: Path) -> None:
        model = model_loading.build_model(folder, torch.float32, torch.device("cpu"))
        model_loading.load_weights(model, folder)
        self._batch = ContinuousBatch(model, Sampling(temperature=0.0), 1, 64 + NUM_TOKENS)
        self._number = 0

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the likeliest tokens."""
        self._number += 1
        self._batch.add(Request(self._number, prompt, num_tokens))
        ids: list[int] = []
        while len(ids) < num_tokens:
            output: EngineOutput = self._batch.step(0)
            ids += output.token_ids
        return ids


def timed(work: Any, number: int) -> dict[str, float]:
    """Return median and 99th percentile of what `work` takes."""
    work()
    seconds = []
    for _ in range(number):
        began = time.monotonic()
        work()
        seconds.append(time.monotonic() - began)
    cuts = quantiles(seconds, n=100)
    return {"p50_s": round(cuts[49], 4), "p99_s": round(cuts[98], 4)}


def storm(
    client: openai.OpenAI, cli: Cli, kills: int, coordinator_kills: int
) -> tuple[list[int], dict[str, Any]]:
    """Kill whichever machine generates the stream, again and again, and now and then the coordinator; return
    the stream's ids, and how it went."""
    ids: list[int] = []
    found: dict[str, Any] = {
        "kills": 0,
        "coordinator_kills": 0,
        "finish_reason": None,
        "longest_pause_s": 0.0,
    }

    def read() -> None:
        last = time.monotonic()
        stream = client.completions.create(
            model="served", prompt=PROMPT, max_tokens=NUM_TOKENS, stream=True, extra_body=IDS
        )
        for chunk in stream:
            now = time.monotonic()
            found["longest_pause_s"] = round(max(found["longest_pause_s"], now - last), 1)
            last = now
            ids.extend(chunk.choices[0].model_extra["token_ids"])  # type: ignore[index] # ours
            found["finish_reason"] = chunk.choices[0].finish_reason or found["finish_reason"]

    reader = threading.Thread(target=read)
    reader.start()
    while found["kills"] < kills and reader.is_alive():
        known = len(ids)
        while reader.is_alive() and len(ids) < known + NUM_TOKENS // (3 * kills):
            time.sleep(0.05)
        status = json.loads(cli.run_folder("served").status.read_bytes())
        busy = [i["machine"] for i in status["instances"] if i["state"] == "ready" and i["in_flight"]]
        if reader.is_alive() and busy:
            cli("preempt", "served", busy[0])
            found["kills"] += 1
            print(json.dumps({"kill": found["kills"], "tokens": len(ids)}), flush=True)
            if found["kills"] * (coordinator_kills + 1) // (kills + 1) > found["coordinator_kills"]:
                cli.process("served", "coordinator").send_signal(signal.SIGKILL)
                found["coordinator_kills"] += 1
                time.sleep(1.0)  # the status is the old one's until the next has written its own
    reader.join()
    return ids, found


def measure(cli: Cli, kills: int, coordinator_kills: int, number: int) -> dict[str, Any]:
    """Serve a run, and return what was found."""
    model = str(varied_model(cli.home / "model", 64 + NUM_TOKENS))
    cli("launch", cli.job("served", model=model, **JOB), "--yes", "--detach")
    cli.wait("served", lambda s: sum(i["state"] == "ready" for i in s["instances"]) == 3, timeout_s=180)
    run = cli.run_folder("served")
    engine = Engine(max(run.weights.glob("v[0-9]*")))
    with connect(run) as client:
        prompt = client.completions.create(model="served", prompt=PROMPT, max_tokens=1, extra_body=IDS)
        prompt_ids: list[int] = prompt.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index] # ours

        def ask() -> None:
            client.completions.create(model="served", prompt=prompt_ids, max_tokens=1, extra_body=IDS)

        alone, served = timed(lambda: engine.generate(prompt_ids, 1), number), timed(ask, number)
        wanted = engine.generate(prompt_ids, NUM_TOKENS)
        ids, found = storm(client, cli, kills, coordinator_kills)
    cli("down", "served", "--yes")
    same = next((i for i, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]), len(ids))
    return {
        "engine": alone,
        "endpoint": served,
        "overhead_p50_s": round(served["p50_s"] - alone["p50_s"], 4),
        "stream": {
            **found,
            "tokens": len(ids),
            "distinct_tokens": len(set(ids)),
            "equal_tokens": same,
            "wanted": len(wanted),
        },
    }


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--coordinator-kills", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cli_of_its_own(Path(folder)) as cli:
        found = measure(cli, options.kills, options.coordinator_kills, options.requests)
    stream = found["stream"]
    passed = (
        stream["kills"] == options.kills
        and stream["coordinator_kills"] == options.coordinator_kills
        and stream["finish_reason"] == "length"
        and stream["equal_tokens"] == stream["tokens"] == NUM_TOKENS
        and found["overhead_p50_s"] <= LIMIT_S
    )
    summary = {"commit": commit(), **found, "pass": passed}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
