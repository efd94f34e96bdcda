"""Ten thousand rows through a head that is killed: each row once, and right.

    python -m benchmarks.serving.batch --rows 10000 --out batch.json

A run serves an engine without a model (emulated: its tokens follow from the prompt), and `rlboost generate`
answers a file of rows. Meanwhile SIGKILL takes, at these shares of the rows: the coordinator, the endpoint,
every process of the run on this machine (the head and its machines; the run is served again with --resume),
and `rlboost generate` itself, which is typed again. The last line is one JSON object with `pass`: every row
is there once, none is an error, and every token is the one that its prompt leads to.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.checkout import commit, python_path
from benchmarks.serving.fleet import IDS, emulated_job
from rlboost_runtime.agent.engine_host import ENGINE
from rlboost_runtime.engines.emulated import VOCABULARY, emulated_response
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.protocol.messages import Sampling
from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

NAME = "batch"
NUM_TOKENS, CONTEXT = 12, 128
KILLS = {0.15: "coordinator", 0.35: "endpoint", 0.55: "head", 0.8: "generate"}
LIMIT_S = 1_800.0


def answered(out: Path) -> int:
    """Return how many rows are answered so far."""
    return out.read_bytes().count(b"\n") if out.exists() else 0


def run(cli: Cli, num_rows: int) -> dict[str, Any]:
    """Answer the rows through the kills, and return what was found."""
    model = varied_model(cli.home / "model", 2 * CONTEXT)
    path = cli.job(NAME, model=str(model), **emulated_job(CONTEXT))
    served(cli, path)
    random = Random(0)
    prompts = [[random.randrange(VOCABULARY) for _ in range(16)] for _ in range(num_rows)]
    rows, out = cli.home / "in.jsonl", cli.home / "out.jsonl"
    bodies = ({"prompt": prompt, "max_tokens": NUM_TOKENS, **IDS} for prompt in prompts)
    rows.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    began, typed, kills = time.monotonic(), 1, list[str]()
    process = generate(cli, rows, out)
    for share, victim in KILLS.items():
        while answered(out) < share * num_rows and time.monotonic() < began + LIMIT_S:
            if process.poll() is not None:  # it gave up meanwhile: its user types it again
                process, typed = generate(cli, rows, out), typed + 1
            time.sleep(0.1)
        kills.append(f"{victim} at {answered(out)}")
        print(kills[-1], file=sys.stderr, flush=True)
        if victim == "head":
            kill_tagged(cli.run_folder(NAME).path)
            served(cli, path, "--resume")
        elif victim == "generate":
            process.kill()
        else:
            cli.process(NAME, victim).kill()
    while process.wait(LIMIT_S) and typed < 10:
        process, typed = generate(cli, rows, out), typed + 1
    seconds = time.monotonic() - began
    cli("down", NAME, "--yes")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    times = Counter(line["row"] for line in lines)
    wrong = errors = 0
    for line in lines:
        choices = (line.get("response") or {}).get("choices")
        if not choices:
            errors += 1
        elif choices[0]["token_ids"] != emulated_response(prompts[line["row"]], NUM_TOKENS, Sampling())[0]:
            wrong += 1
    return {
        "rows": num_rows, "answered": len(times), "twice": sum(count > 1 for count in times.values()),
        "missing": num_rows - len(times), "wrong": wrong, "errors": errors, "kills": kills,
        "typed": typed, "seconds": round(seconds, 1), "rows_per_s": round(num_rows / seconds, 1),
    }  # fmt: skip


def served(cli: Cli, path: Path, *options: str) -> None:
    """Serve the job; returns once it answers."""
    cli("serve", path, "--yes", "--detach", *options, timeout_s=300)
    cli.wait(NAME, lambda s: any(i["state"] == "ready" for i in s["instances"]), timeout_s=120)


def generate(cli: Cli, rows: Path, out: Path) -> subprocess.Popen[str]:
    """Type `rlboost generate`."""
    return cli.start("generate", NAME, rows, out, "--parallel", "64")


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.batch")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {
        ENGINE: "benchmarks.sessions.engine:ProbedEngine",
        "PYTHONPATH": python_path(),
    }
    with tempfile.TemporaryDirectory() as folder, cli_of_its_own(Path(folder)) as cli:
        found = run(cli, options.rows)
    passed = not any(found[name] for name in ("twice", "missing", "wrong", "errors"))
    summary = {
        "commit": commit(), "machine": platform.platform(), "cpus": os.cpu_count(), "engine": "emulated",
        **found, "pass": passed,
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
