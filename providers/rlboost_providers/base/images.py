"""Machine images of our own: what `rlboost image` makes, lists and deletes in a cloud.

An image is made of the disk of a machine that has everything installed in /opt/rlboost. It carries our tags,
so that it can be found from the cloud alone, and stays until somebody deletes it: it costs a few dollars a
month.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

IMAGE = "rlboost-image"
"""Tag of every image of ours, and of the snapshots under it: the version of RLBoost in it."""
ENGINE = "rlboost-engine"
"""Tag: the engine that is installed in it."""
SAVE_S = 3600.0
"""Longest wait for a cloud to make an image of a disk."""


@dataclass(frozen=True, slots=True)
class MachineImage:
    """One image. Times in seconds since the Unix epoch."""

    cloud: str
    place: str
    """Where machines can be booted from it: the region; empty: everywhere in the cloud."""
    name: str
    """What a job's `image` says to boot from it."""
    label: str
    """Its name for people."""
    version: str
    engine: str
    made_at: float | None
    is_ready: bool
    size_gb: int


class ImageStore(Protocol):
    """The images of one cloud, or of one of its regions."""

    def save(
        self, run: str, machine: str, label: str, marks: Mapping[str, str], say: Callable[[str], None]
    ) -> MachineImage:
        """Make an image of the machine's disk and wait until it is ready. `run`: as the machine's tag says.
        Raises `NotFound`, `ProviderError` and `RuntimeFault` where it is not ready in time."""

    def images(self) -> list[MachineImage]:
        """Return those with our tags, newest first. Raises `ProviderError`."""

    def delete(self, name: str) -> None:
        """Delete an image of ours with what it is stored in. Raises `NotFound`, `ProviderError`."""


def tag_value(text: str) -> str:
    """Return `text` as every cloud takes it in a label: 1.2.dev0+g3 becomes 1-2-dev0-g3."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]
