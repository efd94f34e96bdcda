"""Which fast form of the arithmetic is used: the one that agrees with the plain one, here, on this device.

Each check computes values and gradients of random input both ways, the plain one in float32, and compares
them by the norm of their difference. What is not installed, raises, or is farther away than `TOLERANCE` is
not used, and the log says so. A check takes some megabytes and a fraction of a second, most of it for the
first use of a kernel.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.kernels.attention import packed_attention, padded_attention
from rlboost_runtime.trainer.kernels.experts import grouped_experts
from rlboost_runtime.trainer.kernels.head import scored_by_liger, token_logprobs, wide_product
from rlboost_runtime.trainer.kernels.norms import fused_norm, plain_norm

log = logging.getLogger(__name__)

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Norm of the difference by the norm of the plain result: bfloat16 rounds each of a chain of products to 8
bits."""
LENGTHS = (1, 37, 300, 129)
"""Tokens of the sequences on which attention is tried: alone, no multiple of a block, longer than several."""
WINDOW = 7
"""Small, so that one token too many or too few shows."""
GROUPS = (0, 5, 64, 1, 130)
"""Tokens of each expert in the trial; none, few, and no multiples of a tile."""
VOCABULARY = 4111
STEPS = 3
"""Steps of the optimizer in its trial."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The fast forms that are used on a device. `refused`: those that failed here, each with the reason; a
    package that is not installed is none of them."""

    attention: bool = False
    """FlashAttention on the packed row."""
    experts: bool = False
    """Experts as grouped products."""
    head: bool = False
    """Liger's fused linear cross-entropy, where nothing is trained."""
    products: bool = False
    """The head's products in float32 at once."""
    norms: bool = False
    """RMS norms as one kernel."""
    adamw: bool = False
    """AdamW's step as one kernel."""
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def used(self) -> list[str]:
        """Names of those that are used."""
        return [name for name in NAMES if getattr(self, name)]


NAMES = ("attention", "experts", "head", "products", "norms", "adamw")
PLAIN = Kernels()


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The widths of a model on which its kernels are tried."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int = 0
    """0: no experts."""


def shape_for_kernels(config: Any) -> KernelShape:  # transformers' configurations have no common type
    """Return the widths of a model from its configuration."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 0)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    return KernelShape(
        hidden, heads, int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or hidden // heads), int(width or 0) if experts else 0,
    )  # fmt: skip


def trials_on(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """Return, by name, the trials of the kernels that there are for `device`: each returns its error.

    Only experts and optimizer have fast forms on CPUs.
    """
    on_gpu = device.type == "cuda"
    trials: dict[str, Callable[[], float]] = {}
    if on_gpu and dtype is torch.bfloat16:
        trials["attention"] = lambda: attention_error(shape, device, dtype)
    if shape.expert_width:
        trials["experts"] = lambda: experts_error(shape, device, dtype)
    if on_gpu:
        trials["head"] = lambda: head_error(shape, device, dtype)
    if on_gpu and dtype is torch.bfloat16:
        trials["products"] = lambda: products_error(shape, device, dtype)
        trials["norms"] = lambda: norms_error(shape, device, dtype)
    trials["adamw"] = lambda: adamw_error(device)
    return trials


def choose_kernels(trials: Mapping[str, Callable[[], float]], dtype: torch.dtype) -> Kernels:
    """Return which kernels agree with their plain form, in `dtype`."""
    taken, refused = dict.fromkeys(NAMES, False), {}
    for name, trial in trials.items():
        try:
            problem = _problem(trial, TOLERANCE[torch.float32 if name == "adamw" else dtype])
        except ImportError as exc:
            event(log, "kernel.absent", kernel=name, why=str(exc))
            continue
        taken[name] = not problem
        if problem:
            refused[name] = problem
            event(log, "kernel.refused", level=logging.WARNING, kernel=name, why=problem)
    found = Kernels(**taken, refused=refused)
    event(log, "kernels.chosen", dtype=str(dtype).removeprefix("torch."), used=found.used)
    return found


def _problem(trial: Callable[[], float], limit: float) -> str:
    """Return why a kernel is not used; empty if it agrees. Raises `ImportError` where it is not installed."""
    try:
        error = trial()
    except ImportError:
        raise
    except Exception as exc:  # noqa: BLE001 - whatever it is, there is another way
        return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else ''}"
    return "" if error <= limit else f"{error:.2g} away from the plain form, {limit:g} is allowed"


def _draw(seed: int, device: torch.device) -> Callable[..., Tensor]:
    """Return a source of normal numbers, drawn in main memory: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def _apart(found: Sequence[Tensor | None], plain: Sequence[Tensor | None]) -> float:
    """Return the largest difference of a pair, by the norm of the plain one; infinite if it is no number."""
    worst = 0.0
    for one, other in zip(found, plain, strict=True):
        assert one is not None
        assert other is not None
        error = float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _with_gradients(
    inputs: Sequence[Tensor], compute: Callable[..., Tensor], upstream: Tensor
) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    found = compute(*leaves)
    found.backward(upstream.to(found.dtype))  # type: ignore[no-untyped-call]
    return [found.detach(), *(each.grad for each in leaves if each.grad is not None)]


def attention_error(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = packed_attention,
) -> float:
    """Return how far `kernel` is from attention over each sequence alone, with a window and without."""
    draw, total = _draw(0, device), sum(LENGTHS)
    heads = [
        draw(total, num, shape.head_dim).to(dtype) for num in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    upstream = draw(total, shape.heads, shape.head_dim).to(dtype)
    starts = torch.tensor([sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)], dtype=torch.int32).to(device)
    scaling = shape.head_dim**-0.5

    def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        found = []
        for start, end in itertools.pairwise(starts.tolist()):
            q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
            found.append(padded_attention(q, k, v, scaling, window)[0].transpose(0, 1))
        return torch.cat(found)

    worst = 0.0
    for window in (None, WINDOW):
        found = _with_gradients(
            heads, lambda q, k, v, w=window: kernel(q, k, v, starts, max(LENGTHS), scaling, w), upstream
        )
        exact = [each.float() for each in heads]
        wanted = _with_gradients(exact, lambda q, k, v, w=window: plain(q, k, v, w), upstream.float())
        worst = max(worst, _apart(found, wanted))
    return worst


def experts_error(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = grouped_experts,
) -> float:
    """Return how far `kernel` is from one expert's products after the other's."""
    draw, num = _draw(1, device), len(GROUPS)
    hidden = draw(sum(GROUPS), shape.hidden).to(dtype)
    up = (draw(num, 2 * shape.expert_width, shape.hidden) * shape.hidden**-0.5).to(dtype)
    down = (draw(num, shape.hidden, shape.expert_width) * shape.expert_width**-0.5).to(dtype)
    order = torch.randperm(sum(GROUPS), generator=torch.Generator().manual_seed(2))
    of = torch.cat([torch.full((n,), i) for i, n in enumerate(GROUPS)])[order].to(device)
    weights = draw(sum(GROUPS), 1).abs().to(dtype)

    def gate(both: Tensor) -> Tensor:
        first, second = both.chunk(2, dim=-1)
        return nn.functional.silu(first) * second

    def fast(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
        module = SimpleNamespace(
            num_experts=num, gate_up_proj=up, down_proj=down, has_gate=True, has_bias=False,
            is_transposed=False, _is_expert_parallel=False, _apply_gate=gate,
        )  # fmt: skip
        return kernel(module, hidden, of[:, None], weights)

    def plain(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        for i in range(num):
            (rows,) = torch.where(of == i)
            answer = gate(hidden[rows] @ up[i].T) @ down[i].T
            found = found.index_add(0, rows, answer * weights[rows].float())
        return found

    upstream = draw(sum(GROUPS), shape.hidden).to(dtype)
    found = _with_gradients([hidden, up, down], fast, upstream)
    wanted = _with_gradients([each.float() for each in (hidden, up, down)], plain, upstream.float())
    return _apart(found, wanted)


def head_error(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = scored_by_liger,
) -> float:
    """Return how far `kernel` is from our own logprobs, in float32."""
    draw = _draw(3, device)
    hidden = draw(sum(LENGTHS), shape.hidden).to(dtype)
    head = (draw(VOCABULARY, shape.hidden) * shape.hidden**-0.5).to(dtype)
    targets = torch.arange(sum(LENGTHS), device=device) * 7 % VOCABULARY
    with torch.no_grad():
        plain, _ = token_logprobs(hidden.float(), head.float(), targets, 0.7)
        return _apart([kernel(hidden, head, targets, 0.7)], [plain])


def products_error(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = wide_product,
) -> float:
    """Return how far `kernel` is from the logits in float32, and from a gradient of the head added to one."""
    draw = _draw(5, device)
    hidden = draw(sum(LENGTHS), shape.hidden).to(dtype)
    head, logits = draw(VOCABULARY, shape.hidden).to(dtype), draw(sum(LENGTHS), VOCABULARY).to(dtype)
    before = draw(VOCABULARY, shape.hidden)
    plain = [hidden.float() @ head.float().T, before + logits.float().T @ hidden.float()]
    onto = before.clone()
    kernel(logits.T, hidden, onto=onto)
    return _apart([kernel(hidden, head.T), onto], plain)


def norms_error(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = fused_norm,
) -> float:
    """Return how far `kernel` is from the norm written out in float32, over a stream's width and a head's."""
    draw, worst = _draw(6, device), 0.0
    for sizes in ((sum(LENGTHS), shape.hidden), (sum(LENGTHS), shape.heads, shape.head_dim)):
        inputs = [draw(*sizes).to(dtype), draw(sizes[-1]).to(dtype)]
        upstream = draw(*sizes).to(dtype)
        found = _with_gradients(inputs, lambda hidden, weight: kernel(hidden, weight, 1e-6), upstream)
        exact = [each.float() for each in inputs]
        wanted = _with_gradients(
            exact, lambda hidden, weight: plain_norm(hidden, weight, 1e-6), upstream.float()
        )
        worst = max(worst, _apart(found, wanted))
    return worst


def adamw_error(
    device: torch.device, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> float:
    """Return how far the fused step is from the plain one after some steps: of the weights' changes."""
    draw = _draw(4, device)
    start, gradients = [draw(33, 5), draw(7)], [[draw(33, 5), draw(7)] for _ in range(STEPS)]

    def changes(*, fused: bool) -> Iterator[Tensor]:
        weights = [nn.Parameter(each.clone()) for each in start]
        optimizer = make(weights, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=False)
        for each in gradients:
            for weight, gradient in zip(weights, each, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        return (weight.detach() - before for weight, before in zip(weights, start, strict=True))

    return _apart(list(changes(fused=True)), list(changes(fused=False)))
