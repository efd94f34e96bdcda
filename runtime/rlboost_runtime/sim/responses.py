"""How long responses become: lognormal, part of the spread common to a group, cut at the limit.

The lengths of a step depend on the seed and the step alone, so that policies are compared on the same
responses.

The truth about the open steps' responses: how long each becomes and what has been received of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rlboost_runtime.core.base.messages import FinishReason, ResponseRequest
from rlboost_runtime.sim.presets import Assumptions, Turns, Workload


@dataclass(frozen=True, slots=True)
class SimTurn:
    """One turn of an episode: what is sampled, and what its environment adds after it, in so many seconds."""

    tokens: int
    told: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class StepLengths:
    """One step's responses, group after group."""

    prompts: tuple[int, ...]
    """Prompt tokens, by response."""
    tokens: tuple[int, ...]
    """Response tokens, by response; of an episode what all its turns sample."""
    turns: tuple[tuple[SimTurn, ...], ...] = ()
    """By episode; none where a rollout is one response."""


def draw_lengths(workload: Workload, assumptions: Assumptions, seed: int, step: int) -> StepLengths:
    """Return the lengths of a step's responses."""
    random = Random(f"{seed}/{step}")  # noqa: S311 (lengths, no secrets)
    common = assumptions.length_sigma * math.sqrt(assumptions.length_group_share)
    own = assumptions.length_sigma * math.sqrt(1.0 - assumptions.length_group_share)
    middle = math.log(assumptions.length_median)
    prompts: list[int] = []
    tokens: list[int] = []
    for _ in range(workload.prompts):
        prompt = max(1, round(workload.prompt_tokens * random.uniform(0.5, 1.5)))
        centre = middle + common * random.gauss(0.0, 1.0)
        for _ in range(workload.group_size):
            length = math.exp(centre + own * random.gauss(0.0, 1.0))
            prompts.append(prompt)
            tokens.append(max(1, min(workload.max_response_tokens, round(length))))
    if workload.turns is None:
        return StepLengths(tuple(prompts), tuple(tokens))
    turns = tuple(_draw_turns(workload.turns, each, workload.max_response_tokens, random) for each in tokens)
    sampled = tuple(sum(turn.tokens for turn in episode) for episode in turns)
    return StepLengths(tuple(prompts), sampled, turns)


def _draw_turns(turns: Turns, tokens: int, most: int, random: Random) -> tuple[SimTurn, ...]:
    """Return the turns in which an episode samples `tokens`, of about one length; it ends where its context
    would get longer than `most`."""
    number = max(1, round(turns.mean * random.uniform(0.5, 1.5)))
    found: list[SimTurn] = []
    for _ in range(min(number, tokens)):
        sampled = max(1, min(most, round(tokens / number * random.uniform(0.5, 1.5))))
        told = round(turns.told_tokens * random.uniform(0.5, 1.5))
        pause_s = random.expovariate(1.0 / turns.pause_s) if turns.pause_s else 0.0
        found.append(SimTurn(sampled, told, pause_s))
        most -= sampled + told
        if most < 1:
            break
    return (*found[:-1], SimTurn(found[-1].tokens, 0, found[-1].pause_s))  # nothing is read after the last


class ResponseStore:
    """Plays the coordinator's token store: counts instead of tokens."""

    def __init__(self, group_size: int, max_tokens: int) -> None:
        self.tokens: dict[int, int] = {}
        """Received tokens, by response of the open steps."""
        self.tokens_redone = 0
        """Received tokens that were thrown away and have to be generated again."""
        self.max_tokens = max_tokens
        """Most tokens of a response, or of an episode after its prompt."""
        self._group_size = group_size
        self._next = 0
        self._steps: list[tuple[int, StepLengths]] = []
        """First response and lengths of the open steps, newest first."""

    def open_step(
        self, lengths: StepLengths, num_kept: int = 0, carried: Sequence[int] | None = None
    ) -> tuple[ResponseRequest, ...]:
        """Begin a step; return what the trainer asks for. So many steps before it stay open; `carried`: the
        tokens that its responses have already."""
        numbers = range(self._next, self._next + len(lengths.tokens))
        self._next = numbers.stop
        self._steps = [(numbers.start, lengths), *self._steps[:num_kept]]
        since = self._steps[-1][0]
        kept = {number: tokens for number, tokens in self.tokens.items() if since <= number < numbers.start}
        self.tokens = kept | dict(zip(numbers, carried or [0] * len(numbers), strict=True))
        return tuple(
            ResponseRequest(number, i // self._group_size, lengths.prompts[i], self.max_tokens)
            for i, number in enumerate(numbers)
        )

    def is_open(self, response: int) -> bool:
        """Return True if the response belongs to an open step."""
        return response in self.tokens

    def tokens_of(self, responses: Sequence[int]) -> list[int] | None:
        """Return the tokens that each response of a step has; None for a step that is closed."""
        return [self.tokens[each] for each in responses] if responses[0] in self.tokens else None

    def is_finished(self, response: int) -> bool:
        """Return True if the response is of an open step and complete."""
        return response in self.tokens and self.tokens.get(response) == self.goal_of(response)

    def begin(self, response: int, keep_tokens: int | None) -> int:
        """Return after how many tokens an assignment continues; drop what is not kept."""
        tokens = self.tokens[response]
        if keep_tokens is not None and keep_tokens < tokens:
            self.tokens_redone += tokens - keep_tokens
            self.tokens[response] = tokens = keep_tokens
        return tokens

    def prompt_of(self, response: int) -> int:
        """Return the prompt's tokens."""
        first, lengths = self._step_of(response)
        return lengths.prompts[response - first]

    def goal_of(self, response: int) -> int:
        """Return how many tokens the response becomes."""
        first, lengths = self._step_of(response)
        return lengths.tokens[response - first]

    def _step_of(self, response: int) -> tuple[int, StepLengths]:
        return next(step for step in self._steps if step[0] <= response)

    def finish(self, response: int) -> tuple[int, FinishReason]:
        """Note that a response is complete; return its length and why it ended."""
        goal = self.goal_of(response)
        self.tokens[response] = goal
        return goal, FinishReason.LENGTH if goal >= self.max_tokens else FinishReason.STOP

    def turns_of(self, episode: int) -> tuple[SimTurn, ...]:
        """Return the turns of an episode."""
        first, lengths = self._step_of(episode)
        return lengths.turns[episode - first]

    def session_of(self, response: int) -> int | None:
        """Return what a response has its prefix in common with; None: nothing."""
        return None

    def members_of(self, first: int, group: int) -> range:
        """Return the responses of a group of the step whose first response is given."""
        start = first + group * self._group_size
        return range(start, start + self._group_size)

    def lengths_of(self, response: int) -> tuple[int, int]:
        """Return (prompt, response) tokens."""
        return self.prompt_of(response), self.goal_of(response)
