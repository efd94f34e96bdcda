"""What a trainer's ranks say to one another stays on the machine: a scan of their listening sockets."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LAUNCH = """
import sys
from rlboost_runtime.trainer.node import TrainerNode, run_ranks
sys.exit(run_ranks("closed", sys.argv[1:], TrainerNode(ranks=2), ()))
"""
RANK = """
import json, os, sys
import psutil, torch
import torch.distributed as dist
from rlboost_runtime.trainer.learn.ranks import Ranks
ranks = Ranks.join()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
if ranks.leads:
    launcher = psutil.Process(os.getppid())
    found = [
        (each.laddr.ip, each.laddr.port)
        for process in (launcher, *launcher.children(recursive=True))
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
dist.barrier()
ranks.leave()
"""


@pytest.mark.e2e
def test_the_ranks_of_a_trainer_listen_on_loopback_only(tmp_path: Path) -> None:
    script, found = tmp_path / "rank.py", tmp_path / "found.json"
    script.write_text(RANK)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", LAUNCH, str(script), str(found)]
    subprocess.run(command, env=environment, check=True, timeout=100)
    listening = json.loads(found.read_text())
    assert len(listening) >= 3, "the store, and gloo on each rank"
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in listening), listening
