"""Sharding for a GPU, on a machine without one: whatever goes there raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlboost_runtime.job import TinyModel
from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.ranks import Adam, Ranks, full_tensor, shard
from rlboost_runtime.trainer.learn.sharded_state import StateSaver, restore_moments
from rlboost_runtime.trainer.models.tiny import make_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs that a GPU raises")


class NothingOnGpu(TorchFunctionMode):
    """FSDP makes one empty tensor on its device; anything else raises, since this torch has no CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and args == (0,):
            kwargs.pop("device", None)
        return func(*args, **kwargs)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Rank 0 of two whose collectives do nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield Ranks(0, 2, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_shards_and_moments_begin_in_main_memory(two_gpus: Ranks, tmp_path: Path) -> None:
    model = make_model(TinyModel(init="tiny", hidden_size=32, num_layers=2), 64)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    alone = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for parameter in model.parameters():
        alone.state[parameter] = {"exp_avg": parameter.detach(), "exp_avg_sq": parameter.detach()}
    StateSaver(model, alone).begin(tmp_path).result()
    scorer = LogprobModel(model)
    with NothingOnGpu():
        shard(scorer, two_gpus, torch.device("cuda"))
        optimizer = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        restore_moments(model, optimizer, tmp_path, dict.fromkeys(whole, 3.0), two_gpus)
        gathered = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.device_type == "cuda"
        local = parameter.to_local()
        assert torch.equal(local, whole[name][: len(local)])
        assert len(local) == (len(whole[name]) + 1) // 2
        for moment in optimizer.state[parameter].values():
            assert moment.device.type == "cpu"
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"].to_local(), local)
    assert {name: (tensor.shape, tensor.device.type) for name, tensor in gathered.items()} == {
        name: (tensor.shape, "cpu") for name, tensor in whole.items()
    }
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, frequencies[name])
    assert model.device.type == "cpu"
