"""Python's garbage collector, set for a process that makes many short-lived objects and keeps many others.

Reference counting frees nearly everything here; the collector only has to find rare cycles. By default it
walks all long-lived objects every few thousand frames, which takes 5 to 8 % of the coordinator's time under
the load of `benchmarks/ingest`.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)
"""Allocations before a young collection, young ones before a middle one, middle ones before a full one."""


def relax() -> None:
    """Collect rarely; call once the process has imported what it needs."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
