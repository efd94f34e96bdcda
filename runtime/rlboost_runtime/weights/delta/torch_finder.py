"""The encoders of a delta in torch operations, for heads whose GPU is faster at it than their cores.

Guarantee: the same bytes as from `kernels.find_changes` and `codes.find_codes`, whatever the device.

Shape suffix: N patterns of a chunk, C of them changed, W of these by more than one ulp.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from rlboost_runtime.weights.delta import codes as delta_codes
from rlboost_runtime.weights.delta import kernels as delta_kernels
from rlboost_runtime.weights.delta.file import Finder
from rlboost_runtime.weights.delta.kernels import Bytes, Patterns

_ALL_SKIPPED = 255
"""The token for 64 x 64 unchanged patterns."""


def best_finder(device: torch.device) -> Finder | None:
    """Return the finder to use where this is the best device: None, the CPU's own, without a GPU."""
    return finder(device) if device.type == "cuda" else None


def finder(device: torch.device) -> Finder:
    """Return a finder that runs on a device; may be called by several threads.

    Where the device's memory is full (an engine may be using it) it runs on the CPU.
    """
    staging = _Staging(device)

    def find_tokens(base: Patterns, new: Patterns, tokens: Bytes, extras: Bytes) -> tuple[int, int, int]:
        try:
            found_tokens, found_extras, num_changed = encode(staging.take(0, base), staging.take(1, new))
        except torch.OutOfMemoryError:
            return delta_kernels.find_changes()(base, new, tokens, extras)
        return _fill(tokens, found_tokens), _fill(extras, found_extras), num_changed

    def find_codes(base: Patterns, new: Patterns, codes: Bytes, extras: Bytes) -> tuple[int, int]:
        try:
            found_codes, found_extras, num_changed = encode_all(staging.take(0, base), staging.take(1, new))
        except torch.OutOfMemoryError:
            return delta_codes.find_codes()(base, new, codes, extras)
        _fill(codes, found_codes)
        return _fill(extras, found_extras), num_changed

    return Finder(find_tokens, find_codes)


def _fill(target: Bytes, found: Tensor) -> int:
    size = found.numel()
    target[:size] = found.cpu().numpy()
    return size


def encode(base_N: Tensor, new_N: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return tokens, extras (bytes, on the patterns' device) and how many of the 16-bit patterns changed."""
    at_C = torch.nonzero(new_N != base_N).flatten()
    gap_C = at_C.clone()
    gap_C[1:] -= at_C[:-1] + 1
    pattern_C = new_N[at_C]
    step_C = (pattern_C - base_N[at_C]).int()  # subtracted in 16 bits: it wraps around there
    zigzag_C = ((step_C << 1) ^ (step_C >> 31)) - 1
    kind_C = zigzag_C.clamp(max=2)
    is_wild_C = kind_C == 2
    extras = _extras(zigzag_C[is_wild_C] - 2, pattern_C[is_wild_C])
    return _tokens(gap_C, kind_C), extras, at_C.numel()


def encode_all(base_N: Tensor, new_N: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return codes, extras (likewise) and how many of the 16-bit patterns changed."""
    size = delta_codes.num_codes(new_N.numel())
    step_N = (new_N - base_N).int()  # subtracted in 16 bits: it wraps around there
    end_N = new_N[4 * size :]
    step_4S, new_4S = step_N[: 4 * size].view(4, size), new_N[: 4 * size].view(4, size)
    code_4S = (step_4S == -1) + 3 * (step_4S == 1).int() + 2 * (step_4S.abs() > 1)
    code_S = code_4S[0] | code_4S[1] << 2 | code_4S[2] << 4 | code_4S[3] << 6
    is_wild_S4 = (code_4S == 2).T  # byte by byte
    step_W = step_4S.T[is_wild_S4]
    beyond_W = ((step_W << 1) ^ (step_W >> 31)) - 3
    extras = _extras(beyond_W, new_4S.T[is_wild_S4])
    whole = torch.stack([end_N & 255, end_N >> 8 & 255], 1).flatten().to(torch.uint8)
    return code_S.to(torch.uint8), torch.cat([extras, whole]), int(torch.count_nonzero(step_N))


def _tokens(gap_C: Tensor, kind_C: Tensor) -> Tensor:
    """One token per change, and before it those that skip its gap but for the last 63 patterns."""
    words_C = gap_C >> 6
    skips_C = (words_C + 63) >> 6
    end_C = (skips_C + 1).cumsum(0)
    size = int(end_C[-1]) if end_C.numel() else 0
    tokens = torch.full((size,), _ALL_SKIPPED, dtype=torch.uint8, device=gap_C.device)
    tokens[end_C - 1] = ((gap_C & 63) << 2 | kind_C).to(torch.uint8)
    has_skip_C = skips_C > 0
    left = (words_C - ((skips_C - 1) << 6))[has_skip_C]
    tokens[end_C[has_skip_C] - 2] = ((left - 1) << 2 | 3).to(torch.uint8)
    return tokens


def _extras(beyond_W: Tensor, pattern_W: Tensor) -> Tensor:
    """A byte per change of more than one ulp; 255, and the pattern itself, where it does not fit."""
    first_W = beyond_W.clamp(max=255)
    is_long_W = first_W == 255
    end_W = (1 + 2 * is_long_W.long()).cumsum(0)
    size = int(end_W[-1]) if end_W.numel() else 0
    extras = torch.empty(size, dtype=torch.uint8, device=beyond_W.device)
    end_long = end_W[is_long_W]
    pattern = pattern_W[is_long_W].int()
    extras[end_long - 1] = (pattern >> 8 & 255).to(torch.uint8)
    extras[end_long - 2] = (pattern & 255).to(torch.uint8)
    start_W = end_W - 1 - 2 * is_long_W.long()
    extras[start_W] = first_W.to(torch.uint8)
    return extras


class _Staging(threading.local):
    """Memory of one thread by which patterns get to the device: pinned, for the copy to run at full speed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.int16) for _ in range(2)]

    def take(self, slot: int, patterns: Patterns) -> Tensor:
        """Return the patterns on the device; the next call with this slot overwrites them on the way."""
        if self._memory[slot].numel() < patterns.size:
            is_pinned = self._device.type == "cuda"
            self._memory[slot] = torch.empty(patterns.size, dtype=torch.int16, pin_memory=is_pinned)
        memory = self._memory[slot][: patterns.size]
        memory.numpy()[:] = patterns
        return memory.to(self._device)
