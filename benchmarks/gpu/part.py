"""Run one part in this process: `python -m benchmarks.gpu.part MODULE SIZE OUT [--tiny] [--deadline S]`.

Figures are written to OUT as they come, so that what was measured before an error or a deadline is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.report import PartReport


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit("its deadline was reached")


def main() -> None:
    """Run the part; whatever it raises goes into its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("size")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--deadline", type=float, default=600.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    report = PartReport(options.out, options.size, options.tiny, time.monotonic() + options.deadline)
    try:
        importlib.import_module(f"benchmarks.gpu.{options.module}").run(report)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - the report is what it is for
        traceback.print_exc()
        report.failed(f"{type(exc).__name__}: {str(exc).strip()[:600]}")
    report.write()


def read(path: Path) -> dict[str, Any]:
    """Return a part's figures; empty if it ended before there were any."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found


if __name__ == "__main__":
    main()
