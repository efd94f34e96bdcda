"""The hot loops of a delta, compiled by numba: 16-bit patterns against a base, into bytes and back.

Patterns are compared as integers of 16 bits, whatever they mean; for bfloat16 a step of one is an *ulp*. Each
changed pattern becomes one token, a byte: the upper six bits count the unchanged patterns before it (0 to
63), the lower two say how far it moved, as a zigzag number z: 0 is -1, 1 is +1, and 2 is anything else, whose
z - 2 is the next byte of a second plane, *extras* (255 there: the new pattern follows in two bytes, low one
first). A lower part of 3 is no change but (upper part + 1) x 64 unchanged patterns. Most changes of an
optimizer's step are of one ulp (benchmarks/weights), so that a change takes one byte, and an entropy coder
then takes little more than the entropy of where changes are. Where much changed, `codes` is faster.

Guarantees: `apply_changes` never reads or writes outside its arrays, whatever the tokens are. Both loops hold
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


count_trailing_zeros: Any = intrinsic(_trailing_zeros)
"""Of a word that is not 0, for compiled loops."""
_ctz = count_trailing_zeros


# Indices are unsigned below: signed ones may be negative, which numba then asks of each of them.
_U = np.uint64
_U32 = np.uint32


def _find_changes(base: Patterns, new: Patterns, tokens: Bytes, extras: Bytes) -> tuple[int, int, int]:
    num, num_changed = base.size, 0
    num_tokens: Any = _U(0)
    num_extras: Any = _U(0)
    next_at: Any = _U(0)
    for word in range(num // 64 + 1):
        start = word * 64
        mask: Any = _U(0)
        if start + 64 <= num:
            for j in range(64):  # becomes vector code; with a variable bound it would not
                mask |= _U(base[start + j] != new[start + j]) << _U(j)
        else:
            for j in range(num - start):
                mask |= _U(base[start + j] != new[start + j]) << _U(j)
        while mask != _U(0):
            at = _U(start) + _ctz(mask)
            mask &= mask - _U(1)
            gap = at - next_at
            next_at = at + _U(1)
            while gap >= _U(64):
                skipped = min(gap >> _U(6), _U(64))
                tokens[num_tokens] = ((skipped - _U(1)) << _U(2)) | _U(3)
                num_tokens += _U(1)
                gap -= skipped << _U(6)
            step: Any = np.int32(np.int16(new[at] - base[at]))
            zigzag: Any = _U32(((step << np.int32(1)) ^ (step >> np.int32(31))) - np.int32(1))
            kind = min(zigzag, _U32(2))
            tokens[num_tokens] = (gap << _U(2)) | _U(kind)
            num_tokens += _U(1)
            num_changed += 1
            extras[num_extras] = min(zigzag - _U32(2), _U32(255))  # overwritten unless it counts
            num_extras += _U(kind >> _U32(1))
            if zigzag >= _U32(257):
                pattern: Any = np.uint16(new[at])
                extras[num_extras] = pattern & np.uint16(255)
                extras[num_extras + _U(1)] = pattern >> np.uint16(8)
                num_extras += _U(2)
    return int(num_tokens), int(num_extras), num_changed


def _apply_changes(patterns: Patterns, tokens: Bytes, extras: Bytes) -> bool:
    if extras.size < 3:
        return False
    next_at: Any = _U(0)
    at_extra: Any = _U(0)
    num, num_extras = _U(patterns.size), _U(extras.size - 2)
    for i in range(tokens.size):
        token: Any = _U32(tokens[i])
        kind = token & _U32(3)
        gap = _U(token >> _U32(2))
        if kind == _U32(3):
            next_at += (gap + _U(1)) << _U(6)
            continue
        at = next_at + gap
        next_at = at + _U(1)
        if at >= num or at_extra >= num_extras:
            return False
        has_extra = kind >> _U32(1)
        zigzag = kind + _U32(1) + has_extra * _U32(extras[at_extra])
        at_extra += _U(has_extra)
        if zigzag == _U32(258):
            low: Any = np.uint16(extras[at_extra])
            patterns[at] = np.int16(low | (np.uint16(extras[at_extra + _U(1)]) << np.uint16(8)))
            at_extra += _U(2)
        else:
            patterns[at] += np.int16(np.int32(zigzag >> _U32(1)) ^ -np.int32(zigzag & _U32(1)))
    return bool(next_at <= num and at_extra == num_extras - _U(1))


EXTRAS_PADDING = 3
"""Bytes that must follow the extras in the array given to `apply_changes`: it reads ahead."""


@functools.cache
def find_changes() -> FindChanges:
    """Return the encoder: (base, new, tokens, extras) -> numbers of tokens, extras and changes.

    The last two arrays are filled, and need room for `max_tokens` and `max_extras`. Compiled when first
    called in a process, or taken from numba's cache on disk.
    """
    loop: FindChanges = compiled(_find_changes)
    return loop


@functools.cache
def apply_changes() -> Callable[[Patterns, Bytes, Bytes], bool]:
    """Return the decoder: (patterns, tokens, extras and `EXTRAS_PADDING` more) -> True if all was valid.

    Patterns are those of the base and are changed in place; False leaves them undefined.
    """
    loop: Callable[[Patterns, Bytes, Bytes], bool] = compiled(_apply_changes)
    return loop


def compiled(loop: Callable[..., Any]) -> Any:
    """Return the loop compiled; numba refuses to cache where it may write nowhere, and needs no cache."""
    try:
        return numba.njit(nogil=True, cache=True)(loop)
    except RuntimeError:
        return numba.njit(nogil=True)(loop)
