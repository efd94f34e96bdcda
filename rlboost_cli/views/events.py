"""A run's events as lines for a person: alike ones that follow each other become one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]  # "at", "kind", "text" of a status


ALIKE_WITHIN_S = 30.0
"""Events that say the same of several instances are one line if they lie no further apart."""
_MOST_NAMES = 4


def event_line(event: Event) -> str:
    """Return one event: when, and what."""
    at = time.strftime("%H:%M:%S", time.localtime(float(event.get("at", 0))))
    return f"{at} {event.get('text') or event.get('kind', '')}"


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events, oldest first, with neighbours that say the same of several instances made one."""
    groups: list[list[Event]] = []
    for event in events:
        if groups and _are_alike(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def _are_alike(first: Event, second: Event) -> bool:
    name, said = _split(second)
    is_close = float(second.get("at", 0)) - float(first.get("at", 0)) <= ALIKE_WITHIN_S
    same = first.get("kind") == second.get("kind") and _split(first)[1] == said
    return bool(name) and same and is_close and any(c.isdigit() for c in name)


def _split(event: Event) -> tuple[str, str]:
    name, _, said = str(event.get("text", "")).partition(" ")
    return name, said


def _one(group: list[Event]) -> Event:
    names = list(dict.fromkeys(_split(event)[0] for event in group))
    shown = names[:_MOST_NAMES]
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more")
    who = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    said = _split(group[0])[1]
    for one, many in (("serves ", "serve "), ("has ", "have "), ("is ", "are "), ("was ", "were ")):
        if len(names) > 1 and said.startswith(one):
            said = many + said.removeprefix(one)
    return {**group[-1], "text": f"{who} {said}"}
