"""What a result says of the machine that it was measured on, and whether that was all ours meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

DISTURBED = 0.03
"""Share of the cores' time above which what the host took from us says more than what we measure."""


class Stolen:
    """How much of this machine's time its host has given to others since this was made.

    From `steal` of /proc/stat, which counts in hundredths of a second; 0 where the system does not tell.
    """

    def __init__(self) -> None:
        self._began = self._ticks()

    def share(self) -> float:
        """Return stolen time over all time of all cores: 0 to 1."""
        stolen, total = (after - before for before, after in zip(self._began, self._ticks(), strict=True))
        return stolen / total if total > 0 else 0.0

    @staticmethod
    def _ticks() -> tuple[int, int]:
        path = Path("/proc/stat")
        if not path.exists():
            return 0, 0
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, path.read_text().split()[1:9])
        return steal, user + nice + system + idle + iowait + irq + softirq + steal


def describe_machine() -> dict[str, Any]:
    """Return cores, model, load and the commit of the checkout."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cores": os.cpu_count(),
        "cpu": models[0] if models else platform.processor(),
        "kernel": platform.release(),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "commit": commit.stdout.strip(),
    }
