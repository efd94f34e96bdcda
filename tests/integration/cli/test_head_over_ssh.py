"""A head over a real sshd: who is let in, what is said where it cannot be reached, used or installed."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from rlboost_cli.head import control
from rlboost_cli.head.connection import Head, HeadRefused, HeadUnreachable, Printed
from rlboost_cli.head.control import bring_up, end_run
from rlboost_cli.head.deployment import install
from rlboost_cli.head.mirror import open_mirror, refresh_if_elsewhere
from rlboost_cli.main import app
from rlboost_cli.runs.teardown import end_run as end_for_certain
from rlboost_cli.runs.teardown import end_without_head
from rlboost_runtime.errors import ConfigError, CredentialsRejected, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.create import prepare_run, reopen
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from tests.fakes.sshd import Sshd, make_home, sshd_on

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    home = make_home(tmp_path / "user")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with sshd_on(tmp_path / "sshd", home) as made:
        yield made


def run_on(host: str, tmp_path: Path, **trainer: Any) -> tuple[RunFolder, Job]:
    fields = {
        "name": "far",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "trainer": {"infra": "ssh", "hosts": [host], "folder": str(tmp_path / "head"), **trainer},
    }
    path = tmp_path / "job.yaml"
    with path.open("w") as file:
        YAML().dump(fields, file)
    job = load_job(path)
    return prepare_run(path, job).run, job


def silently(words: str) -> None:
    pass


def test_a_head_that_is_off_is_named_with_what_to_try(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path)
    server.stop()
    with pytest.raises(HeadUnreachable) as refusal:
        bring_up(run, silently)
    assert f"the head of far does not answer: {server.host} cannot be reached" in refusal.value.problem
    assert f"`ssh {server.host} true` works" in refusal.value.remedy
    assert refusal.value.exit_code == 7
    with pytest.raises(HeadUnreachable, match="and its machines may still be running there") as refusal:
        end_run(run, silently)
    assert "--lost-head" in refusal.value.remedy
    assert not run.outcome.exists(), "nothing is known of what runs there"


def test_a_head_whose_key_is_not_known_is_not_talked_to(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path)
    (server.home / ".ssh/known_hosts").write_text("")
    with pytest.raises(CredentialsRejected, match=r"the host key of .* is not known: SHA256:") as refusal:
        bring_up(run, silently)
    assert f"type: ssh -p {server.port} 127.0.0.1" in refusal.value.remedy
    assert not (tmp_path / "head").exists()


def test_a_python_that_is_not_there_is_named_as_the_jobs_field(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"trainer\.python: .* has no program /nowhere/python") as refusal:
        bring_up(run, silently)
    assert refusal.value.exit_code == 2


def test_an_installation_that_fails_says_its_last_lines_and_leaves_nothing(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlboost_runtime.deploy.shipment.template",
        lambda name: "echo no way to PyPI >&2; exit 3\n" if name == "install.sh" else "",
    )
    run, job = run_on(server.host, tmp_path)
    said: list[str] = []
    with Head(run) as head:
        there, _ = head.ask("look")
        with pytest.raises(RuntimeFault, match=r"could not be installed on .* \(status 3\)") as refusal:
            install(head, there, job, said.append)
    assert "  no way to PyPI" in refusal.value.problem
    assert f"{server.host}: no way to PyPI" in said
    assert [path.name for path in (tmp_path / "head").iterdir()] == ["heads"]


def test_a_runtime_that_another_run_uses_is_not_replaced(server: Sshd, tmp_path: Path) -> None:
    run, job = run_on(server.host, tmp_path)
    there = {"has_python": True, "busy": ["other"], "wheel": "0" * 64, "free_bytes": 10**12}
    with Head(run) as head, pytest.raises(RuntimeFault, match=r"other on .* another version of RLBoost"):
        install(head, there, job, silently)


def test_a_command_that_fails_there_says_here_what_it_said(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path, python=sys.executable)
    with Head(run) as head:
        head.ask("look")
        with pytest.raises(HeadRefused, match="no run far in ") as refusal:
            head.rlboost("cost", "far")
        assert refusal.value.exit_code == 3
        assert "rlboost" in head.rlboost("--help").out


def test_what_is_brought_there_is_for_its_owner_alone(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path)
    with Head(run) as head:
        head.ask("look")
    for path in (tmp_path / "head").rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_run_that_never_came_to_its_head_is_ended_without_a_trace(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path)
    end_run(run, silently)
    assert not list((tmp_path / "head").glob("heads/*/runs/*"))


@pytest.mark.parametrize(
    ("is_known", "why"), [(False, "the host key of"), (True, ": Not a directory")], ids=["key", "folder"]
)
def test_a_head_that_refuses_does_not_keep_us_from_what_is_known_of_it_or_of_other_runs(
    server: Sshd, tmp_path: Path, is_known: bool, why: str
) -> None:
    run, _ = run_on(server.host, tmp_path)
    open_mirror(run)
    write_json(run.status, {"step": 3})
    if is_known:
        (tmp_path / "head").write_text("a file, where its folder was")
        write_json(run.mirror, {"marks": {}, "at": time.time()})
    else:
        (server.home / ".ssh/known_hosts").write_text("")
    silence = refresh_if_elsewhere(run)
    assert silence is not None
    assert why in silence
    assert ("showing the state of" in silence) is is_known
    for command in (["status"], ["status", "far"], ["logs", "far"]):
        said = CliRunner().invoke(app, command)
        assert said.exit_code == 0, said.output


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that are typed on the head; nothing comes of them."""
    commands: list[tuple[str, ...]] = []

    def note(head: Head, *arguments: str, **more: Any) -> Printed:
        commands.append(arguments)
        return Printed("", "")

    monkeypatch.setattr(Head, "rlboost", note)
    return commands


def test_a_run_that_is_ended_while_its_head_is_prepared_is_not_started(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[tuple[str, ...]]
) -> None:
    run, _ = run_on(server.host, tmp_path, python=sys.executable)
    monkeypatch.setattr(control, "install", lambda *_: end_for_certain(run, silently))  # another terminal
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        bring_up(run, silently)
    assert (read_json(run.outcome) or {})["state"] == "stopped"
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        bring_up(run, silently)  # whoever was still being asked whether to launch
    assert typed == []


def test_an_end_that_comes_while_the_run_is_being_started_waits_until_it_is(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = run_on(server.host, tmp_path, python=sys.executable)
    said: list[str] = []
    other = threading.Thread(target=end_for_certain, args=(run, said.append))

    def starts_slowly(head: Head, *arguments: str, **more: Any) -> Printed:
        other.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not run.outcome.exists()
        return Printed("", "")

    monkeypatch.setattr(Head, "rlboost", starts_slowly)
    bring_up(run, silently)
    other.join(timeout=60)
    assert said[:1] == ["waiting for another command, which starts or ends far"]


def test_a_run_that_ended_on_its_head_is_resumed_there_only_where_that_was_asked_for(
    server: Sshd, tmp_path: Path, typed: list[tuple[str, ...]]
) -> None:
    run, _ = run_on(server.host, tmp_path, python=sys.executable)
    with Head(run) as head:
        head.ask("look")
    (home,) = (tmp_path / "head/heads").iterdir()
    (home / "runs/far").mkdir(parents=True)
    (home / "runs/far/job.json").write_text("{}")
    write_json(home / "runs/far/outcome.json", {"state": "failed"})
    with pytest.raises(RuntimeFault, match="far was stopped in the meantime"):
        bring_up(run, silently)
    assert (read_json(run.outcome), typed) == ({"state": "failed"}, [])
    reopen(run)
    bring_up(run, silently)
    assert typed == [("up", "far", "--resume", "--yes")]
    end_run(run, silently)  # the head did not come to it
    assert read_json(run.outcome) == {"state": "failed"}


def test_a_head_that_is_gone_for_good_is_given_up_and_not_asked_again(server: Sshd, tmp_path: Path) -> None:
    run, _ = run_on(server.host, tmp_path)
    server.stop()
    told = refresh_if_elsewhere(run)
    assert told is not None
    assert "does not answer" in told
    end_without_head(run, silently)
    assert read_json(run.outcome)["state"] == "stopped"
    assert refresh_if_elsewhere(run) is None


BARE = """
import sys
for name in ("aiohttp blake3 fastapi numba numpy obstore uvicorn uvloop websockets zstandard"
             " torch transformers reasoning_gym math_verify safetensors peft boto3").split():
    sys.modules[name] = None
sys.argv = ["rlboost", "launch", sys.argv[1], "--detach", "--yes"]
from rlboost_cli.main import run
run()
"""


def test_a_laptop_without_torch_or_anything_of_a_run_can_launch(server: Sshd, tmp_path: Path) -> None:
    run_on(server.host, tmp_path, python="/nowhere/python")
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "trainer.python: " in done.stderr, done.stderr  # it got as far as asking the machine
    assert done.returncode == 2
