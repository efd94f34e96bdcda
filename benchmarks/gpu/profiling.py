"""Where the time of a training step goes on this device: `python -m benchmarks.gpu.profiling SIZE [LAYERS]`.

Prints the kernels that take most of it, the head alone in chunks of several sizes, and hand-overs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.policies import DEVICE, MICRO_BATCH_TOKENS, TrainedPolicy, fitted, make_policy
from benchmarks.gpu.shapes import ModelShape
from rlboost_runtime.trainer.kernels import head

ROWS = 28
CHUNKS_MIB = (64, 256, 512, 1024)


def _seconds(work: Callable[[], object], times: int = 1) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def main() -> None:
    """Profile."""
    size = sys.argv[1]
    found = fitted(size)
    shape = found.shape
    assert shape is not None
    if len(sys.argv) > 2:
        shape = replace(shape, layers=int(sys.argv[2]))
    print(f"{size}: {shape.layers} layers, checkpointing {found.checkpointing}")
    trained = make_policy(size, shape, checkpointing=found.checkpointing)
    print(f"take {_seconds(trained.residency.take):.2f} s, kernels {trained.policy.scorer.kernels.used}")
    trained.step(0)
    torch.cuda.reset_peak_memory_stats()
    steps = [_seconds(partial(trained.step, number)) for number in range(1, 4)]
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"steps {steps}; {trained.tokens / min(steps):.0f} tokens/s, peak {peak:.2f} GB")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        took = _seconds(lambda: trained.step(5))
    events = profiled.key_averages()
    total = sum(each.self_device_time_total for each in events if each.device_type.name == "CUDA") / 1e6
    print(f"profiled step {took:.3f} s, kernels together {total:.3f} s")
    for each in sorted(events, key=lambda e: -e.self_device_time_total)[:ROWS]:
        took_ms, where = each.self_device_time_total / 1e3, each.device_type.name
        print(f"{took_ms:9.2f} ms {each.count:6d} x {where} {each.key[:110]}")
    del profiled, events
    _head(shape, MICRO_BATCH_TOKENS[size])
    _hand_overs(trained)


def _head(shape: ModelShape, tokens: int) -> None:
    hidden = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, shape.vocabulary, (tokens,), device=DEVICE)

    def both() -> None:
        logprobs, _ = head.token_logprobs(hidden, weight, targets, 1.0, wide=True)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    for mib in CHUNKS_MIB:
        head.GPU_CHUNK_BYTES = mib << 20
        both()
        torch.cuda.reset_peak_memory_stats()
        took, peak = _seconds(both, 3), torch.cuda.max_memory_allocated() / 1e9
        print(f"head in chunks of {mib} MiB: {1e3 * took:.1f} ms, peak {peak:.2f} GB")


def _hand_overs(trained: TrainedPolicy) -> None:
    for _ in range(3):
        trained.step(6)
        print(
            f"free {_seconds(trained.residency.free):.2f} s, take {_seconds(trained.residency.take):.2f} s,"
            f" {trained.policy.mover._memory.held_bytes / 1e9:.1f} GB of main memory held"
        )


if __name__ == "__main__":
    main()
