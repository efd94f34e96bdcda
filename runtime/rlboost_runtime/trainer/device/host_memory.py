"""Main memory for what leaves the accelerator, kept from one hand-over to the next.

New pages cost a GPU's copy more than the copy itself: 1.3 GB/s into fresh memory where the bus carries over
40 (benchmarks/gpu/results). So memory is taken once in huge pages, registered with CUDA, and reused.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

SMALLEST_BYTES = 1 << 20
"""What is smaller gets ordinary memory."""


class HostMemory:
    """Gives tensors in main memory. Their memory comes back when nobody refers to it any more."""

    def __init__(self, *, registers: bool) -> None:
        """`registers`: with CUDA, so that copies are direct and do not wait for each other."""
        self._registers = registers
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.held_bytes = 0
        """All that was taken, in use or free."""

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor of the shape and dtype of `tensor`, contiguous."""
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST_BYTES:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        free = self._free[size]
        memory = free.pop() if free else self._take(size)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)

    def _take(self, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.held_bytes += size
        pages = torch.frombuffer(memory, dtype=torch.uint8)
        pages.zero_()  # on all cores; registering would touch one page after the other
        if self._registers:
            error = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
            if error:  # a limit of locked memory, say: copies are slower, and right
                self._registers = False
                event(log, "host_memory.not_registered", level=logging.WARNING, cuda_error=error)
        return memory
