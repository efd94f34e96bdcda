"""A state with a table of legal moves and the history of how it came to be.

A move outside the table raises `IllegalMove` with the whole history of the object, so that a report of a bug
starts with what led to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)

HISTORY_LENGTH = 64
"""Moves remembered per object: a long run moves an instance a few times per step; the last ones matter."""


class IllegalMove(RuntimeError):
    """An object was asked to do what its state does not allow: a bug in the core, never in its input."""


class StateMachine(Generic[S]):
    """The state of one object, called `subject` in messages."""

    __slots__ = ("_legal", "history", "state", "subject")

    def __init__(self, subject: str, state: S, legal: Mapping[S, frozenset[S]], at: float) -> None:
        self.subject = subject
        self.state = state
        self.history: deque[tuple[float, S, str]] = deque([(at, state, "created")], maxlen=HISTORY_LENGTH)
        self._legal = legal

    def move(self, to: S, why: str, at: float) -> None:
        """Go to `to`; `at` in seconds of the run. Raises `IllegalMove`."""
        if to not in self._legal[self.state]:
            raise self.illegal(f"-> {to}", why, at)
        self.state = to
        self.history.append((at, to, why))

    @property
    def since(self) -> float:
        """When it came into this state, in seconds of the run."""
        return self.history[-1][0]

    def illegal(self, what: str, why: str, at: float) -> IllegalMove:
        """Return the error for something that the present state does not allow."""
        return IllegalMove(f"{self.subject}: {self.state} {what} ({why}) at {at:g} s; history: {self.line()}")

    def __str__(self) -> str:
        """Return the subject and its history: formatted only where it is read."""
        return f"{self.subject}: {self.line()}"

    def line(self) -> str:
        """Return the history on one line."""
        return "; ".join(f"{at:g} s {state} ({why})" for at, state, why in self.history)
