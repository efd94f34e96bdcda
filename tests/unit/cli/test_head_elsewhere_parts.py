"""Parts of a head elsewhere, without a connection: what is shipped, what is fetched, what is refused."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.head import deployment, mirror
from rlboost_cli.head.connection import Head
from rlboost_cli.head.mirror import close_mirror, is_complete, is_live, refresh, refresh_if_elsewhere
from rlboost_runtime.billing.launch_records import HeadMachine, own_head_machine
from rlboost_runtime.deploy.shipment import requirements_of
from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.remote import head as program
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import kept_place
from rlboost_runtime.run.index import is_supervised

HEAD = {"infra": "ssh", "hosts": ["me@gpu-1.example.org:2222"], "python": "/opt/py", "folder": "/data"}


def job(**changes: Any) -> Job:
    fields = {"name": "far", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["spell_backward"]}}
    return Job.model_validate_json(json.dumps({**fields, "trainer": HEAD, **changes}))


class HeadHere(Head):
    """The program itself, on a folder of this machine: everything of a conversation but the connection."""

    def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
        request = {
            "folder": str(self.run.path / "there"),
            "python": None,
            "owner": "me",
            "run": self.run.name,
        }
        return program.DO[do](program.RunPlace(request), {**request, **more}, io.BytesIO())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    run = RunFolder(tmp_path / "far")
    run.path.mkdir()
    write_json(run.head, {"host": "gpu-1"})
    return run


@pytest.fixture
def there(here: RunFolder) -> Path:
    folder = here.path / "there/heads/me/runs/far"
    (folder / "logs/machines/spot-0").mkdir(parents=True)
    return folder


# --- the job over there -----------------------------------------------------------------------------------


def test_the_job_there_is_one_of_a_run_of_that_machine(here: RunFolder) -> None:
    given = job(requirements=[], rollout={"spot": {"any_of": [{"infra": "local"}]}})
    mine = deployment.on_its_head(given, Head(here))
    assert mine.trainer.infra == "local"
    written = here.path / "far.head.yaml"
    written.write_text(mine.model_dump_json(exclude_defaults=True))
    assert load_job(written) == mine  # as strict as any job file
    assert mine.trainer.address is None, "nobody elsewhere needs to reach it"


def test_a_head_must_have_the_gpus_that_it_was_bought_with(here: RunFolder) -> None:
    bought = {"infra": "aws/us-east-1", "accelerators": "H100:8", "ranks": 8}
    given = job(trainer=bought, after={"done": "stay"})
    assert deployment.on_its_head(given, Head(here)).trainer.accelerators == "H100:8"


def bought_in(run: RunFolder, zone: str) -> None:
    head = HeadMachine(
        machine="head-1",
        provider="aws",
        zone=zone,
        accelerator="H100:8",
        price_micro_usd_per_hour=98_000_000,
        price_source="a list",
        intended_at=0.0,
        launched_at=1.0,
    )
    write_json(run.head_machines, [asdict(head)])


@pytest.mark.parametrize("zone", ["us-east-1b", "aws/us-east-1/us-east-1b"])
def test_what_a_bought_head_sends_is_billed_as_from_its_cloud(here: RunFolder, zone: str) -> None:
    bought_in(here, zone)
    given = job(trainer={"infra": "aws/us-east-1", "accelerators": "H100:8"}, after={"done": "stay"})
    mine = deployment.on_its_head(given, Head(here))
    assert mine.trainer.location == "aws/us-east-1"
    assert mine.trainer.node_offer is None


@pytest.mark.parametrize("zone", ["us-east-1b", "aws/us-east-1/us-east-1b"])
def test_a_bought_head_buys_the_other_nodes_like_itself_and_in_its_zone(here: RunFolder, zone: str) -> None:
    bought_in(here, zone)
    trainer = {"infra": "aws/us-east-1", "accelerators": "H100:8", "nodes": 3, "reservation": "cr-0123456789"}
    given = job(trainer=trainer, after={"done": "stay"})
    mine = deployment.on_its_head(given, Head(here))
    assert (mine.trainer.bought_nodes, mine.trainer.reservation) == (2, "cr-0123456789")
    assert mine.trainer.node_offer is not None
    assert mine.trainer.node_offer.infra == "aws/us-east-1/us-east-1b"
    assert mine.trainer.node_offer.accelerators == "H100:8"
    written = here.path / "far.head.yaml"
    written.write_text(mine.model_dump_json(exclude_defaults=True))
    assert load_job(written).trainer.node_offer == mine.trainer.node_offer


def test_machines_elsewhere_reach_the_head_where_we_do_unless_an_address_is_given(here: RunFolder) -> None:
    write_json(here.head, {"host": "me@gpu-1.example.org:2222"})
    cloud = {"spot": {"any_of": [{"infra": "aws/us-east-1", "accelerators": "L4:1"}]}}
    assert deployment.on_its_head(job(rollout=cloud), Head(here)).trainer.address == "gpu-1.example.org"
    given = job(rollout=cloud, trainer={**HEAD, "address": "10.0.0.7"})
    assert deployment.on_its_head(given, Head(here)).trainer.address == "10.0.0.7"


def test_what_the_jobs_clouds_need_is_installed_there_beside_its_own_requirements() -> None:
    cloud = {"spot": {"any_of": [{"infra": "aws/us-east-1", "accelerators": "L4:1", "via": "direct"}]}}
    lines = requirements_of(
        job(rollout=cloud, requirements=["sympy==1.14"], trainer={**HEAD, "python": None})
    )
    assert [line for line in lines if line.startswith("boto3")]
    assert lines[-1] == "sympy==1.14"
    assert not [line for line in lines if line.startswith(("torch", "pytest", "paramiko"))]


def test_files_arrive_as_they_were_also_empty_and_large_ones(tmp_path: Path) -> None:
    sent = {"a.txt": b"", "sub/b.bin": os.urandom(3 * 512 + 1), "c" * 150: b"x" * (deployment._BLOCK + 7)}
    for name, content in sent.items():
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    packed = b"".join(deployment.packed({name: tmp_path / "from" / name for name in sent}))
    program.unpack(io.BytesIO(packed), tmp_path / "to")
    assert {name: (tmp_path / "to" / name).read_bytes() for name in sent} == sent


def test_a_rented_machine_knows_that_it_is_in_use_as_long_as_files_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setattr(program.Asked, "file", asked)
    large = tmp_path / "model"
    large.write_bytes(bytes(3 * program.BLOCK))
    seen: list[bool] = []

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            seen.append(asked.exists())
            asked.unlink(missing_ok=True)  # long ago
            return super().read(size)

    program.unpack(Slow(b"".join(deployment.packed({"model": large}))), tmp_path / "to")
    assert sum(seen) >= 2


# --- what is known here -----------------------------------------------------------------------------------


def test_only_what_is_new_is_fetched_and_nothing_is_lost_or_doubled(here: RunFolder, there: Path) -> None:
    log, head = there / "logs/machines/spot-0/agent-0.log", HeadHere(here)
    written = ""
    for line in ("one\n", "two\n", "", "a half"):
        written += line
        log.write_text(written)
        write_json(there / "status.json", {"step": len(written)})
        refresh(here, head, logs=True)
        assert (here.logs / "machines/spot-0/agent-0.log").read_text() == written
        assert read_json(here.status) == {"step": len(written)}
    answer, blob = head.ask(
        "mirror", known=json.loads(here.mirror.read_text())["marks"], ledger=True, logs=True
    )
    assert (answer["files"], blob) == ([], b"")


def test_the_end_that_a_run_is_resumed_after_is_not_taken_for_its_next_one(
    here: RunFolder, there: Path
) -> None:
    head = HeadHere(here)
    write_json(there / "outcome.json", {"state": "stopped"})
    write_json(there / "ending.json", {"state": "stopped"})
    refresh(here, head)
    here.outcome.rename(here.path / "outcome.previous.json")  # what `launch --resume` does
    here.ending.unlink()
    for _ in range(2):
        refresh(here, head)  # `status`, while the head does not know of it yet
        assert not here.outcome.exists()
        assert not here.ending.exists()
    (there / "outcome.json").unlink()
    refresh(here, head)
    write_json(there / "outcome.json", {"state": "done"})
    refresh(here, head)
    assert read_json(here.outcome) == {"state": "done"}


def test_a_log_longer_than_one_answer_comes_in_several(
    here: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MOST_BYTES", 1000)
    for name, size in (("a", 2500), ("b", 10)):
        (there / f"logs/{name}.log").write_bytes(os.urandom(size))
    refresh(here, HeadHere(here), logs=True)
    for name in "ab":
        assert (here.logs / f"{name}.log").read_bytes() == (there / f"logs/{name}.log").read_bytes()


def test_two_commands_that_look_at_once_leave_a_log_as_it_is(
    here: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, lines = there / "logs/trainer.log", "".join(f"line {number:04}\n" for number in range(101))
    log.write_text(lines[:500])
    refresh(here, HeadHere(here), logs=True)
    log.write_text(lines[:900])
    known = json.loads(here.mirror.read_text())["marks"]
    early = HeadHere(here).ask("mirror", known=known, ledger=False, logs=True)

    class Slow(HeadHere):
        """What it says was asked for by a command that comes to writing it only later."""

        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            return early

    other = threading.Thread(target=refresh, args=(here, Slow(here)), kwargs={"logs": True})
    log.write_text(lines[:1000])
    take = mirror._write_copy

    def while_the_other_writes(*what: Any) -> None:
        take(*what)
        if not other.ident:
            other.start()
            other.join(timeout=0.5)

    monkeypatch.setattr(mirror, "_write_copy", while_the_other_writes)
    refresh(here, HeadHere(here), logs=True)
    other.join(timeout=10)
    log.write_text(lines)
    refresh(here, HeadHere(here), logs=True)
    assert (here.logs / "trainer.log").read_text() == lines


def test_a_look_does_not_wait_for_ever_for_another_that_was_stopped(
    here: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "WAIT_S", 0.1)
    with mirror._writing(here), pytest.raises(RuntimeFault, match="another command has been updating"):
        refresh(here, HeadHere(here))


def test_a_file_that_was_cut_here_is_made_whole(here: RunFolder, there: Path) -> None:
    head = HeadHere(here)
    (there / "metrics.jsonl").write_text("one\ntwo\n")
    refresh(here, head, logs=True)
    here.metrics.write_text("one\ntwo\nthr")  # a command that was killed while it wrote
    (there / "metrics.jsonl").write_text("one\ntwo\nthree\n")
    refresh(here, head, logs=True)
    assert here.metrics.read_text() == "one\ntwo\nthree\n"


def test_what_is_gone_there_is_gone_here(here: RunFolder, there: Path) -> None:
    head = HeadHere(here)
    write_json(there / "outcome.json", {"state": "failed"})
    refresh(here, head)
    assert here.outcome.exists()
    (there / "outcome.json").unlink()  # resumed
    refresh(here, head)
    assert not here.outcome.exists()


def test_the_ledger_comes_as_of_now_while_it_is_written(here: RunFolder, there: Path) -> None:
    head = HeadHere(here)
    writer = sqlite3.connect(there / "ledger.sqlite", isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE spent (usd INTEGER)")
    for expected in (1, 2):
        writer.execute("INSERT INTO spent VALUES (1)")
        refresh(here, head, ledger=True)
        copy = sqlite3.connect(f"{here.ledger.as_uri()}?mode=ro", uri=True)
        assert copy.execute("SELECT count(*) FROM spent").fetchone() == (expected,)
        copy.close()
    writer.close()
    assert [path.name for path in here.path.glob("ledger*")] == ["ledger.sqlite"]


def test_the_ledger_comes_also_where_the_disk_takes_no_copy(
    here: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite3.connect(there / "ledger.sqlite").execute("CREATE TABLE spent (usd INTEGER)").connection.close()
    monkeypatch.setattr("tempfile.tempdir", str(here.path / "full"))
    refresh(here, HeadHere(here), ledger=True)
    assert here.ledger.exists()


def test_a_ledger_that_cannot_be_read_is_said_in_words(here: RunFolder, there: Path) -> None:
    (there / "ledger.sqlite").write_text("no database at all, and long enough to be looked at" * 20)
    asked = {"do": "mirror", "known": {}, "ledger": True, "logs": False}
    request = asked | {"folder": str(here.path / "there"), "python": None, "owner": "me", "run": "far"}
    done = subprocess.run(
        [sys.executable, program.__file__],
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        check=True,
    )
    problem = json.loads(done.stdout.splitlines()[-1])["answer"]["problem"]
    assert problem == f"{there / 'ledger.sqlite'}: file is not a database"


def test_what_a_head_is_rented_as_stays_readable_there_where_its_disk_is_full(
    here: RunFolder, there: Path
) -> None:
    head = HeadMachine("head-1", "aws", "us-east-2a", "A10G:1", 36_000_000, "t", 1000.0)
    told = {"folder": str(here.path / "there"), "python": None, "owner": "me", "run": "far"}

    def looks(head: HeadMachine) -> dict[str, Any]:
        asked = {"do": "look", "rental": asdict(head), **told}
        done = subprocess.run(
            [sys.executable, program.__file__],
            input=json.dumps(asked).encode() + b"\n",
            capture_output=True,
            check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["answer"]
        return answer

    HeadHere(here).ask("look", rental=asdict(head))
    assert looks(head)["exists"] is False, "nothing needs to be written"
    assert "File too large" in looks(replace(head, launched_at=1001.0))["problem"]
    assert own_head_machine(RunFolder(there)) == head
    assert (there.parents[1] / "owner").read_text() == "me"
    assert sorted(path.name for path in there.parents[1].iterdir()) == ["owner", "rental.json", "runs"]
    (there.parents[1] / "rental.json").write_text("")
    assert own_head_machine(RunFolder(there)) is None


@pytest.mark.parametrize(
    "name", ["../stolen", "job.json", "secrets/token", "logs/../job.json", "/etc/passwd", "logs/.hidden"]
)
def test_a_head_that_sends_what_nobody_asked_for_is_refused(here: RunFolder, name: str) -> None:
    class Liar(HeadHere):
        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            told = {"name": name, "mark": [1, 1], "age": 0.0, "offset": 0, "bytes": 1}
            return {"files": [told], "gone": [], "supervised": True, "more": False}, b"x"

    with pytest.raises(ProtocolError, match="was not requested"):
        refresh(here, Liar(here))
    assert sorted(path.name for path in here.path.parent.rglob("*") if path.is_file()) == ["head.json"]


def test_a_coordinator_lives_where_its_status_is_fresh_and_its_supervisor_was_seen(
    here: RunFolder, there: Path
) -> None:
    write_json(there / "status.json", {})
    refresh(here, HeadHere(here))
    assert not is_supervised(here)
    write_json(here.mirror, {"supervised": True})
    assert is_live(here)
    os.utime(here.status, (time.time() - 60, time.time() - 60))
    assert not is_live(here)


def test_an_ended_run_of_which_everything_is_here_is_not_asked_again(here: RunFolder) -> None:
    write_json(here.outcome, {"state": "done"})
    close_mirror(here)
    assert is_complete(here)
    assert refresh_if_elsewhere(here) is None  # there is no such host


def test_where_the_head_is_stays_readable(here: RunFolder) -> None:
    assert kept_place(here).host == "gpu-1"


# --- words ------------------------------------------------------------------------------------------------


def test_what_a_command_says_there_is_said_here_with_its_exit_code(here: RunFolder) -> None:
    class Failing(HeadHere):
        def ask(self, do: str, **more: Any) -> tuple[dict[str, Any], bytes]:
            assert more["environment"] == {"RLBOOST_ERRORS": "json"}
            return {"status": 3, "out": "", "err": printed}, b""

    from rlboost_cli.head.connection import HeadRefused

    error = '{"error": {"class": "NotFound", "problem": "no machine x", "remedy": "see", "exit_code": 3}}'
    printed = f"noise\n{error}\n"
    with pytest.raises(HeadRefused) as refusal:
        Failing(here).rlboost("preempt", "far", "x")
    assert (refusal.value.problem, refusal.value.remedy) == ("on gpu-1: no machine x", "see")
    assert refusal.value.exit_code == 3
    printed = "No module named rlboost_cli\n"
    with pytest.raises(HeadRefused, match="on gpu-1: No module named rlboost_cli; rlboost logs"):
        Failing(here).rlboost("preempt", "far", "x")


# --- after a restart of the machine -----------------------------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with systemd: `systemctl` and `sudo` note what they are told, and `sudo` does it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, rest in (("systemctl", ""), ("sudo", 'shift; exec "$@"')):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/told\n{rest}\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(program, "SYSTEMD", tmp_path)
    monkeypatch.setattr(program, "UNITS", tmp_path)
    return tmp_path


def test_a_run_goes_on_after_a_restart_of_its_head_until_it_is_ended(
    here: RunFolder, there: Path, systemd: Path
) -> None:
    head = HeadHere(here)
    assert head.ask("keep", on=True)[0] == {"kept": True}
    unit = systemd / "rlboost-me-far.service"
    assert f"ConditionPathExists=!{there}/outcome.json" in unit.read_text()
    assert f"-m rlboost_runtime.supervisor {there}" in unit.read_text()
    assert head.ask("keep", on=False)[0] == {"kept": False}
    assert not unit.exists()
    told = [line.removeprefix("sudo -n ") for line in (systemd / "told").read_text().splitlines()]
    assert [line for line in told if line.startswith("systemctl")][
        -1
    ] == "systemctl disable rlboost-me-far.service"
    assert "systemctl enable rlboost-me-far.service" in told


def test_systemd_itself_finds_nothing_wrong_with_the_unit(here: RunFolder, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    request = {"folder": str(here.path / "there"), "python": sys.executable, "owner": "me", "run": "far"}
    unit = tmp_path / "rlboost-me-far.service"
    unit.write_text(program.unit_text(program.RunPlace(request)))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert unit.name not in done.stderr, done.stderr


def test_without_systemd_nothing_is_changed(here: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SYSTEMD", here.path / "nothing")
    assert HeadHere(here).ask("keep", on=True)[0] == {"kept": False}
