"""Which deltas a new version offers: one from the version before it, and those that this one already had.

They lie beside the version's own files, older ones as hard links, so that a version stays complete in itself
and one lease covers all of it. A delta is offered only where it pays: together with those after it, it takes
less than `MAX_CHAIN_SHARE` of the full file. Nothing is lost by leaving one out: every version can be fetched
whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.delta.file import MAX_SHARE, Finder, write_delta
from rlboost_runtime.weights.manifest import DELTA_PREFIX, Delta, File, Manifest, describe_file

TARGET = "model.safetensors"
MAX_CHAIN_SHARE = MAX_SHARE
MAX_THREADS = 8
"""The trainer uses the head's cores too."""


def add_deltas(
    base_folder: Path,
    folder: Path,
    manifest: Manifest,
    max_deltas: int,
    chunk_bytes: int,
    finder: Finder | None = None,
) -> Manifest:
    """Write deltas into `folder`, which holds the files of `manifest`; return it with them.

    `base_folder`: the version before, held by the caller; `finder`: as `write_delta` has it. Without
    deltas where that one has another layout, the very same weights, or too much has changed. Raises
    `OSError`.
    """
    try:
        base = manifests.read_manifest(base_folder)
    except ProtocolError:
        return manifest
    target = _file(manifest, TARGET)
    if target is None or base.tensors != manifest.tensors or target == _file(base, TARGET):
        return manifest
    path = folder / delta_name(base.version)
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    stats = write_delta(
        base_folder / TARGET,
        folder / TARGET,
        target.chunks,
        path,
        threads=threads,
        finder=finder,
    )
    if stats is None:
        return manifest
    deltas = [
        Delta(
            base.version,
            base.content_digest,
            TARGET,
            describe_file(path, chunk_bytes),
            round(stats.changed, 6),
        )
    ]
    size = stats.num_bytes
    for delta in base.deltas[: max_deltas - 1]:
        size += delta.file.size
        if size > MAX_CHAIN_SHARE * target.size or _grid(base) != _grid(manifest):
            break
        _link(base_folder / delta.file.name, folder / delta.file.name)
        deltas.append(delta)
    return msgspec.structs.replace(manifest, deltas=tuple(deltas))


def delta_name(base: int) -> str:
    """Return the name of the delta that starts at version `base`."""
    return f"{DELTA_PREFIX}{manifests.version_name(base)}.bin"


def _file(manifest: Manifest, name: str) -> File | None:
    return next((file for file in manifest.files if file.name == name), None)


def _grid(manifest: Manifest) -> list[tuple[int, int]]:
    """Return how the target is cut: deltas can follow one another only on the same chunks."""
    target = _file(manifest, TARGET)
    return [] if target is None else [(chunk.offset, chunk.length) for chunk in target.chunks]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
