"""The shapes of Qwen3 models from constants, and what a training step on one takes: bytes and operations.

Without torch, so that a size that does not fit is found out before anything is imported. Suffixes as in
`trainer/learn`: E width, V vocabulary, S positions of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GB = 1e9
WEIGHT, GRADIENT, MOMENTS, CAST = 4, 4, 8, 2
"""Bytes per parameter: in float32 itself, its gradient and AdamW's two moments; its bfloat16 copy."""
CHUNK_COPIES, CHUNK_BYTES = 4, 512 * 1024**2
"""A chunk of logits, its softmax, its gradient and a cast (`trainer/kernels/head.py`)."""
KEEP_BYTES = 128 * 1024**2
"""All logits are kept where they take no more."""
USABLE = 0.90
"""Share of the device's memory that the arithmetic may fill: the context and fragments take the rest."""
USABLE_HOST = 0.70
FEWEST_LAYERS = 4
"""With fewer the head, not the layers, would be measured."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen3 model. `full_layers`: of the published model, where `layers` may be fewer."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    full_layers: int
    head_dim: int = 128
    vocabulary: int = 151_936
    experts: int = 0
    """0: the MLP is dense. `intermediate` is the width of one."""
    active: int = 1
    """Experts that compute a token."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return self._parameters_with(max(1, self.experts))

    def _parameters_with(self, experts: int) -> int:
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * heads + 2 * kv + 3 * self.intermediate * experts + self.experts)
        return matrices + 2 * self.hidden + 2 * self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return tables + self.layers * self.layer_parameters + self.hidden

    def config(self, positions: int) -> dict[str, object]:
        """Return the arguments of `Qwen3Config`, or of `Qwen3MoeConfig`."""
        mixture = {
            "num_experts": self.experts, "num_experts_per_tok": self.active, "norm_topk_prob": True,
            "moe_intermediate_size": self.intermediate, "architectures": ["Qwen3MoeForCausalLM"],
        }  # fmt: skip
        dense = {"architectures": ["Qwen3ForCausalLM"]}
        return (mixture if self.experts else dense) | {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": positions,
            "tie_word_embeddings": self.tied, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None,
        }  # fmt: skip

    def flops_per_token(self, length: int) -> float:
        """Return operations per trained token of sequences of `length`: forward and backward, causal
        attention, the head included; what checkpointing computes twice is not counted."""
        matrices = self.layers * self._parameters_with(self.active) + self.vocabulary * self.hidden
        return 6.0 * matrices + 6.0 * self.layers * self.heads * self.head_dim * length


SHAPES = {
    "0.6B": ModelShape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, True, 28),
    "1.7B": ModelShape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, True, 28),
    "8B": ModelShape("Qwen3-8B", 4096, 12288, 36, 32, 8, False, 36),
    "30B-A3B": ModelShape("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, False, 48, experts=128, active=8),
    "tiny-moe": ModelShape(
        "tiny-moe", 128, 64, 2, 4, 2, False, 2, head_dim=32, vocabulary=512, experts=8, active=2
    ),
    "tiny": ModelShape("tiny", 128, 384, 2, 4, 2, True, 2, head_dim=32, vocabulary=512),
}

PEAK_BF16_TFLOPS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "A100": 312,
    "A800": 312, "H800": 989, "H20": 148, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense bfloat16, from NVIDIA's data sheets; the longest name found in the device's counts."""


def peak_flops(device: str) -> float | None:
    """Return the device's dense bfloat16 operations per second; None: not in our table."""
    found = [name for name in PEAK_BF16_TFLOPS if name in device]
    return PEAK_BF16_TFLOPS[max(found, key=len)] * 1e12 if found else None


def saved_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool, fused_norms: bool = True) -> int:
    """Return what a forward pass keeps for the backward pass in bfloat16, with the cast weights.

    Behind the layers: the last norm's input and result; without the fused kernel its float32 forms too.
    """
    logits = 4 * tokens * shape.vocabulary
    after = CAST * shape.vocabulary * shape.hidden + (logits if logits <= KEEP_BYTES else 0)
    after += tokens * (4 if fused_norms else 8) * shape.hidden
    if checkpointing:
        return after + shape.layers * tokens * 2 * shape.hidden
    kept = tokens * _layer_bytes(shape, fused_norms=fused_norms)
    return after + shape.layers * (kept + CAST * shape.layer_parameters)


def _layer_bytes(shape: ModelShape, *, fused_norms: bool) -> int:
    """Bytes that one layer keeps of one position.

    E: two norms with input and output (8). Query heads: the projection that their norm reads, what attention
    reads, attention's result (6), key heads likewise with the value (6). Norms that are not fused keep their
    input in float32 and what it is before the weight (8 and 4 more). I: gate, activation, up, their product
    (8), for each expert of the token, which also has its copy of the token and its answer.
    """
    e, qk = (8, 6) if fused_norms else (16, 10)
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    copies = 4 * shape.hidden * shape.active if shape.experts else 0
    return e * shape.hidden + qk * (heads + kv) + 8 * shape.intermediate * shape.active + copies


def step_bytes(
    shape: ModelShape, tokens: int, *, checkpointing: bool, fused_norms: bool = True
) -> dict[str, int]:
    """Return a training step's peak on the device, by part, with gradients of an earlier micro-batch."""
    parts = {
        "weights": WEIGHT * shape.parameters,
        "gradients": GRADIENT * shape.parameters,
        "moments": MOMENTS * shape.parameters,
        "saved": saved_bytes(shape, tokens, checkpointing=checkpointing, fused_norms=fused_norms),
    }
    parts["transient"] = _transient_bytes(shape, tokens, checkpointing=checkpointing, fused_norms=fused_norms)
    return parts


def _transient_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool, fused_norms: bool) -> int:
    """Return what comes and goes above the rest: the head's; checkpointed, a layer's or the casts."""
    table = shape.vocabulary * shape.hidden
    logits = 4 * tokens * shape.vocabulary
    head = (
        (2 + 4) * table  # the new gradient as it is summed, and in bfloat16
        + CHUNK_COPIES * min(CHUNK_BYTES, logits)
        + 3 * 4 * tokens * shape.hidden
    )
    if not checkpointing:
        return head
    again = tokens * _layer_bytes(shape, fused_norms=fused_norms) + (CAST + GRADIENT) * shape.layer_parameters
    return max(head, again)


@dataclass(frozen=True, slots=True)
class FittedShape:
    """A shape as it fits, `why` saying with what arithmetic; `shape` None: it does not fit at all."""

    shape: ModelShape | None
    checkpointing: bool
    why: str


def fit(shape: ModelShape, tokens: int, device_bytes: int, host_bytes: int) -> FittedShape:
    """Return the shape with as many layers as fit, without checkpointing where that is possible.

    The optimizer's offload does not help: it brings all moments back for the step.
    """
    for layers in range(shape.layers, FEWEST_LAYERS - 1, -1):
        tried = replace(shape, layers=layers)
        for checkpointing in (False, True) if layers == shape.layers else (True,):
            need = sum(step_bytes(tried, tokens, checkpointing=checkpointing).values())
            host = (WEIGHT + MOMENTS + CAST) * tried.parameters
            if need <= USABLE * device_bytes and host <= USABLE_HOST * host_bytes:
                how = "with activation checkpointing" if checkpointing else "without checkpointing"
                why = f"{tried.layers} of {shape.full_layers} layers {how}: {need / GB:.1f} GB predicted"
                if layers < shape.layers:
                    why += "; all layers: " + arithmetic(shape, tokens, device_bytes, host_bytes)
                return FittedShape(tried, checkpointing, why)
    return FittedShape(
        None, True, f"{FEWEST_LAYERS} layers do not fit; all layers: "
        + arithmetic(shape, tokens, device_bytes, host_bytes),
    )  # fmt: skip


def arithmetic(shape: ModelShape, tokens: int, device_bytes: int, host_bytes: int) -> str:
    """Return what the whole shape needs and what there is."""
    parts = step_bytes(shape, tokens, checkpointing=True)
    return (
        f"{shape.parameters / 1e9:.2f} G parameters x (4 + 4 + 8) bytes = {16 * shape.parameters / GB:.1f} GB"
        f" for weights, gradients and moments, with activations {sum(parts.values()) / GB:.1f} GB; the device"
        f" has {device_bytes / GB:.1f} GB, of which {USABLE:.0%} may be filled; in main memory"
        f" {(WEIGHT + MOMENTS + CAST) * shape.parameters / GB:.1f} GB of {host_bytes / GB:.1f} GB,"
        f" of which {USABLE_HOST:.0%}"
    )
