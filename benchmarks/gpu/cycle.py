"""Trainer and engine take turns on a device: hand-overs, tokens/s, and from a publication to its service."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.generating import spec, tokens_per_s
from benchmarks.gpu.policies import DEVICE, TrainedPolicy, fitted, make_policy, use_all_cores
from benchmarks.gpu.report import PartReport
from rlboost_runtime.engines.base import DEFAULT_VLLM_OPTIONS, Engine
from rlboost_runtime.engines.transformers.engine import TransformersEngine
from rlboost_runtime.trainer.artifacts.publisher import Publication, Publisher, VersionContent
from rlboost_runtime.trainer.learn.model_files import version_configs
from rlboost_runtime.weights.store.store import WeightStore

CYCLES = 3
START_TIMEOUT_S = 90.0
SLEEPING_BYTES = 2.0e9
"""What a sleeping engine and our own context may have grown by: contexts, kernels and workspaces. Awake the
engine has over 4 GB, of weights and KV cache."""
PROBE = list(b"What is two and two?")


@dataclass(slots=True)
class PublishedVersions:
    """A store with its publisher, and what has been published."""

    store: WeightStore
    done: list[Publication] = field(default_factory=list)

    def content(self, trained: TrainedPolicy) -> VersionContent:
        """Return what a version of the policy is made of."""
        policy = trained.policy
        return VersionContent(
            policy.weights,
            lambda: version_configs(policy.model, "bfloat16"),
            lambda: policy.probe(PROBE, "bfloat16"),
            policy.tied(),
        )


def run(report: PartReport) -> None:
    """Measure."""
    found = fitted(report.size)
    if found.shape is None:
        report.skip(found.why)
        return
    threads = use_all_cores(report.tiny)
    with tempfile.TemporaryDirectory(prefix="rlboost-gpu-") as name:
        trained = make_policy(report.size, found.shape, checkpointing=found.checkpointing)
        published = PublishedVersions(WeightStore(Path(name) / "weights"))
        log = Path(name) / "engine.log"
        engine = TransformersEngine(spec("transformers", report.size, log, threads, DEFAULT_VLLM_OPTIONS))
        try:
            asyncio.run(_cycles(report, trained, published, engine))
        except Exception:
            if log.exists():
                print(log.read_text(errors="replace")[-4000:])
            raise


async def _cycles(
    report: PartReport, trained: TrainedPolicy, published: PublishedVersions, engine: Engine
) -> None:
    before = _used()
    try:
        report.add(engine_start_s=await _timed(lambda: engine.start(START_TIMEOUT_S)))
        with Publisher(published.store, "bfloat16", published.done.append) as publisher:
            publisher.begin(0, published.content(trained))
            publisher.ready()
            report.add(first_load_s=await _timed(lambda: engine.load(0, published.store.path(0))))
            await tokens_per_s(engine, report.size, 0)  # kernels are loaded
            rates = [await tokens_per_s(engine, report.size, 1000 * (i + 1)) for i in range(2)]
            report.add(engine="transformers", engine_tokens_per_s=max(rates))
            cycles = []
            for number in range(1, 1 + (1 if report.tiny else CYCLES)):
                cycles.append(await _cycle(report, trained, published, publisher, engine, number, before))
                report.add(cycles=cycles)
                if report.left_s < 20:
                    break
    finally:
        await engine.stop()


async def _cycle(
    report: PartReport,
    trained: TrainedPolicy,
    published: PublishedVersions,
    publisher: Publisher,
    engine: Engine,
    number: int,
    before: int,
) -> dict[str, float]:
    """Engine off, trainer on, a step, trainer off, engine on with the new version."""
    found = {"engine_off_s": await _timed(engine.sleep)}
    if DEVICE.type == "cuda":
        held = _used() - before
        found["sleeping_engine_gb"] = round(held / 1e9, 3)
        report.check("sleeping_engine_frees_the_device", held <= SLEEPING_BYTES)
    found["trainer_on_s"] = _seconds(trained.residency.take)
    found["step_s"] = _seconds(lambda: trained.step(number))
    started = time.perf_counter()
    found["publish_stop_s"] = round(publisher.begin(number, published.content(trained)), 4)
    found["trainer_off_s"] = _seconds(trained.residency.free)
    publisher.ready()
    found["published_s"] = round(time.perf_counter() - started, 4)
    found["engine_on_s"] = round(
        await _timed(engine.wake) + await _timed(lambda: engine.load(number, published.store.path(number))), 4
    )
    found["publish_to_served_s"] = round(time.perf_counter() - started, 4)
    probe = published.done[-1].manifest.probe
    _, logprobs = await engine.greedy(list(probe.token_ids), 1)
    found["probe_error_nats"] = round(abs(logprobs[0] - probe.logprobs[0]), 4)
    report.check("engine_serves_what_was_published", found["probe_error_nats"] <= probe.tolerance)
    found["engine_tokens_per_s"] = await tokens_per_s(engine, report.size, 100_000 * number)
    return found


def _used() -> int:
    if DEVICE.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 4)


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return round(time.perf_counter() - started, 4)
