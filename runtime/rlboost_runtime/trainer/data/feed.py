"""Which prompts a step gets where that also depends on what was solved.

A source with a `curriculum` (job/data.py) passes over prompts whose last visits were all solved, or all
unsolved, for some of their turns; a step that lacks groups asks for more prompts. Then the cursor is no
longer the step alone (`prompts.py`), so it is kept here and in each checkpoint, with every prompt's last
visits.

Guarantees:

- a step's prompts follow from the data, the seed and the rewards of earlier steps: those of steps up to
  `max_staleness` + 1 before it, which are trained by the time that it may be requested at the earliest. When
  groups arrive, and in which order, means nothing;
- `restore(state_after(k), k + 1)` goes on exactly as the feed that was left;
- a prompt is passed over in at most `rest_epochs` turns in a row;
- a step without both has the prompts of `PromptSource.batch`, and no state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.data.prompts import Prompt, PromptSource

log = logging.getLogger(__name__)

SOLVED, UNSOLVED, MIXED = 1, -1, 0
Visit = tuple[int, int, int]
"""Group in its step, index of the prompt, and SOLVED, UNSOLVED or MIXED."""


@dataclass(slots=True)
class _Cursor:
    """Where the sources are, and what the visits of their prompts were like."""

    turn: int
    """Prompts handed out."""
    places: list[int]
    """Of each source, turns of its prompts, with those that were passed over."""
    streaks: dict[int, int] = field(default_factory=dict)
    """By prompt: n visits in a row that were solved, or -n that were unsolved; none: it was mixed last."""
    rested: dict[int, int] = field(default_factory=dict)
    """By prompt: turns in a row in which it was passed over."""
    learned: int = -1
    """The last step whose visits count."""

    def copy(self) -> _Cursor:
        return replace(self, places=list(self.places), streaks=dict(self.streaks), rested=dict(self.rested))


class PromptFeed:
    """The prompts of one step after another. For the training thread."""

    def __init__(self, source: PromptSource, *, max_staleness: int = 0, refills: bool = False) -> None:
        """`refills`: `more` may be called; only with `max_staleness` 0."""
        assert not (refills and max_staleness), "the next step may be chosen before this one is full"
        self._source = source
        self._staleness = max_staleness
        self._curricula = {each.index: each.curriculum for each in source.prompts() if each.curriculum}
        self._is_pure = not self._curricula and not refills
        self._cursor = self._at_turn(0)
        self._begun: dict[int, _Cursor] = {}
        """The cursors before the steps that may have to be chosen again."""
        self._visits: dict[int, list[Visit]] = {}
        """By step, of those that may have to be learned again."""
        self._passed_over: dict[int, int] = {}

    def of_step(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`; steps are asked for in order."""
        if self._is_pure:
            return self._source.batch(step)
        for known in range(self._cursor.learned + 1, step - self._staleness):
            self._learn(known)
        self._begun = {k: v for k, v in self._begun.items() if k >= step - self._staleness}
        self._begun[step] = self._cursor.copy()
        self._passed_over[step] = 0
        return [self._next(step) for _ in range(self._source.per_step)]

    def more(self, step: int, num: int) -> list[Prompt]:
        """Return `num` further prompts for `step`, the newest one."""
        return [self._next(step) for _ in range(num)]

    def saw(self, step: int, group: int, prompt: Prompt, rewards: Iterable[float]) -> None:
        """Take in the rewards of the usable responses to a prompt of `step`."""
        curriculum = self._curricula.get(prompt.index)
        found = [] if curriculum is None else [reward >= curriculum.correct_from for reward in rewards]
        if found:
            verdict = SOLVED if all(found) else MIXED if any(found) else UNSOLVED
            self._visits.setdefault(step, []).append((group, prompt.index, verdict))

    def metrics(self, step: int) -> dict[str, float]:
        """Return how many prompts rest now, and in how many turns one was passed over for `step`; {} without
        a curriculum."""
        if not self._curricula:
            return {}
        resting = [streak for index, streak in self._cursor.streaks.items() if self._is_settled(index)]
        solved = sum(streak > 0 for streak in resting)
        return {
            "prompts_resting_solved": float(solved),
            "prompts_resting_unsolved": float(len(resting) - solved),
            "prompts_passed_over": float(self._passed_over.get(step, 0)),
        }

    # --- checkpoints ----------------------------------------------------------------------------------------

    def state_after(self, step: int) -> dict[str, Any] | None:  # JSON values
        """Return what a trainer needs to go on after `step`, whose groups were all seen; None: nothing."""
        if self._is_pure:
            return None
        cursor = self._begun.get(step + 1, self._cursor)
        visits = {each: found for each, found in self._visits.items() if cursor.learned < each <= step}
        known = sorted(cursor.streaks.keys() | cursor.rested.keys())
        return {
            "sizes": self._source.sizes(),
            "turn": cursor.turn,
            "places": list(cursor.places),  # it is written while the next step is chosen
            "learned": cursor.learned,
            "prompts": [[i, cursor.streaks.get(i, 0), cursor.rested.get(i, 0)] for i in known],
            "visits": [[each, *visit] for each, found in sorted(visits.items()) for visit in sorted(found)],
        }

    def restore(self, state: dict[str, Any] | None, step: int) -> None:  # JSON values
        """Go on with `step` after `state`; without one, or one of other data, with the prompts that `step`
        has where nothing is passed over."""
        if self._is_pure:
            return
        self._begun, self._visits, self._passed_over = {}, {}, {}
        self._cursor = self._at_turn(step * self._source.per_step)
        self._cursor.learned = step - 1
        if state is None or state["sizes"] != self._source.sizes():
            event(log, "data.visits_unknown", why="no state" if state is None else "other data", step=step)
            return
        prompts = state["prompts"]
        self._cursor = _Cursor(
            state["turn"], list(state["places"]),
            {i: streak for i, streak, _ in prompts if streak},
            {i: rested for i, _, rested in prompts if rested},
            state["learned"],
        )  # fmt: skip
        for each, *visit in state["visits"]:
            self._visits.setdefault(each, []).append((visit[0], visit[1], visit[2]))

    # --- turns ----------------------------------------------------------------------------------------------

    def _at_turn(self, turn: int) -> _Cursor:
        return _Cursor(turn, self._source.places_at(turn))

    def _next(self, step: int) -> Prompt:
        cursor = self._cursor
        number = self._source.whose_turn(cursor.turn)
        cursor.turn += 1
        while True:  # ends, as every prompt that is passed over comes nearer to its next visit
            prompt = self._source.at(number, cursor.places[number])
            cursor.places[number] += 1
            if not self._rests(prompt.index):
                return prompt
            self._passed_over[step] = self._passed_over.get(step, 0) + 1

    def _rests(self, index: int) -> bool:
        """Return True if the prompt's turn is passed over, and count it."""
        curriculum, rested = self._curricula.get(index), self._cursor.rested
        if (
            curriculum is None
            or not self._is_settled(index)
            or rested.get(index, 0) >= curriculum.rest_epochs
        ):
            rested.pop(index, None)
            return False
        rested[index] = rested.get(index, 0) + 1
        return True

    def _is_settled(self, index: int) -> bool:
        curriculum, streak = self._curricula[index], self._cursor.streaks.get(index, 0)
        is_meant = curriculum.skip == "both" or (curriculum.skip == "solved") == (streak > 0)
        return is_meant and abs(streak) >= curriculum.visits

    def _learn(self, step: int) -> None:
        streaks = self._cursor.streaks
        for _, index, verdict in sorted(self._visits.get(step, [])):
            before = streaks.pop(index, 0)
            if verdict != MIXED:
                streaks[index] = verdict * (abs(before) + 1 if before * verdict > 0 else 1)
        self._cursor.learned = step
        for each in [each for each in self._visits if each < step - self._staleness]:
            del self._visits[each]
            self._passed_over.pop(each, None)
