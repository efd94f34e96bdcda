"""The cost report as one CSV table with a header.

Rows by `kind`:

- `machine`: one per machine, also those whose launch was refused (at no cost). Their `usd`, and that of the
  `other` rows, add up to the run's total;
- `other`: egress and storage;
- `step`: one per trained step, numbered from 1. Their `usd`, and that of the two `outside` rows (`before` the
  first step and `after` the last), add up to the total as well: money appears twice in the table, by
  machine and by step.

Columns that do not apply are empty:

===================  =========================================================================================
kind                 machine, other, step or outside
id                   the machine's name, the step's number, egress, storage, before or after
pool                 reserved or spot
zone                 where the machine was
started_at           UTC, ISO 8601, to the microsecond: first launch, or the step's begin
ended_at             likewise; empty while it lasts
seconds              billed, all lives together; or from the step's begin to its end
tokens               response tokens that the step was trained on
reward_mean          mean reward of the step
price_usd_per_hour   of the machine, the last one
usd                  what it cost; a step pays for all that was spent since the end of the one before
useful_usd           the part of a machine's `usd` that was not found to be wasted
boot_usd ..          and the parts that were (boot, idle, lost, redone); with it they add up to `usd`
===================  =========================================================================================

Dollars have six decimals and are exact.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

WASTE = ("boot", "idle", "lost", "redone")
COLUMNS = (
    "kind", "id", "pool", "zone", "started_at", "ended_at", "seconds", "tokens", "reward_mean",
    "price_usd_per_hour", "usd", "useful_usd", *(f"{kind}_usd" for kind in WASTE),
)  # fmt: skip

Json = dict[str, Any]  # parts of the report, design section 6


def cost_csv(report: Json) -> str:
    """Return the table; no newline at its end."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(report))
    return out.getvalue().rstrip("\n")


def _rows(report: Json) -> Iterator[Json]:
    for machine in report["machines"]:
        yield {
            "kind": "machine",
            "id": machine["id"],
            "pool": machine["pool"],
            "zone": machine["zone"],
            **_times(machine),
            "seconds": machine["billed_s"],
            "price_usd_per_hour": _usd(machine["price_usd_per_hour"]),
            "usd": _usd(machine["cost_usd"]),
            "useful_usd": _usd(machine["useful_usd"]),
            **{f"{kind}_usd": _usd(machine["wasted_usd"][kind]) for kind in WASTE},
        }
    for kind, amount in report["other_usd"].items():
        yield {"kind": "other", "id": kind, "usd": _usd(amount)}
    for step in report["steps"]:
        yield {
            "kind": "step",
            "id": step["step"] + 1,
            **_times(step),
            "seconds": step["seconds"],
            "tokens": step["tokens"],
            "reward_mean": step["reward_mean"],
            "usd": _usd(step["usd"]),
        }
    for when, amount in report["outside_steps_usd"].items():
        yield {"kind": "outside", "id": when, "usd": _usd(amount)}


def _times(row: Json) -> Json:
    return {name: _time(row[name]) for name in ("started_at", "ended_at")}


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")


def _usd(amount: float) -> str:
    return f"{amount:.6f}"
