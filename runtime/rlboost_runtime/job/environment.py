"""Environments: what a rollout of several turns talks to."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from rlboost_runtime.job.base import Model


class VerifiersTaskset(Model):
    """A taskset of verifiers 0.4 (its API v1), used as it is, in a Python environment of its own."""

    taskset: str
    """Id of the taskset: a package of that Python environment, or a module among the job's `files`. `rlboost
    tasks JOB` writes its tasks as the rows of a data file."""
    config: dict[str, Any] = Field(default={})  # any JSON: the taskset's own fields
    """Fields of the taskset's configuration."""
    python: str | None = None
    """Full path of a Python that has verifiers and the taskset; null: one is made with uv, once."""
    packages: list[str] = Field(default=[])
    """Where `python` is null: what is installed beside verifiers, such as my-taskset==1.2."""
    harness: str | None = None
    """A harness of verifiers that plays the agent; null: a loop that answers and calls tools, without a
    process of its own."""
    harness_config: dict[str, Any] = Field(default={})  # any JSON: the harness's own fields
    """Fields of the harness's configuration."""
    renderer: dict[str, Any] = Field(default={"name": "default", "tool_parser": "qwen3"})
    """How verifiers makes token ids of messages: a configuration of its `renderers` package, such as {name:
    qwen3}; default: the tokenizer's chat template, or the one of `data.chat_template`."""


def _one_of(*names: str) -> ConfigDict:
    """Return a configuration by which editors, too, know that exactly one of the fields is given."""
    given: list[JsonValue] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names
    ]
    return ConfigDict(json_schema_extra={"oneOf": given})


class OpenEnvServer(Model):
    """A server of OpenEnv: each episode is a session of its own."""

    model_config = _one_of("url", "command")

    url: str | None = None
    """Where it listens, such as http://10.0.0.7:8000; needs `reward_network: true`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Instead of `url`: a program that listens on 127.0.0.1 at the port that stands for {port}; one per
    process that plays episodes, started in the folder of the job's files."""
    observation: str | None = None
    """Field of the observation that the model reads; null: its only text, else all of it as JSON."""
    action: str | None = None
    """Field of the action that gets the model's response; null: its only required field. An action with
    several fields, and the tools of an MCP environment, are offered to the model as tools."""
    reward: Literal["sum", "last"] = "sum"
    """Whether an episode's reward is the sum of its steps' or the last one's."""
    connect_timeout_s: float = Field(default=100.0, gt=0, le=115)
    """So long it may take to start, and to begin a session."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if (self.url is None) == (self.command is None):
            what = "neither url nor command" if self.url is None else "both url and command"
            raise ValueError(f"openenv has {what}; write one of them")
        if self.command is not None and not any("{port}" in word for word in self.command):
            raise ValueError("openenv.command does not contain {port}; write it where the port belongs")
        return self


_KINDS = ("python", "command", "verifiers", "openenv")


class Environment(Model):
    """How episodes are played."""

    model_config = _one_of(*_KINDS)

    python: str | None = None
    """`file.py:Class` or `file.py:function` relative to the job file (docs/agents.md)."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Instead of `python`: a program and its arguments, started once per episode in the folder of the job's
    files. It reads the row as JSON from standard input, finds the model by OPENAI_BASE_URL and
    OPENAI_API_KEY, and prints {"reward": number} as its last line."""
    verifiers: VerifiersTaskset | None = None
    """Instead of `python`: a taskset of verifiers."""
    openenv: OpenEnvServer | None = None
    """Instead of `python`: a server of OpenEnv."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Requests to the model per episode."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of an episode, without the time that it waits for the model."""
    tries: int = Field(default=3, ge=1, le=100)
    """So often an episode is begun that fails; then it is left out."""
    processes: int | None = Field(default=None, ge=1)
    """Processes that play episodes; null: a quarter of the cores, from 1 to 8."""
    concurrency: int = Field(default=256, ge=1, le=65_536)
    """Episodes under way at once."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        found = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if not found:
            raise ValueError(f"environment has none of {', '.join(_KINDS)}; write one of them")
        if len(found) > 1:
            raise ValueError(f"environment has {' and '.join(found)}; write one of them")
        return self

    @property
    def file(self) -> str | None:
        """The Python file, relative to the job file; None for a command."""
        return None if self.python is None else self.python.rpartition(":")[0]

    @property
    def name(self) -> str:
        """What people know it by."""
        if self.verifiers is not None:
            return self.verifiers.taskset
        if self.openenv is not None:
            return self.openenv.url or " ".join(self.openenv.command or ())
        return self.python or " ".join(self.command or ())

    @property
    def program(self) -> str:
        """The program of an environment that has packages of its own; "" for ours, or one that is still to be
        made."""
        if self.verifiers is not None:
            return self.verifiers.python or ""
        command = self.command if self.openenv is None else self.openenv.command
        return command[0] if command else ""
