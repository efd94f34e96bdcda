"""Reads a job's sources of prompts: JSON lines, parquet, what `datasets` loads, reasoning-gym.

Rows are plain JSON objects whatever they were read from, so equal rows give equal prompts. A bad row is a
`ConfigError` that says where it is (file:line, or file:row from 1) and what to do.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import (
    Curriculum,
    PromptData,
    PromptDataset,
    PromptFile,
    ReasoningGym,
    RewardSetting,
    data_sources,
)
from rlboost_runtime.job.data import PromptSettings, RowSettings, find_prompt, prompt_problem

Row = dict[str, Any]  # any JSON object: a line of the user's file, or a reasoning-gym entry
Chat = tuple[dict[str, Any], ...]  # messages: role, content, and what else a template reads


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a chat template makes prompts of messages and of text."""

    template: str | None = None
    """The template itself; None: the tokenizer's."""
    is_off: bool = False
    takes_text: bool = False
    """Text too becomes a user message."""
    system_prompt: str | None = None
    args: dict[str, bool | int | float | str] = field(default_factory=dict)
    final_assistant: str = "refuse"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its row; `answer`, and `response`, which sft learns, are None where the data has none.

    `text`: the prompt, of messages the last user's. `source`: its number in the job's list of sources;
    `weight`, `shuffle` and `curriculum` are that source's. `reward`: None is the job's. `where`: for error
    messages.
    """

    text: str
    answer: str | None
    row: Row
    messages: Chat | None = None
    chat: ChatFormat = ChatFormat()
    source: int = 0
    weight: float | None = None
    shuffle: bool = True
    curriculum: Curriculum | None = None
    reward: RewardSetting | None = None
    response: str | None = None
    where: str = field(default="", compare=False)

    @property
    def conversation(self) -> Chat | None:
        """The messages that a chat template gets; None: the text is read as it is."""
        if self.messages is None and not self.chat.takes_text:
            return None
        messages = self.messages or ({"role": "user", "content": self.text},)
        if self.chat.system_prompt is not None and messages[0]["role"] != "system":
            return {"role": "system", "content": self.chat.system_prompt}, *messages
        return messages


def read_examples(data: PromptData | list[PromptData], files: Path) -> list[Example]:
    """Return the prompts of all sources, one source after the other. Their files lie in `files` under the
    names that the job uses.

    Raises `ConfigError` for a source that is missing, empty or not of its format, for a row without a prompt,
    and for an unknown data set or option.
    """
    return list(chain.from_iterable(_read(one, files, i) for i, one in enumerate(data_sources(data))))


def _read(data: PromptData, files: Path, source: int) -> Iterator[Example]:
    settings = {
        "chat": chat_format(data, files), "source": source, "weight": data.weight,
        "shuffle": data.shuffle, "curriculum": data.curriculum, "reward": data.reward,
    }  # fmt: skip
    if isinstance(data, ReasoningGym):
        yield from generate_examples(data, seed=data.seed, size=data.size, **settings)
        return
    empty = True
    for where, row in _rows(data, files):
        empty = False
        yield _example(where, row, data, settings)
    if empty:
        name = data.source if isinstance(data, PromptFile) else data.dataset
        raise ConfigError(f"data: {name} is empty: the data set has no row", "give at least one prompt")


def chat_format(data: PromptSettings, files: Path) -> ChatFormat:
    """Return what the source says of chat templates. Raises `ConfigError` for a file that cannot be read."""
    template = None
    if data.template_file is not None:
        try:
            template = (files / data.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"data.chat_template: {data.template_file} cannot be read: {exc}",
                "give a Jinja file next to the job file, or auto, tokenizer or none",
            ) from exc
    takes_text = data.chat_template not in ("auto", "none") or data.system_prompt is not None
    return ChatFormat(
        template, data.chat_template == "none", takes_text, data.system_prompt, data.template_args,
        data.final_assistant if isinstance(data, RowSettings) else "refuse",
    )  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------------------


def _rows(data: PromptFile | PromptDataset, files: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row with the place where it stands."""
    if isinstance(data, PromptDataset):
        rows: Iterable[Row] = _load_dataset(data, files)
        name, problem = data.dataset, "data.dataset"
    elif data.source.endswith(".parquet"):
        rows, name, problem = _parquet_rows(data, files / data.source), data.source, "data.source"
    else:
        yield from _json_lines(files / data.source, data.source)
        return
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{number}", json.loads(json.dumps(row, default=str))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{problem}: {name} cannot be read: {exc}", "see that the file is whole") from exc


def _json_lines(path: Path, name: str) -> Iterator[tuple[str, Row]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{name}:{number}", _parse_line(line, f"{name}:{number}")
    except FileNotFoundError:
        raise ConfigError(f"data.source: {name} does not exist", "give a JSON-lines file") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"data.source: {name} is not UTF-8: {exc}", "give a JSON-lines or .parquet file"
        ) from exc


def _parse_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{where}: not JSON: {exc}", "each line must be one JSON object") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {type(row).__name__}", "each line must be one JSON object")
    return row


def _extra(name: str) -> Any:  # a module without types
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"data: reading it needs {name.partition('.')[0]}, which is not installed",
            "type: pip install 'rlboost[data]' (on a head elsewhere: requirements: [datasets])",
        ) from None


def _parquet_rows(data: PromptFile, path: Path) -> Iterator[Row]:
    parquet = _extra("pyarrow.parquet")
    if not path.is_file():
        raise ConfigError(f"data.source: {data.source} does not exist", "give a .parquet file")
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=_columns(data, file.schema_arrow.names)):
            yield from batch.to_pylist()


def _load_dataset(data: PromptDataset, files: Path) -> Iterable[Row]:
    datasets = _extra("datasets")
    path = Path(os.path.expanduser(data.dataset))
    folder = files / path if data.copied_folder is not None else path
    try:
        if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        elif (folder / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(folder))[data.split]
        else:
            name = str(folder) if folder.is_absolute() else data.dataset
            rows = datasets.load_dataset(name, data.subset, split=data.split, revision=data.revision)
    except Exception as exc:  # whatever `datasets`, its readers and the network raise
        told = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise ConfigError(
            f"data.dataset: {data.dataset}, split {data.split}, cannot be loaded: {told}",
            "check dataset, subset and split; a private one needs HF_TOKEN in secrets, a folder a leading ./",
        ) from exc
    columns = _columns(data, rows.column_names)
    return rows if columns is None else rows.select_columns(columns)  # type: ignore[no-any-return]


def _columns(data: RowSettings, found: list[str]) -> list[str] | None:
    """Return the columns to read; None: all."""
    if not data.columns:
        return None
    if missing := sorted(set(data.columns) - set(found)):
        raise ConfigError(
            f"data.columns: there is no column {missing[0]} (columns: {', '.join(found)})", "correct it"
        )
    return [name for name in found if name in _kept(data)]


def _kept(data: RowSettings) -> set[str]:
    own = {data.prompt_field, data.messages_field or "messages", data.response_field or "answer", "answer"}
    return {*data.columns, *own}


# --- prompts of rows ----------------------------------------------------------------------------------------


def _example(where: str, row: Row, data: RowSettings, settings: dict[str, Any]) -> Example:
    answer = row.get("answer")
    told = None if answer is None else str(answer)
    if data.columns:
        kept = _kept(data)
        row = {name: value for name, value in row.items() if name in kept}
    given = told if data.response_field is None else row.get(data.response_field)
    response = None if given is None else str(given)
    name, prompt = find_prompt(row, data.prompt_field, data.messages_field)
    if isinstance(prompt, str):
        return Example(prompt, told, row, response=response, where=where, **settings)
    if problem := prompt_problem(row, data.prompt_field, data.messages_field):
        raise ConfigError(f"{where}: {problem[0]}", problem[1])
    messages = tuple(prompt)
    if messages[-1]["role"] == "assistant":
        if data.final_assistant == "refuse":
            raise ConfigError(
                f"{where}: the messages in {name} end with the assistant's",
                "write data.final_assistant: drop where it is the answer, continue where the model is to"
                " complete it",
            )
        if data.final_assistant == "drop":
            if data.response_field is None:
                response = str(messages[-1]["content"])
            messages = messages[:-1]
    users = [str(each["content"]) for each in messages if each["role"] == "user"]
    if not users:
        raise ConfigError(f"{where}: no user message in {name}", "give one, or leave the row out")
    return Example(users[-1], told, row, messages=messages, response=response, where=where, **settings)


# --- reasoning-gym ------------------------------------------------------------------------------------------


def generate_examples(
    data: ReasoningGym,
    *,
    seed: int,
    size: int,
    **settings: Any,  # fields of Example
) -> list[Example]:
    """Return `size` reasoning-gym examples drawn from `seed`, the named data sets taking turns.

    The prompt is the question, and a newline where it is no message. Raises `ConfigError` for an unknown data
    set or option.
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
    end = "" if settings.get("chat", ChatFormat()).takes_text else "\n"
    answered = [(each, str(each["answer"])) for each in entries]
    return [
        Example(f"{each['question']}{end}", answer, each, response=answer, **settings)
        for each, answer in answered
    ]


def import_reasoning_gym() -> ModuleType:
    """Return reasoning-gym, whose import takes seconds.

    Where its installer compiled nothing (uv), the first import does, with warnings of a dependency's syntax.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")
