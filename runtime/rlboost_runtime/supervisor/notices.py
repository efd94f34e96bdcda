"""What people are told of a run, and what they were told already: pure, apart from the record's file.

Each notice has a key. A key that is in the record is never due again, so a notice is made once, through any
restart of coordinator or supervisor. A warning that comes back within `QUIET_S` is the same one: a restarted
coordinator has to measure for minutes before it holds a warning on the fleet again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rlboost_runtime.health import limits
from rlboost_runtime.job.notify import NotifyKind
from rlboost_runtime.protocol.status import Status
from rlboost_runtime.run.folder import read_json, write_json

BUDGET_PERCENT = (100, 80, 50)
QUIET_S = 1800.0
"""Seconds without a warning after which its return is told again."""
SEEN_EVERY_S = 60.0
"""How exactly the record knows when a warning was last in force, in seconds."""
BUDGET_EXIT_CODE = 5
"""Of the outcome of a run that its budget ended."""
MAX_KEPT = 300
"""Notices in the record; the oldest finished ones of warnings are dropped beyond that."""

Delivery = Literal["waiting", "sending", "sent", "failed", "unclear"]


class NoticeRecord(msgspec.Struct):
    """A notice, and how far it is with each target."""

    kind: NotifyKind
    text: str
    at: float
    targets: dict[str, Delivery] = {}
    tries: dict[str, int] = {}

    @property
    def is_finished(self) -> bool:
        """True if nothing of it is to be sent any more."""
        return not {"waiting", "sending"} & set(self.targets.values())


class NoticeLog(msgspec.Struct):
    """Content of `notified.json`."""

    notices: dict[str, NoticeRecord] = {}
    seen: dict[str, float] = {}
    """When a warning was last in force, by its code, to about `SEEN_EVERY_S`."""

    @classmethod
    def read(cls, path: Path) -> NoticeLog:
        """Return the record in `path`; an empty one where there is none that can be read."""
        try:
            return msgspec.convert(read_json(path) or {}, cls)
        except msgspec.ValidationError:
            return cls()

    def write(self, path: Path) -> None:
        """Replace `path`, durably. Raises `OSError`."""
        finished = [
            key for key, each in self.notices.items() if each.is_finished and key.startswith("health")
        ]
        for key in finished[: max(0, len(self.notices) - MAX_KEPT)]:
            del self.notices[key]
        write_json(path, msgspec.to_builtins(self), durably=True)


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to tell."""

    key: str
    kind: NotifyKind
    text: str


@dataclass(slots=True)
class RunView:
    """What a supervisor sees of its run at one moment; times are seconds since the Unix epoch."""

    run: str
    now: float
    since: float
    """When this supervisor started: older reports are its predecessor's business."""
    status: Status
    outcome: Mapping[str, Any] | None = None  # JSON values
    is_training_wanted: bool = True
    warnings: dict[str, str] = field(default_factory=dict)
    """Text by code of the warnings in force."""

    def __post_init__(self) -> None:
        reported_at = max(self.status.at or 0.0, self.since)
        if (self.status.at or 0.0) >= self.since:
            self.warnings = {each.code: f"{each.text} {each.advice}" for each in self.status.warnings}
        silent_s = self.now - reported_at
        if self.is_training_wanted and self.outcome is None and silent_s >= limits.STUCK_S:
            self.warnings.setdefault(
                "stuck",
                f"Stuck: the coordinator has not reported for {silent_s / 60:.0f} min."
                " See `rlboost logs` of the run, coordinator and supervisor.",
            )


def due(view: RunView, log: NoticeLog) -> list[Notice]:
    """Return what is to be told now and has not been; remember in `log` which warnings are in force."""
    return [*_warnings(view, log), *_budget(view, log), *_ended(view, log)]


def _warnings(view: RunView, log: NoticeLog) -> Iterator[Notice]:
    for code, text in view.warnings.items():
        seen = log.seen.get(code)
        if seen is None or view.now - seen > QUIET_S:
            kind: NotifyKind = code if code in ("preemption_storm", "stuck") else "health"  # type: ignore[assignment]
            yield Notice(f"health {code} {view.now:.0f}", kind, f"{view.run}: {text}")
        if seen is None or view.now - seen > SEEN_EVERY_S:
            log.seen[code] = view.now


def _budget(view: RunView, log: NoticeLog) -> Iterator[Notice]:
    """Yield the highest share of the budget that is newly spent; lower ones are then no news."""
    cost = view.status.cost
    if cost.budget_usd is None or cost.spent_usd is None:
        return
    ended = (view.outcome or {}).get("exit_code") == BUDGET_EXIT_CODE
    for percent in BUDGET_PERCENT:
        if cost.spent_usd >= cost.budget_usd * percent / 100 or (ended and percent == 100):
            keys = [f"budget {cost.budget_usd:.2f} {each}" for each in BUDGET_PERCENT if each >= percent]
            if not any(key in log.notices for key in keys):
                text = f"{view.run} has spent ${cost.spent_usd:.2f} of its budget of ${cost.budget_usd:.2f}"
                yield Notice(keys[-1], "budget", f"{text} ({percent} %)." + (" It has ended." * ended))
            return


def _ended(view: RunView, log: NoticeLog) -> Iterator[Notice]:
    if view.outcome is None:
        return
    state = view.outcome.get("state")
    if state not in ("done", "failed") or "ended" in log.notices:
        return
    status = view.status
    parts = [f"{status.step} of {status.steps or '?'} steps"]
    if status.reward_mean is not None:
        parts.append(f"reward {status.reward_mean:.3f}")
    if status.cost.spent_usd is not None:
        parts.append(f"${status.cost.spent_usd:.2f} spent")
    words = [f"{view.run} {'is done' if state == 'done' else 'has failed'}: {', '.join(parts)}."]
    words += [str(view.outcome.get(name) or "") for name in ("problem", "remedy", "warning")]
    yield Notice("ended", "done" if state == "done" else "failed", " ".join(filter(None, words)))
