"""What the endpoint knows of the run's model: its tokenizer, chat template, stop tokens and context."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.inference.bodies import BadRequest
from rlboost_runtime.inference.reasoning import Tags, tags_of
from rlboost_runtime.job import Job
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder


class NotReady(RuntimeFault):
    """Nothing can be served yet."""


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """The model under its run's name."""

    name: str
    tokenizer: Any  # transformers' tokenizers have no common typed base
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    created: int
    sampling: Sampling
    """What a request gets that leaves it open: the run's own."""
    is_greedy_only: bool
    """The engines take the likeliest token and nothing else."""
    reasoning: Tags | None = None
    """What the model writes around its reasoning; None: it has none."""

    def sampling_of(self, temperature: float | None, top_p: float | None, stops: tuple[int, ...]) -> Sampling:
        """Return how to sample. Raises `BadRequest` for what the engines cannot do."""
        own = self.sampling
        if self.is_greedy_only and (temperature or 0.0) > 0:
            raise BadRequest(
                "this run decodes greedily (algorithm.temperature: 0)",
                "write 0 or leave it out",
                "temperature",
            )
        wanted = own.temperature if temperature is None else temperature
        return Sampling(wanted, own.top_p if top_p is None else top_p, stops, ignore_eos=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Return the ids of a conversation under the model's chat template. Raises `BadRequest`."""
        return self.encode(self.render_text(messages, tools, **options), add_special_tokens=False)

    def render_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> str:
        """Return a conversation as text under a chat template, by default the model's. Raises
        `BadRequest`."""
        if not options.get("chat_template") and not self.tokenizer.chat_template:
            raise BadRequest(f"{self.name} has no chat template", "use /v1/completions", "messages")
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except Exception as problem:  # a template is a program, and the conversation its input
            raise BadRequest(
                f"the chat template refuses this: {problem}", "correct messages", "messages"
            ) from problem

    def described(self) -> dict[str, Any]:
        """Return it as `GET /v1/models` lists it."""
        found = {"id": self.name, "object": "model", "created": self.created, "owned_by": "rlboost"}
        return found | {"max_model_len": self.max_model_len}

    def tokenizer_described(self) -> dict[str, Any]:
        """Return what a client needs to know of the tokenizer to work with ids."""
        known, names = self.tokenizer, ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(known, name, None) for name in names} | {
            "tokenizer_class": type(known).__name__,
            "vocab_size": len(known),
            "model_max_length": self.max_model_len,
            "chat_template": known.chat_template,
        }


def load_model(run: RunFolder, job: Job) -> EndpointModel:
    """Return the run's model. Raises `NotReady` before its first version is published."""
    versions = sorted(run.weights.glob("v[0-9]*"))
    if not run.tokenizer.is_dir() or not versions:
        raise NotReady("the model has not been published yet", "try again in a moment")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(run.tokenizer), local_files_only=True)
    length = job.algorithm.max_prompt_tokens + job.algorithm.max_response_tokens
    algorithm = job.algorithm
    return EndpointModel(
        name=run.name,
        tokenizer=tokenizer,
        stop_token_ids=_stops(versions[-1], tokenizer),
        max_model_len=length,
        created=int(time.time()),
        sampling=Sampling(algorithm.temperature, algorithm.top_p),
        is_greedy_only=job.rollout.engine == "transformers" and algorithm.temperature == 0,
        reasoning=tags_of(tokenizer),
    )


def _stops(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return what ends a response: what every version's generation configuration says, as engines read it."""
    found = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
    ends = [found] if isinstance(found, int) else found or []
    return tuple(sorted({*ends, tokenizer.eos_token_id} - {None}))
