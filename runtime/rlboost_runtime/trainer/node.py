"""`python -m rlboost_runtime.trainer.node HOST:PORT RUN NUMBER NODES RANKS`: one further node of a trainer.

A bought node's start-up script runs it; on machines of your own you do. HOST:PORT is the job's
`trainer.node_address`, NUMBER counts from 1 (the head is 0). A node needs RLBoost and
nothing of the run: job, model and weights come from the head. If the head's trainer dies or its machine
vanishes silently, the node waits for the next trainer; it ends, with exit code 0, when the run does. Traffic
between nodes is neither authenticated nor encrypted: use a private network.

The ranks are started with torchrun's machinery, on one machine or several. The starting process only waits:
if one rank fails all end, and the exit code is the trainer's own if it reported that the run cannot continue.
Ranks die with the process that started them, also when that is killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlboost_runtime import logs
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.head import LOOPBACK

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Pause between two attempts: the head's trainer needs longer to come back."""
CHECK_EVERY_S = 20.0
"""Interval between two checks of the head's machine."""
CHECK_TIMEOUT_S = 10.0
"""Longest wait for an answer to a check."""
MAX_MISSED = 6
"""Checks without an answer, in a row, after which the head is considered lost."""
_MODULE = "rlboost_runtime.trainer.node"


def main(arguments: list[str]) -> int:
    """Run a node, or one of its ranks; return the exit code."""
    if is_rank():
        return _run_rank()
    try:
        address, run, *numbers = arguments
        number, nodes, ranks = map(int, numbers)
    except ValueError:
        print(f"usage: python -m {_MODULE} HOST:PORT RUN NUMBER NODES RANKS", file=sys.stderr)
        return 2
    logs.setup(f"trainer-node-{number}")
    place = TrainerNode(ranks, nodes, number, address)
    while _run_once(run, place):
        event(log, "node.head_lost", level=logging.WARNING, address=address)
        time.sleep(PAUSE_S)
    return 0


def _run_once(run: str, place: TrainerNode) -> bool:
    """Run this node's ranks once; return True if the run goes on, False once it ended."""
    from torch.distributed import DistError

    try:
        return run_ranks(run, ["-m", _MODULE], place, ()) != 0
    except DistError as error:  # the head did not appear within the rendezvous timeout
        event(log, "node.head_absent", level=logging.WARNING, problem=str(error).partition("\n")[0])
        return True


def _run_rank() -> int:
    # torch and transformers: only ranks need them
    from rlboost_runtime.trainer.learn.rank_worker import run_worker
    from rlboost_runtime.trainer.learn.ranks import Ranks

    die_with_launcher()
    ranks = Ranks.join()
    logs.setup(f"trainer-{ranks.rank}")
    head = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    threading.Thread(target=end_without, args=(head,), name="head-watch", daemon=True).start()
    run_worker(ranks)
    ranks.leave()
    return 0


def end_without(
    head: tuple[str, int],
    *,
    check_every_s: float = CHECK_EVERY_S,
    timeout_s: float = CHECK_TIMEOUT_S,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Call `end(1)` once `head` (host, port) has not answered `MAX_MISSED` times in a row.

    A machine that loses power closes no connection, and a rank receives nothing while a step is rolled out.
    """
    missed = 0
    while missed < MAX_MISSED:
        time.sleep(check_every_s)
        try:
            socket.create_connection(head, timeout=timeout_s).close()
        except OSError as error:
            missed += 1
            event(log, "node.head_silent", level=logging.WARNING, times=missed, problem=str(error))
        else:
            missed = 0
    end(1)


def watch_nodes(run: RunFolder) -> None:
    """End this process, the head's, once another set of nodes is there than now; its ranks end with it.

    A machine that vanishes closes no connection: its peers would wait for it for as long as a collective may
    take. The coordinator learns of it from its agents within seconds, and from its cloud. The exit code is 0:
    the loss is no fault of the trainer's, which is started again once all nodes are there.
    """
    began_with = read_json(run.trainer_nodes)

    def watch() -> None:
        while read_json(run.trainer_nodes) == began_with:
            time.sleep(NODES_EVERY_S)
        event(log, "trainer.nodes_changed", level=logging.WARNING, began_with=began_with)
        os._exit(0)

    threading.Thread(target=watch, name="node-watch", daemon=True).start()


NODES_EVERY_S = 1.0
"""How often the head looks which nodes are there."""
RENDEZVOUS_S = 900
"""How long nodes wait for one another: a machine may still be booting."""

_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Return True if this process was started as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(frozen=True, slots=True)
class TrainerNode:
    """One node of a run: node 0 is the head; `address` is its HOST:PORT, where all nodes rendezvous."""

    ranks: int
    """Processes of this node."""
    nodes: int = 1
    number: int = 0
    address: str | None = None


def use_growing_segments() -> None:
    """Let torch's allocator on GPUs grow its segments, unless the user has set it otherwise.

    Rows of ever other lengths leave gaps that no later row fits into; a job that is planned to the brim would
    then run out of memory. Before the first allocation; ranks inherit it.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def run_ranks(name: str, command: list[str], place: TrainerNode, final_codes: tuple[int, ...]) -> int:
    """Run `python COMMAND` as this node's ranks of run `name`; return the exit code.

    One of `final_codes` if a rank ended with it, else 1 if any failed. Waits up to `RENDEZVOUS_S` for the
    other nodes.
    """
    use_growing_segments()
    among_nodes = place.nodes > 1
    address = place.address if among_nodes and place.address else f"{LOOPBACK}:0"
    _use_interface_facing(address.rpartition(":")[0])
    store = None
    if place.number == 0:
        address, store = _store_at(address)
    config = LaunchConfig(
        min_nodes=place.nodes, max_nodes=place.nodes, nproc_per_node=place.ranks, run_id=name,
        rdzv_backend="static", rdzv_endpoint=address, local_addr=address.rpartition(":")[0],
        rdzv_configs={"rank": place.number, "timeout": RENDEZVOUS_S},
        max_restarts=0, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as exc:
        codes = {failure.exitcode for failure in exc.failures.values()}
        return next((code for code in final_codes if code in codes), 1)
    finally:
        del store
    return 0


def _store_at(address: str) -> tuple[str, TCPStore]:
    """Return HOST:PORT and the ranks' store there; torch alone would listen on every address of the machine.

    The rendezvous in this process finds the store by its port (`multi_tenant`). Raises `OSError` where
    `address` is not one of this machine's.
    """
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return f"{host}:{port}", store


def _use_interface_facing(host: str) -> None:
    """Make gloo and NCCL listen on the interface that faces `host` only, unless one is configured."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: asks the kernel for the route
        own = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def die_with_launcher() -> None:
    """Make the kernel end this rank with the process that started it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit("the launcher is gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
