"""The agent's side of a pull: a child that reports, and what the agent makes of it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.agent.weight_children import MIN_MEASURED_BYTES, Puller
from rlboost_runtime.weights.child_pipe import PullRequest

pytestmark = pytest.mark.integration


def puller(tmp_path: Path, *lines: dict[str, Any]) -> tuple[Puller, Path]:
    """Return a puller whose child says these lines, the last of them once a file is there."""
    script, go = tmp_path / "child.py", tmp_path / "go"
    script.write_text(
        "import json, sys, time, pathlib\n"
        f"request = json.loads(sys.stdin.readline()); lines = {[json.dumps(line) for line in lines]!r}\n"
        f"pathlib.Path({str(tmp_path / 'request')!r}).write_text(json.dumps(request))\n"
        "for line in lines[:-1]: print(line, flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "print(lines[-1], flush=True)\n"
    )
    template = PullRequest("", -1, str(tmp_path), "token", "PEM", 2)
    return Puller(template, tmp_path / "log", (sys.executable, "-S", str(script))), go


def progress(done_bytes: int) -> dict[str, Any]:
    return {"type": "PullProgress", "done_bytes": done_bytes, "total_bytes": 100}


def done(**more: Any) -> dict[str, Any]:
    return {"type": "PullReport", "version": 7, "folder": "/there", "pulled_bytes": 1, **more}


async def test_how_far_a_pull_is_can_be_asked_until_it_is_over(tmp_path: Path) -> None:
    mine, go = puller(tmp_path, progress(10), progress(40), done())
    assert mine.progress is None
    pulling = asyncio.create_task(mine.pull(7))
    async with asyncio.timeout(20):
        while mine.progress != (7, 40, 100):  # noqa: ASYNC110 - it is polled in the product too
            await asyncio.sleep(0.01)
        go.touch()
        await pulling
    assert mine.progress is None


async def test_what_went_wrong_in_a_good_pull_is_an_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, go = puller(tmp_path, done(num_corrupt=3, complaints={"spot-2/0": "bytes 0+9 came wrong"}))
    go.touch()
    with caplog.at_level("WARNING"):
        await mine.pull(7)
    said = {record.message: vars(record)["fields"] for record in caplog.records if "fields" in vars(record)}
    assert said["pull.chunks_corrupt"]["num_chunks"] == 3
    assert said["pull.source_left_out"]["source"] == "spot-2/0"


@pytest.mark.parametrize(("num", "known"), [(MIN_MEASURED_BYTES - 1, False), (MIN_MEASURED_BYTES, True)])
async def test_a_rate_is_taken_from_pulls_that_are_large_enough(
    tmp_path: Path, num: int, known: bool
) -> None:
    mine, go = puller(tmp_path, done(pulled_bytes=num, fetch_s=num / 5e6))
    go.touch()
    await mine.pull(7)
    await mine.pull(8)
    request = json.loads((tmp_path / "request").read_text())
    assert request["version"] == 8
    assert request.get("bytes_per_s") == (5e6 if known else None)
