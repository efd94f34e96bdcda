"""Whether the GPUs that were promised are seen, and why not: nothing that was bought with GPUs runs on CPUs.

`nvidia-smi` says what the driver has; what a program can use also depends on the CUDA that it was built for.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from rlboost_runtime.errors import GpuMissing

ASK_S = 60.0
"""nvidia-smi takes seconds where the driver is loaded for it."""
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""The oldest driver of a major CUDA; each runs all its minor ones (NVIDIA's table of CUDA compatibility)."""
_REMEDY = "or write trainer.allow_cpu: true to continue on CPUs"


@dataclass(frozen=True, slots=True)
class Driver:
    """What `nvidia-smi` says. `version`: empty where there is no driver, or it does not work."""

    num_gpus: int = 0
    version: str = ""


def ask_driver() -> Driver:
    """Return what this machine's driver has."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, timeout=ASK_S, check=True, text=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return Driver()
    return Driver(len(said), said[0] if said else "")


def require_gpus(promised: int, seen: int, driver: Driver, cuda: str | None = None) -> None:
    """Raise `GpuMissing` where fewer GPUs are seen than were promised.

    `cuda`: what the program that looked was built for, such as 13.0; empty: for CPUs; None: any will do.
    """
    if seen >= promised:
        return
    found = f"{promised} GPU{' was' if promised == 1 else 's were'} rented, but {seen} can be used"
    if not driver.version:
        raise GpuMissing(f"{found}: nvidia-smi finds no driver", f"use an image that has one, {_REMEDY}")
    found += f" (driver {driver.version}, which has {driver.num_gpus})"
    if cuda == "":
        raise GpuMissing(f"{found}: this torch is a build for CPUs", f"install one for CUDA, {_REMEDY}")
    oldest = _DRIVER_OF_CUDA.get(int((cuda or "0").partition(".")[0]), 0)
    if int(driver.version.partition(".")[0]) < oldest:
        raise GpuMissing(
            f"{found}: torch was built for CUDA {cuda}, which needs driver {oldest}",
            f"use an image with driver {oldest} or newer, {_REMEDY}",
        )
    raise GpuMissing(found, f"check CUDA_VISIBLE_DEVICES and the machine's type, {_REMEDY}")
