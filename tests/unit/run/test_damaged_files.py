"""Small files of a run that are cut, emptied or garbled: named, or written anew; never another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.index import is_open
from rlboost_runtime.run.security import create_secrets, read_token, repair_secrets, server_context

OUTCOME = {"state": "budget", "problem": "spent", "remedy": "", "exit_code": 5}
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
        for bad in (good[: len(good) // 2], b"", good[:150] + b"x" + good[151:]):
            path.write_bytes(bad)
            assert repair_secrets(run)
            server_context(run)
            assert not repair_secrets(run)
    run.token.write_bytes(b"")
    assert repair_secrets(run)
    assert len(read_token(run)) > 30


def test_an_outcome_is_written_whole(run: RunFolder) -> None:
    write_json(run.outcome, OUTCOME, durably=True)
    assert json.loads(run.outcome.read_bytes()) == OUTCOME
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".outcome")] == []
