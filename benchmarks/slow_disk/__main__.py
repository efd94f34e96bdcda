"""`python -m benchmarks.slow_disk FILE [publication|journal]`: what a slow disk costs; needs root on Linux.

Prints what it measured as JSON, and keeps it in FILE beside what is there; see README.md here.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.checkout import commit
from benchmarks.slow_disk.disk import loop_disk
from benchmarks.slow_disk.journal import acknowledgements, beside_checkpoints, summary
from benchmarks.slow_disk.publication import publish_to_served

DISK_BYTES, BYTES_PER_S = 4 << 30, 50_000_000
MOST_SLOWER = 1.3
ALONE_S, BESIDE_S, PUBLICATIONS = 60.0, 300.0, 3


def journal() -> dict[str, object]:
    """Acknowledgements on the slow disk: alone, beside checkpoints, and alone again. One look at what the
    disk takes is in it, which otherwise comes every `paced_file.LOOK_EVERY_S`."""
    found: dict[str, object] = {"load_average": os.getloadavg()[0]}
    with loop_disk(DISK_BYTES) as disk:
        disk.throttle(BYTES_PER_S)
        (disk.folder / "checkpoints").mkdir()
        alone = asyncio.run(acknowledgements(disk.folder / "journal", ALONE_S))
        beside, written = beside_checkpoints(disk.folder, BESIDE_S)
        alone += asyncio.run(acknowledgements(disk.folder / "journal", ALONE_S))
        found |= {"alone_s": summary(alone), "beside_checkpoints_s": summary(beside)}
        rates = [each["num_bytes"] / (each["ended"] - each["began"]) / 1e6 for each in written]
        found["checkpoint_mb_per_s"] = [round(rate, 1) for rate in rates]
    return found


def publication() -> dict[str, object]:
    """Seconds until a version is served, by disk and by where versions are kept."""
    found: dict[str, object] = {"load_average": os.getloadavg()[0]}
    for name, limit, keep_in in (
        ("fast disk, kept on it", None, "disk"),
        ("fast disk, kept in memory", None, "auto"),
        ("slow disk, kept in memory", BYTES_PER_S, "auto"),
        ("slow disk, kept on it", BYTES_PER_S, "disk"),
    ):
        with loop_disk(DISK_BYTES) as disk:
            disk.throttle(limit)
            times = publish_to_served(disk.folder, keep_in, PUBLICATIONS)["publish_to_served_s"]
        found[name] = {"median_s": median(times), "all_s": times}
        print(name, times, file=sys.stderr, flush=True)
    return found


def main(path: Path, parts: list[str]) -> int:
    """Measure, judge and print."""
    torch.set_num_threads(1)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    disk = f"ext4 on a loop device, throttled to {BYTES_PER_S / 1e6:.0f} MB/s"
    for name, measure in (("publication", publication), ("journal", journal)):
        if name not in parts:
            continue
        began = time.strftime("%Y-%m-%d %H:%M")
        report[name] = {
            "at": began, "commit": commit(), "machine": platform.platform(), "cpus": os.cpu_count(),
            "disk": disk, **measure(),
        }  # fmt: skip
    if "publication" in report:
        served = report["publication"]
        fast = min(served[name]["median_s"] for name in served if name.startswith("fast"))
        report["slow_to_fast"] = round(served["slow disk, kept in memory"]["median_s"] / fast, 3)
        report["pass"] = report["slow_to_fast"] <= MOST_SLOWER
    text = json.dumps(report, indent=1)
    path.write_text(text + "\n")
    print(text)
    return 0 if report.get("pass", True) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or ["publication", "journal"]))
