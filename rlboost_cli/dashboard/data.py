"""Everything that the page of a run shows, read from its folder and, while it runs, from its coordinator."""

from __future__ import annotations

import json
import time
from contextlib import closing
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import to_builtins

from rlboost_cli.runs.files import sample_rows
from rlboost_cli.runs.metrics import MetricHistory, history_of
from rlboost_cli.runs.run_status import run_status, status_json
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import NotFound
from rlboost_runtime.health.glossary import described
from rlboost_runtime.run.folder import RunFolder

MAX_EVENTS = 1000
"""Newest events on the page."""
MAX_SAMPLES = 600
"""Newest samples in one answer; a search looks through all of them."""


class _Boot(msgspec.Struct):
    """What the ledger keeps of a machine's boot, in seconds of the run."""

    launched_at: float
    ready_at: float | None = None


def run_data(run: RunFolder, *, has_samples: bool = False) -> dict[str, Any]:
    """Return what the page shows now. Times are seconds since the Unix epoch, money is in dollars.

    Keys: `run`, `version`, `at`, `has_ended`, `status` (as `status --json`), `cost` (as `cost --json`),
    `metrics`, `machines`, `events`; with `has_samples` also `samples`.
    """
    found = run_status(run)
    data = {
        "run": run.name,
        "version": version("rlboost"),
        "at": time.time(),
        "has_ended": found.has_ended,
        "problem": found.problem,
        "status": status_json(run, found),
        "cost": to_builtins(report_of(run)),
        "metrics": _metrics(history_of(run)),
        **_books(run),
    }
    return data | ({"samples": sample_rows(run, limit=MAX_SAMPLES)} if has_samples else {})


def _metrics(history: MetricHistory) -> dict[str, Any]:
    known = {name: described(name) for name in history.chosen([], every=True)}
    names = [name for name, metric in known.items() if metric.section]
    return {
        "steps": history.steps,
        "values": {name: [_short(value) for value in history.values(name)] for name in names},
        "important": history.chosen([]),
        "about": {
            name: {"section": known[name].section, "unit": known[name].unit, "meaning": known[name].meaning}
            for name in names
        },
    }


def _short(value: float | None) -> float | None:
    """Six digits draw the same curve in half of the bytes."""
    return None if value is None else float(f"{value:.6g}")


def _books(run: RunFolder) -> dict[str, Any]:
    """Return what only the ledger has: why machines went, how long they booted, and the newest events."""
    try:
        with closing(Ledger(run.ledger, read_only=True)) as ledger:
            bills = ledger.machines(time.time())
            boots = {name: _boot_s(kept) for name, kept in ledger.kept_boots().items()}
            events = ledger.events(MAX_EVENTS)
    except NotFound:
        return {"machines": [], "events": []}
    return {
        "machines": [
            {"id": bill.machine, "detail": bill.detail, "boot_s": boots.get(bill.machine)} for bill in bills
        ],
        "events": [{"at": event.at, "kind": event.kind, "text": event.text} for event in events],
    }


def _boot_s(kept: str) -> float | None:
    """Return the seconds from a machine's launch until it served; None if it never did."""
    try:
        boot = msgspec.json.decode(kept, type=_Boot)
    except msgspec.DecodeError:
        return None
    return None if boot.ready_at is None else boot.ready_at - boot.launched_at


def encoded(data: dict[str, Any]) -> bytes:
    """Return `data` as JSON that may also stand in a `<script>` of a page: no text in it ends the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode()
