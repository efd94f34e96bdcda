"""Asking many places the same thing: side by side, and none keeps what the others say from being heard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlboost_runtime.errors import RLBoostError

Place = TypeVar("Place")
Answer = TypeVar("Answer")

_AT_ONCE = 16


def ask_all(
    places: Collection[Place], ask: Callable[[Place], Answer]
) -> tuple[dict[Place, Answer], dict[Place, RLBoostError]]:
    """Return the answers, and what those said that gave none, in the places' order.

    Blocks until the slowest has answered.
    """
    answers: dict[Place, Answer] = {}
    problems: dict[Place, RLBoostError] = {}
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(places)))) as pool:
        calls = {place: pool.submit(ask, place) for place in places}
    for place, call in calls.items():
        try:
            answers[place] = call.result()
        except RLBoostError as problem:
            problems[place] = problem
    return answers, problems
