"""One run's status as lines: for `status` in full, for the live view cut to the terminal's size.

Pure, and tolerant of missing keys: which are there depends on who wrote the status. A line carries the name
of a style for those who can show one; nothing is said by colour alone.

How machines came into service, phase by phase: a table for `rlboost status`.

How long engines took to start and new weights to come, in two lines; medians over the instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rlboost_cli.terminal.screen import Glyphs, Line, Size
from rlboost_cli.terminal.text import ENDED, dash, duration, table, usd
from rlboost_cli.views.events import event_line, merged
from rlboost_cli.views.fleet_table import fleet_rows, fleet_table

if TYPE_CHECKING:
    from rlboost_cli.runs.run_status import RunStatus

Json = dict[str, Any]  # an object of design section 6

WIDEST = 120
"""Columns after which a wider terminal makes nothing clearer."""
_LABEL = 9
_FIGURE = 7
"""Columns before a bar."""
_MOST_EVENTS = 8
_FEWEST_EVENTS = 3
_FULL_EVENTS = 12
_ROOMY_HEIGHT = 18
"""Lines from which on there is room for empty ones."""
_FOOT = "Ctrl-C detaches; the run goes on"
_FOOTED_ROOM = 4
"""Lines below the head from which on there is room for the foot."""
_LOUD_KINDS = {"preempted", "noticed", "lost", "no capacity", "refused", "recalled", "trainer", "coordinator"}


def live_lines(found: RunStatus, size: Size, glyphs: Glyphs, *, is_last: bool = False) -> list[Line]:
    """Return the view of one status for a terminal of `size`; it leaves the terminal's last line free.

    The last one, which stays on the screen, does not say how to leave.
    """
    width = min(size.width - 1, WIDEST)  # a sign in the last column may wrap
    room = max(1, size.height - 1)
    head = [*_head(found.data, width, glyphs), *(Line(text, "warn") for text in staleness(found))][:room]
    rows, events = fleet_rows(found.data), _events(found.data, _MOST_EVENTS)
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
    lines = [line.text for line in _head(found.data, width, glyphs)]
    rows = fleet_rows(found.data)
    if rows:
        lines += ["", *(line.text for line in fleet_table(rows, len(rows) + 1, width))]
    for times in (boot_times(found.data), engine_times(found.data)):
        lines += ["", *times] if times else []
    outcome = found.data.get("outcome") or {}
    if outcome.get("problem"):
        lines += ["", f"{outcome['problem']}; {outcome.get('remedy', '')}"]
    events = [line.text for line in _events(found.data, _FULL_EVENTS)]
    return [*lines, "", *events] if events else lines


def staleness(found: RunStatus) -> list[str]:
    """Return what to say where the coordinator or the supervisor is gone; empty where all is well."""
    name = found.data.get("run", "RUN")
    if found.problem is None and not found.is_supervised:
        return [
            "the run goes on, but its supervisor is gone: a process that fails now stays down",
            f"rlboost launch {name} starts the supervisor again; rlboost down {name} ends the run",
        ]
    if found.problem is None:
        return []
    if not found.was_started:
        return [found.problem, f"rlboost launch {name} starts it; rlboost down {name} ends it"]
    if not found.is_reached:
        return [found.problem, f"the run goes on without this machine; this is {duration(found.age_s)} old"]
    if found.is_supervised:
        return [f"the coordinator is silent and is started again; this is {duration(found.age_s)} old"]
    return [
        f"{found.problem}; what follows is {duration(found.age_s)} old",
        f"rlboost launch {name} starts it again; rlboost down {name} ends the run",
    ]


# --- the head ----------------------------------------------------------------------------------------------


def _head(status: Json, width: int, glyphs: Glyphs) -> list[Line]:
    state = str(status.get("state", "unknown"))
    lines = [
        Line(f"{status.get('run', '')}: {state}{_elapsed(status)}", "title"),
        Line(_labelled("step", _step(status, width, glyphs))),
    ]
    phase = _phase(status, state, width, glyphs)
    lines += [Line(_labelled("phase" if i == 0 else "", text)) for i, text in enumerate(phase)]
    if rewards := _rewards(status, width, glyphs):
        lines.append(Line(_labelled("reward", rewards)))
    lines += [Line(_labelled("rollout" if i == 0 else "", text)) for i, text in enumerate(_rollout(status))]
    lines += [Line(_labelled("cost" if i == 0 else "", text)) for i, text in enumerate(_cost(status))]
    if problem := status.get("journal_problem"):
        lines.append(Line(_labelled("warning", f"the run waits for room on its disk: {problem}"), "warn"))
    return lines


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}".rstrip()


def _elapsed(status: Json) -> str:
    started, at = status.get("started_at"), status.get("at")
    return "" if started is None or at is None else f", {duration(max(0.0, float(at) - float(started)))}"


def _step(status: Json, width: int, glyphs: Glyphs) -> str:
    step, steps = int(status.get("step") or 0), status.get("steps")
    version = status.get("policy_version")
    words = f"{step}/{dash(steps) if steps is not None else '?'}"
    tail = "" if version is None else f"  policy version {version}"
    bar = f"  {glyphs.bar(step / steps, _bar_width(width))}" if steps else ""
    return f"{words:<{_FIGURE}}{bar}{tail}"


def _phase(status: Json, state: str, width: int, glyphs: Glyphs) -> Iterator[str]:
    phase = status.get("phase")
    if not phase or phase == state:
        return
    preparing, responses = status.get("preparing") or {}, status.get("step_responses")
    if preparing:
        yield f"{phase}{_since(status, preparing)}"
        if done := _amount(preparing, width, glyphs):
            yield done
    elif responses and responses.get("requested"):
        share = int(responses["finished"]) / int(responses["requested"])
        count = f"{responses['finished']}/{responses['requested']}"
        yield f"{count:<{_FIGURE}}  {glyphs.bar(share, _bar_width(width))}  {_short_phase(str(phase))}"
    else:
        yield str(phase)


def _bar_width(width: int) -> int:
    return max(8, min(24, width // 4))


def _short_phase(phase: str) -> str:
    return re.sub(r", \d+ of \d+ responses finished$", "", phase)


def _since(status: Json, preparing: Json) -> str:
    at, since = status.get("at"), preparing.get("since")
    if at is None or since is None or float(at) - float(since) < 2.0:
        return ""
    return f", {duration(float(at) - float(since))} so far"


def _amount(preparing: Json, width: int, glyphs: Glyphs) -> str:
    done, of, unit = preparing.get("done"), preparing.get("of"), str(preparing.get("unit") or "")
    if done is None:
        return ""
    if not of:
        return _quantity(float(done), unit)
    words = f"{_quantity(float(done), unit)} of {_quantity(float(of), unit)}"
    if unit == "reward":
        words = f"reward {float(done):.2f} of {float(of):.2f}"
    return f"{'':<{_FIGURE}}  {glyphs.bar(float(done) / float(of), _bar_width(width))}  {words}"


def _quantity(amount: float, unit: str) -> str:
    if unit == "B":
        for size, name in ((1e9, "GB"), (1e6, "MB")):
            if amount >= size:
                return f"{amount / size:.1f} {name}"
        return f"{amount / 1e3:.0f} kB"
    return f"{amount:g} {unit}".rstrip()


def _rewards(status: Json, width: int, glyphs: Glyphs) -> str:
    mean, history = status.get("reward_mean"), status.get("reward_history") or []
    if mean is None:
        return ""
    return f"{mean:<{_FIGURE}.3f}  {glyphs.sparkline(history, _bar_width(width))}".rstrip()


def _rollout(status: Json) -> list[str]:
    tokens, responses = status.get("tokens") or {}, status.get("responses") or {}
    if not tokens.get("generated") and not responses.get("requested"):
        return []
    preemptions = sum(int(number) for number in (status.get("preemptions") or {}).values())
    finished = f"{int(responses.get('finished') or 0):,} responses finished"
    first = finished if status.get("state") in ENDED else f"{tokens_per_s(status)}; {finished}"
    migrated, lost = int(responses.get("migrated") or 0), int(tokens.get("lost_estimate") or 0)
    if not preemptions and not migrated and not lost:
        return [first]
    what = "1 preemption" if preemptions == 1 else f"{preemptions:,} preemptions"
    return [first, f"{what} survived: {migrated:,} responses migrated, about {lost:,} tokens lost"]


def tokens_per_s(status: Json) -> str:
    """Return the run's generation rate."""
    return f"{float(status.get('tokens_per_s') or 0):,.0f} tokens/s"


def _cost(status: Json) -> list[str]:
    cost = status.get("cost") or {}
    if not cost:
        return []
    budget = "" if cost.get("budget_usd") is None else f" of {usd(cost['budget_usd'], 2)}"
    rate = float(cost.get("rate_usd_per_hour") or 0.0)
    going = f" so far, {usd(rate, 2)} per hour" if status.get("state") not in ENDED else " in all"
    first = f"{usd(cost.get('spent_usd') or 0.0, 2)}{budget}{going}"
    compared = _on_demand(cost.get("counterfactual") or {}, rate)
    return [first, compared] if compared else [first]


def _on_demand(found: Json, rate_usd_per_hour: float) -> str:
    """Return what the same tokens would cost with reserved machines only; empty where that is not known."""
    saving = found.get("saving_fraction")
    if saving is None or float(saving) >= 1:
        return ""
    basis = re.split(r"[,:;]", str(found.get("basis") or "estimated"))[0]
    hourly = f"{usd(rate_usd_per_hour / (1 - float(saving)), 2)} per hour" if rate_usd_per_hour else ""
    million = f"{usd(found.get('usd_per_million_tokens'), 2)} per million"
    words = f"{saving:.0%} saved" if saving >= 0 else f"spot costs {-saving:.0%} more"
    return f"on demand only ({basis}): {hourly or million}, {words}"


# --- what happened -----------------------------------------------------------------------------------------


def _events(status: Json, most: int) -> list[Line]:
    events = merged(status.get("events") or [])[-most:]
    return [Line(event_line(e), "warn" if e.get("kind") in _LOUD_KINDS else "") for e in events]


PHASES = ("request", "boot", "install", "dial_in", "wait", "weights", "engine", "first_token")
"""As `coordinator/observers/boot_times.py` has them, in their order."""
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


def engine_times(status: Json) -> list[str]:
    """Return a line on the phases of starts and one on the newest weights, where they are known."""
    instances: Sequence[Json] = status.get("instances") or []
    starts: list[Json] = [instance["start_s"] for instance in instances if instance.get("start_s")]
    loads: list[Json] = [
        {"pull": i.get("pull_s"), "load": i.get("load_s"), "pause": i.get("pause_s")}
        for i in instances
        if i.get("load_s")
    ]
    return [*_line("engine start", starts), *_line("new weights", loads)]


def _line(label: str, found: Sequence[Json]) -> list[str]:
    if not found:
        return []
    names = dict.fromkeys(name for times in found for name in times)
    medians = {name: median(times.get(name) or 0.0 for times in found) for name in names}
    words = ", ".join(f"{name.replace('_', ' ')} {_duration(took)}" for name, took in medians.items())
    return [f"{label:<12} {words}{f' (median of {len(found)})' if len(found) > 1 else ''}"]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
