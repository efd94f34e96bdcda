"""The GPU changes hands between trainer and engines: two ranks (gloo, FSDP2) on a device in main memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.trainer.test_ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.e2e, pytest.mark.timeout(300)]  # e2e: most of a minute

SCRIPT = Path(__file__).with_name("handover_steps.py")
CYCLES = {"tied": 10, "untied": 3, "lora": 2, "bfloat16": 2, "ppo": 2}
WITHIN = {"bfloat16": 0.02}
"""Nats; else 1e-5."""


@pytest.fixture(scope="module")
def found(made_once: Callable[..., Path]) -> dict[str, Any]:
    """What two processes found. Each asserted after every `free` that nothing was left on the device, and
    that nothing was there before the first `take`, also on resume."""
    return torch.load(made_once("handovers", partial(run_ranks, SCRIPT)), weights_only=False)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def agree(cycle: dict[str, Any], within: float = 1e-5) -> bool:
    """Trainer, probe and a fresh load of the version in float32 compute the same."""
    pairs = (("trainer", "fresh"), ("probe", "trainer_probe"), ("probe", "fresh_probe"))
    return all(apart(cycle[one], cycle[other]) < within for one, other in pairs)


@pytest.mark.parametrize("case", list(CYCLES))
def test_trainer_probe_and_published_version_agree_after_every_hand_over(found, case):
    cycles = found[case]["cycles"]
    assert len(cycles) == 1 + CYCLES[case], "one publication is before the first step"
    for cycle in cycles:
        assert agree(cycle, WITHIN.get(case, 1e-5)), cycle
        assert cycle["greedy"] or case in WITHIN
    for before, after in itertools.pairwise(cycles):
        assert apart(before["fresh"], after["fresh"]) > 1e-3, "training changes the policy"


@pytest.mark.parametrize("case", list(CYCLES))
def test_a_resumed_trainer_begins_in_main_memory_and_goes_on_alike(found, case):
    assert found[case]["distance"] < 1e-6


def test_moving_the_model_inside_the_root_would_be_noticed(found):
    """Up to 14388ed ranks trained with the embedding, norm and head of the first hand-over."""
    before, *after = found["old mover"]["cycles"]
    assert agree(before)
    assert not any(agree(cycle) for cycle in after)
