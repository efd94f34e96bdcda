"""Steps of episodes in virtual time: turns are requests that arrive while a step is open, as in live runs.

The trainer asks for a step of episodes, none of which has work of its own. Each asks for its first turn at
once; when a turn is complete its environment takes its time, adds its tokens to the context, and the next
turn arrives. Turns of an episode are one session: the core prefers the engine that holds their prefix, and
that engine computes only what is new. After its last turn the episode is over, and is trained with all of its
context.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Event,
    Finished,
    FinishReason,
    RequestArrived,
    ResponseRequest,
)
from rlboost_runtime.sim.clock import Agenda
from rlboost_runtime.sim.responses import ResponseStore


@dataclass(frozen=True, slots=True)
class _Asked:
    """One turn under way."""

    episode: int
    turn: int
    prompt: int
    goal: int


class EpisodeStore(ResponseStore):
    """The truth about the open step's episodes, and about the turns that are asked for."""

    def __init__(self, group_size: int, max_tokens: int) -> None:
        super().__init__(group_size, max_tokens)
        self._asked: dict[int, _Asked] = {}

    def ask(self, number: int, episode: int, turn: int) -> ResponseRequest:
        """A turn arrives under `number`; return what the core is told of it."""
        turns = self.turns_of(episode)
        told = sum(each.tokens + each.told for each in turns[:turn])
        prompt = super().prompt_of(episode) + told
        self._asked[number] = _Asked(episode, turn, prompt, turns[turn].tokens)
        self.tokens[number] = 0
        most = self.max_tokens - told
        return ResponseRequest(number, FIRST_REQUEST + episode, prompt, most, episode)

    def turn_of(self, number: int) -> tuple[int, int]:
        """Return the episode and the turn that a request is."""
        asked = self._asked[number]
        return asked.episode, asked.turn

    def session_of(self, response: int) -> int | None:
        """Return what the request has its prefix in common with."""
        asked = self._asked.get(response)
        return None if asked is None else asked.episode

    def prompt_of(self, response: int) -> int:
        """Return the prompt's tokens: of a turn all that was said before it."""
        asked = self._asked.get(response)
        return super().prompt_of(response) if asked is None else asked.prompt

    def goal_of(self, response: int) -> int:
        """Return how many tokens are sampled: in a turn, or in all of an episode."""
        asked = self._asked.get(response)
        return super().goal_of(response) if asked is None else asked.goal

    def finish(self, response: int) -> tuple[int, FinishReason]:
        """Note that a turn or an episode is complete; return its tokens and why it ended. A turn is forgotten
        then."""
        asked = self._asked.pop(response, None)
        if asked is None:
            return super().finish(response)
        del self.tokens[response]
        return asked.goal, FinishReason.STOP

    def lengths_of(self, response: int) -> tuple[int, int]:
        """Return (what is only read, what is sampled) of an episode, in tokens."""
        told = sum(turn.told for turn in self.turns_of(response))
        return super().prompt_of(response) + told, super().goal_of(response)


class EpisodeHost(Protocol):
    """What playing episodes needs of the world."""

    agenda: Agenda

    def send(self, event: Event) -> None:
        """Send the core an event."""

    def note(self, event: Event) -> None:
        """Let the core handle an event once it has handled those of this moment."""

    def finished(self, response: int) -> None:
        """A response is complete."""


class EpisodePlay:
    """Plays the episodes of the open step."""

    def __init__(self, host: EpisodeHost, store: EpisodeStore, concurrency: int) -> None:
        """`concurrency`: episodes under way at once."""
        self._host = host
        self._concurrency = concurrency
        self._to_begin: deque[int] = deque()
        self._store = store
        self._next_request = FIRST_REQUEST

    def begin(self) -> None:
        """Let all episodes of the step that is just being opened begin."""
        self._host.agenda.after(0.0, self._begin_all)

    def turn_finished(self, number: int) -> bool:
        """Let the environment go on after a turn; return False if `number` is none that is under way."""
        if number < FIRST_REQUEST or not self._store.is_open(number):
            return False
        episode, turn = self._store.turn_of(number)
        tokens, reason = self._store.finish(number)
        self._host.note(Finished(self._host.agenda.now, number, tokens, reason))
        pause_s = self._store.turns_of(episode)[turn].pause_s
        self._host.agenda.after(pause_s, lambda: self._go_on(episode, turn + 1))
        return True

    def _begin_all(self) -> None:
        self._to_begin = deque(self._store.tokens)
        for _ in range(min(self._concurrency, len(self._to_begin))):
            self._ask(self._to_begin.popleft(), 0)

    def _go_on(self, episode: int, turn: int) -> None:
        if turn < len(self._store.turns_of(episode)):
            self._ask(episode, turn)
        else:
            self._host.finished(episode)
            if self._to_begin:
                self._ask(self._to_begin.popleft(), 0)

    def _ask(self, episode: int, turn: int) -> None:
        number, self._next_request = self._next_request, self._next_request + 1
        self._host.send(RequestArrived(self._host.agenda.now, self._store.ask(number, episode, turn)))
