"""Whole runs that meet a broken reward and a full disk: told in words, resumed, nothing lost.

They have no spot machine at all, which is a normal state: they train to the end on their own engine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run.folder import read_json

pytestmark = pytest.mark.e2e

BROKEN = "def score(prompt, response, row):\n    return row['answr']\n"
MOODY = """\
import os, time
calls = 0

def first(what):
    try:
        open(what, "x").close()
        return True
    except FileExistsError:
        return False

def score(prompt, response, row):
    global calls
    calls += 1
    print("x" * 100_000)
    if calls % 12 == 3: raise ValueError("bad luck")
    if calls % 12 == 5: return float("nan")
    if calls % 12 == 7: return "0.5"
    if calls == 2 and first("hung"): time.sleep(1000)
    if calls == 4 and first("died"): os._exit(3)
    return len(set(response))
"""
JOB = """\
name: demo
model: {{init: tiny, hidden_size: 32, num_layers: 1, warmup: null}}
data: {{source: prompts.jsonl}}
reward: rewards.py:score
reward_timeout_s: 1.0
reward_sandbox: off  # its function leaves marks for the next process
algorithm: {{group_size: 4, prompts_per_step: 6, steps: 3, max_prompt_tokens: 64, max_response_tokens: 24}}
trainer: {{price_usd_per_hour: 10.0}}
rollout:
  engine_args: {{max_running: 32, tokens_per_s_per_response: {rate}}}
  seeding_initial_s: 0.5
  spot: {{max_instances: 0}}
evidence: {{keep_journal: true, count_tokens: true}}
"""
RESPONSES = 6 * 4


def write_inputs(cli: Any, reward: str, rate: str = "null") -> Path:
    """Write job, prompts and reward; return the job's path."""
    rows = [{"prompt": f"spell {n}:"} for n in range(20)] + [{"prompt": "x" * 500}]
    (cli.home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cli.home / "rewards.py").write_text(reward)
    job: Path = cli.home / "demo.yaml"
    job.write_text(JOB.format(rate=rate))
    return job


def error_of(text: str) -> tuple[str, str]:
    """The one error of what was printed, and its hint."""
    assert "Traceback" not in text
    assert text.count("\nerror: ") == 1, text
    problem, _, hint = text.partition("\nerror: ")[2].partition("\n\nhint: ")
    return problem, hint.strip()


def test_a_broken_reward_is_corrected_and_what_still_fails_is_scored_and_counted(cli: Any) -> None:
    job = write_inputs(cli, BROKEN)
    refused = cli("launch", job, "--yes", expect=2)
    assert "KeyError: 'answr'" in refused.stderr
    assert not cli.run_folder("demo").path.exists(), "nothing was started"
    done = cli("launch", job, "--yes", "--no-doctor", expect=1)
    problem, hint = error_of(done.stderr)
    assert problem == (
        "demo failed: reward rewards.py:score failed for the first 16 responses;"
        " the last one raised an error: rewards.py:2: KeyError: 'answr'"
    )
    assert hint.startswith("correct it, then launch the run again with --resume")
    assert "rlboost launch demo --resume  starts over" in done.stdout
    cli.assert_gone("demo")

    write_inputs(cli, MOODY)
    done = cli("launch", "demo", "--resume", "--yes", "--no-doctor")
    assert "note: rewards.py has changed; the run continues with the new version" in done.stderr
    assert "1 prompt is longer than algorithm.max_prompt_tokens and left out" in done.stdout
    count = cli.json("status", "demo")["rewards"]
    assert count["scored"] == 3 * RESPONSES
    assert (count["timeout"], count["died"]) == (1, 1)
    assert min(count["raised"], count["not_finite"], count["not_a_number"]) >= 3
    told = f"{count['failed']} of {3 * RESPONSES} responses scored 0 because their reward failed ("
    assert told in done.stdout
    cost = cli.json("cost", "demo")
    assert {machine["pool"] for machine in cost["machines"]} == {"reserved"}
    assert audit(cli.run_folder("demo")).problems == []
    assert cost["rewards"] == count
    assert any(note.startswith(told) for note in cost["notes"])
    assert any("responses scored 0" in event["text"] for event in cli.json("status", "demo")["events"])
    assert (cli.run_folder("demo").logs / "reward.log").stat().st_size < 5 << 20
    cli.assert_gone("demo")


# --- a full disk -------------------------------------------------------------------------------------------


@pytest.fixture
def disk(cli: Any) -> Iterator[Path]:
    """The home on a disk of 24 MiB of its own. In CI it must be possible to mount one."""
    runs = cli.home / "runs"
    runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "rlboost-test", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        told = f"a small disk cannot be mounted ({done.stderr.strip()}): run as root, or with `unshare -rm`"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    yield runs
    for folder in runs.glob("*"):
        kill_tagged(folder)
    subprocess.run(["umount", "--lazy", str(runs)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    path = disk / ".fill"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    os.truncate(path, path.stat().st_size - leave)
    return path


def text_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def said_in(text: str, *ways: str) -> bool:
    """Whether one of `ways` is said: the coordinator speaks as long as it can, then the command itself."""
    return any(way in text for way in ways)


def wait_for(ready: Callable[[], Any], timeout_s: float = 600.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_run_whose_disk_fills_waits_or_fails_in_words_and_loses_nothing(cli: Any, disk: Path) -> None:
    job = write_inputs(cli, "def score(response):\n    return len(set(response))\n", rate="10")
    job.write_text(job.read_text() + "\nweights: {keep_in: disk}\n")  # in memory no version needs the disk
    attached = cli.start("launch", job, "--yes")
    run = cli.run_folder("demo")
    journal = run.journal / "step-000000.seg"

    # full in the middle of a rollout: the journal takes no token, the run waits and says so
    wait_for(lambda: journal.exists() and journal.stat().st_size > 4000)
    taken = fill(disk)
    by_coordinator = "the run waits for its disk (journal: No space left on device"
    by_command = f"the disk of {run.path} is full (0.00 of 0.03 GB free): demo waits"
    wait_for(lambda: said_in(text_of(cli("status", "demo")), by_coordinator, by_command))
    assert not run.outcome.exists()
    taken.unlink()

    # full again where the next version is published: room for notes, none for weights
    second = run.journal / "step-000001.seg"
    wait_for(lambda: second.exists() and second.stat().st_size > 2000)  # its version has been pulled
    taken = fill(disk, leave=60_000)
    out, err = attached.communicate(timeout=600)
    assert attached.returncode == 1, (out, err)
    problem, hint = error_of(err)
    assert problem.startswith(f"demo failed: the disk of {run.path} is full")
    assert hint.startswith("make room there, then type rlboost launch demo --resume")
    cli.assert_gone("demo")
    outcome = run.outcome.read_bytes()

    # resumed too early: refused, and still to be resumed
    fill(disk)
    problem, _ = error_of(cli("launch", "demo", "--resume", "--yes", expect=1).stderr)
    assert problem.endswith("nothing was started")
    assert run.outcome.read_bytes() == outcome
    taken.unlink()

    cli("launch", "demo", "--resume", "--yes")
    assert read_json(run.outcome)["state"] == "done"
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert [step["responses_scored"] for step in steps] == [RESPONSES] * 3
    cli.assert_gone("demo")


def test_a_run_whose_gpus_are_missing_ends_at_once_and_trains_on_no_cpu(cli):
    job = write_inputs(cli, "def score(prompt, response, row):\n    return 1.0\n")
    job.write_text(job.read_text().replace("price_usd_per_hour: 10.0", 'accelerators: "H100:8"'))
    done = cli("launch", job, "--yes", "--no-doctor", expect=8)
    problem, hint = error_of(done.stderr)
    assert "rented, but 0 can be used: nvidia-smi finds no driver" in problem
    assert "use an image that has one, or write trainer.allow_cpu: true" in hint
    assert not cli.run_folder("demo").metrics.exists()
    cli.assert_gone("demo")
