"""Main memory for what leaves the device: reused as soon as nobody refers to it, and not before."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from rlboost_runtime.trainer.device.host_memory import SMALLEST_BYTES, HostMemory
from rlboost_runtime.trainer.device.mover import Mover

CPU = torch.device("cpu")
LARGE = SMALLEST_BYTES // 4 + 1
"""Numbers of float32."""


def test_memory_is_reused_once_nobody_refers_to_it() -> None:
    memory = HostMemory(registers=False)
    first = memory.like(torch.empty(LARGE))
    where = first.data_ptr()
    part = first.view(-1)[10:20]
    held = memory.held_bytes
    del first
    other = memory.like(torch.empty(LARGE))
    assert other.data_ptr() != where, "a view still refers to it"
    del part
    again = memory.like(torch.empty(LARGE))
    assert again.data_ptr() == where
    assert memory.held_bytes == 2 * held
    assert memory.like(torch.empty(LARGE + 1)).data_ptr() not in (where, other.data_ptr())


def test_a_parameter_that_moves_away_and_back_frees_it() -> None:
    memory = HostMemory(registers=False)
    parameter = torch.nn.Parameter(torch.ones(LARGE))
    for _ in range(3):
        parameter.data = memory.like(parameter).copy_(parameter.data)
        parameter.data = parameter.data.clone()
    assert memory.held_bytes == 4 * LARGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (1024, 513)])
def test_shape_dtype_and_content_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(-99, 99, shape).to(dtype)
    found = Mover(CPU)._copied(tensor)
    assert found.shape == tensor.shape
    assert found.dtype is dtype
    assert torch.equal(found, tensor)


def test_what_is_not_contiguous_is_copied_in_order() -> None:
    tensor = torch.arange(2 * LARGE, dtype=torch.float32).view(2, -1).T
    assert torch.equal(Mover(CPU)._copied(tensor), tensor)


def test_a_shard_stays_a_shard_and_its_rows_are_in_kept_memory(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1,
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(LARGE)
        shard = distribute_tensor(whole, mesh, [Replicate()])
        mover = Mover(CPU)
        with torch.no_grad():
            found = mover._copied(shard)
        assert isinstance(found, DTensor)
        assert found.placements == shard.placements
        assert torch.equal(found.full_tensor(), whole)
        assert found.to_local().data_ptr() != shard.to_local().data_ptr()
        assert mover._memory.held_bytes == 4 * LARGE
    finally:
        dist.destroy_process_group()
