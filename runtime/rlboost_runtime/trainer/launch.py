"""Start the trainer as several ranks by torchrun's machinery, on this machine.

The starting process only waits: if one rank ends badly all end, and the exit code is the trainer's own where
it said that the run cannot go on. Ranks die with the process that started them, also when that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_ranks(name: str, arguments: list[str], num_ranks: int, final_codes: tuple[int, ...]) -> int:
    """Run `python -m rlboost_runtime.trainer ARGUMENTS` as `num_ranks` ranks; return the exit code.

    One of `final_codes` if a rank ended with it, else 1 if any failed.
    """
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "rlboost_runtime.trainer", *arguments)
    except ChildFailedError as exc:
        codes = {failure.exitcode for failure in exc.failures.values()}
        return next((code for code in final_codes if code in codes), 1)
    return 0


def die_with_launcher() -> None:
    """Have the kernel end this rank with the process that started it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit("the launcher is gone")
