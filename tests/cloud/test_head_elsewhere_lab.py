"""A head elsewhere with nothing of ours on it: a namespace machine, on which a Python 3.11, our requirements
and our wheel are installed over SSH; it trains, with the laptop's commands only looking."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from cloudlab.client import Lab
from lab_machines import rented

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]
UP_S = 600.0
VENV = "/home/ubuntu/.rlboost/venv"


def test_a_bare_machine_becomes_a_head_and_trains(lab: Lab, account: dict[str, str], cloud_cli: Cli) -> None:
    ssh = Path(account["HOME"]) / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "id_ed25519")], check=True)
    with rented(lab, (ssh / "id_ed25519.pub").read_text().strip()) as (machine, address):
        train_on(lab, machine, address, ssh, cloud_cli)


def train_on(lab: Lab, machine: str, address: str, ssh: Path, cloud_cli: Cli) -> None:
    lab.ask("shell", id=machine, script="rm -rf /home/ubuntu/.rlboost")  # the lab's image has it
    assert lab.ask("shell", id=machine, script=f"test -e {VENV} || echo bare") == "bare\n"
    with (ssh / "known_hosts").open("a") as known:  # what a person does who compares fingerprints
        subprocess.run(["ssh-keyscan", "-t", "ed25519", address], stdout=known, check=True)
    cloud_cli.environment.pop("SSH_AUTH_SOCK", None)
    trainer = {"infra": "ssh", "hosts": [f"ubuntu@{address}"]}
    job = cloud_cli.job(
        "bare", trainer=trainer, algorithm={"steps": 1}, rollout={"spot": {"max_instances": 1}}
    )
    began = time.monotonic()
    cloud_cli("up", job, "--yes", timeout_s=UP_S)
    first_s = time.monotonic() - began
    assert lab.ask("shell", id=machine, script=f"{VENV}/bin/python --version").startswith("Python 3.11.")
    began = time.monotonic()
    cloud_cli("up", job, "--yes", timeout_s=UP_S)
    print(f"up on a bare machine {first_s:.1f} s, again {time.monotonic() - began:.1f} s")
    cloud_cli("launch", job, "--yes", timeout_s=UP_S)
    assert cloud_cli.json("status", "bare")["state"] == "done"
    assert (cloud_cli.run_folder("bare").checkpoints / "model" / "model.safetensors").exists()
    assert cloud_cli.json("cost", "bare")["tokens_trained"] > 0
    left = lab.ask("shell", id=machine, script="pgrep -u ubuntu -af rlboost_runtime || echo nothing")
    assert left.strip() == "nothing", left
