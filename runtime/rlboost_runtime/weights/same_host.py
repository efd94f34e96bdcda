"""Versions of a store on this very machine: linked into a receiver's folder, no byte copied.

The files of a version never change, so a hard link is as good as a copy: engines that map it share the pages
that the trainer wrote. It stays what it is when the store deletes the version.
"""

from __future__ import annotations

from pathlib import Path

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.part_folder import part_folder
from rlboost_runtime.weights.store import VersionGone, WeightStore


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
