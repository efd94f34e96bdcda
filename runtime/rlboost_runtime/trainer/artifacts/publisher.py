"""Publishes weight versions beside training, which stops only for one cast copy of the model.

`Publisher.begin` casts the weights into memory of its own, kept from version to version; a thread then
writes, digests, compares with the version before (`weights.delta.file`) and renames, while training goes on.
There is one copy, so the next publication waits for the last one. Weights that are frozen under adapters are
copied and written once; later versions link to them.

Guarantees: a version is announced, on that thread, only once it lies complete and durable in the store; what
fails there is raised as `BackgroundWork` has it; the same weights give the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from rlboost_runtime.logs import event
from rlboost_runtime.run.paced_file import PacedFile
from rlboost_runtime.weights.manifest import (
    Manifest,
    Probe,
    Tied,
    content_digest,
    describe_file,
    read_manifest,
)
from rlboost_runtime.weights.store.store import WeightStore

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
_SCRATCH = ".scratch-"

_SPELLED = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class WeightsCopy:
    """The bytes of `model.safetensors`: weights cast to what engines compute in, in memory that is reused."""

    def __init__(self, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._header = b""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] = {}

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights, one at a time: the first ones may be gone when the last one comes."""
        if not self._places:
            self._take_first(weights)
            return
        left = set(self._places)
        for name, tensor in weights:
            self._places[name].copy_(tensor)
            left.discard(name)
        assert not left, f"weights missing: {sorted(left)[:3]}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, once there was a copy."""
        return len(self._header) + self._bytes.nbytes

    def write(self, path: Path) -> None:
        """Write the file."""
        with PacedFile(path) as file:
            file.write(self._header)
            file.write(self._bytes.numpy().data)

    def _take_first(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Lay out the file by what comes; later calls bring the same names and shapes."""
        found = {name: tensor.to("cpu", self._kind(tensor), copy=True) for name, tensor in weights}
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        order = sorted(found, key=lambda name: (-found[name].element_size(), name))  # keeps all aligned
        for name in order:
            start, end = end, end + found[name].nbytes
            entries[name] = {
                "dtype": _SPELLED[found[name].dtype],
                "shape": list(found[name].shape),
                "data_offsets": [start, end],
            }
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._header = len(header).to_bytes(8, "little") + header
        self._bytes = torch.empty(end, dtype=torch.uint8)
        end = 0
        for name in order:
            tensor = found.pop(name)
            start, end = end, end + tensor.nbytes
            self._places[name] = self._bytes[start:end].view(tensor.dtype).view(tensor.shape)
            self._places[name].copy_(tensor)

    def _kind(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True, slots=True)
class VersionContent:
    """What a version is made of, computed when it is asked for.

    `weights`: by name, whole, tied ones once. `configs`: the version's other files. `are_frozen`: the weights
    are those of every version, and what differs is among the other files.
    """

    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    configs: Callable[[], Mapping[str, bytes]]
    probe: Callable[[], Probe]
    tied: Sequence[Tied] = ()
    are_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that lies in the store. `stop_s`: training stood still; `publish_s`: from then on."""

    manifest: Manifest
    stop_s: float
    publish_s: float

    @property
    def delta_bytes(self) -> int:
        """Size of the delta from the version before; 0: there is none."""
        return self.manifest.deltas[0].file.size if self.manifest.deltas else 0


class BackgroundWork:
    """Work beside training: one piece at a time, in order, on a thread of its own.

    What goes wrong in a piece is raised in the training thread at its next `ready` or `start`, or at the end,
    so that no run goes on for long without what the work was for. The methods belong to one other thread;
    `with` waits for the last piece.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's, for debuggers."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._piece: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.ready()

    @property
    def is_busy(self) -> bool:
        """True while a piece is under way."""
        return self._piece is not None and not self._piece.done()

    def ready(self) -> None:
        """Return once nothing is under way any more. Raises what the last piece raised."""
        if self._piece is not None:
            piece, self._piece = self._piece, None
            piece.result()

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the piece before it is done. Raises what that one raised."""
        self.ready()
        self._piece = self._thread.submit(work)


class Publisher(BackgroundWork):
    """The writer of weight versions; see the module."""

    def __init__(
        self,
        store: WeightStore,
        dtype: str,
        on_published: Callable[[Publication], None],
        prepare: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`dtype`: what engines compute in; `on_published` is called on the publisher's thread; `prepare`
        before a version of so many bytes is put into the store."""
        super().__init__("publish")
        self._store = store
        self._copy = WeightsCopy(dtype)
        self._on_published = on_published
        self._prepare = prepare
        self._looked_at: VersionContent | None = None
        """What the copy is of, until the first publication: nothing was trained meanwhile."""
        self._frozen_in: Path | None = None
        """The newest version whose weights are the frozen ones."""

    def begin(self, version: int, content: VersionContent) -> float:
        """Copy the weights and publish the copy; return the seconds that the copy took."""
        probe, configs = content.probe(), dict(content.configs())
        self.ready()
        started = time.monotonic()
        if not content.are_frozen:
            self._frozen_in = None
        if self._frozen_in is None:
            self._copy.take(content.weights())
        self._looked_at = None
        self._prepare(self._copy.num_bytes if self._frozen_in is None else 0)
        stop_s = time.monotonic() - started
        self.start(lambda: self._publish(version, configs, probe, content, stop_s))
        return stop_s

    def find_stored(self, content: VersionContent) -> Manifest | None:
        """Return the newest stored version with exactly this content: one published by an earlier process."""
        self._take_once(content)
        self._prepare(self._copy.num_bytes)
        self._store.put_damaged_aside()
        versions = self._store.versions()
        if not versions:
            return None
        digest = self._digest(content)
        manifests = (read_manifest(self._store.path(version)) for version in reversed(versions))
        return next((manifest for manifest in manifests if manifest.content_digest == digest), None)

    def former_number(self, content: VersionContent) -> int | None:
        """Return the number under which a head that was lost had published exactly this content: responses to
        it go on."""
        former = [each for each in self._store.former() if each.version not in self._store.versions()]
        digest = self._digest(content) if former else ""
        return next((each.version for each in former if each.content_digest == digest), None)

    def _take_once(self, content: VersionContent) -> None:
        """Copy the weights, unless that is what was done last."""
        self.ready()
        if self._looked_at is not content:
            self._copy.take(content.weights())
            self._looked_at = content

    def _digest(self, content: VersionContent) -> str:
        """Return the digest that a version with this content has."""
        self._take_once(content)
        folder = self._store.folder
        with scratch_folder(folder.resolve() if folder.is_symlink() else folder.parent) as folder:
            self._write(folder, content.configs())
            paths = sorted(folder.iterdir())
            return content_digest([describe_file(path, self._store.chunk_bytes) for path in paths])

    def _publish(
        self,
        version: int,
        configs: Mapping[str, bytes],
        probe: Probe,
        content: VersionContent,
        stop_s: float,
    ) -> None:
        started = time.monotonic()
        manifest = self._store.publish(
            version, lambda folder: self._write(folder, configs), probe, content.tied
        )
        self._frozen_in = self._store.path(version) if content.are_frozen else None
        done = Publication(manifest, stop_s, time.monotonic() - started)
        event(
            log,
            "weights.published",
            version=manifest.version,
            num_bytes=manifest.num_bytes,
            delta_bytes=done.delta_bytes,
            stop_s=round(stop_s, 4),
            publish_s=round(done.publish_s, 4),
        )
        self._on_published(done)

    def _write(self, folder: Path, configs: Mapping[str, bytes]) -> None:
        if self._frozen_in is None or not _link(self._frozen_in / WEIGHTS, folder / WEIGHTS):
            self._copy.write(folder / WEIGHTS)
        for name, data in configs.items():
            (folder / name).write_bytes(data)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder below `parent`, gone afterwards. What a killed process left there is deleted
    first, since a run has one trainer."""
    for left in parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_SCRATCH) as name:
        yield Path(name)


def _link(source: Path, target: Path) -> bool:
    """Return True if `target` is now a link to `source`, which may be gone, or on another kind of disk."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
