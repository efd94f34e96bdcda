"""Which prompts a step gets.

The prompts of step k are a pure function of (data, seed, k): the data cursor *is* the step, so nothing has to
be saved for a resume (but where `feed.py` passes over some, or adds some). Each epoch of a source visits
every usable prompt once, in an order drawn from (seed, epoch), or in its own. Several sources are interleaved
as evenly as their weights allow.
Prompts longer than `max_prompt_tokens` are skipped, counted and logged; a data set without any usable prompt
is a `ConfigError`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Curriculum, Evaluation, RewardSetting
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.trainer.data.reading import Chat, ChatFormat, Example, Row

log = logging.getLogger(__name__)

Encode = Callable[[Example], tuple[str, list[int]]]
"""What the model reads, as text and as token ids."""

EncodeResponse = Callable[[Example], list[int]]
"""The token ids of an example's own response."""

CYCLE = 1000
"""Sources take turns in a pattern of so many prompts: weights are exact to a thousandth."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `index` in the data set, what the model reads (`text`), the question that the reward
    function gets with the row, and the reward; None: the job's. `evaluation`: what it is for, if it is not
    trained on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    row: Row
    question: str = ""
    reward: RewardSetting | None = None
    evaluation: Evaluation | None = None
    response_ids: tuple[int, ...] = ()
    """What sft learns to say."""
    messages: Chat | None = None
    """What episodes begin with; None: with the text."""
    chat: ChatFormat = field(default_factory=ChatFormat)
    curriculum: Curriculum | None = None

    def sampling(self, algorithm: Algorithm) -> Sampling:
        """Return how its responses are sampled."""
        asked = self.evaluation
        if asked is None:
            return Sampling(algorithm.temperature, algorithm.top_p)
        temperature = algorithm.temperature if asked.temperature is None else asked.temperature
        return Sampling(temperature, asked.top_p or algorithm.top_p)

    def num_responses(self, group_size: int) -> int:
        """Return how many responses it gets where those that are trained on get `group_size`."""
        return (self.evaluation and self.evaluation.samples) or group_size


class PromptSource:
    """The prompts of each step."""

    def __init__(
        self,
        examples: Sequence[Example],
        encode: Encode,
        *,
        prompts_per_step: int,
        max_prompt_tokens: int,
        seed: int,
        num_held_out: int = 0,
        encode_response: EncodeResponse | None = None,
        max_response_tokens: int = 0,
    ) -> None:
        """The last `num_held_out` usable prompts of every source's share are in no step. With
        `encode_response` prompts have their responses, and those with longer ones are skipped. Raises
        `ConfigError`."""
        usable, self.num_skipped = usable_prompts(examples, encode, max_prompt_tokens)
        if encode_response is not None:
            usable = _with_responses(usable, examples, encode_response, max_response_tokens)
            self.num_skipped = len(examples) - len(usable)
        if num_held_out >= len(usable):
            raise ConfigError(
                f"evaluation.prompts: {num_held_out} of {len(usable)} usable prompts leave none to train",
                f"write at most {len(usable) - 1}, or add prompts",
            )
        by_source = _by_source(examples, usable)
        self.held_out = _hold_out(by_source, num_held_out)
        self._sources = [source for source in by_source if source]
        self.per_step = prompts_per_step
        self._seed = seed
        weights = [examples[source[0].index].weight for source in self._sources]
        sizes = [len(s) if w is None else w for s, w in zip(self._sources, weights, strict=True)]
        self._turns = _turns(sizes)
        self._shuffled = [examples[source[0].index].shuffle for source in self._sources]
        self._epoch_orders: dict[int, tuple[int, list[int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`: the same ones for the same step, always."""
        start = step * self.per_step
        return [self._of_turn(turn) for turn in range(start, start + self.per_step)]

    def _of_turn(self, turn: int) -> Prompt:
        cycle, at = divmod(turn, len(self._turns))
        number, before, per_cycle = self._turns[at]
        return self.at(number, cycle * per_cycle + before)

    # --- for a cursor of one's own --------------------------------------------------------------------------

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts of all sources."""
        return chain.from_iterable(self._sources)

    def sizes(self) -> list[int]:
        """Return the number of prompts of each source."""
        return list(map(len, self._sources))

    def whose_turn(self, turn: int) -> int:
        """Return the source whose turn is the `turn`th, from 0."""
        return self._turns[turn % len(self._turns)][0]

    def places_at(self, turn: int) -> list[int]:
        """Return how many turns each source has had before the `turn`th."""
        cycle, at = divmod(turn, len(self._turns))
        found = [0] * len(self._sources)
        for number, _, per_cycle in self._turns:
            found[number] = cycle * per_cycle
        for number, _, _ in self._turns[:at]:
            found[number] += 1
        return found

    def at(self, number: int, place: int) -> Prompt:
        """Return the prompt at a place, from 0, of a source's epochs one after another."""
        source = self._sources[number]
        epoch, in_epoch = divmod(place, len(source))
        return source[self._order(number, epoch)[in_epoch]]

    def _order(self, number: int, epoch: int) -> list[int]:
        known = self._epoch_orders.get(number)
        if known is None or known[0] != epoch:
            order = list(range(len(self._sources[number])))
            if self._shuffled[number]:
                of_source = f"/{number}" if number else ""
                random.Random(f"{self._seed}{of_source}/{epoch}").shuffle(order)  # noqa: S311 - no secret
            known = self._epoch_orders[number] = (epoch, order)
        return known[1]


def _turns(weights: Sequence[float]) -> list[tuple[int, int, int]]:
    """Return whose turn it is at each place of the pattern: a source's number, how many turns it has had in
    the pattern before, and how many it has in all. Each source has one at least."""
    counts = [max(1, round(CYCLE * weight / sum(weights))) for weight in weights]
    turns = [((i + 0.5) / count, number, i) for number, count in enumerate(counts) for i in range(count)]
    return [(number, i, counts[number]) for _, number, i in sorted(turns)]


def _by_source(examples: Sequence[Example], usable: Sequence[Prompt]) -> list[list[Prompt]]:
    found: dict[int, list[Prompt]] = {}
    for prompt in usable:
        found.setdefault(examples[prompt.index].source, []).append(prompt)
    return list(found.values())


def _hold_out(sources: list[list[Prompt]], num: int) -> list[Prompt]:
    """Take `num` prompts from the sources' ends, of each about its share; none is emptied while another has
    more than one."""
    total = sum(map(len, sources))
    taken: list[list[Prompt]] = [[] for _ in sources]
    for i, source in enumerate(sources):
        share = min(len(source) - 1, num * len(source) // total)
        taken[i] = [source.pop() for _ in range(share)]
    while sum(map(len, taken)) < num:
        longest = max(range(len(sources)), key=lambda i: len(sources[i]))
        taken[longest].append(sources[longest].pop())
    return [prompt for each in taken for prompt in reversed(each)]


def _with_responses(
    prompts: Sequence[Prompt], examples: Sequence[Example], encode: EncodeResponse, max_tokens: int
) -> list[Prompt]:
    """Return the prompts with their responses, those without too long ones."""
    found = [replace(each, response_ids=tuple(encode(examples[each.index]))) for each in prompts]
    fitting = [each for each in found if len(each.response_ids) <= max_tokens]
    longest = max(len(each.response_ids) for each in found)
    if not fitting:
        shortest = min(len(each.response_ids) for each in found)
        raise ConfigError(
            f"data: none of {len(found)} responses has at most max_response_tokens {max_tokens} tokens"
            f" (the shortest has {shortest})",
            "raise algorithm.max_response_tokens or shorten the responses",
        )
    if skipped := len(found) - len(fitting):
        event(
            log, "data.responses_skipped", level=logging.WARNING,
            skipped=skipped, of=len(found), longest=longest, max_response_tokens=max_tokens,
        )  # fmt: skip
    return fitting


def usable_prompts(
    examples: Sequence[Example], encode: Encode, max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """Return the prompts that are neither empty nor too long, and how many are. Raises `ConfigError`."""
    if not examples:
        raise ConfigError("data: the data set is empty", "give at least one prompt")
    prompts, lengths = [], []
    for index, example in enumerate(examples):
        text, ids = encode(example)
        lengths.append(len(ids))
        if 0 < len(ids) <= max_prompt_tokens:
            prompts.append(
                Prompt(
                    index, text, tuple(ids), example.row, example.text, example.reward,
                    messages=example.conversation, chat=example.chat, curriculum=example.curriculum,
                )
            )  # fmt: skip
    if not prompts:
        raise ConfigError(
            f"data: none of {len(examples)} prompts has 1 to max_prompt_tokens {max_prompt_tokens} tokens"
            f" (the shortest has {min(lengths)})",
            "raise algorithm.max_prompt_tokens or shorten the prompts",
        )
    if skipped := len(examples) - len(prompts):
        event(
            log, "data.prompts_skipped", level=logging.WARNING,
            skipped=skipped, of=len(examples), too_long=sum(n > max_prompt_tokens for n in lengths),
            empty=lengths.count(0), longest=max(lengths), max_prompt_tokens=max_prompt_tokens,
        )  # fmt: skip
    return prompts, len(examples) - len(prompts)
