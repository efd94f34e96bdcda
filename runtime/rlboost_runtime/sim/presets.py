"""The simulator's free parameters, and what is assumed beside them.

`Calibration` holds the only numbers that were fitted; `benchmarks/paper/calibration.json` has to what, and
which figures are predictions. `Assumptions` are judgements or come from a source, and were not moved to
fit.

GPUs and models as public data sheets and model cards give them: what the roofline model computes with.

Nothing here is fitted. Units: floating-point operations per second (dense bf16), bytes, bytes per second.

What is simulated: a model on machines with a workload, at prices. The paper's three set-ups are presets.

Machines, batch and prices are the paper's (arXiv 2510.19225, section 6.1, and the artifact's scripts): 128
prompts x 8 responses of at most 14,336 tokens, one reserved 8xH100 node (two for 32B) at $83.79/h each,
spot machines with two H100 at $5.32/h and a 50 Gbit/s link, 200 Gbit/s at the reserved node. One
calibration serves all presets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlboost_providers.base.accelerators import bandwidth
from rlboost_runtime.core.base.token_cost import MachineKind, Measured, usd_per_token


@dataclass(frozen=True, slots=True)
class Calibration:
    """The free parameters: one set for all presets."""

    decode_bandwidth_share: float
    """Memory bandwidth that decoding reaches, share of the peak."""
    decode_step_s: float
    """Fixed seconds of a decode step: launches, sampling, all-reduces."""
    train_mfu: float
    """Share of the peak that training reaches, on the operations counted in `trainer_model`."""
    micro_batch_s: float
    """Fixed seconds of a micro-batch of the streaming trainer."""
    growth_headroom_tokens: int
    """KV tokens that an engine keeps free for each sequence when it admits another."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Judged or taken from a source; not fitted."""

    prefill_flops_share: float = 0.5
    """Share of the peak in prefills; compute-bound kernels reach 0.4-0.6."""
    decode_flops_share: float = 0.6
    """The same for the matrix products of large decode batches."""
    reserved_memory_share: float = 0.6
    """GPU memory for weights and KV cache on the reserved node: `gpu_memory_utilization` of the authors'
    scripts."""
    spot_memory_share: float = 0.6
    """The same on spot machines: `mem-fraction-static` of the authors' scripts; with more, theirs failed."""
    max_running: int = 256
    """Sequences that an engine decodes at once: `max_num_seqs` and `max-running-requests` of the authors'
    scripts for 8B."""
    draft_tokens: int = 0
    """Tokens that engines propose for each sequence in a decode step (speculative decoding); 0: none."""
    accepted_length: float = 1.0
    """Tokens of a step with drafts, in the mean: `SUFFIX_ACCEPTED_LENGTH` for drafts from earlier text."""
    micro_batch_responses: int = 16
    """`min_stream_batch_size` of the authors' scripts."""
    forward_passes: float = 6.0
    """Forward passes' worth of work per trained response: in the paper's recipe the old log-probabilities,
    the reference's, and forward, recomputed forward and twice that backward in the update."""
    early_passes: float = 2.0
    """Of those, the ones that need only the response, not its group: the log-probabilities."""
    trains_whole_groups: bool = True
    """Micro-batches are made of complete groups, as in our live trainer and the published code; else of
    single responses in the order in which they finish, as the paper says (section 4.1)."""
    wake_s: float = 6.0
    """Trainer's memory out, engines' in: weights and KV cache of a sleeping engine."""
    sleep_s: float = 4.0
    """The other way."""
    optimizer_s: float = 8.0
    """Optimizer step with states in host memory."""
    gather_s: float = 3.0
    """All-gather of the new weights into the sender's buffer."""
    apply_s: float = 2.0
    """Weights from a spot machine's memory into its engine, and the probe."""
    boot_s: float = 60.0
    """From the request to an engine without weights, images and model being cached as on the paper's
    machines."""
    startup_s: float = 0.0
    """From the run's begin to its first step: the trainer reads data and model; machines boot meanwhile."""
    retry_s: float = 10.0
    """After so long a launch that found no free node is tried again."""
    wire_share: float = 1.0
    """Bytes of a version on the wire over the weights' bytes: below 1 with deltas and adapters."""
    frozen_bytes: float = 0.0
    """Weights under adapters, which a machine's first version brings besides."""
    notice_s: float = 0.0
    """Seconds of warning that a removal brings where the trace has none of its own: the paper relies on
    none."""
    length_median: float = 6_100.0
    """Response tokens without a limit: median of the lognormal."""
    length_sigma: float = 0.72
    """Standard deviation of the logarithm of lengths."""
    length_group_share: float = 0.4
    """Share of the logarithm's variance that the responses of one prompt have in common."""


DRAFT_TOKENS = 4
"""As our vLLM engines propose (`engines.vllm.command`)."""
SUFFIX_ACCEPTED_LENGTH = 1.7
"""Published for suffixes of a response's own text, with those of 15 siblings 2.53 (Seer, arXiv
2511.14617)."""

PAPER_CALIBRATION = Calibration(
    decode_bandwidth_share=0.811,
    decode_step_s=0.0048,
    train_mfu=0.504,
    micro_batch_s=0.192,
    growth_headroom_tokens=1_827,
)


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
# Bandwidths are `BANDWIDTH_GB_PER_S`.
def _gpu(name: str, flops: float, memory_bytes: float) -> GpuType:
    return GpuType(name, flops, bandwidth(name), memory_bytes)


H100 = _gpu("H100", 989e12, 80e9)
L40S = _gpu("L40S", 362e12, 48e9)
GPUS = {
    gpu.name: gpu
    for gpu in (
        H100,
        L40S,
        _gpu("H200", 989e12, 141e9),
        _gpu("B200", 2_250e12, 180e9),
        _gpu("GH200", 989e12, 96e9),
        _gpu("A100-80GB", 312e12, 80e9),
        _gpu("A100", 312e12, 40e9),
        _gpu("L4", 121e12, 24e9),
        _gpu("A10G", 70e12, 24e9),
        _gpu("A6000", 155e12, 48e9),
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
    egress_usd_per_gb: float | None = None
    """What weights cost on their way to it; None: the preset's price."""
    engine_pace: float = 1.0
    """Speed of its engines over that of the calibrated roofline: below 1 where engines share their cores."""

    @property
    def engines(self) -> int:
        """Engines (instances) of one machine."""
        return self.gpus // self.tensor_parallel

    def kind(self, place: str) -> MachineKind:
        """Return what it is for the rank of offers."""
        bandwidth = self.tensor_parallel * self.gpu.bandwidth * self.engine_pace
        return MachineKind(self.gpu.name, self.engines, bandwidth, place)


@dataclass(frozen=True, slots=True)
class Turns:
    """Episodes instead of responses: what a step's rollouts do between the tokens that they sample."""

    mean: float
    """Turns of an episode; from half to one and a half times as many."""
    told_tokens: float
    """Tokens that the environment adds after a turn, in the mean."""
    pause_s: float
    """Seconds that it takes for that, in the mean; exponential."""
    concurrency: int = 256
    """Episodes under way at once: `environment.concurrency`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's prompts and how long the answers become."""

    prompts: int = 128
    group_size: int = 8
    prompt_tokens: int = 256
    """Mean prompt length; the paper's are at most 512."""
    max_response_tokens: int = 14_336
    turns: Turns | None = None
    """None: each rollout is one response. Else `Assumptions.length_median` is of all that an episode samples,
    and `max_response_tokens` bounds that with what the environment adds."""
    max_staleness: int = 0
    """So many steps are rolled out ahead of the one that is trained (the job's `algorithm.max_staleness`)."""
    in_flight_updates: bool = False
    """Responses go on under versions that are published meanwhile."""

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

    def usd_per_token(self, shape: MachineShape, measured: Measured) -> float:
        """Return what the tokens of a spot machine cost, by what a run has measured."""
        egress = self.egress_of(shape)
        if not measured.whole_bytes:
            measured = replace(measured, whole_bytes=self.assumptions.wire_share * self.model.weight_bytes)
        return usd_per_token(self.kind_of(shape), shape.usd_per_hour, egress, measured)

    def kind_of(self, shape: MachineShape) -> MachineKind:
        """Return what a spot machine is; machines of one shape are in one place."""
        return shape.kind(f"offer {self.spot.index(shape)}")

    def egress_of(self, shape: MachineShape) -> float:
        """Return dollars per GB of weights on their way to a spot machine."""
        return self.egress_usd_per_gb if shape.egress_usd_per_gb is None else shape.egress_usd_per_gb

    @property
    def best_spot(self) -> MachineShape:
        """The kind of spot machine whose tokens cost least, for all that is known before the run."""
        return min(self.spot, key=lambda shape: self.usd_per_token(shape, Measured()))

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


def agent_preset() -> Preset:
    """Return a set-up for a coding agent: episodes of 24 turns on the paper's 14B machines.

    Turns and tokens are those of a recorded trajectory of mini-swe-agent, the first of Hugging Face's
    zetomatoz/guidellm-agentic-coding-trajectories: 24 requests, 6,122 tokens written (993 to 11,300 in the
    others), and a context of 18,855 at the end, of which the environment has added some 11,200. The limit of
    40K tokens is SkyRL-Agent's (arXiv 2511.16108). How long tools take is not in there: 2 s a turn are
    assumed.
    """
    paper = presets()["paper-14b"]
    turns = Turns(mean=24, told_tokens=490, pause_s=2.0)
    workload = Workload(prompts=64, prompt_tokens=1_500, max_response_tokens=38_500, turns=turns)
    return replace(paper, name="agent-14b", workload=workload)
