"""What disks do to files."""

from __future__ import annotations

import random
from pathlib import Path


def spoil(path: Path, rng: random.Random) -> None:
    """Flip a bit, cut the end off, zero the end, or delete the file."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    match rng.randrange(8):
        case 0:
            path.unlink()
            return
        case 1:
            del data[at:]
        case 2:
            data[at:] = bytes(len(data) - at)
        case _:
            data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
