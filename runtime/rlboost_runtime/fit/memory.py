"""The bytes of a training GPU, part by part, as this project's trainer uses them.

What a layer keeps for the backward pass was counted with `saved_tensors_hooks` on the trainer's own forward
pass of packed rows (a unit test repeats it): bytes per position and element of width, for the residual stream
(E), queries (Q), keys and values (K) and the MLP (I), in float32 and in bfloat16. One rank in bfloat16 keeps
the cast weights too; on several ranks FSDP gathers them again.

Norms compute in float32: each keeps its input so (where that is a copy), the normed values before the weight
and after it. An MLP keeps gate, activation, up and their product. Checkpointing keeps the stream alone.
Figures of models with experts are estimates: how their kernels copy tokens differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlboost_runtime.fit.shape import TransformerShape

Arithmetic = Literal["float32", "bfloat16"]

GIB = 2**30
WEIGHT, GRADIENT, MOMENTS, CAST = 4, 4, 8, 2
"""Bytes per parameter: in float32 itself, its gradient and AdamW's two moments; its bfloat16 copy."""
CHUNK_BYTES, GPU_CHUNK_BYTES = 4 * 64 * 2**20, 4 * 512 * 2**20
"""A chunk of logits, its softmax, its gradient and a cast (`trainer/kernels/head.py`)."""
KEEP_BYTES = 128 * 2**20
"""All logits are kept for the backward pass where they take no more."""
CONTEXT_BYTES = 2 * 10**9
"""CUDA context, NCCL's buffers, workspaces of cuBLAS. Judged."""
ASLEEP_BYTES = 3 * 10**9
"""A vLLM engine that sleeps at level 2: its context and CUDA graphs. Judged."""
USABLE = 0.95
"""Share of a GPU's memory that may be planned for: fragments of the allocator take the rest. Judged."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes per position and element that a layer keeps; `stream`: of these the layer's own input."""

    e: int
    q: int
    k: int
    i: int
    stream: int
    qk_norm: int
    """Of `q` and `k`, what goes where queries and keys are not normalised."""


_KEPT: Mapping[Arithmetic, _Kept] = {
    "float32": _Kept(e=24, q=16, k=16, i=16, stream=4, qk_norm=8),
    "bfloat16": _Kept(e=16, q=10, k=10, i=8, stream=2, qk_norm=6),
}


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """How a model is trained on each of `ranks` GPUs (or CPUs)."""

    shape: TransformerShape
    arithmetic: Arithmetic
    ranks: int
    tokens: int
    """Positions of the largest forward pass."""
    checkpointing: bool
    offload: bool
    """The moments are on the GPU for the optimizer's step only."""
    lora_rank: int = 0
    """0: every weight is trained."""
    on_gpu: bool = True
    shares_gpu: bool = True
    """True if a sleeping engine is on the GPU too."""
    has_reference: bool = False
    """True if a KL penalty has a reference model of its own: in main memory but for a forward pass."""
    context: int = 1
    """Ranks that share a forward pass's positions."""
    has_critic: bool = False
    """True if a critic, taken to be as large as the policy, is trained beside it: its state is on the GPU as
    the policy's is; their passes follow one another."""

    @property
    def positions(self) -> int:
        """Positions of the largest forward pass on one rank."""
        return -(-self.tokens // self.context)

    @property
    def models(self) -> int:
        """Models that are trained."""
        return 2 if self.has_critic else 1

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments."""
        return self.shape.adapter_parameters(self.lora_rank) if self.lora_rank else self.shape.parameters

    @property
    def casts(self) -> bool:
        """True if cast weights are kept for the backward pass."""
        return self.arithmetic == "bfloat16" and self.ranks == 1

    @property
    def element(self) -> int:
        """Bytes of one number of the arithmetic."""
        return 4 if self.arithmetic == "float32" else CAST

    @property
    def all_parameters(self) -> int:
        """Parameters of the model with its adapters."""
        return self.shape.parameters + self.shape.adapter_parameters(self.lora_rank)

    @property
    def reference(self) -> int:
        """Bytes of the reference model, taken to be as large as the policy."""
        return self.element * self.shape.parameters if self.has_reference else 0


def layer_bytes(setup: TrainingSetup) -> int:
    """Return what one layer keeps of all positions, without checkpointing."""
    shape, kept = setup.shape, _KEPT[setup.arithmetic]
    less = 0 if shape.has_qk_norm else kept.qk_norm
    width = kept.e * shape.hidden + (kept.q - less) * shape.queries + (kept.k - less) * shape.keys
    width += kept.i * shape.intermediate * shape.active_experts
    if shape.experts:  # a copy of the token for each of its experts, and each one's answer
        width += 2 * setup.element * shape.hidden * shape.active_experts
    width += 7 * setup.element * setup.lora_rank
    casts = CAST * shape.layer_parameters if setup.casts else 0
    return setup.positions * width + casts


def saved_bytes(setup: TrainingSetup) -> int:
    """Return what a forward pass keeps for the backward pass: `activations`, with what is behind the layers.

    Behind the layers are the last norm and the hidden states that the head reads.
    """
    shape, kept = setup.shape, _KEPT[setup.arithmetic]
    logits = 4 * setup.positions * shape.vocabulary
    behind = setup.positions * (8 if setup.arithmetic == "bfloat16" else 8 + setup.element) * shape.hidden
    behind += logits if logits <= KEEP_BYTES else 0
    if setup.checkpointing:
        return behind + shape.layers * setup.positions * kept.stream * shape.hidden
    return behind + shape.layers * layer_bytes(setup)


def gpu_bytes(setup: TrainingSetup) -> dict[str, int]:
    """Return the parts of a GPU's memory during a forward and backward pass, with gradients accumulated."""
    shape, ranks = setup.shape, setup.ranks
    parts = {
        "weights": WEIGHT * setup.models * setup.all_parameters // ranks,
        "gradients": GRADIENT * setup.models * setup.trained // ranks,
        "moments": 0 if setup.offload else MOMENTS * setup.models * setup.trained // ranks,
        "activations": saved_bytes(setup),
        "one layer redone": layer_bytes(setup) if setup.checkpointing else 0,
        "logits chunk": min(
            GPU_CHUNK_BYTES if setup.on_gpu else CHUNK_BYTES, 4 * 4 * setup.positions * shape.vocabulary
        ),
        "embedding and head": _root_bytes(setup),
        "gathered layers": _gathered_bytes(setup),
        "contexts": CONTEXT_BYTES if setup.on_gpu else 0,
        "sleeping engine": ASLEEP_BYTES if setup.on_gpu and setup.shares_gpu else 0,
    }
    return {name: size for name, size in parts.items() if size}


def step_bytes(setup: TrainingSetup) -> int:
    """Return a GPU's memory at the optimizer's step: offloaded moments are there, of one model at a time,
    activations are not."""
    moments = MOMENTS * (1 if setup.offload else setup.models)
    state = setup.models * (WEIGHT * setup.all_parameters + GRADIENT * setup.trained)
    state += moments * setup.trained
    beside = (CONTEXT_BYTES + ASLEEP_BYTES * setup.shares_gpu) if setup.on_gpu else 0
    return state // setup.ranks + beside


def peak_bytes(setup: TrainingSetup) -> int:
    """Return the most that a GPU holds. It leans upwards: not all parts are at their largest at once."""
    parts = gpu_bytes(setup)
    kept = parts["activations"] + parts.get("one layer redone", 0)
    return max(sum(parts.values()) - kept + max(kept, setup.reference // setup.ranks), step_bytes(setup))


def _gathered_bytes(setup: TrainingSetup) -> int:
    """Return two gathered layers, and one layer's gradients, in the arithmetic's dtype and in float32."""
    if setup.ranks == 1:
        return 0
    gradients = 0 if setup.lora_rank else setup.element + GRADIENT
    return (2 * setup.element + gradients) * setup.shape.layer_parameters


def _root_bytes(setup: TrainingSetup) -> int:
    """Return what the head's products and the weights outside of all layers take for a while.

    Sharded: both tables gathered, the head's gradient summed in float32, it and the embedding's gradient in
    the arithmetic's dtype. Alone: the head's cast, a chunk's product, and the new gradient. Frozen weights
    have no gradient.
    """
    table, root = setup.shape.table, setup.shape.root_parameters
    summed = 0 if setup.lora_rank else GRADIENT * table
    if setup.ranks > 1:
        return setup.element * root * (1 if setup.lora_rank else 2) + summed
    return summed + (2 * CAST * table if setup.casts else 0)
