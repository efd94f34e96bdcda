"""The two hot loops of a delta, compiled by numba: 16-bit patterns against a base, into bytes and back.

Patterns are compared as integers of 16 bits, whatever they mean; for bfloat16 a step of one is an *ulp*. Each
changed pattern becomes one token, a byte: the upper six bits count the unchanged patterns before it (0 to
63), the lower two say how far it moved, as a zigzag number z: 0 is -1, 1 is +1, and 2 is anything else, whose
z - 2 is the next byte of a second plane, *extras* (255 there: the new pattern follows in two bytes, low one
first). A lower part of 3 is no change but (upper part + 1) x 64 unchanged patterns. Most changes of an
optimizer's step are of one ulp (benchmarks/weights), so that a change takes one byte, and an entropy coder
then takes little more than the entropy of where changes are.

Guarantees: `apply_changes` never reads or writes outside its arrays, whatever the tokens say. Both loops hold
no lock of the interpreter while they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

Patterns = npt.NDArray[np.int16]
Bytes = npt.NDArray[np.uint8]
FindChanges = Callable[[Patterns, Patterns, Bytes, Bytes], tuple[int, int, int]]
"""See `find_changes`."""


def max_tokens(num_patterns: int) -> int:
    """Return the most tokens that so many patterns can take."""
    return num_patterns + num_patterns // 64 + 2


def max_extras(num_patterns: int) -> int:
    """Return the most bytes of extras that so many patterns can take."""
    return 3 * num_patterns + 3


def _trailing_zeros(context: Any, _value: Any) -> Any:  # numba's own types, which are not public
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.uint64(numba.types.uint64), generate


_ctz: Any = intrinsic(_trailing_zeros)


def _find_changes(base: Patterns, new: Patterns, tokens: Bytes, extras: Bytes) -> tuple[int, int, int]:
    num, num_tokens, num_extras, num_changed = base.size, 0, 0, 0
    previous: Any = np.int64(-1)
    for word in range(num // 64 + 1):
        start = word * 64
        mask: Any = np.uint64(0)
        if start + 64 <= num:
            for j in range(64):  # becomes vector code; with a variable bound it would not
                mask |= np.uint64(base[start + j] != new[start + j]) << np.uint64(j)
        else:
            for j in range(num - start):
                mask |= np.uint64(base[start + j] != new[start + j]) << np.uint64(j)
        while mask != 0:
            at = start + np.int64(_ctz(mask))
            mask &= mask - np.uint64(1)
            gap = at - previous - 1
            previous = at
            while gap >= 64:
                skipped = min(gap >> 6, 64)
                tokens[num_tokens] = ((skipped - 1) << 2) | 3
                num_tokens += 1
                gap -= skipped << 6
            step: Any = np.int64(np.int16(new[at] - base[at]))
            zigzag = ((step << 1) ^ (step >> 63)) - 1
            kind = min(zigzag, 2)
            tokens[num_tokens] = (gap << 2) | kind
            num_tokens += 1
            num_changed += 1
            extra = min(zigzag - 2, 255)
            extras[num_extras] = np.uint8(extra)  # overwritten unless it counts: dearer to branch
            num_extras += kind >> 1
            if extra == 255:
                extras[num_extras] = np.uint16(new[at]) & 255
                extras[num_extras + 1] = np.uint16(new[at]) >> 8
                num_extras += 2
    return num_tokens, num_extras, num_changed


def _apply_changes(patterns: Patterns, tokens: Bytes, extras: Bytes) -> bool:
    at: Any = np.int64(-1)
    at_extra: Any = np.int64(0)
    num, num_extras = np.int64(patterns.size), np.int64(extras.size) - 2
    for i in range(tokens.size):
        token: Any = np.int64(tokens[i])
        kind = token & 3
        if kind == 3:
            at += ((token >> 2) + 1) << 6
            continue
        at += (token >> 2) + 1
        if at >= num or at_extra >= num_extras:
            return False
        has_extra = kind >> 1
        zigzag = kind + 1 + has_extra * np.int64(extras[at_extra])
        at_extra += has_extra
        if zigzag == 258:
            patterns[at] = np.int16(np.uint16(extras[at_extra]) | (np.uint16(extras[at_extra + 1]) << 8))
            at_extra += 2
        else:
            patterns[at] += np.int16((zigzag >> 1) ^ -(zigzag & 1))
    return bool(at < num and at_extra == num_extras - 1)


EXTRAS_PADDING = 3
"""Bytes that must follow the extras in the array given to `apply_changes`: it reads ahead."""


@functools.cache
def find_changes() -> FindChanges:
    """Return the encoder: (base, new, tokens, extras) -> numbers of tokens, extras and changes.

    The last two arrays are filled, and need room for `max_tokens` and `max_extras`. Compiled when first
    called in a process, or taken from numba's cache on disk.
    """
    compiled: FindChanges = _compiled(_find_changes)
    return compiled


@functools.cache
def apply_changes() -> Callable[[Patterns, Bytes, Bytes], bool]:
    """Return the decoder: (patterns, tokens, extras and `EXTRAS_PADDING` more) -> whether all made sense.

    Patterns are those of the base and are changed in place; False leaves them undefined.
    """
    compiled: Callable[[Patterns, Bytes, Bytes], bool] = _compiled(_apply_changes)
    return compiled


def _compiled(loop: Callable[..., Any]) -> Any:
    """Return the loop compiled; numba refuses to cache where it may write nowhere, and needs no cache."""
    try:
        return numba.njit(nogil=True, cache=True)(loop)
    except RuntimeError:
        return numba.njit(nogil=True)(loop)
