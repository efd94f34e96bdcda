"""Where the responses of an instance go on after it is lost or was given notice.

A fold over the core's events and commands, for the story alone: nothing is decided on it. It remembers the
open step's responses only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlboost_runtime.core.messages import Assign, Command, Event, Finished, StepStarted


@dataclass(frozen=True, slots=True)
class Migration:
    """Responses that left `source`, all of them now elsewhere or finished."""

    source: str
    targets: dict[str, int]
    """Instance to responses that went on there."""


@dataclass(slots=True)
class Migrations:
    """Follows responses from one instance to the next."""

    _held: dict[int, str] = field(default_factory=dict)
    """Unfinished response to the instance that had it last."""
    _former: dict[int, str] = field(default_factory=dict)
    """Response that waits for a new holder to the one that it left."""
    _waiting: dict[str, set[int]] = field(default_factory=dict)
    _targets: dict[str, Counter[str]] = field(default_factory=dict)
    _first_response: int | None = None

    def hear(self, event: Event, commands: list[Command]) -> list[Migration]:
        """Take in an event and what followed from it; return the migrations that this completed."""
        match event:
            case StepStarted(requests=requests) if requests[0].response != self._first_response:
                self._forget(requests[0].response)
            case Finished(response=response):
                self._held.pop(response, None)
                self._settle(response)
            case _:
                pass
        for command in commands:
            if isinstance(command, Assign):
                self._held[command.response] = command.instance
                self._settle(command.response, command.instance)
        return self._completed() if self._waiting else []

    def leave(self, instance: str) -> int:
        """Note that what `instance` holds has to go elsewhere; return how many responses that are.

        Again for the same instance counts only what it has got since.
        """
        held = {r for r, holder in self._held.items() if holder == instance and r not in self._former}
        for response in held:
            self._former[response] = instance
        if held:
            self._waiting.setdefault(instance, set()).update(held)
            self._targets.setdefault(instance, Counter())
        return len(held)

    def _settle(self, response: int, target: str | None = None) -> None:
        source = self._former.pop(response, None)
        if source is not None:
            self._waiting[source].discard(response)
            if target is not None:
                self._targets[source][target] += 1

    def _completed(self) -> list[Migration]:
        done = [source for source, waiting in self._waiting.items() if not waiting]
        for source in done:
            del self._waiting[source]
        return [Migration(source, dict(self._targets.pop(source).most_common())) for source in done]

    def _forget(self, first_response: int) -> None:
        self._first_response = first_response
        for memory in (self._held, self._former, self._waiting, self._targets):
            memory.clear()
