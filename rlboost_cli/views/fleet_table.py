"""The fleet as a table: a row per instance, and per machine that has none; it fits any terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlboost_cli.terminal.screen import Line
from rlboost_cli.terminal.text import dash, table

if TYPE_CHECKING:
    from rlboost_runtime.protocol.status import InstanceRow, MachineRow, Status

_COLUMNS = ("instance", "pool", "machine", "state", "version", "in flight", "tok/s", "up")
_DROPPED_FIRST = ("machine", "pool", "up", "tok/s")
"""Columns that a narrow terminal does without, in this order."""
_LEAST_TABLE = 3
"""Lines of the smallest table: its header, a row, and the count of the rest."""
_STATE_STYLES = {
    **dict.fromkeys(("draining", "disconnected", "no contact"), "warn"),
    **dict.fromkeys(("loading", "waiting", "booting", "launching", "asleep"), "dim"),
    "ready": "good",
    "training": "busy",
}


def fleet_rows(status: Status) -> list[dict[str, str]]:
    """Return a row per instance, and per machine that has none yet; by pool, then by number."""
    rows = [_instance_row(i) for i in status.instances]
    with_instances = {i.machine for i in status.instances}
    rows += [
        _machine_row(m)
        for m in status.machines
        if m.id not in with_instances and m.state in ("intended", "running")
    ]
    return sorted(rows, key=_place)


def fleet_table(rows: Sequence[dict[str, str]], room: int, width: int) -> list[Line]:
    """Return the table on at most `room` lines; what it does not show is counted."""
    if not rows or room < 1:
        return []
    if room < min(_LEAST_TABLE, len(rows) + 1):
        return [Line(f"{len(rows)} instances: {_states(rows)}")]
    shown = rows if len(rows) < room else rows[: room - 2]
    columns = _fitting(rows, width)
    header, *lines = table(columns, [[row[c] for c in columns] for row in shown]).splitlines()
    styled = [Line(text, _STATE_STYLES.get(row["state"], "")) for text, row in zip(lines, shown, strict=True)]
    hidden = rows[len(shown) :]
    more = [Line(f"+ {len(hidden)} more: {_states(hidden)}")] if hidden else []
    return [Line(header, "header"), *styled, *more]


def _instance_row(instance: InstanceRow) -> dict[str, str]:
    return {
        "instance": instance.id,
        "pool": dash(instance.pool),
        "machine": dash(instance.machine),
        "state": dash(instance.state),
        "version": _version(instance),
        "in flight": str(instance.in_flight),
        "tok/s": f"{instance.tokens_per_s:,.0f}",
        "up": _uptime(instance.uptime_s),
    }


def _version(instance: InstanceRow) -> str:
    """Return the version that it serves, and how much it has of the next."""
    served, pulling = dash(instance.policy_version), instance.pulling
    if pulling is None or not pulling.total_bytes:
        return served
    return f"{served}, {pulling.version} at {pulling.done_bytes / pulling.total_bytes:.0%}"


def _machine_row(machine: MachineRow) -> dict[str, str]:
    is_launching = machine.state == "intended"
    return dict.fromkeys(_COLUMNS, "-") | {
        "machine": machine.id,
        "instance": machine.id,
        "pool": dash(machine.pool),
        "state": "launching" if is_launching else "no contact" if machine.joined else "booting",
        "up": "-" if is_launching else _uptime(machine.billed_s),
    }


def _uptime(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"


def _place(row: dict[str, str]) -> tuple[bool, list[tuple[int, str]]]:
    parts = re.split(r"(\d+)", f"{row['machine']} {row['instance']}")
    return row["pool"] != "reserved", [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """Return the columns that fit; measured over all rows, so that scrolling fleets do not jump."""
    columns = list(_COLUMNS)
    if all(row["instance"].partition("/")[0] == row["machine"] for row in rows):
        columns.remove("machine")  # it would say the same again
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    for name in (each for each in _DROPPED_FIRST if each in columns):
        if sum(widths[c] + 2 for c in columns) - 2 <= width:
            break
        columns.remove(name)
    return columns


def _states(rows: Sequence[dict[str, str]]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(r["state"] for r in rows).most_common())
