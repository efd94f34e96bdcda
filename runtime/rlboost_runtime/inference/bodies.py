"""What clients send, checked: bodies of the routes, and what they ask of the fleet.

Unknown fields are tolerated, as clients send many. What would change the answer and cannot be done is refused
by name, never ignored; docs/endpoint.md lists it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from rlboost_runtime.errors import ConfigError

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
"""Each is looked for after every token."""
_RENDER_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "options", "padding", "return_dict", "return_tensors", "self", "text", "tokenize", "tools", "truncation",
}  # fmt: skip
Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


class BadRequest(ConfigError):
    """The request cannot be served as it is. `param`: the field."""

    def __init__(self, problem: str, remedy: str, param: str | None = None) -> None:
        super().__init__(problem, remedy)
        self.param = param


class NoSuchModel(ConfigError):
    """The request names a model that is not served."""


class StreamOptions(BaseModel):
    """Where a stream has its usage: in a line at its end, and in every line."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(BaseModel):
    """Fields that all three token routes have."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    def refuse_unsupported(self) -> None:
        """Raise `BadRequest` for what is asked for and cannot be done."""
        harmless: dict[str, tuple[object, ...]] = {
            "best_of": (self.n,), "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,),
            "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
            "logit_bias": ({},), "prompt_logprobs": (), "guided_json": (), "guided_regex": (),
            "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
            "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (), "allowed_token_ids": (),
            "bad_words": ([],),
        }  # fmt: skip
        for name, values in harmless.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise BadRequest(f"{name} is not supported", f"leave {name} out", name)
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in self.stops):
            raise BadRequest(
                f"stop has more than {MAX_STOPS} strings, or one of more than {MAX_STOP_CHARS} characters",
                "send fewer or shorter ones",
                "stop",
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerateBody(BaseModel):
    """`POST /inference/v1/generate`: ids in, ids and logprobs out."""

    class Params(SamplingBody):
        """Its `sampling_params`."""

        logprobs: int | None = None

    model: str | None = None
    token_ids: Ids = Field(min_length=1)
    sampling_params: Params = Params()
    stream: bool = False

    def check(self) -> None:
        """Raise `BadRequest` for what cannot be done."""
        self.sampling_params.refuse_unsupported()
        if self.stream:
            raise BadRequest(
                "this route does not stream", "use /v1/completions with return_token_ids", "stream"
            )


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    model: str | None = None
    prompt: str | Ids | list[str] | list[Ids]
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    echo: bool = False
    suffix: str | None = None

    def check(self) -> None:
        """Raise `BadRequest` for what cannot be done."""
        self.refuse_unsupported()
        if self.prompt == []:
            raise BadRequest("prompt is an empty list", "send text or token ids", "prompt")
        if self.echo:
            raise BadRequest(
                "echo is not supported: engines return no logprobs of prompts", "leave it out", "echo"
            )
        if self.suffix:
            raise BadRequest("suffix is not supported", "leave it out", "suffix")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1:
            raise BadRequest(
                f"logprobs is {self.logprobs}; only that of the sampled token is known", "write 0", "logprobs"
            )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or several."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)  # type: ignore[arg-type] # several of either


class ResponseFormat(BaseModel):
    """Only text is supported."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check(self) -> None:
        """Raise `BadRequest` for what cannot be done."""
        self.refuse_unsupported()
        if self.top_logprobs:
            raise BadRequest(
                "only the sampled token's logprob is known", "write top_logprobs: 0", "top_logprobs"
            )
        if taken := sorted(_RENDER_ARGUMENTS.intersection(self.chat_template_kwargs)):
            raise BadRequest(
                f"chat_template_kwargs may not have {taken[0]}",
                "leave it out; the template is the model's own",
                "chat_template_kwargs",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise BadRequest(
                "a tool cannot be forced: guided decoding does not survive a migration",
                "write auto",
                "tool_choice",
            )
        if self.response_format is not None and self.response_format.type != "text":
            raise BadRequest(
                "guided decoding does not survive a migration", "leave response_format out", "response_format"
            )

    def tools_to_find(self) -> list[dict[str, Any]] | None:
        """Return the tools whose calls are to be found in the response."""
        return None if self.tool_choice == "none" else self.tools

    def render_options(self) -> dict[str, bool]:
        """Return what the chat template is to add."""
        return {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates want them."""
        return as_conversation(self.messages)


def as_conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates know them: parts of a content joined by line breaks, arguments of
    tool calls as objects, and reasoning under its other name. Raises `BadRequest`."""
    found = []
    for message in messages:
        shown = {**message, "content": _text_of(message.get("content"))}
        if "reasoning" in shown:
            shown.setdefault("reasoning_content", shown["reasoning"])
        if isinstance(calls := shown.get("tool_calls"), list):
            shown["tool_calls"] = [_with_arguments(call) for call in calls]
        found.append(shown)
    return found


def _with_arguments(call: Any) -> Any:  # whatever the client sent
    """Return a tool call whose arguments are an object: clients send it as text, and templates print it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _text_of(content: object) -> object:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type", "text") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise BadRequest("a content part is no text", "send parts of type text only", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    tokens: Ids
