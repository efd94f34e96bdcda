"""`python -m cloudlab.prepare`: make what the lab's tests need and would take minutes to make."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cloudlab.image import build_image, cache_folder
from cloudlab.machine import alone
from rlboost_providers.skypilot.session import skypilot_python

LOCK = Path(__file__).parents[3] / "templates/rlboost_templates/deploy/machine.txt"


def main() -> int:
    """Make the image and SkyPilot's venv side by side; returns the exit code."""
    began = time.monotonic()
    cache = cache_folder()
    os.environ["RLBOOST_HOME"] = str(cache)
    with alone(), ThreadPoolExecutor(1) as pool:
        skypilot = pool.submit(skypilot_python)
        build_image(cache, LOCK)
        print(f"SkyPilot: {skypilot.result()}")
    print(f"the lab is ready after {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
