"""The processes (ranks) over which one policy is sharded, and an AdamW whose state is read and set whole.

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.mover import IN_MAIN_MEMORY, Mover
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


class Apply(msgspec.Struct, tag="apply", frozen=True):
    """`Learner.apply`."""


class GatherModel(msgspec.Struct, tag="gather_model", frozen=True):
    """`Policy.full_state`."""


class GatherOptimizer(msgspec.Struct, tag="gather_optimizer", frozen=True):
    """`Adam.state_dict`."""


class ScatterOptimizer(msgspec.Struct, tag="scatter_optimizer", frozen=True):
    """`Adam.load_state_dict`; `steps` of each parameter, None where it has no state."""

    steps: list[float | None]


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
    LoadPolicy | BeginStep | Accumulate | Recompute | ScoreReference | Apply | GatherModel | GatherOptimizer
    | ScatterOptimizer | RunProbe | Free | Take | End
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

    @classmethod
    def join(cls) -> Ranks:
        """Join the group that torchrun's environment describes; without one, return `ALONE`."""
        num = int(os.environ.get("WORLD_SIZE", "1"))
        if num == 1:
            return ALONE
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
        return cls(dist.get_rank(), num, control)

    def leave(self) -> None:
        """Leave the group."""
        if self.control is not None:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

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
    for block in _blocks(scorer):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)
    torch.nn.Module.to_empty(scorer, device="cpu")
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    for name, parameter in scorer.named_parameters():
        _local(parameter).copy_(rows(name, weights.pop(name)))


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


def _blocks(scorer: LogprobModel) -> list[nn.Module]:
    """Return the model's layers: the modules that `transformers` never splits."""
    names = set(getattr(scorer.model, "_no_split_modules", None) or ())
    return [module for module in scorer.modules() if type(module).__name__ in names]


def _decayed_apart(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:  # torch's format
    """Return two groups: matrices, and vectors without weight decay."""
    every = list(parameters)
    return [
        {"params": [parameter for parameter in every if parameter.ndim > 1]},
        {"params": [parameter for parameter in every if parameter.ndim < 2], "weight_decay": 0.0},
    ]


_HYPERPARAMETERS = ("betas", "eps", "weight_decay")


class Adam(torch.optim.AdamW):
    """AdamW whose `state_dict` holds whole tensors, so that it does not depend on the number of ranks.

    `offload` keeps the moments in main memory, except during the step itself.

    The state is keyed by parameter number, as torch.optim's is, on any number of ranks.
    (`torch.distributed.checkpoint.state_dict` keys it by name, and creates missing state by an optimizer step
    without gradients, which counts as one.)
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        ranks: Ranks = ALONE,
        offload: bool = False,
        mover: Mover = IN_MAIN_MEMORY,
    ) -> None:
        """`mover`: where `offload` takes the moments for a step. `weight_decay` is for matrices alone."""
        super().__init__(
            _decayed_apart(parameters) if weight_decay else parameters, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, fused=True,
        )  # fmt: skip
        self.offload = offload
        self._ranks = ranks
        self._mover = mover

    def update(self) -> None:
        """Take a step with the gradients as they are."""
        if self.offload:
            self.move(self._mover.onto)
        self.step()
        if self.offload:
            self.move(self._mover.off)

    def move(self, how: Callable[[Tensor], Tensor]) -> None:
        """Move the state, one tensor at a time."""
        for state in self.state.values():
            for name, value in state.items():  # step counts too: the fused kernel reads them on the device
                if isinstance(value, Tensor):
                    state[name] = how(value)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:  # torch's format
        """Return the whole state, gathered from all ranks, on the CPU; without moments on ranks other than 0.

        With one rank on a CPU it shares the optimizer's memory."""
        self._ranks.broadcast(GatherOptimizer())
        found = super().state_dict()
        found["state"] = {number: self._gathered(each) for number, each in found["state"].items()}
        return found

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:  # torch's format
        """Gather one parameter's state; called for one at a time, so that no GPU ever holds all moments."""
        found = {}
        for name, value in state.items():
            gathered = full_tensor(value) if isinstance(value, Tensor) else value
            if self._ranks.leads:
                found[name] = gathered.to("cpu") if isinstance(gathered, Tensor) else gathered
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # torch's format
        """Set the state from a whole one, saved by any number of ranks; rank 0 passes it. Hyperparameters but
        the learning rate stay those of this optimizer: a fork may have others than its parent."""
        if self._ranks.control is None:
            own = [{name: group[name] for name in _HYPERPARAMETERS} for group in self.param_groups]
            super().load_state_dict(state_dict)
            for group, kept in zip(self.param_groups, own, strict=True):
                group.update(kept)
            return
        parameters, states = self._parameters, state_dict["state"]
        steps = [float(states[i]["step"]) if i in states else None for i in range(len(parameters))]
        self._ranks.broadcast(ScatterOptimizer(steps))
        for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = stored["lr"]
        self._scatter(steps, states)

    def receive_state(self, steps: list[float | None]) -> None:
        """Receive this rank's part of what rank 0 loads."""
        self._scatter(steps, {})

    @torch.no_grad()
    def _scatter(self, steps: list[float | None], states: dict[int, dict[str, Tensor]]) -> None:
        for number, (parameter, step) in enumerate(zip(self._parameters, steps, strict=True)):
            if step is None:
                continue
            whole_state = states.get(number, {})
            state: dict[str, Tensor] = {"step": torch.tensor(step, device=parameter.device)}
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _part(whole_state.get(name), parameter, self._ranks)
            self.state[parameter] = state
        if self.offload:
            self.move(self._mover.off)


def _part(tensor: Tensor | None, parameter: nn.Parameter, ranks: Ranks) -> Tensor:
    """Return this rank's part of rank 0's whole tensor, sharded like the parameter and where it is.

    It travels through main memory. (`distribute_tensor` would put it on the device of the mesh.)
    """
    part = torch.zeros_like(parameter, dtype=torch.float32)
    _local(part).copy_(scatter_rows(None if tensor is None else tensor.float(), parameter.shape, ranks))
    return part


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


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
