"""The second form of a delta, for chunks of which much changed: a code of two bits for every pattern.

0 is as in the base, 1 one less, 3 one more, 2 anything else (patterns are those of `kernels`). Four
codes share a byte: a chunk's patterns lie in four stripes of `num_codes` each, and the byte at j has the
codes of the patterns at j in each stripe, the first stripe's lowest. So one vector instruction makes or
applies many of them, where a token for each change takes some ten cycles (benchmarks/weights).

For each 2, byte by byte and lowest first, *extras* have a byte: z - 3 for the step's zigzag number z (3 is
-2, 4 is +2), or 255, and the new pattern follows in two bytes, low one first. The last few patterns, which
fill no stripes, end the extras as they are.

Guarantees: as those of `kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

from rlboost_runtime.weights.delta.kernels import Bytes, Patterns, compiled, count_trailing_zeros

FindCodes = Callable[[Patterns, Patterns, Bytes, Bytes], tuple[int, int]]
"""See `find_codes`."""

_STRIPES = 4


def num_codes(num_patterns: int) -> int:
    """Return how many bytes of codes so many patterns have."""
    return num_patterns // (8 * _STRIPES) * 8


def max_extras(num_patterns: int) -> int:
    """Return the most bytes of extras that so many patterns can take."""
    return 3 * num_patterns


def _count_ones(_context: Any, _value: Any) -> Any:  # numba's own types, which are not public
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return numba.types.uint64(numba.types.uint64), generate


_popcount: Any = intrinsic(_count_ones)
_ctz = count_trailing_zeros

# Indices are unsigned below: signed ones may be negative, which numba then asks of each of them.
_U = np.uint64
_U32 = np.uint32
_BLOCK = 1024
"""Code bytes made or applied before the 2s among them are looked after: their patterns are still near."""
_BITS = _U(0x5555555555555555)
"""The lower bit of every code in a word."""


def _find_codes(base: Patterns, new: Patterns, codes: Bytes, extras: Bytes) -> tuple[int, int]:
    size = codes.size
    words = codes.view(np.uint64)
    places = np.empty(_STRIPES * _BLOCK + 4, np.uint32)
    num_extras: Any = _U(0)
    num_changed: Any = _U(0)
    one, three = np.uint16(1), np.uint16(3)
    for start in range(0, size, _BLOCK):
        end = min(size, start + _BLOCK)
        b0, b1 = base[start:end], base[size + start : size + end]
        b2, b3 = base[2 * size + start : 2 * size + end], base[3 * size + start : 3 * size + end]
        n0, n1 = new[start:end], new[size + start : size + end]
        n2, n3 = new[2 * size + start : 2 * size + end], new[3 * size + start : 3 * size + end]
        block = codes[start:end]
        for j in range(end - start):  # becomes vector code
            c0: Any = min(np.uint16(np.uint16(n0[j] - b0[j]) + one), three)
            c1: Any = min(np.uint16(np.uint16(n1[j] - b1[j]) + one), three)
            c2: Any = min(np.uint16(np.uint16(n2[j] - b2[j]) + one), three)
            c3: Any = min(np.uint16(np.uint16(n3[j] - b3[j]) + one), three)
            four: Any = c0 | (c1 << np.uint16(2)) | (c2 << np.uint16(4)) | (c3 << np.uint16(6))
            block[j] = np.uint8(four ^ np.uint16(0x55))
        num_places: Any = _U(0)
        for i in range(start // 8, end // 8):
            word: Any = words[i]
            num_changed += _popcount((word | (word >> _U(1))) & _BITS)
            num_places = _note_others(word, _U(8 * i), _U(size), places, num_places)
        for i in range(num_places):
            at: Any = places[_U(i)]
            step: Any = np.int32(np.int16(new[at] - base[at]))
            zigzag: Any = _U32((step << np.int32(1)) ^ (step >> np.int32(31)))
            beyond = min(zigzag - _U32(3), _U32(255))
            extras[num_extras] = beyond
            num_extras += _U(1)
            if beyond == _U32(255):
                num_extras = _put(new[at], extras, num_extras)
    for i in range(_STRIPES * size, new.size):
        num_changed += _U(base[i] != new[i])
        num_extras = _put(new[i], extras, num_extras)
    return int(num_extras), int(num_changed)


def _apply_codes(patterns: Patterns, codes: Bytes, extras: Bytes) -> bool:
    size = codes.size
    if extras.size < 3 or patterns.size < _STRIPES * size:
        return False
    words = codes.view(np.uint64)
    places = np.empty(_STRIPES * _BLOCK + 4, np.uint32)
    at_extra: Any = _U(0)
    end_extras: Any = _U(extras.size - 3)
    one, two, three = np.int16(1), np.int16(2), np.int16(3)
    for start in range(0, size, _BLOCK):
        end = min(size, start + _BLOCK)
        p0, p1 = patterns[start:end], patterns[size + start : size + end]
        p2, p3 = patterns[2 * size + start : 2 * size + end], patterns[3 * size + start : 3 * size + end]
        block = codes[start:end]
        for j in range(end - start):  # becomes vector code
            four: Any = np.int16(block[j] ^ np.uint8(0x55))
            p0[j] = np.int16(p0[j] + (four & three) - one)
            p1[j] = np.int16(p1[j] + ((four >> np.int16(2)) & three) - one)
            p2[j] = np.int16(p2[j] + ((four >> np.int16(4)) & three) - one)
            p3[j] = np.int16(p3[j] + ((four >> np.int16(6)) & three) - one)
        num_places: Any = _U(0)
        for i in range(start // 8, end // 8):
            num_places = _note_others(words[i], _U(8 * i), _U(size), places, num_places)
        for i in range(num_places):
            if at_extra >= end_extras:
                return False
            at: Any = places[_U(i)]
            beyond: Any = _U32(extras[at_extra])
            at_extra += _U(1)
            if beyond == _U32(255):
                patterns[at] = _taken(extras, at_extra)
                at_extra += _U(2)
            else:
                zigzag = beyond + _U32(3)
                step: Any = np.int16(np.int32(zigzag >> _U32(1)) ^ -np.int32(zigzag & _U32(1)))
                patterns[at] = np.int16(patterns[at] + step - two)  # the code 2 was added above
    for i in range(_STRIPES * size, patterns.size):
        if at_extra >= end_extras:
            return False
        patterns[i] = _taken(extras, at_extra)
        at_extra += _U(2)
    return bool(at_extra == end_extras)


def _note(word: Any, first: Any, size: Any, places: Any, num: Any) -> Any:
    """Append the places of the patterns whose codes in this word are 2; return how many there are then."""
    mask = (word >> _U(1)) & ~word & _BITS
    count = _popcount(mask)
    for j in range(4):  # mostly enough, and cheaper than to ask after each one whether it was the last
        places[num + _U(j)] = _U32(_place(mask, first, size))
        mask &= mask - _U(1)
    i: Any = _U(4)
    while mask != _U(0):
        places[num + i] = _U32(_place(mask, first, size))
        mask &= mask - _U(1)
        i += _U(1)
    return num + count


def _place_of(mask: Any, first: Any, size: Any) -> Any:
    bit = _ctz(mask)
    return first + (bit >> _U(3)) + ((bit & _U(7)) >> _U(1)) * size


def _put_pattern(pattern: Any, extras: Any, num: Any) -> Any:
    bits = np.uint16(pattern)
    extras[num] = bits & np.uint16(255)
    extras[num + _U(1)] = bits >> np.uint16(8)
    return num + _U(2)


def _take_pattern(extras: Any, at: Any) -> Any:
    return np.int16(np.uint16(extras[at]) | (np.uint16(extras[at + _U(1)]) << np.uint16(8)))


_inlined: Any = numba.njit(nogil=True, inline="always")
_place: Any = _inlined(_place_of)
_note_others: Any = _inlined(_note)
_put: Any = _inlined(_put_pattern)
_taken: Any = _inlined(_take_pattern)


@functools.cache
def find_codes() -> FindCodes:
    """Return the encoder: (base, new, codes, extras) -> how many bytes of extras, and how many changes.

    The last two arrays are filled: `num_codes` bytes, and room for `max_extras`.
    """
    loop: FindCodes = compiled(_find_codes)
    return loop


@functools.cache
def apply_codes() -> Callable[[Patterns, Bytes, Bytes], bool]:
    """Return the decoder: (patterns, codes, extras and `EXTRAS_PADDING` more) -> True if all was valid.

    Patterns are those of the base and are changed in place; False leaves them undefined.
    """
    loop: Callable[[Patterns, Bytes, Bytes], bool] = compiled(_apply_codes)
    return loop
