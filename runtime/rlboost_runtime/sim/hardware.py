"""GPUs and models as public data sheets and model cards give them: what the roofline model computes with.

Nothing here is fitted. Units: floating-point operations per second (dense bf16), bytes, bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
"""Weights and KV cache are bf16."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU's peak rates."""

    name: str
    flops: float
    """Dense bf16 peak, operations per second."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    memory_bytes: float


# NVIDIA data sheets: H100 SXM5 (2023), H200 SXM (2024), B200 (2024), GH200 (2023), A100 40GB and 80GB SXM
# (2021), L40S (2023), L4 (2023), A10 (2021; AWS's A10G has 70 of its 125 Tflop/s), RTX A6000 (2021). Where a
# sheet quotes bf16 with sparsity this is the dense half. Names are SkyPilot's.
H100 = GpuType("H100", 989e12, 3.35e12, 80e9)
L40S = GpuType("L40S", 362e12, 0.864e12, 48e9)
GPUS = {
    gpu.name: gpu
    for gpu in (
        H100,
        L40S,
        GpuType("H200", 989e12, 4.8e12, 141e9),
        GpuType("B200", 2_250e12, 8.0e12, 180e9),
        GpuType("GH200", 989e12, 4.0e12, 96e9),
        GpuType("A100-80GB", 312e12, 2.039e12, 80e9),
        GpuType("A100", 312e12, 1.555e12, 40e9),
        GpuType("L4", 121e12, 0.3e12, 24e9),
        GpuType("A10G", 70e12, 0.6e12, 24e9),
        GpuType("A6000", 155e12, 0.768e12, 48e9),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a dense transformer decides its cost."""

    name: str
    parameters: float
    layers: int
    hidden: int
    """Width of the query projection: heads x head size."""
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return BF16_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache for one token: keys and values of all layers."""
        return 2.0 * BF16_BYTES * self.layers * self.kv_heads * self.head_size

    def forward_flops(self, tokens: float) -> float:
        """Operations of one forward pass over one sequence of `tokens`: 2P each, and causal attention."""
        return (2.0 * self.parameters + 2.0 * self.hidden * self.layers * tokens) * tokens


# Hugging Face configurations of Qwen/Qwen3-8B, -14B and -32B.
QWEN3_8B = ModelShape("Qwen3-8B", 8.19e9, 36, 4096, 8, 128)
QWEN3_14B = ModelShape("Qwen3-14B", 14.77e9, 40, 5120, 8, 128)
QWEN3_32B = ModelShape("Qwen3-32B", 32.76e9, 64, 8192, 8, 128)
MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B)}
