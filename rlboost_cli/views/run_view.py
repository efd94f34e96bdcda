"""One run's status as lines: for `status` in full, for the live view cut to the terminal's size.

Pure. A line carries the name of a style for a terminal that can show one; no information is in colour alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rlboost_cli.terminal.screen import Glyphs, Line, Size
from rlboost_cli.terminal.text import ENDED, against_on_demand, counted, duration, labelled, table, usd
from rlboost_cli.views.events import event_line, merged
from rlboost_cli.views.fleet_table import fleet_rows, fleet_table
from rlboost_cli.views.health import evaluation_words, full_warnings, short_warnings

if TYPE_CHECKING:
    from rlboost_cli.runs.run_status import RunStatus
    from rlboost_runtime.protocol.status import MachineRow, Preparation, ServingStatus, Status

WIDEST = 120
"""Columns after which a wider terminal makes nothing clearer."""
_FIGURE = 7
"""Columns before a bar."""
_MOST_EVENTS = 8
_FEWEST_EVENTS = 3
_FULL_EVENTS = 12
_ROOMY_HEIGHT = 18
"""Lines from which on there is room for empty ones."""
_PACE_STEPS = 3
"""Trained steps from which on the time left is estimated."""
_COMPARED_STEPS = 10
"""Steps after which the cost is compared with that on demand; a shorter run is compared at its end."""
_FOOT = "Ctrl-C detaches; the run continues"
_FOOTED_ROOM = 4
"""Lines below the head from which on there is room for the foot."""
_LOUD_KINDS = {
    *("preempted", "noticed", "lost", "no capacity", "refused", "recalled", "trainer", "coordinator"),
    "warning",
}


def live_lines(found: RunStatus, size: Size, glyphs: Glyphs, *, is_last: bool = False) -> list[Line]:
    """Return the view of one status for a terminal of `size`; it leaves the terminal's last line free.

    The last one, which stays on the screen, does not say how to leave.
    """
    width = min(size.width - 1, WIDEST)  # a sign in the last column may wrap
    room = max(1, size.height - 1)
    status = found.status
    warnings = [*short_warnings(status), *staleness(found)]
    head = [*_head(status, width, glyphs), *(Line(text, "warn") for text in warnings)][:room]
    rows, events = fleet_rows(status), _events(status, _MOST_EVENTS)
    gap = [Line("")] if size.height >= _ROOMY_HEIGHT else []
    left = room - len(head)
    foot = [] if is_last or found.has_ended or left < _FOOTED_ROOM else [*gap, Line(_FOOT, "dim")]
    left = max(0, left - len(foot) - len(gap) * (bool(rows) + bool(events)))
    fewest = min(_FEWEST_EVENTS, left // 2)
    num_events = min(len(events), max(fewest, left - (len(rows) + 1 if rows else 0)))
    fleet = fleet_table(rows, left - num_events, width)
    parts = [head, fleet and [*gap, *fleet], num_events and [*gap, *events[-num_events:]], foot]
    return [Line(glyphs.cut(line.text, width), line.style) for part in parts for line in part or []]


def status_lines(found: RunStatus, glyphs: Glyphs, width: int = WIDEST) -> list[str]:
    """Return one run's status in full: every instance, whatever the height."""
    status = found.status
    lines = [line.text for line in _head(status, width, glyphs)]
    lines += full_warnings(status.warnings, width)
    rows = fleet_rows(status)
    if rows:
        lines += ["", *(line.text for line in fleet_table(rows, len(rows) + 1, width))]
    for times in (boot_times(status), engine_times(status)):
        lines += ["", *times] if times else []
    outcome = found.data.get("outcome") or {}
    if outcome.get("problem"):
        lines += ["", f"{outcome['problem']}; {outcome.get('remedy', '')}"]
    events = [line.text for line in _events(status, _FULL_EVENTS)]
    return [*lines, "", *events] if events else lines


def staleness(found: RunStatus) -> list[str]:
    """Return what to say where the coordinator or the supervisor is gone; empty where all is well."""
    name = found.status.run
    if found.problem is None and not found.is_supervised:
        return [
            "the run continues without its supervisor: a process that fails now is not restarted",
            f"rlboost launch {name} restarts the supervisor; rlboost down {name} ends the run",
        ]
    if found.problem is None:
        return []
    if not found.was_started:
        return [found.problem, f"rlboost launch {name} starts it; rlboost down {name} ends it"]
    if not found.is_reached:
        return [
            found.problem,
            f"the run continues without this machine; status {duration(found.age_s)} old",
        ]
    if found.is_supervised:
        return [f"the coordinator does not answer and is being restarted; status {duration(found.age_s)} old"]
    return [
        f"{found.problem}; the status below is {duration(found.age_s)} old",
        f"rlboost launch {name} restarts it; rlboost down {name} ends the run",
    ]


# --- the head ----------------------------------------------------------------------------------------------


def _head(status: Status, width: int, glyphs: Glyphs) -> list[Line]:
    left_s = seconds_left(status)
    eta = "" if left_s is None else f", about {duration(left_s)} left"
    lines = [Line(f"{status.run}: {status.state}{_elapsed(status)}{eta}", "title")]
    summary = {
        "from": [", from ".join(status.ancestors)] if status.ancestors else [],
        "step": [] if status.serving else [_step(status, width, glyphs)],
        "served": [] if status.serving is None else _served(status.serving),
        "phase": _phase(status, width, glyphs),
        "reward": _rewards(status, width, glyphs),
        "eval": [evaluation_words(each) for each in status.evaluations],
        "prompts": _resting(status),
        "rollout": _rollout(status),
        "cost": _cost(status, left_s),
    }
    for label, words in summary.items():
        lines += [Line(line) for line in labelled(label, *words)]
    if problem := status.journal_problem:
        words = labelled("warning", f"the run waits for free disk space: {problem}")
        lines += [Line(line, "warn") for line in words]
    return lines


def _elapsed(status: Status) -> str:
    if status.started_at is None or status.at is None:
        return ""
    return f", {duration(max(0.0, status.at - status.started_at))}"


def _served(serving: ServingStatus) -> list[str]:
    waiting = f", {serving.waiting:,} wait for an engine, the longest {serving.longest_wait_s:,.1f} s"
    first = f"{serving.open:,} open{waiting if serving.waiting else ''}; {serving.finished:,} answered"
    first += f" with {serving.tokens:,} tokens"
    per_million = serving.usd_per_million_tokens
    return [first] if per_million is None else [first, f"{usd(per_million, 2)} per million tokens"]


def _step(status: Status, width: int, glyphs: Glyphs) -> str:
    step, steps, version = status.step, status.steps, status.policy_version
    words = f"{step}/{'?' if steps is None else steps}"
    tail = "" if version is None else f"  policy version {version}"
    bar = f"  {glyphs.bar(step / steps, _bar_width(width))}" if steps else ""
    return f"{words:<{_FIGURE}}{bar}{tail}"


def _phase(status: Status, width: int, glyphs: Glyphs) -> Iterator[str]:
    phase, preparing, responses = status.phase, status.preparing, status.step_responses
    if not phase or phase == status.state:
        return
    if preparing is not None:
        yield f"{phase}{_since(status, preparing)}"
        if done := _amount(preparing, width, glyphs):
            yield done
    elif responses is not None and responses.requested:
        bar = glyphs.bar(responses.finished / responses.requested, _bar_width(width))
        yield f"{f'{responses.finished}/{responses.requested}':<{_FIGURE}}  {bar}  {_short_phase(phase)}"
    else:
        yield phase


def _bar_width(width: int) -> int:
    return max(8, min(24, width // 4))


def _short_phase(phase: str) -> str:
    return re.sub(r", \d+ of \d+ responses finished$", "", phase)


def _since(status: Status, preparing: Preparation) -> str:
    if status.at is None or preparing.since is None or status.at - preparing.since < 2.0:
        return ""
    return f", {duration(status.at - preparing.since)} so far"


def _amount(preparing: Preparation, width: int, glyphs: Glyphs) -> str:
    done, of, unit = preparing.done, preparing.of, preparing.unit
    if done is None:
        return ""
    if not of:
        return _quantity(done, unit)
    words = f"{_quantity(done, unit)} of {_quantity(of, unit)}"
    if unit == "reward":
        words = f"reward {done:.2f} of {of:.2f}"
    return f"{'':<{_FIGURE}}  {glyphs.bar(done / of, _bar_width(width))}  {words}"


def _quantity(amount: float, unit: str) -> str:
    if unit == "B":
        for size, name in ((1e9, "GB"), (1e6, "MB")):
            if amount >= size:
                return f"{amount / size:.1f} {name}"
        return f"{amount / 1e3:.0f} kB"
    return f"{amount:g} {unit}".rstrip()


def _rewards(status: Status, width: int, glyphs: Glyphs) -> list[str]:
    if status.reward_mean is None:
        return []
    line = glyphs.sparkline(status.reward_history, _bar_width(width))
    return [f"{status.reward_mean:<{_FIGURE}.3f}  {line}"]


def _resting(status: Status) -> list[str]:
    found = status.curriculum
    if found is None:
        return []
    return [f"passed over for a while: {found.resting_solved:,} solved, {found.resting_unsolved:,} unsolved"]


def _rollout(status: Status) -> list[str]:
    if not status.tokens.generated and not status.responses.requested:
        return []
    preemptions = status.preemptions.total
    finished = f"{status.responses.finished:,} responses finished"
    first = finished if status.state in ENDED else f"{tokens_per_s(status)}; {finished}"
    migrated, lost = status.responses.migrated, status.tokens.lost_estimate
    if not preemptions and not migrated and not lost:
        return [first]
    if not preemptions and not lost:  # of a machine that has notice, or was released
        return [first, f"{migrated:,} responses migrated; no preemption so far"]
    what = counted(preemptions, "preemption")
    return [first, f"{what} survived: {migrated:,} responses migrated, about {lost:,} tokens lost"]


def tokens_per_s(status: Status) -> str:
    """Return the run's generation rate."""
    return f"{status.tokens_per_s:,.0f} tokens/s"


def seconds_left(status: Status) -> float | None:
    """Return how long the remaining steps take at the pace of the recent ones; None where that is not known.

    The pace is that of the newest `Status.events` of kind "step", so that start-up does not count.
    """
    trained = [event.at for event in status.events if event.kind == "step"]
    if status.state in ENDED or status.steps is None or status.at is None or len(trained) < _PACE_STEPS:
        return None
    per_step = (trained[-1] - trained[0]) / (len(trained) - 1)
    return max(0.0, (status.steps - status.step) * per_step - (status.at - trained[-1]))


def _cost(status: Status, left_s: float | None) -> list[str]:
    cost = status.cost
    if cost.spent_usd is None:
        return []
    budget = "" if cost.budget_usd is None else f" of {usd(cost.budget_usd, 2)}"
    going = " in all" if status.state in ENDED else f" so far, {usd(cost.rate_usd_per_hour, 2)} per hour"
    if left_s is not None and cost.rate_usd_per_hour:
        going += f", about {usd(cost.spent_usd + cost.rate_usd_per_hour * left_s / 3600, 2)} at the end"
    found = cost.counterfactual
    first = f"{usd(cost.spent_usd, 2)}{budget}{going}"
    if not found or not _has_enough_steps(status):
        return [first]
    compared = against_on_demand(found.usd_per_million_tokens, found.saving_fraction, found.basis)
    return [first, f"per million: {compared}"] if compared else [first]


def _has_enough_steps(status: Status) -> bool:
    """Return True if the comparison is no accident of the first steps, in which machines still boot."""
    return status.state in ENDED or status.step >= min(_COMPARED_STEPS, status.steps or _COMPARED_STEPS)


# --- what happened -----------------------------------------------------------------------------------------


def _events(status: Status, most: int) -> list[Line]:
    events = merged(status.events)[-most:]
    return [Line(event_line(e), "warn" if e.kind in _LOUD_KINDS else "") for e in events]


PHASES = ("request", "boot", "install", "dial_in", "wait", "weights", "engine", "first_token")
"""As `coordinator/observers/boot_times.py` has them, in their order."""
MOST = 8
"""The newest machines are shown: a run of days has had hundreds."""


def boot_times(status: Status) -> list[str]:
    """Return a row per machine that was launched, the newest last; [] where none was."""
    booted = [m for m in status.machines if m.boot_s]
    if not booted:
        return []
    rows = [[m.id, *(_seconds(m.boot_s.get(name)) for name in PHASES), _whole(m)] for m in booted[-MOST:]]
    names = ("token" if name == PHASES[-1] else name.replace("_", " ") for name in PHASES)
    hidden = len(booted) - len(rows)
    more = [f"+ {counted(hidden, 'earlier machine')}"] if hidden else []
    return [*table(["boot (s)", *names, "all"], rows).splitlines(), *more]


def _whole(machine: MachineRow) -> str | None:
    """Return the time until the first token, None where there is none yet."""
    return _seconds(sum(machine.boot_s.values())) if PHASES[-1] in machine.boot_s else None


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.{0 if seconds >= 100 else 1}f}"


def engine_times(status: Status) -> list[str]:
    """Return a line on the phases of engines' starts and one on loading the newest weights, where they are
    known: medians over the instances."""
    starts = [i.start_s for i in status.instances if i.start_s]
    loads = [{"pull": i.pull_s, "load": i.load_s, "pause": i.pause_s} for i in status.instances if i.load_s]
    return [*_line("engine start", starts), *_line("new weights", loads)]


def _line(label: str, found: Sequence[dict[str, float]]) -> list[str]:
    if not found:
        return []
    names = dict.fromkeys(name for times in found for name in times)
    medians = {name: median(times.get(name, 0.0) for times in found) for name in names}
    words = ", ".join(f"{name.replace('_', ' ')} {_duration(took)}" for name, took in medians.items())
    return [f"{label:<12} {words}{f' (median of {len(found)})' if len(found) > 1 else ''}"]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
