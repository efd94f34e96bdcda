"""The policy's weights over several ranks (FSDP2), and an AdamW whose state is read and set whole.

Each block of the model is gathered when it computes and given back afterwards; gradients are averaged over
the ranks (the learner multiplies that away, because losses are sums). With bfloat16 the shards, the
gradients' sums and the optimizer stay float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlboost_runtime.trainer.ranks import ALONE, GatherOptimizer, Ranks, ScatterOptimizer, whole
from rlboost_runtime.trainer.scoring import Scorer


def shard(scorer: Scorer, ranks: Ranks, device: torch.device) -> None:
    """Divide the model's weights over the ranks; all must hold the same ones."""
    mesh = init_device_mesh(device.type, (ranks.num,))
    precision = MixedPrecisionPolicy()
    if scorer.compute_dtype is not torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=scorer.compute_dtype, reduce_dtype=torch.float32)
    for block in _blocks(scorer):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)


def _blocks(scorer: Scorer) -> list[nn.Module]:
    """Return the model's layers, as `transformers` names them."""
    names = set(getattr(scorer.model, "_no_split_modules", None) or ())
    return [module for module in scorer.modules() if type(module).__name__ in names]


class Adam(torch.optim.AdamW):
    """AdamW whose `state_dict` holds whole tensors, so that it does not depend on the number of ranks.

    `offload` keeps the moments in main memory, but for the step itself.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        ranks: Ranks = ALONE,
        offload: bool = False,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=0.0, fused=True)
        self.offload = offload
        self._ranks = ranks

    def update(self) -> None:
        """Do a step with the gradients as they are."""
        device = self._parameters[0].device
        if self.offload:
            self.move(device)
        self.step()
        if self.offload:
            self.move(torch.device("cpu"))

    def move(self, device: torch.device) -> None:
        """Put the state on `device`."""
        for state in self.state.values():
            for name, value in state.items():  # step counts too: the fused kernel reads them on the device
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:  # torch's format
        """Return the state, of all ranks together, on the CPU; on ranks other than 0 without moments.

        Alone on a CPU it is the optimizer's own memory."""
        self._ranks.tell(GatherOptimizer())
        found = super().state_dict()
        found["state"] = {number: self._whole(each) for number, each in found["state"].items()}
        return found

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:  # torch's format
        """Gather one parameter's state: one at a time, so that no rank ever holds all moments on its GPU."""
        found = {}
        for name, value in state.items():
            gathered = whole(value) if isinstance(value, Tensor) else value
            if self._ranks.leads:
                found[name] = gathered.to("cpu") if isinstance(gathered, Tensor) else gathered
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # torch's format
        """Set the state from a whole one, whatever number of ranks it is from; rank 0 has it."""
        if self._ranks.control is None:
            super().load_state_dict(state_dict)
            return
        parameters, states = self._parameters, state_dict["state"]
        steps = [float(states[i]["step"]) if i in states else None for i in range(len(parameters))]
        self._ranks.tell(ScatterOptimizer(steps))
        for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = stored["lr"]
        self._scatter(steps, states)

    def receive_state(self, steps: list[float | None]) -> None:
        """Take this rank's part of what rank 0 loads."""
        self._scatter(steps, {})

    def _scatter(self, steps: list[float | None], states: dict[int, dict[str, Tensor]]) -> None:
        for number, (parameter, step) in enumerate(zip(self._parameters, steps, strict=True)):
            if step is None:
                continue
            whole_state = states.get(number, {})
            state: dict[str, Tensor] = {"step": torch.tensor(step, device=parameter.device)}
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _part(whole_state.get(name), parameter)
            self.state[parameter] = state
        if self.offload:
            self.move(torch.device("cpu"))


def _part(tensor: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of rank 0's whole tensor, divided like the parameter."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if tensor is None:
        tensor = torch.zeros(parameter.shape, dtype=torch.float32)
    return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements)
