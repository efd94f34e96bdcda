"""Deltas made on the device, bit for bit those of the CPU, applied, and compared on the device again.

Applying has one implementation, on the CPU: receivers restore files before an engine loads them.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.policies import DEVICE, use_all_cores
from benchmarks.gpu.report import PartReport
from rlboost_runtime.weights.delta.file import DeltaFile, Finder, in_order, write_delta
from rlboost_runtime.weights.delta.torch_finder import finder
from rlboost_runtime.weights.manifest import Chunk, describe_file
from rlboost_runtime.weights.store.store import CHUNK_BYTES

PATTERNS = {"0.6B": 256 * 1024**2, "tiny": 1024**2}
CHANGED = {"few": 0.03, "many": 0.4}
"""Shares of the patterns that change; above `CODES_SHARE` the other form is used."""


def run(report: PartReport) -> None:
    """Measure."""
    threads = min(use_all_cores(report.tiny), 8)
    shm = Path("/dev/shm")
    num_bytes = 2 * PATTERNS[report.size]
    room = shm.is_dir() and os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize > 8 * num_bytes
    report.add(megabytes=num_bytes / 1e6, threads=threads, applied_on="cpu", in_memory=room)
    with tempfile.TemporaryDirectory(dir=shm if room else None, prefix="rlboost-gpu-") as name:
        for kind, share in CHANGED.items():
            _one(report, Path(name), kind, share, threads)


def _one(report: PartReport, folder: Path, kind: str, share: float, threads: int) -> None:
    base, new = _versions(PATTERNS[report.size], share)
    _write(base, folder / "base")
    _write(new, folder / "new")
    chunks = describe_file(folder / "new", CHUNK_BYTES).chunks
    num_bytes = 2 * base.numel()
    by_cpu = _make(folder, "cpu", chunks, None, threads)
    made = finder(DEVICE)
    _make(folder, "warm", chunks, made, threads)
    by_device = _make(folder, "device", chunks, made, threads)
    same = (folder / "cpu").read_bytes() == (folder / "device").read_bytes()
    report.check(f"{kind}_same_bytes_as_cpu", same)
    started = time.perf_counter()
    restored = _apply(folder / "base", folder / "device", chunks, threads)
    apply_s = time.perf_counter() - started
    report.check(f"{kind}_restored_bit_exact_on_device", bool(torch.equal(restored.to(DEVICE), new)))
    report.add(**{
        f"{kind}_changed": round(share, 3),
        f"{kind}_times_smaller": round(num_bytes / (folder / "device").stat().st_size, 2),
        f"{kind}_made_by_cpu_gb_per_s": round(num_bytes / 1e9 / by_cpu, 3),
        f"{kind}_made_by_device_gb_per_s": round(num_bytes / 1e9 / by_device, 3),
        f"{kind}_applied_gb_per_s": round(num_bytes / 1e9 / apply_s, 3),
    })  # fmt: skip


def _versions(num: int, share: float) -> tuple[Tensor, Tensor]:
    """Return two versions as 16-bit patterns: weights, and some moved by one ulp, few by much more."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = torch.randn(num, generator=generator, device=DEVICE).mul_(0.02).to(torch.bfloat16)
    base = weights.view(torch.int16)
    drawn = torch.rand(num, generator=generator, device=DEVICE)
    step = (drawn < share).to(torch.int16) - 2 * (drawn < share / 2).to(torch.int16)
    step += 700 * (drawn < share / 500).to(torch.int16)
    return base, base + step


def _write(patterns: Tensor, path: Path) -> None:
    with path.open("wb") as file:
        file.write(patterns.cpu().numpy().data)


def _make(folder: Path, name: str, chunks: tuple[Chunk, ...], find: Finder | None, threads: int) -> float:
    started = time.perf_counter()
    stats = write_delta(
        folder / "base", folder / "new", chunks, folder / name, threads=threads, max_share=2.0, finder=find
    )
    assert stats is not None
    return time.perf_counter() - started


def _apply(base: Path, delta: Path, chunks: tuple[Chunk, ...], threads: int) -> Tensor:
    data = bytearray(base.read_bytes())
    view = memoryview(data)
    with DeltaFile(delta) as opened:

        def one(i: int) -> None:
            opened.apply(i, view[chunks[i].offset : chunks[i].offset + chunks[i].length])

        for _ in in_order(one, range(len(chunks)), threads):
            pass
    return torch.frombuffer(data, dtype=torch.int16)
