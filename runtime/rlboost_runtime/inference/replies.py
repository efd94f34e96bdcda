"""What the routes answer: OpenAI's shapes, with token ids where they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlboost_runtime.inference.reasoning import ReasoningText
from rlboost_runtime.inference.tool_calls import ToolCall, ToolText, find_tool_calls

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(slots=True)
class ChoicePiece:
    """What one choice grew by; all of it, where the answer is no stream."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token of the request, that ended it."""
    versions: list[int] = field(default_factory=list)
    """Policy versions that made it; known once it is over."""

    def add(self, other: ChoicePiece) -> None:
        """Append what came after it."""
        self.text += other.text
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        self.versions = other.versions


@dataclass(frozen=True, slots=True)
class Form:
    """How one request wants its answer."""

    request_id: str
    model: str
    is_chat: bool
    has_logprobs: bool
    has_token_ids: bool
    token_name: Callable[[int], str]
    """How a token is shown beside its logprob."""
    prompt_ids: Sequence[list[int]]
    """One per prompt."""
    finds_tools: bool = False
    """The request names tools: calls in the text are shown as such."""
    written_calls: dict[str, str] = field(default_factory=dict)
    """Takes responses with tool calls as the model wrote them, by the id of the first call."""
    divide: Callable[[], ReasoningText] | None = None
    """Makes what finds the reasoning of a response; None: it is shown as the model wrote it."""
    shows_reasoning: bool = True
    has_running_usage: bool = False
    """Each line of a stream has the usage so far."""
    _held: dict[int, ToolText] = field(default_factory=dict)
    _divided: dict[int, ReasoningText] = field(default_factory=dict)
    _num_characters: dict[int, int] = field(default_factory=dict)
    _num_tokens: list[int] = field(default_factory=lambda: [0])
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[ChoicePiece], num_choices: int) -> Json:
        """Return the answer that is no stream; there are `num_choices` per prompt."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        shown = [self._choice(piece, num_choices) for piece in choices]
        answer = self._head(kind) | {"choices": shown, "usage": self.usage(sum(len(c.ids) for c in choices))}
        if self.has_token_ids and self.is_chat:
            answer["prompt_token_ids"] = self.prompt_ids[0]
        return answer

    def chunk(self, piece: ChoicePiece, *, is_first: bool) -> Json:
        """Return one line of a stream."""
        choice = _bare_choice(piece)
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | self._delta(choice, piece)
        else:
            choice["text"] = piece.text
        self._add_tokens(choice, piece)
        self._num_tokens[0] += len(piece.ids)
        line = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        line["choices"] = [choice]
        return line | ({"usage": self.usage(self._num_tokens[0])} if self.has_running_usage else {})

    def usage_chunk(self, num_tokens: int) -> Json:
        """Return the line of a stream that has its usage."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> Json:
        """Return the numbers of tokens, each prompt counted once."""
        prompt = sum(map(len, self.prompt_ids))
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, piece: ChoicePiece, num_choices: int) -> Json:
        choice = _bare_choice(piece)
        if self.is_chat:
            thoughts, text = self._divide(piece)
            text, calls = find_tool_calls(text) if self.finds_tools else (text, [])
            choice["message"] = {"role": "assistant", "content": text or (None if calls else "")}
            self._add_reasoning(choice["message"], thoughts)
            self._add_calls(choice, choice["message"], calls, piece.text, indexed=False)
        else:
            choice["text"] = piece.text
            if self.has_token_ids:
                choice["prompt_token_ids"] = self.prompt_ids[piece.index // num_choices]
        self._add_tokens(choice, piece)
        return choice

    def _delta(self, choice: Json, piece: ChoicePiece) -> Json:
        """Return what a choice of a stream grows by."""
        thoughts, text = self._divide(piece)
        delta: Json = {"content": text}
        self._add_reasoning(delta, thoughts)
        if not self.finds_tools:
            return delta
        held = self._held.setdefault(piece.index, ToolText())
        delta["content"] = held.add(text)
        if piece.finish_reason is not None:
            rest, calls = held.finish()
            delta["content"] += rest
            self._add_calls(choice, delta, calls, held.text, indexed=True)
        return delta

    def _divide(self, piece: ChoicePiece) -> tuple[str, str]:
        """Return the reasoning and the answer in what a choice grew by."""
        if self.divide is None:
            return "", piece.text
        divided = self._divided.setdefault(piece.index, self.divide())
        thoughts, text = divided.add(piece.text)
        if piece.finish_reason is not None:
            last_thoughts, last_text = divided.finish()
            thoughts, text = thoughts + last_thoughts, text + last_text
        return thoughts, text

    def _add_reasoning(self, message: Json, thoughts: str) -> None:
        """Add it under both names that clients know: vLLM's and DeepSeek's."""
        if thoughts and self.shows_reasoning:
            message["reasoning"] = message["reasoning_content"] = thoughts

    def _add_calls(
        self, choice: Json, message: Json, calls: Sequence[ToolCall], text: str, *, indexed: bool
    ) -> None:
        if calls:
            self.written_calls[calls[0].call_id] = text
            message["tool_calls"] = [call.as_json(i if indexed else None) for i, call in enumerate(calls)]
            choice["finish_reason"] = "tool_calls"

    def _add_tokens(self, choice: Json, piece: ChoicePiece) -> None:
        if self.has_token_ids:
            choice["token_ids"] = piece.ids
        if not self.has_logprobs:
            return
        names, logprobs = [self.token_name(i) for i in piece.ids], finite(piece.logprobs)
        if not self.is_chat:
            at, offsets = self._num_characters.get(piece.index, 0), []
            for name in names:
                offsets.append(at)
                at += len(name)
            self._num_characters[piece.index] = at
            choice["logprobs"] = {
                "tokens": names,
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": offsets,
            }
            return
        choice["logprobs"] = {"content": [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]}  # fmt: skip


def _bare_choice(piece: ChoicePiece) -> Json:
    ended = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
    return {"index": piece.index, **ended, "logprobs": None}


def generated(request_id: str, prompt_ids: list[int], choices: Sequence[ChoicePiece]) -> Json:
    """Return the answer of `/inference/v1/generate`."""
    return {
        "request_id": request_id,
        "prompt_token_ids": prompt_ids,
        "choices": [
            {
                "index": piece.index,
                "token_ids": piece.ids,
                "finish_reason": piece.finish_reason,
                "logprobs": {"content": [
                    {"token": f"token_id:{token}", "logprob": logprob}
                    for token, logprob in zip(piece.ids, finite(piece.logprobs), strict=True)
                ]},
            }
            for piece in choices
        ],
    }  # fmt: skip


def finite(logprobs: Sequence[float]) -> list[float]:
    """Return logprobs that JSON can carry."""
    return [max(LOWEST_LOGPROB, value) for value in logprobs]


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
