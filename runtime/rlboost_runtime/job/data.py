"""Where prompts come from: files, data sets, generated tasks; and how chat templates make prompts of them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlboost_runtime.job.base import Model, Seed
from rlboost_runtime.job.task import RewardSetting

CHAT_TEMPLATES = ("auto", "tokenizer", "none")
"""What `chat_template` may say beside the name of a file."""


class Curriculum(Model):
    """Passes over prompts that teach nothing at present: all responses of their last visits were correct, or
    none was."""

    visits: int = Field(default=2, ge=1, le=100)
    """A prompt rests once so many visits in a row were all solved, or all unsolved."""
    skip: Literal["both", "solved", "unsolved"] = "both"
    """Which ones rest. solved: all responses were correct; unsolved: none was."""
    rest_epochs: int = Field(default=4, ge=1, le=1000)
    """How many of its turns, one an epoch, a resting prompt is passed over. Then it is visited again, and
    rests again unless that visit was different."""
    correct_from: float = 1.0
    """A response with at least this reward is correct."""


class PromptSettings(Model):
    """What every source of prompts may say."""

    chat_template: str = "auto"
    """auto: messages get the tokenizer's chat template, text is read as it is; tokenizer: text becomes a user
    message and gets it, too; none: text is meant as it is, messages are refused; else a Jinja file, relative
    to the job file, used instead of the tokenizer's for messages and text."""
    system_prompt: str | None = None
    """A system message put before messages that have none, and before text, which then becomes a user
    message; null: none."""
    template_args: dict[str, bool | int | float | str] = Field(default={})
    """Variables of the chat template, such as {enable_thinking: false}."""
    weight: float | None = Field(default=None, gt=0)
    """In a list of sources: share of the prompts relative to the others' weights; null: the number of its
    prompts."""
    reward: RewardSetting | None = None
    """What scores these prompts, in the form of the job's `reward`; null: that one."""
    shuffle: bool = True
    """Visit the prompts in another random order each epoch; false: always in their own order."""
    curriculum: Curriculum | None = None
    """Pass over prompts that are always or never solved, for a while; null: visit all in every epoch."""

    @property
    def template_file(self) -> str | None:
        """The file that holds the chat template, relative to the job file; None: there is none."""
        return None if self.chat_template in CHAT_TEMPLATES else self.chat_template

    @model_validator(mode="after")
    def _template_has_a_use(self) -> Self:
        if self.chat_template == "none" and (self.system_prompt is not None or self.template_args):
            field = "template_args" if self.system_prompt is None else "system_prompt"
            raise ValueError(
                f"{field} is for a chat template, but chat_template is none; write tokenizer, or remove it"
            )
        return self


class RowSettings(PromptSettings):
    """What sources made of rows may say."""

    prompt_field: str = "prompt"
    """Field that holds the prompt: text, or a list of messages. The whole row reaches the reward function."""
    messages_field: str | None = None
    """Field that holds a list of messages, each {role, content}; null: `prompt_field`, or else `messages`,
    where that is such a list."""
    final_assistant: Literal["refuse", "drop", "continue"] = "refuse"
    """Messages that end with the assistant's: refuse: an error; drop: it is the answer, and left out (with
    loss sft it is learnt); continue: the model continues it."""
    response_field: str | None = None
    """Field with the response that loss sft learns; null: the last message where final_assistant is drop, or
    else `answer`."""
    columns: list[str] = Field(default=[])
    """Fields that are kept of each row for the reward function, beside prompt and answer; []: all."""


class PromptFile(RowSettings):
    """Prompts from a file."""

    source: str
    """JSON-lines or .parquet file, relative to the job file."""


class PromptDataset(RowSettings):
    """Prompts from what the `datasets` package loads (pip install 'rlboost[data]')."""

    dataset: str
    """Id of a data set of the Hugging Face hub, such as openai/gsm8k; or a folder: relative to the job file
    with a leading ./ and copied to the run, or by its whole path and read in place."""
    subset: str | None = None
    """Name of the data set's configuration, such as main; null: its only or default one."""
    split: str = "train"
    """Split, also a part of one: train[:90%]."""
    revision: str | None = None
    """Hub: commit, tag or branch. Only a commit gives a resumed run certainly the same rows; null: the
    newest."""

    @property
    def copied_folder(self) -> str | None:
        """The folder that is copied to the run, relative to the job file; None: there is none."""
        return self.dataset if self.dataset.startswith("./") else None


class ReasoningGym(PromptSettings):
    """Prompts generated by reasoning-gym data sets."""

    reasoning_gym: list[str] = Field(min_length=1)
    """Names of data sets, mixed evenly."""
    size: int = Field(default=2000, ge=1, le=100_000_000)
    """Number of prompts."""
    seed: Seed = 0
    """Seed of the generated prompts."""
    config: dict[str, int | float | str | bool] = Field(default={})
    """Options of the data set(s), such as min_word_len."""


PromptData = PromptFile | PromptDataset | ReasoningGym


def data_sources(data: PromptData | list[PromptData]) -> list[PromptData]:
    """Return the sources of `data`, one or several."""
    return data if isinstance(data, list) else [data]


def data_files(data: PromptData | list[PromptData]) -> list[str]:
    """Return the files and folders that `data` names relative to the job file, except for rewards."""
    names: list[str | None] = []
    for source in data_sources(data):
        if isinstance(source, PromptFile):
            names.append(source.source)
        if isinstance(source, PromptDataset):
            names.append(source.copied_folder)
        names.append(source.template_file)
    return [name for name in names if name is not None]


# --- where a row has its prompt -----------------------------------------------------------------------------


def find_prompt(row: dict[str, Any], prompt_field: str, messages_field: str | None) -> tuple[str, Any]:
    """Return the field that holds the row's prompt, and what is in it, good or bad."""
    if messages_field is not None:
        return messages_field, row.get(messages_field)
    found = row.get(prompt_field)
    if isinstance(found, str) and found:
        return prompt_field, found
    name = "messages" if not looks_like_chat(found) and looks_like_chat(row.get("messages")) else prompt_field
    found = row.get(name)
    return name, None if found == "" else found


def looks_like_chat(value: object) -> bool:
    """Return True for a list that begins with a message."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def prompt_problem(
    row: dict[str, Any], prompt_field: str, messages_field: str | None
) -> tuple[str, str] | None:
    """Return what is wrong with a row's prompt and what to do; None where it is good."""
    name, prompt = find_prompt(row, prompt_field, messages_field)
    if isinstance(prompt, str) and messages_field is None:
        return None
    if not looks_like_chat(prompt):
        fields = ", ".join(sorted(row)) or "nothing"
        chats = [each for each, value in row.items() if looks_like_chat(value)]
        if chats:
            return f"no prompt in field {name} (fields: {fields})", f"write messages_field: {chats[0]}"
        if messages_field is not None:
            texts = f" (fields: {fields})"
            return f"no list of messages in field {name}{texts}", "set data.messages_field or prompt_field"
        return f"no text in field {name} (fields: {fields})", "set data.prompt_field"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} of {name} has no role", "each message needs role and content"
        if not isinstance(message.get("content"), str):
            return f"message {number} of {name} has no text as content", "each message needs role and content"
    return None
