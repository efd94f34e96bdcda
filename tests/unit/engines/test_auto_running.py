"""How many responses the engine transformers runs at once where the job leaves it open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlboost_runtime.engines.base import AUTO_ON_CPU, EngineSpec
from rlboost_runtime.engines.transformers.continuous_batch import running_in_memory
from rlboost_runtime.protocol.messages import Sampling


class OnCpu(torch.nn.Identity):
    """All of a model that counts here: where it is."""

    device = torch.device("cpu")


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "running"),
    [(SMALL, AUTO_ON_CPU), (SMALL | {"num_hidden_layers": 10**9}, 1), ({}, AUTO_ON_CPU)],
)
def test_free_memory_bounds_what_runs_at_once(tmp_path: Path, config: dict[str, int], running: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = EngineSpec("transformers", Sampling(), 1024, None, "float32", 1, log=tmp_path / "log")
    assert running_in_memory(OnCpu(), spec, tmp_path) == running
