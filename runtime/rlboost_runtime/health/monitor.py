"""The health of one run: takes steps and facts about the fleet, and holds the warnings in force.

A warning begins after several bad steps in a row (or, for the fleet, a long time) and ends after as many good
ones by a milder limit. So it neither flickers nor repeats while its cause lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlboost_runtime.health import limits
from rlboost_runtime.health.glossary import evaluation_metric
from rlboost_runtime.health.rules import (
    BACKUP,
    FLEET,
    SAVING,
    STORM,
    STUCK,
    Kind,
    Row,
    Rule,
    finite,
    step_rules,
)
from rlboost_runtime.protocol.status import CurriculumStatus, EvaluationStatus, HealthWarning


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A warning that began or ended."""

    warning: HealthWarning
    has_begun: bool

    @property
    def kind(self) -> str:
        """Kind of the run's event."""
        return "warning" if self.has_begun else "recovered"

    @property
    def text(self) -> str:
        """Text of the run's event."""
        warning = self.warning
        if self.has_begun:
            return f"warning {warning.code}: {warning.text}"
        return f"warning {warning.code} has ended"


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What the fleet and the bill look like at one moment."""

    now: float
    """Seconds on any steady clock."""
    steps: int
    """Trained steps."""
    connected: int
    """Spot instances that are connected."""
    useful: int
    """Spot instances from which on another one does not pay."""
    is_rolling_out: bool = True
    """False while no step is open: then nobody needs a fleet."""
    saving_fraction: float | None = None
    """Saving over on-demand machines alone, as of the last trained step; None: not known."""
    lost: int = 0
    """Spot instances lost since the run began."""
    tokens: int = 0
    """Tokens accepted since the coordinator started."""
    backup_lag_s: float | None = None
    """Age of the copy of the head; None: there is none."""
    backup_problem: str = ""
    is_progress_due: bool = True
    """False while the trainer is not wanted yet, or loads something before its first step."""


class HealthMonitor:
    """Feed it every trained step and, about once a second, the fleet."""

    def __init__(self, before: Iterable[tuple[int, Row]] = (), *, is_market_ours: bool = False) -> None:
        """`before`: (step from 0, metrics) of steps that were reported earlier; their warnings are in force,
        and are not reported again. `is_market_ours`: the job file itself has a market that takes machines, as
        demonstrations do, so that their loss is meant and no storm."""
        self._is_market_ours = is_market_ours
        self._rules = step_rules()
        self._saving = Rule(SAVING, lambda row: None)
        self._judged_steps = 0
        self._fleet: HealthWarning | None = None
        self._short_since: float | None = None
        self._enough_since: float | None = None
        self._storm: HealthWarning | None = None
        self._lost: deque[tuple[float, int]] = deque()
        self._stuck: HealthWarning | None = None
        self._backup: HealthWarning | None = None
        self._last_progress: tuple[int, int] | None = None
        self._progress_at = 0.0
        self._longest_step_s = 0.0
        self.evaluations: dict[str, EvaluationStatus] = {}
        """The newest results of each evaluation, by its name."""
        self.curriculum: CurriculumStatus | None = None
        for step, row in before:
            self.trained(step, row)

    @property
    def active(self) -> list[HealthWarning]:
        """Warnings in force."""
        held = [*(rule.active for rule in (*self._rules, self._saving)), *self._of_fleet]
        return [warning for warning in held if warning is not None]

    def trained(self, step: int, row: Row) -> list[HealthChange]:
        """Take in the metrics of a step, counted from 0; return what began or ended."""
        self.evaluated(step + 1, row)
        rest = [
            finite(row, f"prompts_{what}") for what in ("resting_solved", "resting_unsolved", "passed_over")
        ]
        if rest[0] is not None:
            self.curriculum = CurriculumStatus(*(int(each or 0) for each in rest))
        self._longest_step_s = max(self._longest_step_s, finite(row, "step_s") or 0.0)
        changes = []
        for rule in self._rules:
            was = rule.active
            if rule.step(step + 1, row):
                changes.append(_change(was, rule.active))
        return changes

    def look(self, facts: FleetFacts) -> list[HealthChange]:
        """Take in the fleet and the bill; return what began or ended."""
        changes = []
        was = self._saving.active
        if self._is_new_saving(facts) and self._saving.take(facts.steps, facts.saving_fraction or 0.0):
            changes.append(_change(was, self._saving.active))
        held = self._of_fleet
        self._fleet = self._fleet_now(facts)
        self._storm = self._storm_now(facts)
        self._stuck = self._stuck_now(facts)
        self._backup = self._backup_now(facts)
        pairs = zip(held, self._of_fleet, strict=True)
        return changes + [_change(was, now) for was, now in pairs if (was is None) != (now is None)]

    @property
    def _of_fleet(self) -> tuple[HealthWarning | None, ...]:
        return self._fleet, self._storm, self._stuck, self._backup

    def evaluated(self, step: int, row: Row) -> None:
        """Take in the evaluations among the metrics of a step, counted from 1."""
        found: dict[str, dict[str, float]] = {}
        for key in row:
            parts, value = evaluation_metric(key), finite(row, key)
            if parts is not None and value is not None:
                found.setdefault(parts[0], {})[parts[1]] = value
        updates = int(finite(row, "eval_updates") or 0)
        for name, values in found.items():
            first = self.evaluations[name].first if name in self.evaluations else values
            self.evaluations[name] = EvaluationStatus(name, step, updates, values, first)

    def _is_new_saving(self, facts: FleetFacts) -> bool:
        """Return True once per trained step whose comparison counts."""
        if facts.saving_fraction is None or facts.steps == self._judged_steps:
            return False
        self._judged_steps = facts.steps
        return facts.steps >= limits.SAVING_FROM_STEP

    def _fleet_now(self, facts: FleetFacts) -> HealthWarning | None:
        if not facts.is_rolling_out or facts.useful <= 0:
            self._short_since = self._enough_since = None
            return self._fleet
        share = facts.connected / facts.useful
        self._short_since = _since(self._short_since, facts.now, is_so=FLEET.is_bad(share))
        is_enough = share >= limits.FLEET_SHARE_ENDS
        self._enough_since = _since(self._enough_since, facts.now, is_so=is_enough)
        if self._enough_since is not None and facts.now - self._enough_since >= limits.FLEET_RECOVERED_S:
            return None
        if self._short_since is not None and facts.now - self._short_since >= limits.FLEET_LONG_S:
            since = facts.steps + 1 if self._fleet is None else self._fleet.since_step
            return _fleet_warning(FLEET, share, since, minutes=(facts.now - self._short_since) / 60)
        return self._fleet

    def _storm_now(self, facts: FleetFacts) -> HealthWarning | None:
        """Return the warning on instances lost within `STORM_S`, those before the first look left out."""
        if self._is_market_ours:
            return None
        self._lost.append((facts.now, facts.lost))
        while facts.now - self._lost[0][0] > limits.STORM_S:
            self._lost.popleft()
        lost = facts.lost - self._lost[0][1]
        share = lost / (lost + facts.connected) if lost else 0.0
        if self._storm is not None:
            if share < STORM.ends:
                return None
            since = self._storm.since_step
        elif lost < limits.STORM_LEAST or not STORM.is_bad(share):
            return None
        else:
            since = facts.steps + 1
        return _fleet_warning(STORM, share, since, minutes=limits.STORM_S / 60, count=lost)

    def _stuck_now(self, facts: FleetFacts) -> HealthWarning | None:
        progress = (facts.tokens, facts.steps)
        if progress != self._last_progress or not facts.is_progress_due:
            self._last_progress, self._progress_at = progress, facts.now
        limit_s = max(limits.STUCK_S, limits.STUCK_FACTOR * self._longest_step_s)
        silent_s = facts.now - self._progress_at
        if silent_s < limit_s:
            return None
        kind = replace(STUCK, begins=limit_s / 60)
        return _fleet_warning(kind, silent_s / 60, facts.steps + 1, minutes=silent_s / 60)

    def _backup_now(self, facts: FleetFacts) -> HealthWarning | None:
        lag_s = facts.backup_lag_s
        if lag_s is None or BACKUP.is_good(lag_s) or (self._backup is None and not BACKUP.is_bad(lag_s)):
            return None
        since = facts.steps + 1 if self._backup is None else self._backup.since_step
        warning = _fleet_warning(BACKUP, lag_s, since, minutes=lag_s / 60)
        if facts.backup_problem:
            warning.text = f"{warning.text} Last error: {facts.backup_problem}"
        return warning


def _since(since: float | None, now: float, *, is_so: bool) -> float | None:
    if not is_so:
        return None
    return now if since is None else since


def _fleet_warning(
    kind: Kind, value: float, since_step: int | None, *, minutes: float, count: int = 0
) -> HealthWarning:
    text = kind.text.format(value=value, minutes=minutes, count=count, limit=kind.begins)
    return HealthWarning(
        code=kind.code,
        text=text,
        reason=kind.reason,
        advice=kind.advice,
        value=value,
        limit=kind.begins,
        since_step=since_step,
    )


def _change(was: HealthWarning | None, now: HealthWarning | None) -> HealthChange:
    warning = now if now is not None else was
    assert warning is not None
    return HealthChange(warning, has_begun=now is not None)
