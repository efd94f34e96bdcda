"""Environments: what a rollout of several turns talks to."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rlboost_runtime.job.base import Model


class Environment(Model):
    """How episodes are played."""

    python: str | None = None
    """`file.py:Class` or `file.py:function` relative to the job file (docs/agents.md)."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Instead of `python`: a program and its arguments, started once per episode in the folder of the job's
    files. It reads the row as JSON from standard input, finds the model by OPENAI_BASE_URL and
    OPENAI_API_KEY, and prints {"reward": number} as its last line."""
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
        if (self.python is None) == (self.command is None):
            what = "neither python nor command" if self.python is None else "both python and command"
            raise ValueError(f"environment has {what}; write one of them")
        return self

    @property
    def file(self) -> str | None:
        """The Python file, relative to the job file; None for a command."""
        return None if self.python is None else self.python.rpartition(":")[0]

    @property
    def name(self) -> str:
        """What people know it by."""
        return self.python or " ".join(self.command or ())
