"""What is simulated: a model on machines with a workload, at prices. The paper's three set-ups are presets.

Machines, batch and prices are the paper's (arXiv 2510.19225, section 6.1, and the artifact's scripts): 128
prompts x 8 responses of at most 14,336 tokens, one reserved 8xH100 node (two for 32B) at $83.79/h each,
spot machines with two H100 at $5.32/h and a 50 Gbit/s link, 200 Gbit/s at the reserved node. One
calibration serves all presets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlboost_runtime.sim.calibration import PAPER_CALIBRATION, Assumptions, Calibration
from rlboost_runtime.sim.hardware import H100, QWEN3_8B, QWEN3_14B, QWEN3_32B, GpuType, ModelShape

GBIT = 1e9 / 8
"""Bytes per second of one Gbit/s."""


@dataclass(frozen=True, slots=True)
class MachineShape:
    """One kind of machine."""

    gpu: GpuType
    gpus: int
    tensor_parallel: int
    """GPUs of one engine; a machine runs `gpus / tensor_parallel` of them."""
    link_bytes_per_s: float
    usd_per_hour: float

    @property
    def engines(self) -> int:
        """Engines (instances) of one machine."""
        return self.gpus // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's prompts and how long the answers become."""

    prompts: int = 128
    group_size: int = 8
    prompt_tokens: int = 256
    """Mean prompt length; the paper's are at most 512."""
    max_response_tokens: int = 14_336

    @property
    def responses(self) -> int:
        """Responses of one step."""
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True)
class Preset:
    """Everything that a simulation needs but a trace, a policy and a seed."""

    name: str
    model: ModelShape
    reserved: MachineShape
    spot: tuple[MachineShape, ...]
    """Kinds of spot machines; the trace's nodes take them in turn, in the order in which they appear."""
    egress_usd_per_gb: float = 0.0
    """What weights cost on their way from the head to a spot machine."""
    reserved_nodes: int = 1
    engines_per_reserved_node: int | None = None
    """None: as many as its GPUs make."""
    max_spot_instances: int = 8
    seeding_initial_s: float = 150.0
    """First seeding window: the published code's; the paper gives none."""
    workload: Workload = field(default_factory=Workload)
    calibration: Calibration = PAPER_CALIBRATION
    assumptions: Assumptions = field(default_factory=Assumptions)

    @property
    def reserved_usd_per_hour(self) -> float:
        """Price of all reserved nodes."""
        return self.reserved_nodes * self.reserved.usd_per_hour

    @property
    def reserved_engines(self) -> int:
        """Engines on the reserved nodes."""
        each = self.engines_per_reserved_node
        return self.reserved_nodes * (self.reserved.engines if each is None else each)


# Prices: the paper's means over AWS and GCP regions of September 2025 (section 6.1). Links: a3-highgpu-8g,
# -2g and -4g.
RESERVED_8_H100 = MachineShape(H100, 8, 2, 200 * GBIT, 83.79)
SPOT_2_H100 = MachineShape(H100, 2, 2, 50 * GBIT, 5.32)
SPOT_4_H100 = MachineShape(H100, 4, 4, 100 * GBIT, 10.64)


def presets() -> dict[str, Preset]:
    """Return the presets by name.

    Spot machines at most: four in the artifact's 8B set-up, six in the paper's 14B experiments (figures 11,
    12 and 14). For 32B neither that number nor the engines' GPUs are given: with two, as for the smaller
    models, an engine's KV cache would hold eight full-length responses, so engines of four are taken, on
    machines of four GPUs (the paper: as many as a reserved engine has); its dollars imply 2.8 of those on
    average.
    """
    all_presets = (
        Preset("paper-8b", QWEN3_8B, RESERVED_8_H100, (SPOT_2_H100,), max_spot_instances=4),
        Preset("paper-14b", QWEN3_14B, RESERVED_8_H100, (SPOT_2_H100,), max_spot_instances=6),
        Preset(
            "paper-32b",
            QWEN3_32B,
            replace(RESERVED_8_H100, tensor_parallel=4),
            (SPOT_4_H100,),
            reserved_nodes=2,
            max_spot_instances=3,
        ),
    )
    return {preset.name: preset for preset in all_presets}
