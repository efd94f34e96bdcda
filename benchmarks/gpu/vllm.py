"""vLLM's tokens/s through our engine, where a Python with vLLM for GPUs is found."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.cycle import PublishedVersions
from benchmarks.gpu.generating import spec, tokens_per_s
from benchmarks.gpu.policies import DEVICE, fitted, make_policy, use_all_cores
from benchmarks.gpu.report import PartReport
from rlboost_runtime.engines.base import EngineSpec, VllmOptions
from rlboost_runtime.engines.vllm.engine import VllmServerEngine
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.engine_python import PYTHON_VARIABLE, find_engine_python
from rlboost_runtime.trainer.artifacts.publisher import Publisher
from rlboost_runtime.weights.store.store import WeightStore


def run(report: PartReport) -> None:
    """Measure."""
    own = sys.executable if importlib.util.find_spec("vllm") and not os.environ.get(PYTHON_VARIABLE) else None
    try:
        python = find_engine_python(own)
    except ConfigError as exc:
        report.skip(f"no vLLM: {exc}; name its Python in RLBOOST_VLLM_PYTHON")
        return
    if python.is_cpu and DEVICE.type == "cuda":
        report.skip(f"{python.path} has vLLM {python.version} for CPUs")
        return
    found = fitted(report.size)
    if found.shape is None:
        report.skip(found.why)
        return
    report.add(vllm=python.version, python=str(python.path))
    with tempfile.TemporaryDirectory(prefix="rlboost-gpu-") as name:
        trained = make_policy(report.size, found.shape, checkpointing=found.checkpointing)
        published = PublishedVersions(WeightStore(Path(name) / "weights"))
        with Publisher(published.store, "bfloat16", published.done.append) as publisher:
            publisher.begin(0, published.content(trained))
        # nvcc may be missing, and a compilation would take the time: no graphs, no torch.compile
        options = VllmOptions(
            python=str(python.path), enforce_eager=True, gpu_memory_utilization=0.5, may_sleep=True
        )
        log = Path(name) / "vllm.log"
        started = spec("vllm", report.size, log, use_all_cores(report.tiny), options)
        try:
            asyncio.run(_measure(report, started, published))
        except Exception:
            print(log.read_text(errors="replace")[-4000:] if log.exists() else "no log")
            raise


async def _measure(report: PartReport, wanted: EngineSpec, published: PublishedVersions) -> None:
    engine = VllmServerEngine(wanted)
    try:
        await engine.start(60.0)
        await engine.load(0, published.store.path(0))
        await tokens_per_s(engine, report.size, 0)
        rates = [await tokens_per_s(engine, report.size, 1000 * (i + 1)) for i in range(3)]
        report.add(engine="vllm", engine_tokens_per_s=max(rates), without_cuda_graphs=True)
    finally:
        await engine.stop()
