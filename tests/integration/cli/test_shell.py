"""`rlboost ssh`: a shell on the head and on machines, over a real sshd where one is reached."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost_cli.head.shell import HEAD, shell_command
from rlboost_cli.main import app
from rlboost_providers.skypilot.records import SkyRecord, SkyRecords
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.head import HeadPlace, change_place
from tests.fakes.sshd import make_home, make_key, sshd_on

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of this machine with a machine of each kind."""
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    run = RunFolder.named("mine")
    run.path.mkdir(parents=True)
    fields = {
        "name": "mine",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "rollout": {
            "spot": {
                "any_of": [
                    {"infra": "ssh", "hosts": ["me@gpu-1:2222", "gpu-2"], "jump_host": "gate"},
                    {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct"},
                ]
            }
        },
    }
    run.job_json.write_text(Job.model_validate(fields).canonical_json())
    ledger = Ledger(run.ledger)
    for name, provider, zone in (
        ("spot-0", "ssh", "me@gpu-1:2222"),
        ("spot-1", "aws", "us-east-1a"),
        ("spot-2", "skypilot", "gcp/us-central1/us-central1-a"),
        ("spot-3", "local", "local-0"),
        ("spot-4", "ssh", "gpu-2"),
    ):
        ledger.intend(MachineRecord(name, provider, zone, "gpu", 1_000_000, "job", 1000.0))
        ledger.launched(name, 1000.0)
    ledger.ended("spot-4", 1001.0, "gone")
    ledger.close()
    SkyRecords(run.cloud / "skypilot" / "machines").write(
        SkyRecord("spot-2", "rlboost-mine-spot-2", "us-central1-a", 1, 1000.0)
    )
    return run


def test_machines_are_reached_as_the_job_says(run: RunFolder) -> None:
    to_host = ["-J", "gate", "-p", "2222", "me@gpu-1"]
    assert shell_command(run, "spot-0", []) == ["ssh", "-t", *to_host]
    assert shell_command(run, "spot-0/1", ["ls", "a b"]) == ["ssh", *to_host, "ls 'a b'"]
    assert shell_command(run, "spot-2", []) == ["ssh", "-t", "rlboost-mine-spot-2"]


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        (HEAD, "the head of mine is this machine", "its files are in"),
        ("reserved-0/0", "the head of mine is this machine", "its files are in"),
        ("spot-1", "takes no SSH connections", "SkyPilot's machines take them"),
        ("spot-3", "spot-3 is a process of this machine", "rlboost logs mine spot-3"),
        ("spot-4", "spot-4 is not running", "rlboost logs mine spot-4"),
        ("spot-9", "mine has no machine spot-9", "choose one of: spot-0, spot-1, spot-2, spot-3"),
    ],
)
def test_what_cannot_be_reached_is_told(run: RunFolder, name: str, problem: str, remedy: str) -> None:
    with pytest.raises((ConfigError, NotFound), match=problem) as found:
        shell_command(run, name, [])
    assert remedy in found.value.remedy


def test_machines_of_a_head_elsewhere_are_reached_from_there(run: RunFolder) -> None:
    change_place(run, HeadPlace("train-1"))
    assert shell_command(run, HEAD, []) == ["ssh", "-t", "train-1"]
    assert shell_command(run, "spot-0", ["ls", "a b"]) == [
        "ssh", "-t", "train-1", "rlboost ssh mine spot-0 -- ls 'a b'",
    ]  # fmt: skip
    change_place(run, HeadPlace(""))
    with pytest.raises(NotFound, match="is not rented yet"):
        shell_command(run, HEAD, [])


def test_a_rented_head_is_known_by_its_own_key_alone(run: RunFolder, tmp_path: Path) -> None:
    home = make_home(tmp_path / "user")
    with sshd_on(tmp_path / "sshd", home, trusted=False) as server:
        make_key(tmp_path / "other")

        def say(key: Path) -> subprocess.CompletedProcess[str]:
            identity = str(home / ".ssh" / "id_ed25519")
            host_key = " ".join(key.read_text().split()[:2])
            change_place(run, HeadPlace(server.host, identity_file=identity, host_key=host_key))
            words = shell_command(run, HEAD, ["echo", "a  b"])
            environment = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
            return subprocess.run(
                words, capture_output=True, text=True, timeout=30, check=False, env=environment,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

        assert say(server.folder / "host_key.pub").stdout == "a  b\n"
        refused = say(tmp_path / "other.pub")
        assert refused.returncode == 255
        assert "Host key verification failed" in refused.stderr


def test_the_command_says_what_is_wrong(run: RunFolder) -> None:
    done = CliRunner().invoke(app, ["ssh", "mine"])
    assert done.exit_code == 2
    assert "the head of mine is this machine" in done.output
