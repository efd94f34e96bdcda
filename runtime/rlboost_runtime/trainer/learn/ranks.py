"""The processes (ranks) over which one policy is sharded, and their AdamW.

Rank 0 runs the trainer's loop and alone talks to the coordinator. Every method that all ranks have to enter
together, such as a forward pass of a sharded model, begins with `Ranks.broadcast`: on rank 0 it sends the
method and its arguments to the other ranks; on these, and in a trainer of one process, it does nothing. The
others wait in `Ranks.receive` and call the same method (`rank_worker.py`). So all ranks run collectives in
rank 0's order.

Commands travel over gloo as msgpack, token arrays as raw bytes. A rank that ends takes the whole group with
it (torchrun sees to that).

The weights are sharded with FSDP2: each block of the model is gathered when it computes and freed afterwards;
gradients are averaged over the ranks (the learner undoes the averaging, because losses are sums). With
bfloat16 the shards, the gradients' sums and the optimizer stay float32.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.device.mover import IN_MAIN_MEMORY, Mover
from rlboost_runtime.trainer.learn.logprobs import LogprobModel, layers_of
from rlboost_runtime.trainer.learn.sample import Sample

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""Longest wait within a step's arithmetic: for the slowest rank's micro-batch, and for the load of a model. A
machine that vanishes silently is noticed by then; a process that dies is noticed at once, by its closed
connections."""

COMMAND_TIMEOUT = datetime.timedelta(days=2)
"""Longest wait for the next command: the other ranks idle while a step is rolled out."""


class LoadPolicy(msgspec.Struct, tag="load", frozen=True):
    """`Policy.load` and `Policy.set_up`: the first command, unless the run ends before it.

    `job`: the resolved job as JSON. `files`: the model's small files, where its weights follow from rank 0:
    with several nodes, as `source` is there only, or where only `transformers` can read them.
    """

    source: str
    job: str
    files: dict[str, bytes] = {}
    reference: str | None = None
    """The reference's model, where it is one of its own; `reference_files` as `files`."""
    reference_files: dict[str, bytes] = {}
    critic: str | None = None
    """The model that ppo's critic begins as; `critic_files` as `files`."""
    critic_files: dict[str, bytes] = {}


class BeginStep(msgspec.Struct, tag="begin_step", frozen=True):
    """`Learner.begin_step`."""

    step: int


class Accumulate(msgspec.Struct, tag="accumulate", frozen=True):
    """`Learner.accumulate`."""

    samples: list[Sample]


class Recompute(msgspec.Struct, tag="recompute", frozen=True):
    """`Learner.recompute`."""

    samples: list[Sample]


class ScoreReference(msgspec.Struct, tag="reference", frozen=True):
    """`Learner.score_reference`."""

    samples: list[Sample]


class ScoreValues(msgspec.Struct, tag="values", frozen=True):
    """`Learner.score_values`."""

    samples: list[Sample]


class Apply(msgspec.Struct, tag="apply", frozen=True):
    """`Learner.apply`."""


class GatherModel(msgspec.Struct, tag="gather_model", frozen=True):
    """`Policy.full_state`."""


class SaveState(msgspec.Struct, tag="save_state", frozen=True):
    """`StateSaver.begin`."""

    folder: str


class RestoreMoments(msgspec.Struct, tag="restore_moments", frozen=True):
    """`restore_moments`; `steps` of each parameter that has any, by name."""

    folder: str
    steps: dict[str, float]
    is_critic: bool = False
    """True for the critic's, else the policy's."""


class RunProbe(msgspec.Struct, tag="probe", frozen=True):
    """`Policy.probe`."""

    token_ids: list[int]
    dtype: str


class Free(msgspec.Struct, tag="free", frozen=True):
    """`Residency.free`."""


class Take(msgspec.Struct, tag="take", frozen=True):
    """`Residency.take`."""


class End(msgspec.Struct, tag="end", frozen=True):
    """The run is over for this process."""


RankCommand = (
    LoadPolicy | BeginStep | Accumulate | Recompute | ScoreReference | ScoreValues | Apply | GatherModel
    | SaveState | RestoreMoments | RunProbe | Free | Take | End
)  # fmt: skip


def _bytes_of(array: object) -> memoryview:
    assert isinstance(array, np.ndarray)
    return np.ascontiguousarray(array).data.cast("B")


def _array_of(kind: Any, data: bytes) -> object:  # NDArray of one dtype
    return np.frombuffer(data, get_args(get_args(kind)[1])[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand, dec_hook=_array_of)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that hold the policy together."""

    rank: int = 0
    num: int = 1
    control: ProcessGroup | None = None
    """A gloo group with a long deadline, for commands only: collectives of a step must notice a lost machine
    sooner. None with one rank."""
    files: ProcessGroup | None = None
    """As `control`, for the threads that write checkpoints beside training."""
    num_here: int | None = None
    """Ranks on each machine; None: all of them are on one."""

    @classmethod
    def join(cls) -> Ranks:
        """Join the group that torchrun's environment describes; without one, return `ALONE`."""
        num = int(os.environ.get("WORLD_SIZE", "1"))
        if num == 1:
            return ALONE
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Without a device_id: NCCL then takes its memory at the first collective, after the first `take`, and
        # not now, while engines may be awake.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        control, files = (dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) for _ in range(2))
        return cls(dist.get_rank(), num, control, files, int(os.environ.get("LOCAL_WORLD_SIZE", num)))

    def leave(self) -> None:
        """Leave the group."""
        if self.control is not None:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def is_beside_first(self, rank: int) -> bool:
        """Return True if `rank` is on rank 0's machine, and so sees its files."""
        return self.num_here is None or rank < self.num_here

    @property
    def share_files(self) -> bool:
        """True if all ranks see rank 0's files."""
        return self.is_beside_first(self.num - 1)

    def broadcast(self, command: RankCommand) -> None:
        """Make the other ranks enter the method that the caller is in; does nothing on these."""
        if self.control is not None and self.leads:
            self._broadcast_bytes(_encoder.encode(command))

    def receive(self) -> RankCommand:
        """Return rank 0's next command; for the other ranks."""
        assert not self.leads
        return _decoder.decode(self._broadcast_bytes(b""))

    def _broadcast_bytes(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.control)
        body = torch.empty(int(size), dtype=torch.uint8)
        if self.leads and data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self.control)
        return bytes(body.numpy().tobytes())

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks."""
        return list(values) if self.control is None else self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the maxima over all ranks."""
        return list(values) if self.control is None else self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how)
        found: list[float] = tensor.tolist()
        return found

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's `values` (one dimension, of any length), by rank, on all of them."""
        if self.control is None:
            return [values]
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.num)]
        dist.all_gather(sizes, torch.tensor([values.numel()]))
        width = max(1, *(int(size) for size in sizes))
        rows = [values.new_zeros(width) for _ in range(self.num)]
        dist.all_gather(rows, nn.functional.pad(values, (0, width - values.numel())))
        return [row[: int(size)] for row, size in zip(rows, sizes, strict=True)]


ALONE = Ranks()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Rows = Callable[[str, Tensor], Tensor]
"""Returns this rank's rows of a weight, by its name in the scorer and the weight as it was until then."""


@torch.no_grad()
def shard(scorer: LogprobModel, ranks: Ranks, device: torch.device, rows: Rows | None = None) -> None:
    """Shard the model's weights over the ranks, to compute on `device`; `rows`: None where each rank has all.

    The shards stay in main memory. (FSDP puts what it is given onto the device; it leaves alone what is on
    the meta device.)
    """
    if rows is None:
        rows = lambda name, weight: rows_by_rank(weight, ranks)[ranks.rank]  # noqa: E731
    mesh = init_device_mesh(device.type, (ranks.num,))
    precision = MixedPrecisionPolicy()
    if scorer.compute_dtype is not torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=scorer.compute_dtype, reduce_dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in scorer.named_parameters()}
    buffers = _leave_for_meta(scorer)
    for block in layers_of(scorer):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)
    torch.nn.Module.to_empty(scorer, device="cpu")
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    for name, parameter in scorer.named_parameters():
        local_part(parameter).copy_(rows(name, weights.pop(name)))


def _leave_for_meta(scorer: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Replace parameters and buffers by empty ones on the meta device; return the buffers with their places.

    Parameters that were shared are shared afterwards.
    """
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    buffers = []
    for module in scorer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in parameters:
                empty = torch.empty_like(parameter, device="meta")
                parameters[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, parameters[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            buffers.append((module, name, buffer))
            setattr(module, name, torch.empty_like(buffer, device="meta"))
    return buffers


def _decayed_apart(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:  # torch's format
    """Return two groups: matrices, and vectors without weight decay."""
    every = list(parameters)
    return [
        {"params": [parameter for parameter in every if parameter.ndim > 1]},
        {"params": [parameter for parameter in every if parameter.ndim < 2], "weight_decay": 0.0},
    ]


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, in its shape, beside the number of its steps."""


class Adam(torch.optim.AdamW):
    """AdamW; `offload` keeps the moments in main memory, except during the step itself."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        offload: bool = False,
        mover: Mover = IN_MAIN_MEMORY,
    ) -> None:
        """`mover`: where `offload` takes the moments for a step. `weight_decay` is for matrices alone."""
        super().__init__(
            _decayed_apart(parameters) if weight_decay else parameters, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, fused=True,
        )  # fmt: skip
        self.offload = offload
        self._mover = mover

    @classmethod
    def of(cls, model: nn.Module, algorithm: Algorithm, trainer: Trainer, mover: Mover) -> Adam:
        """Return the job's optimizer of what is trained of `model`."""
        return cls(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=algorithm.learning_rate, betas=(algorithm.adam_betas[0], algorithm.adam_betas[1]),
            eps=algorithm.adam_eps, weight_decay=algorithm.weight_decay,
            offload=trainer.offloads_optimizer, mover=mover,
        )  # fmt: skip

    def use_fused(self, *, is_on: bool) -> None:
        """Take steps as one kernel, or as plain arithmetic."""
        for group in self.param_groups:
            group["fused"], group["foreach"] = is_on, False  # foreach would take the weights' memory again

    def update(self) -> None:
        """Take a step with the gradients as they are."""
        if self.offload:
            self.move(self._mover.onto)
        self.step()
        if self.offload:
            self.move(self._mover.off)
            self._mover.wait()

    def move(self, how: Callable[[Tensor], Tensor]) -> None:
        """Move the state, one tensor at a time."""
        for state in self.state.values():
            for name, value in state.items():  # step counts too: the fused kernel reads them on the device
                if isinstance(value, Tensor):
                    state[name] = how(value)


def leave_sharded(scorer: nn.Module) -> None:
    """Free what a forward pass without gradient leaves gathered: the weights outside of all layers, of which
    FSDP expects a backward pass."""
    if isinstance(scorer, FSDPModule):
        scorer.reshard()


def clip_gradients(model: nn.Module, divide_by: float, bound: float) -> float:
    """Divide the model's gradients, clip their norm; return the norm before. All ranks must call this."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.div_(divide_by)
    return float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, bound)))


def scatter_rows(whole: Tensor | None, shape: torch.Size, ranks: Ranks) -> Tensor:
    """Return this rank's rows of rank 0's `whole` tensor in float32, of `shape`; all ranks must call this."""
    height = -(-shape[0] // ranks.num)
    mine = torch.zeros(height, *shape[1:])
    parts = None if whole is None else [_padded(each, height) for each in rows_by_rank(whole, ranks)]
    dist.scatter(mine, parts)
    start, stop = row_range(shape[0], ranks.num, ranks.rank)
    return mine[: stop - start]


def _padded(rows: Tensor, num: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num - len(rows), *rows.shape[1:])])


def row_range(height: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return where the rows that FSDP gives to a rank start and stop."""
    each = -(-height // num_ranks)
    return min(height, rank * each), min(height, (rank + 1) * each)


def rows_by_rank(whole: Tensor, ranks: Ranks) -> list[Tensor]:
    """Return the rows of `whole` that FSDP gives to each rank."""
    ranges = (row_range(len(whole), ranks.num, rank) for rank in range(ranks.num))
    return [whole[start:stop] for start, stop in ranges]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
