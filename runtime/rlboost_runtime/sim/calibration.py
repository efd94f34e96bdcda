"""The simulator's free parameters, and what is assumed beside them.

`Calibration` holds the only numbers that were fitted; `benchmarks/paper/calibration.json` says to what, and
which figures are predictions. `Assumptions` are judgements or come from a source, and were not moved to
fit.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """The same on spot machines: `mem-fraction-static` of the authors' scripts; more failed, they say."""
    max_running: int = 256
    """Sequences that an engine decodes at once: `max_num_seqs` and `max-running-requests` of the authors'
    scripts for 8B."""
    micro_batch_responses: int = 16
    """`min_stream_batch_size` of the authors' scripts."""
    trains_whole_groups: bool = False
    """Micro-batches are made of complete groups, as in our live trainer and the published code. The paper's
    are of single responses in the order in which they finish (section 4.1)."""
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
    notice_s: float = 0.0
    """Seconds of warning that a removal brings where the trace has none of its own: the paper relies on
    none."""
    length_median: float = 6_100.0
    """Response tokens without a limit: median of the lognormal."""
    length_sigma: float = 0.72
    """Standard deviation of the logarithm of lengths."""
    length_group_share: float = 0.4
    """Share of the logarithm's variance that the responses of one prompt have in common."""


PAPER_CALIBRATION = Calibration(
    decode_bandwidth_share=0.811,
    decode_step_s=0.0048,
    train_mfu=0.504,
    micro_batch_s=0.192,
    growth_headroom_tokens=1_827,
)
