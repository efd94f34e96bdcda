"""Moves tensors between main memory and the accelerator."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlboost_runtime.trainer.device.host_memory import HostMemory


class Mover:
    """Moves tensors to `device` and back to main memory.

    On a CPU both are the same memory and nothing moves. Weights, gradients and optimizer state reach the
    accelerator only through a mover, so a test that passes its own sees every transfer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = HostMemory(registers=device.type == "cuda")

    @classmethod
    def to_accelerator(cls) -> Mover:
        """Return the mover to this process's GPU; without a GPU, one that moves nothing."""
        return cls(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def moves(self) -> bool:
        """True if `device` has memory of its own."""
        return self.device.type != "cpu"

    def onto(self, tensor: Tensor) -> Tensor:
        """Return the tensor on `device`; the same object if it is there. Its content is there for what
        computes on the device next, and for others after `wait`."""
        return tensor.to(self.device, non_blocking=True)

    def off(self, tensor: Tensor) -> Tensor:
        """Return the tensor in main memory; the same object if it is there. Its content is there after
        `wait`."""
        return tensor if tensor.device.type == "cpu" else self._copied(tensor)

    def _copied(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            found = torch.empty_like(tensor, device="cpu")
            assert isinstance(found, DTensor)
            found._local_tensor = self._copied(tensor._local_tensor)
            return found
        return self._memory.like(tensor).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until everything is where it was moved to."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def release(self) -> None:
        """Return the device memory that is no longer used, so that other processes can have it."""
        self.wait()
        gc.collect()
        torch.cuda.empty_cache()


IN_MAIN_MEMORY = Mover(torch.device("cpu"))
