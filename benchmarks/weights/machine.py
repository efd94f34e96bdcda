"""What a result says of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


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
