"""A training step with our trainer's code: tokens/s, MFU, memory against its prediction, hand-overs."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor

from benchmarks.gpu.policies import (
    DEVICE,
    MICRO_BATCH_TOKENS,
    PROMPT,
    RESPONSE,
    TrainedPolicy,
    fitted,
    make_policy,
    use_all_cores,
)
from benchmarks.gpu.report import PartReport
from benchmarks.gpu.shapes import GB, ModelShape, peak_flops, saved_bytes, step_bytes

STEPS = 5
PREDICTED_WITHIN = 0.25
"""Share of the measured peak."""
SAVED_WITHIN = 0.15
"""Likewise, of what a forward pass keeps."""
LEFT_BYTES = 256 * 1024**2
"""What may stay allocated after `free`: on Hopper cuBLAS keeps a workspace of 32 MiB per handle, and the
forward and the backward thread have one each. No tensor may stay."""


def run(report: PartReport) -> None:
    """Measure."""
    use_all_cores(report.tiny)
    found = fitted(report.size)
    if found.shape is None:
        report.skip(found.why)
        return
    shape = found.shape
    report.add(
        model=shape.name, layers=shape.layers, of_layers=shape.full_layers, fit=found.why,
        parameters=shape.parameters, activation_checkpointing=found.checkpointing,
        micro_batch_tokens=MICRO_BATCH_TOKENS[report.size],
    )  # fmt: skip
    trained = make_policy(report.size, shape, checkpointing=found.checkpointing)
    report.check("nothing_on_device_before_take", not on_device())
    report.add(take_first_s=_timed(trained.residency.take))
    kernels = trained.policy.scorer.kernels
    report.add(kernels=kernels.used, kernels_refused=dict(kernels.refused))
    report.check("kernels_agree", not kernels.refused)
    _measure_saved(report, trained, shape, checkpointing=found.checkpointing)
    _measure_steps(report, trained, shape, checkpointing=found.checkpointing)
    _hand_over(report, trained)


def on_device() -> list[str]:
    """Return the tensors that are on an accelerator, described."""
    gc.collect()
    return [
        f"{tuple(each.shape)} {each.dtype}"
        for each in gc.get_objects()
        if issubclass(type(each), Tensor) and each.device.type == "cuda"
    ]


def _measure_saved(
    report: PartReport, trained: TrainedPolicy, shape: ModelShape, *, checkpointing: bool
) -> None:
    """Compare what one forward pass keeps with the prediction."""
    own = {parameter.untyped_storage().data_ptr() for parameter in trained.policy.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself it would keep its graph, and so all of this, for ever

    half = trained.samples[: len(trained.samples) // 2]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = trained.policy.forward([s.prompt_ids for s in half], [s.token_ids for s in half], 1.0)
    tokens = sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in half)
    fused = trained.policy.scorer.kernels.norms
    predicted = saved_bytes(shape, tokens, checkpointing=checkpointing, fused_norms=fused)
    measured = sum(kept.values())
    report.add(saved_bytes_measured=measured, saved_bytes_predicted=predicted)
    report.check("saved_is_predicted", abs(predicted / measured - 1) <= SAVED_WITHIN)
    del output


def _measure_steps(
    report: PartReport, trained: TrainedPolicy, shape: ModelShape, *, checkpointing: bool
) -> None:
    trained.step(0)  # kernels are loaded, moments made
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(1, 1 + STEPS):
        seconds.append(_timed(lambda number=number: trained.step(number)))
        if report.left_s < 30 and not report.tiny:
            break
    metrics = trained.learner.sums.metrics()
    per_s = trained.tokens / sorted(seconds)[len(seconds) // 2]
    report.add(steps_timed=len(seconds), step_s=seconds, tokens_per_s=round(per_s, 1))
    report.check("gradients_are_finite", metrics["minibatches_not_finite"] == 0 and metrics["grad_norm"] > 0)
    _report_mfu(report, shape, per_s)
    _report_peak(report, shape, checkpointing=checkpointing, fused_norms=trained.policy.scorer.kernels.norms)


def _report_mfu(report: PartReport, shape: ModelShape, per_s: float) -> None:
    flops = shape.flops_per_token(PROMPT + RESPONSE[report.size]) * per_s
    peak = peak_flops(torch.cuda.get_device_name()) if DEVICE.type == "cuda" else None
    report.add(
        model_tflops=round(flops / 1e12, 3),
        peak_tflops=None if peak is None else peak / 1e12,
        mfu=None if peak is None else round(flops / peak, 4),
    )


def _report_peak(report: PartReport, shape: ModelShape, *, checkpointing: bool, fused_norms: bool) -> None:
    tokens = MICRO_BATCH_TOKENS[report.size]
    parts = step_bytes(shape, tokens, checkpointing=checkpointing, fused_norms=fused_norms)
    predicted = sum(parts.values())
    report.add(peak_gb_predicted=round(predicted / GB, 3), peak_parts_gb=_in_gb(parts))
    if DEVICE.type == "cpu":
        report.add(peak_gb_measured=None, peak_why_not="only CUDA counts the memory of its tensors")
        return
    peak = torch.cuda.max_memory_allocated()
    report.add(
        peak_gb_measured=round(peak / GB, 3),
        peak_gb_reserved=round(torch.cuda.max_memory_reserved() / GB, 3),
        peak_predicted_by_measured=round(predicted / peak, 3),
    )
    report.check("peak_is_predicted", abs(predicted / peak - 1) <= PREDICTED_WITHIN)


def _in_gb(parts: dict[str, int]) -> dict[str, float]:
    return {name: round(value / GB, 3) for name, value in parts.items()}


def _hand_over(report: PartReport, trained: TrainedPolicy) -> None:
    free_s = _timed(trained.residency.free)
    left = on_device()
    report.add(free_s=free_s, tensors_left_on_device=left[:5])
    report.check("no_tensor_stays_after_free", not left)
    if DEVICE.type == "cuda":
        report.add(bytes_left_after_free=torch.cuda.memory_allocated())
        report.check("nothing_stays_after_free", torch.cuda.memory_allocated() <= LEFT_BYTES)
    report.add(take_s=_timed(trained.residency.take))
    trained.step(9)
    report.add(free_again_s=_timed(trained.residency.free), take_again_s=_timed(trained.residency.take))
    report.check("trains_after_hand_over", trained.learner.sums.metrics()["grad_norm"] > 0)


def _timed(work: object) -> float:
    assert callable(work)
    started = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 4)
