"""Where prompts come from, and which ones a step gets.

The prompts of step k are a pure function of (data, seed, k): the data cursor *is* the step, so nothing has to
be saved for a resume. Each epoch visits every usable prompt once, in an order drawn from (seed, epoch).
Prompts longer than `max_prompt_tokens` are skipped, counted and logged; a data set without any usable prompt
is a `ConfigError`.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import PromptFile, ReasoningGym
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

Row = dict[str, Any]  # any JSON object: a line of the user's file, or a reasoning-gym entry
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `index` in the data set, what the model reads, and the row that the reward function
    gets."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    row: Row


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt's text with its row; `answer` is None where the data has none."""

    text: str
    answer: str | None
    row: Row


def read_examples(data: PromptFile | ReasoningGym, files: Path) -> list[Example]:
    """Return the data set. A `PromptFile` lies in `files` under the name that the job uses.

    Raises `ConfigError` for a file that is missing, empty or not JSON lines, for a line without the prompt
    field, and for an unknown reasoning-gym data set or option.
    """
    if isinstance(data, PromptFile):
        return list(_read_prompt_file(files / data.source, data))
    return generate_examples(data, seed=data.seed, size=data.size)


def generate_examples(data: ReasoningGym, *, seed: int, size: int) -> list[Example]:
    """Return `size` reasoning-gym examples drawn from `seed`, the named data sets taking turns.

    The prompt is the question and a newline. Raises `ConfigError` for an unknown data set or option.
    """
    reasoning_gym = import_reasoning_gym()
    names = data.reasoning_gym
    per_set = -(-size // len(names))
    columns = []
    for name in names:
        try:
            entries = reasoning_gym.create_dataset(name, size=per_set, seed=seed, **data.config)
            columns.append([entries[i] for i in range(per_set)])
        except (ValueError, TypeError, AssertionError) as exc:
            raise ConfigError(
                f"data.reasoning_gym: data set {name} cannot be made with config {data.config}: {exc}",
                "see https://github.com/open-thought/reasoning-gym for the names and options of data sets",
            ) from exc
    entries = [entry for turn in zip(*columns, strict=True) for entry in turn][:size]
    return [Example(f"{entry['question']}\n", str(entry["answer"]), entry) for entry in entries]


def _read_prompt_file(path: Path, data: PromptFile) -> Iterator[Example]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(line, number, data)
    except FileNotFoundError:
        raise ConfigError(f"data.source: {data.source} does not exist", "give a JSON-lines file") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"data.source: {data.source} is not UTF-8: {exc}", "give a JSON-lines file"
        ) from exc


def _parse_line(line: str, number: int, data: PromptFile) -> Example:
    where = f"{data.source}:{number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{where}: not JSON: {exc}", "each line must be one JSON object") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {type(row).__name__}", "each line must be one JSON object")
    text = row.get(data.prompt_field)
    if not isinstance(text, str) or not text:
        found = ", ".join(sorted(row)) or "nothing"
        raise ConfigError(
            f"{where}: no text in field {data.prompt_field!r} (fields: {found})", "set data.prompt_field"
        )
    answer = row.get("answer")
    return Example(text, None if answer is None else str(answer), row)


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
    ) -> None:
        """The last `num_held_out` usable prompts are in no step. Raises `ConfigError`."""
        usable, self.num_skipped = _usable(examples, encode, max_prompt_tokens)
        if num_held_out >= len(usable):
            raise ConfigError(
                f"evaluation.prompts: {num_held_out} of {len(usable)} usable prompts leave none to train",
                f"write at most {len(usable) - 1}, or add prompts",
            )
        cut = len(usable) - num_held_out
        self._prompts, self.held_out = usable[:cut], usable[cut:]
        self._per_step = prompts_per_step
        self._seed = seed
        self._epoch_order: tuple[int, list[int]] | None = None
        if self.num_skipped:
            event(
                log, "data.prompts_skipped", level=logging.WARNING,
                skipped=self.num_skipped, of=len(examples), max_prompt_tokens=max_prompt_tokens,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`: the same ones for the same step, always."""
        start = step * self._per_step
        return [self._at(position) for position in range(start, start + self._per_step)]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 - not for secrets
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]


def _usable(examples: Sequence[Example], encode: Encode, max_prompt_tokens: int) -> tuple[list[Prompt], int]:
    if not examples:
        raise ConfigError("data: the data set is empty", "give at least one prompt")
    prompts = []
    shortest: int | None = None
    for index, example in enumerate(examples):
        token_ids = tuple(encode(example.text))
        shortest = len(token_ids) if shortest is None else min(shortest, len(token_ids))
        if 0 < len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, example.text, token_ids, example.row))
    if not prompts:
        raise ConfigError(
            f"data: none of {len(examples)} prompts has 1 to max_prompt_tokens {max_prompt_tokens} tokens"
            f" (the shortest has {shortest})",
            "raise algorithm.max_prompt_tokens or shorten the prompts",
        )
    return prompts, len(examples) - len(prompts)


def import_reasoning_gym() -> ModuleType:
    """Return reasoning-gym, whose import takes seconds.

    Where its installer compiled nothing (uv), the first import does, with warnings of a dependency's syntax.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")
