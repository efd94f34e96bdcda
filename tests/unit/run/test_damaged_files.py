"""Small files of a run that are cut, emptied or garbled: named, or written anew; never another run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.index import is_open
from rlboost_runtime.run.resolved import read_resolved, write_resolved
from rlboost_runtime.run.security import create_secrets, read_token, repair_secrets, server_context

OUTCOME = {"state": "budget", "problem": "spent", "remedy": "", "exit_code": 5}
JOB = {
    "name": "demo",
    "model": {"init": "tiny"},
    "data": {"reasoning_gym": ["basic_arithmetic"]},
    "algorithm": {"prompts_per_step": 8, "group_size": 4, "steps": 20, "max_response_tokens": 100},
    "trainer": {"infra": "local", "price_usd_per_hour": 10.0},
    "rollout": {"spot": {"any_of": [{"infra": "local", "price_usd_per_hour": 2.0}]}},
}
CUTS = [b"", b'{"state": "do', b"\xff\xfe{}", b"\0" * 40]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    create_secrets(run)
    return run


@pytest.mark.parametrize("content", CUTS)
def test_a_damaged_outcome_is_taken_from_what_was_decided(run: RunFolder, content: bytes) -> None:
    write_json(run.ending, OUTCOME)
    run.outcome.write_bytes(content)
    assert not is_open(run)
    assert read_json(run.outcome) == OUTCOME | {"state": "stopped"}
    assert run.outcome.with_name("outcome.json.damaged").read_bytes() == content


@pytest.mark.parametrize("content", CUTS)
def test_a_run_without_a_readable_outcome_is_open_and_comes_to_its_end_again(
    run: RunFolder, content: bytes
) -> None:
    run.outcome.write_bytes(content)
    assert is_open(run)
    assert not run.outcome.exists()


@pytest.mark.parametrize("content", CUTS)
def test_what_is_written_anew_counts_as_absent_and_all_else_is_named(run: RunFolder, content: bytes) -> None:
    run.processes.mkdir()
    for path in (run.endpoint, run.ending, run.wanted, run.status, run.processes / "trainer.json"):
        path.write_bytes(content)
        assert read_json(path) is None
        assert not path.exists()
    run.head.write_bytes(content)
    with pytest.raises(RuntimeFault, match=r"head\.json is damaged"):
        read_json(run.head)


def test_damaged_secrets_are_renewed_and_intact_ones_kept(run: RunFolder) -> None:
    intact = [path.read_bytes() for path in (run.token, run.key, run.certificate)]
    assert not repair_secrets(run)
    assert [path.read_bytes() for path in (run.token, run.key, run.certificate)] == intact
    for path in (run.key, run.certificate):
        good = path.read_bytes()
        for bad in (good[: len(good) // 2], b"", good[:150] + bytes([good[150] ^ 1]) + good[151:]):
            path.write_bytes(bad)
            assert repair_secrets(run)
            server_context(run)
            assert not repair_secrets(run)
    run.token.write_bytes(b"")
    assert repair_secrets(run)
    assert len(read_token(run)) > 30


def test_an_outcome_is_written_whole(run: RunFolder) -> None:
    write_json(run.outcome, OUTCOME, durably=True)
    assert json.loads(run.outcome.read_bytes()).items() >= OUTCOME.items()
    assert read_json(run.outcome) == OUTCOME
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".outcome")] == []


def spoiled(good: bytes) -> Iterator[bytes]:
    """Yield the file with each of its bytes changed by a bit, and every prefix of it."""
    for at in range(len(good)):
        yield good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        yield good[:at]


def test_a_damaged_job_is_named_or_reads_as_it_was_written(tmp_path: Path) -> None:
    """A flipped bit in a number still is JSON: without a checksum it trains something else, silently."""
    job = Job.model_validate_json(json.dumps(JOB))
    path = tmp_path / "job.json"
    write_resolved(path, job)
    good, named = path.read_bytes(), 0
    for content in itertools.islice(spoiled(good), 0, None, 7):
        path.write_bytes(content)
        try:
            assert read_resolved(path) == job
        except (RuntimeFault, ValueError):
            named += 1
    assert named > len(good) // 4
    path.write_text(job.canonical_json())
    assert read_resolved(path) == job, "an earlier version's has no checksum"


def test_a_number_that_changed_in_a_small_file_is_found(run: RunFolder) -> None:
    write_json(run.plan, {"usd": 1.25})
    run.plan.write_bytes(run.plan.read_bytes().replace(b"1.25", b"9.25"))
    assert read_json(run.plan) is None
    assert run.plan.with_name("plan.json.damaged").exists()
    write_json(run.head, {"host": "a"})
    run.head.write_bytes(run.head.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(RuntimeFault, match=r"head\.json is damaged: its checksum"):
        read_json(run.head)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_a_number_that_json_has_not_is_written_and_read_nevertheless(tmp_path: Path, value: float) -> None:
    write_json(tmp_path / "status.json", {"loss": value, "none": [], "text": "\u00fc"})
    found = read_json(tmp_path / "status.json")
    assert isinstance(found, dict)
    assert repr(found["loss"]) == repr(value)
    assert (tmp_path / "status.json").read_text().startswith('{\n "loss": ')
