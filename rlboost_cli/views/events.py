"""A run's events as lines for a person; neighbours that report the same of several instances become one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from rlboost_runtime.protocol.status import RecentEvent

ALIKE_WITHIN_S = 30.0
"""Longest time between two events that become one line."""
_MOST_NAMES = 4


def event_line(event: RecentEvent) -> str:
    """Return one event: when, and what."""
    return timed(event.at, event.text or event.kind)


def timed(at: float, words: str) -> str:
    """Return `words` behind the time of day."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))} {words}"


def merged(events: Iterable[RecentEvent]) -> list[RecentEvent]:
    """Return the events, oldest first, with neighbours that say the same of several instances made one."""
    groups: list[list[RecentEvent]] = []
    for event in events:
        if groups and _are_alike(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def _are_alike(first: RecentEvent, second: RecentEvent) -> bool:
    name, said = _split(second)
    is_close = second.at - first.at <= ALIKE_WITHIN_S
    same = first.kind == second.kind and _split(first)[1] == said
    return bool(name) and same and is_close and any(c.isdigit() for c in name)


def _split(event: RecentEvent) -> tuple[str, str]:
    name, _, said = event.text.partition(" ")
    return name, said


def _one(group: list[RecentEvent]) -> RecentEvent:
    names = list(dict.fromkeys(_split(event)[0] for event in group))
    shown = names[:_MOST_NAMES]
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more")
    who = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    said = _split(group[0])[1]
    for one, many in (("serves ", "serve "), ("has ", "have "), ("is ", "are "), ("was ", "were ")):
        if len(names) > 1 and said.startswith(one):
            said = many + said.removeprefix(one)
    return replace(group[-1], text=f"{who} {said}")
