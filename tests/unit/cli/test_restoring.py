"""`rlboost launch --resume OUTPUT/RUN`: what a new head makes of the copy, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_cli.planning.launching import prepared
from rlboost_cli.runs import restoring
from rlboost_runtime.backup import restore
from rlboost_runtime.backup.fence import own_number
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.head import read_address
from rlboost_runtime.run.index import is_open
from tests.fakes.heads import Head


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restore, "SILENT_S", 0.0)
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "new"))


def lost(tmp_path: Path, **job: object) -> Head:
    head = Head(tmp_path / "old", tmp_path / "out", **job)
    head.book()
    head.ticks(1.0)
    head.checkpoint(3)
    head.streamer().round()
    return head


def resumed(head: Head, address: str | None = None) -> RunFolder:
    return prepared(str(head.output / "r"), None, resume=True, yes=False, address=address)


def test_the_run_is_open_here_with_secrets_of_its_own(tmp_path: Path) -> None:
    head = lost(tmp_path)
    run = resumed(head)
    assert run.path == tmp_path / "new" / "runs" / "r"
    assert is_open(run)
    assert own_number(run) == 2
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000003"]
    restored = read_json(run.restored)
    assert restored is not None
    assert (restored["url"], restored["taken"]) == (head.url, False)
    assert not [path for path in run.path.parent.iterdir() if path.name.startswith(".restoring")]


def test_machines_of_the_lost_head_are_billed_up_to_the_copy(tmp_path: Path) -> None:
    head = lost(tmp_path)
    run = resumed(head)
    ledger = Ledger(run.ledger)
    assert ledger.open_machines() == []
    (bill,) = ledger.machines(1e12)
    ledger.close()
    assert bill.ended_at == pytest.approx(head.state().at, abs=1e-3)


def test_a_run_that_is_here_is_not_replaced(tmp_path: Path) -> None:
    head = lost(tmp_path)
    resumed(head)
    with pytest.raises(ConfigError, match="run r is on this machine already"):
        resumed(head)


def test_an_address_is_needed_where_machines_came_to_the_lost_head(tmp_path: Path) -> None:
    offers = {"spot": {"any_of": [{"infra": "ssh", "hosts": ["me@spot"], "price_usd_per_hour": 1.0}]}}
    head = lost(tmp_path, trainer={"address": "old.example", "control_port": 7410}, rollout=offers)
    with pytest.raises(ConfigError, match=r"the machines of r reached its lost head at old\.example"):
        resumed(head)
    with pytest.raises(ConfigError, match="this run costs money"):
        resumed(head, "new.example")
    assert not head.there("head/claims/000002.json").exists()  # nothing was changed by what was refused
    job = restoring._for_this_machine(head.job, "new.example")
    assert job.trainer.address == "new.example"


def test_the_address_is_where_machines_are_sent(tmp_path: Path) -> None:
    run = resumed(lost(tmp_path), "new.example")
    address = read_address(run)
    assert address is not None
    assert address.host == stored_job(run).trainer.address == "new.example"


def test_secrets_are_asked_of_who_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = lost(tmp_path, secrets=["OF_THE_JOB"])
    with pytest.raises(ConfigError, match="OF_THE_JOB: not set in the environment"):
        resumed(head)
    monkeypatch.setenv("OF_THE_JOB", "value")
    assert read_json(resumed(head).environment) == {"OF_THE_JOB": "value"}


def test_a_trainer_of_ones_own_cannot_be_resumed(tmp_path: Path) -> None:
    head = lost(tmp_path, trainer={"script": "train.py"})
    with pytest.raises(ConfigError, match=r"r has a trainer of its own, train\.py"):
        resumed(head)


@pytest.mark.parametrize(
    ("argument", "resume", "address"),
    [("s3://bucket/r", False, None), ("job.yaml", False, "host"), ("r", True, "host")],
)
def test_a_place_goes_with_resume(argument: str, resume: bool, address: str | None) -> None:
    with pytest.raises(ConfigError, match="a place with the copy of a head"):
        prepared(argument, None, resume=resume, yes=False, address=address)


def test_an_empty_place_says_what_a_place_is(tmp_path: Path) -> None:
    (tmp_path / "out" / "r").mkdir(parents=True)
    with pytest.raises(NotFound, match="there is no copy of a head at file:") as found:
        prepared(str(tmp_path / "out" / "r"), None, resume=True, yes=False)
    assert "OUTPUT/RUN" in found.value.remedy
