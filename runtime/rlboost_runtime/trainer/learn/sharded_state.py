"""What training changes, weights and moments, in files of `torch.distributed.checkpoint`.

Each rank copies its own rows and writes them beside training, so that no rank ever gathers the model, and
training stands still for the copy alone. Any number of ranks reads them: `StoredState.rows` returns whatever
rows a rank keeps. A weight's name there is its own after "model.", its moments' after "exp_avg." and
"exp_avg_sq."; all are float32, tied ones once.

Guarantees: a file is durable when it is complete, and on its way there it is handed to the disk in small
pieces (`run.paced_file`), so that a sync of another file, such as the journal's, hardly waits for it.
Digests are computed of what was meant to be written. Ranks on other machines send their rows to rank 0, which
writes them: a checkpoint survives the loss of any other node.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from rlboost_runtime.run.paced_file import MOST_BYTES, PacedFile
from rlboost_runtime.trainer.learn.ranks import (
    ALONE,
    MOMENTS,
    Adam,
    Ranks,
    RestoreMoments,
    SaveState,
    local_part,
    row_range,
    scatter_rows,
)

METADATA = ".metadata"
"""The file that says which rows are where: its folder holds such a state."""
CRITIC = "critic"
"""The folder within, where there is a critic: its state, as the policy's, with its config and tokenizer."""

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is no mistake


class _Rows:
    """This rank's rows of a tensor, in the interface by which DCP asks for what is to be written."""

    def __init__(self, tensor: Tensor, start: int, shape: torch.Size) -> None:
        self.tensor, self._start, self._shape = tensor, start, shape

    def __create_write_items__(self, fqn: str, _self: object) -> list[WriteItem]:
        if self.tensor.numel() == 0:
            return []  # more ranks than rows
        chunk = _chunk(self._start, self.tensor.shape)
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(chunk, properties, self._shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]


def _chunk(start: int, shape: torch.Size) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start, *[0] * (len(shape) - 1)][: len(shape)]), shape)


class _RowsPlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return cast(_Rows, self.state_dict[index.fqn]).tensor


class StateSaver:
    """Copies this rank's rows of the training's state and writes the copy beside training; one per rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Adam,
        ranks: Ranks = ALONE,
        critic: tuple[torch.nn.Module, Adam] | None = None,
    ) -> None:
        """`critic`: its state goes into a folder of its own within the other."""
        self._trained = {"": (model, optimizer)} | ({} if critic is None else {CRITIC: critic})
        self._ranks = ranks
        self._copies: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._write: Future[dict[str, str]] | None = None

    def begin(self, folder: Path) -> Future[dict[str, str]]:
        """Copy the state, then write the copy into `folder`, which is rank 0's; return the digests by file,
        on ranks other than 0 none. All ranks call this. Waits for the write before, and raises its error."""
        self._ranks.broadcast(SaveState(str(folder)))
        self.wait()
        parts = {
            part: {name: self._copied(part, name, tensor) for name, tensor in self._state(*trained)}
            for part, trained in self._trained.items()
        }
        self._write = self._thread.submit(_save_all, parts, folder, self._ranks)
        return self._write

    def wait(self) -> None:
        """Return once nothing is being written any more. Raises what the write raised."""
        if self._write is not None:
            write, self._write = self._write, None
            write.result()

    def _state(self, model: torch.nn.Module, optimizer: Adam) -> Iterator[tuple[str, Tensor]]:
        buffers = list(stored_buffers(model))  # on all ranks: it brings FSDP back to shards
        for name, parameter in model.named_parameters():
            yield f"model.{name}", parameter.detach()
            for moment in MOMENTS:
                if moment in optimizer.state.get(parameter, {}):
                    yield f"{moment}.{name}", optimizer.state[parameter][moment]
        if self._ranks.leads:
            yield from ((f"model.{name}", buffer) for name, buffer in buffers)

    def _copied(self, part: str, name: str, tensor: Tensor) -> _Rows:
        """Copy into memory that is kept from one checkpoint to the next."""
        start = 0
        if isinstance(tensor, DTensor):
            start, _ = row_range(tensor.shape[0], self._ranks.num, self._ranks.rank)
        local = local_part(tensor)
        copy = self._copies.get(f"{part}/{name}")
        if copy is None:
            copy = self._copies[f"{part}/{name}"] = torch.empty_like(
                local, device="cpu", memory_format=torch.contiguous_format
            )
        return _Rows(copy.copy_(local), start, tensor.shape)


def stored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are part of the model, such as a router's bias, by name."""
    stored = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _save_all(parts: Mapping[str, Mapping[str, _Rows]], folder: Path, ranks: Ranks) -> dict[str, str]:
    """Write one part after the other; return the digests by file."""
    return {
        str(Path(part) / name): digest
        for part, rows in parts.items()
        for name, digest in _save(rows, folder / part, ranks).items()
    }


def _save(rows: Mapping[str, _Rows], folder: Path, ranks: Ranks) -> dict[str, str]:
    writer = _StateWriter(folder, ranks)
    try:
        save(
            dict(rows), storage_writer=writer, planner=_RowsPlanner(), process_group=ranks.files,
            no_dist=ranks.files is None,
        )  # fmt: skip
    except CheckpointException as problem:  # on all ranks, and no `Exception`
        error, _ = next(iter(problem.failures.values()))
        raise error from problem
    if ranks.files is None:
        return writer.digests
    gathered: list[Any] | None = [None] * ranks.num if ranks.leads else None
    dist.gather_object(writer.digests, gathered, 0, ranks.files)
    return {} if gathered is None else {name: digest for each in gathered for name, digest in each.items()}


class _HashedFile(PacedFile):
    """A file that is hashed on its way; the ranks of a machine take turns in writing to its disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, turn=path.parent.parent)
        self._hash = blake3()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write_piece(self, piece: memoryview) -> None:
        self._hash.update(piece)
        super().write_piece(piece)


class _Disk(FileSystem):
    """The folder of a checkpoint that is being written."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        with _HashedFile(Path(path)) as file:
            yield file
        self.digests[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Sent(io.RawIOBase):
    """A file of which rank 0 writes what is written here: pieces, each after its length; 0 is the end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._place = 0

    def write(self, data: Any) -> int:  # a buffer
        view = memoryview(data).cast("B")
        for start in range(0, len(view), MOST_BYTES):
            piece = torch.frombuffer(bytearray(view[start : start + MOST_BYTES]), dtype=torch.uint8)
            dist.send(torch.tensor([len(piece)]), 0, group=self._group)
            dist.send(piece, 0, group=self._group)
        self._place += len(view)
        return len(view)

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if not self.closed:
            dist.send(torch.tensor([0]), 0, group=self._group)
        super().close()


class _FarDisk(_Disk):
    """Rank 0's folder as a rank on another machine sees it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with _Sent(self._group) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False


class _StateWriter(FileSystemWriter):
    """Writes one file per rank; the digests of those that this rank wrote are in `digests`."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        is_far = not ranks.is_beside_first(ranks.rank)
        # The files sync themselves. The rows are in main memory; copied ahead on a CUDA stream, they would
        # cost every rank a context on GPU 0, which is the device of a new thread.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        assert ranks.files is not None or not is_far
        self.fs = _FarDisk(cast(dist.ProcessGroup, ranks.files)) if is_far else _Disk()
        self.digests = self.fs.digests
        self._ranks = ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        if self._ranks.leads:
            for rank in range(self._ranks.num):
                if not self._ranks.is_beside_first(rank):
                    self._receive(rank)
        return written

    def _receive(self, rank: int) -> None:
        """Write the file that a rank on another machine sends."""
        size, group = torch.zeros(1, dtype=torch.long), self._ranks.files
        with self.fs.create_stream(Path(self.path) / f"__{rank}_0.distcp", "wb") as file:
            while True:
                dist.recv(size, rank, group=group)
                if not int(size):
                    return
                piece = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(piece, rank, group=group)
                cast(_HashedFile, file).write(piece.numpy())


class StoredState:
    """The tensors of a state that `StateSaver` wrote."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` where it cannot be read."""
        self._reader = FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Return True if `folder` is one that `StateSaver` wrote into."""
        return (Path(folder) / METADATA).is_file()

    @functools.cached_property
    def adapters(self) -> dict[str, torch.Size]:
        """Shapes of the adapters that are stored, by name in the model; without any, it was trained whole."""
        found = ((name.removeprefix("model."), self._shape(name)) for name in self._names("model."))
        return {name: shape for name, shape in found if ".lora_" in name}

    def __contains__(self, name: str) -> bool:
        return f"model.{name}" in self._metadata.state_dict_metadata

    def rows(self, name: str, start: int, stop: int, kind: str = "model") -> Tensor:
        """Return rows of a weight or, by `kind`, of one of its moments; only these are read."""
        name = f"{kind}.{name}"
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        found = torch.empty(
            [stop - start, *stored.size[1:]][: len(stored.size)], dtype=stored.properties.dtype
        )
        if found.numel():
            items = create_read_items_for_chunk_list(name, stored, [_chunk(start, found.shape)])
            self._reader.read_data(LoadPlan(items), _Into(found)).wait()
        return found

    def close(self) -> None:
        """Nothing is open."""

    def _shape(self, name: str) -> torch.Size:
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        return stored.size

    def _names(self, prefix: str) -> Iterable[str]:
        return (name for name in self._metadata.state_dict_metadata if name.startswith(prefix))


@torch.no_grad()
def restore_moments(
    model: torch.nn.Module,
    optimizer: Adam,
    folder: Path,
    steps: Mapping[str, float],
    ranks: Ranks = ALONE,
    *,
    is_critic: bool = False,
) -> None:
    """Give a fresh optimizer the moments of `folder`, which is rank 0's, in main memory; `steps` of each
    parameter that has any, by name. `is_critic`: these are not the policy's. All ranks call this."""
    ranks.broadcast(RestoreMoments(str(folder), dict(steps), is_critic))
    stored = StoredState(folder) if ranks.is_beside_first(ranks.rank) else None
    for name, parameter in model.named_parameters():
        if name not in steps:
            continue
        state = {"step": torch.tensor(steps[name], device=parameter.device)}
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter, dtype=torch.float32)
            local_part(state[kind]).copy_(_own_rows(stored, name, parameter.shape, kind, ranks))
        optimizer.state[parameter] = state


def _own_rows(stored: StoredState | None, name: str, shape: torch.Size, kind: str, ranks: Ranks) -> Tensor:
    """Return this rank's rows; rank 0 reads for those that cannot."""
    if not ranks.share_files:
        whole = stored.rows(name, 0, shape[0], kind) if stored is not None and ranks.leads else None
        return scatter_rows(whole, shape, ranks)
    assert stored is not None
    return stored.rows(name, *row_range(shape[0], ranks.num, ranks.rank), kind)


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor
