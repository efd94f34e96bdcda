"""What is learnt from: the model and the rewards; `data.py` has the prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlboost_runtime.job.base import Model, Seed


class Warmup(Model):
    """Short supervised warm-up of a tiny random model, so that there is something for RL to improve."""

    reward: float = Field(default=0.30, gt=0, le=1)
    """Stop once the mean sampled reward on held-out prompts reaches this."""
    max_seconds: float = Field(default=60.0, gt=0)
    """Stop at the latest after this many seconds."""


class TinyModel(Model):
    """A small random Qwen3 with a byte-level tokenizer, made offline: for laptops and tests."""

    init: Literal["tiny"]
    """Asks for a random model."""
    hidden_size: int = Field(default=128, ge=32, le=16_384, multiple_of=32)
    """Width of the hidden states."""
    num_layers: int = Field(default=2, ge=1, le=256)
    """Transformer layers."""
    seed: Seed = 0
    """Seed of the random weights."""
    warmup: Warmup | None = Warmup()
    """null leaves the model random."""


class HttpReward(Model):
    """Rewards from an HTTP endpoint."""

    http: str
    """URL for POST requests; `speaks` sets their format."""
    speaks: Literal["plain", "chat", "pooling"] = "plain"
    """plain: gets {"prompt", "response", "row"}, answers {"reward": number}; chat: an OpenAI-compatible
    server's .../v1/chat/completions, whose model is asked `question` and gives a mark; pooling: vLLM's
    .../pooling, where a reward model scores prompt and response."""
    model: str | None = None
    """chat, pooling: the model's name on the server."""
    question: str | None = None
    """chat: what the model is asked. {prompt}, {response}, {best_mark} and the names of the row's fields in
    braces are filled in; null: to mark the response to the prompt from 0 to best_mark."""
    best_mark: int = Field(default=10, ge=1, le=100)
    """chat: marks are whole numbers from 0 to this; the reward is mark / best_mark."""
    max_answer_tokens: int = Field(default=64, ge=8)
    """chat: longest answer; a model that thinks first needs thousands."""
    key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable on the head that holds the endpoint's API key, sent as a bearer token; null:
    none."""
    concurrency: int = Field(default=64, ge=1)
    """Requests under way at once."""
    tries: int = Field(default=4, ge=1)
    """Requests per response, all within reward_timeout_s: failed connections and answers 429, 502, 503 and
    504 are tried again."""

    @model_validator(mode="after")
    def _model_is_named(self) -> Self:
        if self.speaks != "plain" and self.model is None:
            raise ValueError(
                f"speaks {self.speaks}, but there is no model; write the name that the server serves"
            )
        if self.speaks == "plain" and self.model is not None:
            raise ValueError(f"model is {self.model}, but speaks is plain; write speaks: chat, or remove it")
        if self.question is not None and "{response}" not in self.question:
            raise ValueError("question lacks {response}: every answer would get the same mark; add it")
        if self.speaks != "chat" and self.question is not None:
            raise ValueError(f"question is for speaks: chat, but it is {self.speaks}; remove one of them")
        return self


class Weighted(Model):
    """What each of several rewards may say."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """Name in metrics (reward_NAME_mean) and samples."""
    weight: float = 1.0
    """The response's reward is the sum of all, each times its weight; 0: only measured."""


class PythonReward(Weighted):
    """One of several rewards: a function or a built-in one."""

    python: str
    """`file.py:function` relative to the job file, or built in, as in the job's `reward`."""


class WeightedHttpReward(Weighted, HttpReward):
    """One of several rewards: an HTTP endpoint."""


RewardSource = str | HttpReward
"""What computes one reward."""
RewardSetting = str | HttpReward | Annotated[list[PythonReward | WeightedHttpReward], Field(min_length=1)]
"""A reward, or several with names and weights."""


def reward_parts(reward: RewardSetting) -> list[tuple[str, float, RewardSource]]:
    """Return name, weight and source of each reward; a single one has the name "" and the weight 1."""
    if not isinstance(reward, list):
        return [("", 1.0, reward)]
    return [
        (each.name, each.weight, each.python if isinstance(each, PythonReward) else each) for each in reward
    ]


def reward_files(rewards: Iterable[RewardSetting | None]) -> list[str]:
    """Return the Python files that the rewards name, relative to the job file."""
    sources = [source for each in rewards if each is not None for _, _, source in reward_parts(each)]
    return [each.rpartition(":")[0] for each in sources if isinstance(each, str) and ":" in each]


BUILT_IN_REWARDS = ("reasoning_gym", "math", "exact")
"""What `reward` may name beside a function of the user's."""
