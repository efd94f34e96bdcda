"""Versions of a store or of another engine on this very machine: linked into a receiver's folder, no byte
copied.

The files of a version never change, so a hard link is as good as a copy: engines that map it share the pages
that the trainer wrote. It stays what it is when the store deletes the version. A machine's engines take
turns, so that a version travels to a machine once, however many engines it has.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.part_folder import part_folder
from rlboost_runtime.weights.store import VersionGone, WeightStore
from rlboost_runtime.weights.work import Progress

LOOK_S = 0.1
"""How often an engine that waits for its turn looks whether it has come."""


def link_version(store: Path, version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` into `folder` and return where it lies there; None where that cannot be done.

    `store`: Path() or a folder that is not here: there is none on this machine; `digest`: the content digest
    it must have, empty where that is not known. Raises `RuntimeFault` on a full disk.
    """
    if store == Path() or not store.is_dir():
        return None
    try:
        with WeightStore(store).read(version) as lease:
            manifest = manifests.read_manifest(lease.folder)
            if digest not in ("", manifest.content_digest):
                return None
            with part_folder(folder, manifest) as part:
                return part.adopt(lease.folder)
    except (VersionGone, ProtocolError):
        return None


def link_sibling(siblings: Sequence[Path], version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` from the folder of another engine that has it whole, as `link_version` does."""
    for sibling in siblings:
        source = sibling / manifests.version_name(version)
        try:
            manifest = manifests.read_manifest(source)
        except ProtocolError:
            continue
        if digest in ("", manifest.content_digest):
            with part_folder(folder, manifest) as part:
                linked = part.adopt(source)
            if linked is not None:
                return linked
    return None


@contextmanager
def turn(machine: Path, progress: Progress) -> Iterator[None]:
    """Wait until no other engine of `machine`, a folder that all of them have, is pulling.

    Whoever pulls has a deadline of its own, and a process that ends gives its turn back: so to wait is to
    make progress.
    """
    with (machine / ".turn").open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.verified(1)
                time.sleep(LOOK_S)
        yield
