"""Two ranks (gloo, FSDP2) take the steps that one takes: gradients, weights, optimizer, metrics."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.learn.policy import Policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("rank_steps.py")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_steps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


steps = load()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: Path, path: Path, num: int = 2) -> None:
    """Run `script PATH` as so many ranks, which write what they found there."""
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num),
    }  # fmt: skip
    logs = [path.with_name(f"rank{rank}.log") for rank in range(num)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                command = [sys.executable, str(script), str(path)]
                processes.append(subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=file))
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * num, "\n".join(log.read_text() for log in logs)


@pytest.fixture(scope="module")
def two_ranks(made_once: Callable[..., Path]) -> dict[str, Any]:
    """What two processes found, for all cases."""
    return torch.load(made_once("ranks", partial(run_ranks, SCRIPT)), weights_only=False)


def close(found: torch.Tensor, wanted: torch.Tensor, relative: float = 1e-5) -> bool:
    return bool((found - wanted).norm() <= relative * wanted.norm())


@pytest.mark.parametrize("case", list(steps.CASES))
def test_two_ranks_and_random_micro_batches_take_the_step_of_one(two_ranks, case):
    found, wanted = two_ranks[case], steps.alone(case)
    assert len(found["gradients"]) == (4 if "ppo" in case else 2)  # and the critic's
    for gradient, reference in zip(found["gradients"], wanted["gradients"], strict=True):
        assert reference.norm() > 0
        assert close(gradient, reference)
    for name in ("old", "judged"):
        for mine, theirs in zip(found[name], wanted[name], strict=True):
            assert mine == (theirs if theirs is None else pytest.approx(theirs, abs=1e-5)), name
    assert any(each is not None for each in found["judged"]) == ("ppo" in case)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, tensor in found["weights"].items():
        assert close(tensor, wanted["weights"][name], 1e-4), name  # Adam's first steps are signs
    off = 5e-5 if "context" in case else 1e-5  # squares of sums in another order
    assert all(close(a, b, off) for a, b in zip(found["moments"], wanted["moments"], strict=True))
    for mine, theirs in zip(found["routes"], wanted["routes"], strict=True):
        assert np.array_equal(mine, theirs) if case.endswith("replayed") else mine is theirs is None
    for metrics in (found["metrics"], wanted["metrics"]):
        metrics.pop("router_aux_loss", None)  # of loads in each micro-batch
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-6)
    assert found["probe"] == pytest.approx(wanted["probe"], abs=1e-4)


@pytest.fixture(scope="module")
def four_ranks(made_once: Callable[..., Path]) -> dict[str, Any]:
    """What four processes found."""
    return torch.load(made_once("four_ranks", partial(run_ranks, SCRIPT, num=4)), weights_only=False)


@pytest.mark.parametrize("case", list(steps.FOUR))
def test_four_ranks_share_rows_two_by_two_or_all_together(four_ranks, case):
    """Gemma's two heads of keys are repeated where four ranks share; its windows reach across them."""
    found, wanted = four_ranks[case], steps.alone(case)
    for gradient, reference in zip(found["gradients"], wanted["gradients"], strict=True):
        assert close(gradient, reference)
    for mine, theirs in zip(found["old"], wanted["old"], strict=True):
        assert mine == (theirs if theirs is None else pytest.approx(theirs, abs=1e-5))
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-6)
    assert found["probe"] == pytest.approx(wanted["probe"], abs=1e-4)


LOST = """
import datetime, os, signal
from rlboost_runtime.trainer.learn import ranks

ranks.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=5)
mine = ranks.Ranks.join()
assert mine.sum([1.0]) == [2.0]
if mine.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    mine.sum([1.0])
except RuntimeError:
    os._exit(7)
"""


@pytest.mark.e2e  # a quarter of a minute
def test_a_machine_that_vanishes_without_a_word_is_noticed():
    """Its connections stay open and say nothing, as those of a stopped process do."""
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOST], env={**common, "RANK": str(rank)}, stderr=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    try:
        assert processes[0].wait(timeout=120) == 7
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("case", list(steps.LOADED))
def test_each_rank_loads_its_part_of_what_the_folder_has(two_ranks, case, tmp_path):
    found = two_ranks[f"loaded {case}"]
    steps.write_model(tmp_path, case)
    whole = Policy.load(tmp_path)
    whole.set_up(Trainer(), Algorithm(lora=steps.LOADED[case]))
    wanted = whole.full_state()
    assert found["hollow"] is (case != "renamed")
    assert found["state"].keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found["state"][name], tensor), name


def test_no_rank_ever_holds_the_whole_model(two_ranks):
    num_bytes = sum(tensor.nbytes for tensor in two_ranks["loaded stored"]["state"].values())
    assert num_bytes > 70_000_000
    assert (
        two_ranks["loaded stored"]["bytes"] < 0.85 * num_bytes
    )  # half of it, the largest tensor, Python's own
