"""How machines came into service, phase by phase: a table for `rlboost status`."""

from __future__ import annotations

from typing import Any

from rlboost_cli.terminal.text import table

Json = dict[str, Any]  # an object of design section 6

PHASES = ("request", "boot", "install", "dial_in", "wait", "weights", "engine", "first_token")
"""As `coordinator/boots.py` has them, in their order."""
MOST = 8
"""The newest machines are shown: a run of days has had hundreds."""


def boot_times(status: Json) -> list[str]:
    """Return a row per machine that was launched, the newest last; [] where none was."""
    booted = [m for m in status.get("machines") or [] if m.get("boot_s")]
    if not booted:
        return []
    rows = [
        [m["id"], *(_seconds(m["boot_s"].get(name)) for name in PHASES), _whole(m)] for m in booted[-MOST:]
    ]
    names = (name.replace("_", " ") for name in PHASES)
    hidden = len(booted) - len(rows)
    more = [f"+ {hidden} earlier machines"] if hidden else []
    return [*table(["boot, in s", *names, "in all"], rows).splitlines(), *more]


def _whole(machine: Json) -> str | None:
    """Return the time until the first token, None where there is none yet."""
    phases: dict[str, float] = machine["boot_s"]
    return _seconds(sum(phases.values())) if PHASES[-1] in phases else None


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f}"
