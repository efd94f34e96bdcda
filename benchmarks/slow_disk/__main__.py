"""`python -m benchmarks.slow_disk [FILE]`: what a slow disk costs; needs root on Linux and 5 GB of memory.

Prints one JSON object, also into FILE; see README.md here.
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

import torch

from benchmarks.checkout import commit
from benchmarks.slow_disk.disk import loop_disk
from benchmarks.slow_disk.journal import acknowledgements, beside_checkpoints, summary
from benchmarks.slow_disk.publication import publish_to_served

DISK_BYTES, BYTES_PER_S = 4 << 30, 50_000_000
JOURNAL_S, PUBLICATIONS = 20.0, 3


def journal() -> dict[str, object]:
    """Acknowledgements on the slow disk: alone, beside checkpoints, and so again."""
    found: dict[str, object] = {"load_average": os.getloadavg()[0]}
    with loop_disk(DISK_BYTES) as disk:
        disk.throttle(BYTES_PER_S)
        (disk.folder / "checkpoints").mkdir()
        alone: list[float] = []
        beside: list[float] = []
        written: list[dict[str, float]] = []
        for _ in range(2):
            alone += asyncio.run(acknowledgements(disk.folder / "journal", JOURNAL_S))
            more, told = beside_checkpoints(disk.folder, JOURNAL_S)
            beside, written = beside + more, written + told
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


def main() -> int:
    """Measure, judge and print."""
    torch.set_num_threads(1)
    waits, served = journal(), publication()
    fast = min(served[name]["median_s"] for name in served if name.startswith("fast"))  # type: ignore[index]
    slow = served["slow disk, kept in memory"]["median_s"]  # type: ignore[index]
    ratio = slow / fast
    report = {
        "at": time.strftime("%Y-%m-%d %H:%M"), "commit": commit(), "machine": platform.platform(),
        "cpus": os.cpu_count(), "disk": f"ext4 on a loop device, throttled to {BYTES_PER_S / 1e6:.0f} MB/s",
        "journal": waits, "publication": served, "slow_to_fast": round(ratio, 3), "pass": ratio <= 1.3,
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    print(text)
    return 0 if report["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
