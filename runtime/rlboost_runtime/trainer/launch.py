"""Start the trainer as several ranks by torchrun's machinery, on this machine or on several.

The starting process only waits: if one rank ends badly all end, and the exit code is the trainer's own where
it said that the run cannot go on. Ranks die with the process that started them, also when that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

MEETING_S = 900
"""So long nodes wait for one another; a machine may still be booting."""

_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(frozen=True, slots=True)
class Place:
    """A node among those of a run: node 0 is the head; `address` is its HOST:PORT, where all meet."""

    ranks: int
    """Processes of this node."""
    nodes: int = 1
    number: int = 0
    address: str | None = None


def run_ranks(name: str, command: list[str], place: Place, final_codes: tuple[int, ...]) -> int:
    """Run `python COMMAND` as this node's ranks of run `name`; return the exit code.

    One of `final_codes` if a rank ended with it, else 1 if any failed. Waits up to `MEETING_S` for the other
    nodes.
    """
    among_nodes = place.nodes > 1
    if among_nodes:
        _speak_through_the_right_interface(place)
    config = LaunchConfig(
        min_nodes=place.nodes, max_nodes=place.nodes, nproc_per_node=place.ranks, run_id=name,
        rdzv_backend="static" if among_nodes else "c10d",
        rdzv_endpoint=place.address or "localhost:0",
        rdzv_configs={"rank": place.number, "timeout": MEETING_S} if among_nodes else {},
        max_restarts=0, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as exc:
        codes = {failure.exitcode for failure in exc.failures.values()}
        return next((code for code in final_codes if code in codes), 1)
    return 0


def _speak_through_the_right_interface(place: Place) -> None:
    """Have gloo and NCCL use the interface that faces the other nodes, unless somebody chose one."""
    assert place.address is not None
    host = place.address.rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: asks the kernel for the way
        ours = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == ours for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def die_with_launcher() -> None:
    """Have the kernel end this rank with the process that started it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit("the launcher is gone")
