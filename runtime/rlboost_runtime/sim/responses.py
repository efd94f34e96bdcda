"""The truth about the open step's responses: how long each becomes and what has been received of it."""

from __future__ import annotations

from rlboost_runtime.core.messages import FinishReason, ResponseRequest
from rlboost_runtime.sim.lengths import StepLengths


class ResponseStore:
    """Plays the coordinator's token store: counts instead of tokens."""

    def __init__(self, group_size: int, max_tokens: int) -> None:
        self.tokens: dict[int, int] = {}
        """Received tokens, by response of the open step."""
        self.tokens_redone = 0
        """Received tokens that were thrown away and have to be generated again."""
        self._group_size = group_size
        self._max_tokens = max_tokens
        self._first = 0
        self._next = 0
        self._lengths = StepLengths((), ())

    def open_step(self, lengths: StepLengths) -> tuple[ResponseRequest, ...]:
        """Begin a step; return what the trainer asks for."""
        self._lengths = lengths
        self._first, self._next = self._next, self._next + len(lengths.tokens)
        numbers = range(self._first, self._next)
        self.tokens = dict.fromkeys(numbers, 0)
        return tuple(
            ResponseRequest(number, i // self._group_size, lengths.prompts[i], self._max_tokens)
            for i, number in enumerate(numbers)
        )

    def is_open(self, response: int) -> bool:
        """Return whether the response belongs to the open step."""
        return response in self.tokens

    def begin(self, response: int, keep_tokens: int | None) -> int:
        """Return after how many tokens an assignment continues; drop what is not kept."""
        tokens = self.tokens[response]
        if keep_tokens is not None and keep_tokens < tokens:
            self.tokens_redone += tokens - keep_tokens
            self.tokens[response] = tokens = keep_tokens
        return tokens

    def prompt_of(self, response: int) -> int:
        """Return the prompt's tokens."""
        return self._lengths.prompts[response - self._first]

    def goal_of(self, response: int) -> int:
        """Return how many tokens the response becomes."""
        return self._lengths.tokens[response - self._first]

    def finish(self, response: int) -> tuple[int, FinishReason]:
        """Note that a response is complete; return its length and why it ended."""
        goal = self.goal_of(response)
        self.tokens[response] = goal
        return goal, FinishReason.LENGTH if goal >= self._max_tokens else FinishReason.STOP

    def members_of(self, group: int) -> range:
        """Return the responses of a group."""
        start = self._first + group * self._group_size
        return range(start, start + self._group_size)

    def lengths_of(self, response: int) -> tuple[int, int]:
        """Return (prompt, response) tokens."""
        return self.prompt_of(response), self.goal_of(response)
