"""Random requests to the endpoint's routes, right and wrong ones: the same seed makes the same requests.

Each body begins as one that the route takes. Then some of its fields are replaced by values of another type,
at a limit, or beyond it; fields that it does not have are added; now and then the bytes are damaged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "tiny"
_TEXTS = (
    "hello",
    "",
    " ",
    "\n\n",
    "ünï",
    "日本語",
    "🧪" * 3,
    "\x00",
    "<think>",
    "</think>a",
    "<tool_call>{",
    "a" * 400,
)
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**31 - 1, 2**63, -(2**70), "", "x", "0", [],
    [[]], [None], [0], [-1], ["a"], [["a"]], [[0], [1]], {}, {"a": 1}, {"type": "text"}, "auto", "required",
    {"type": "json_object"}, [{"role": "user"}], [{"role": None, "content": 3}],
    [{"content": [{"type": "image_url"}]}],
)  # fmt: skip
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1, 2, -1, 101), "top_p": (0.1, 1, 0, 1.1), "max_tokens": (1, 2, 7, 16, 0, 301),
    "n": (1, 2, 3, 0, 129), "stop": ("e", ["a", "b"], "", ["", "zz"], ["q"] * 65, "w" * 1025),
    "stop_token_ids": ([1], [], [10, 11], [2**31]), "ignore_eos": (True, False), "seed": (0, 1, -1, 2**64),
    "skip_special_tokens": (True, False), "best_of": (1, 2), "top_k": (-1, 0, 5), "min_p": (0, 0.1),
    "presence_penalty": (0, 1), "frequency_penalty": (0, -2), "repetition_penalty": (1, 1.1),
    "logit_bias": ({}, {"1": 5}), "prompt_logprobs": (None, 0), "guided_json": ({"type": "object"},),
    "min_tokens": (0, 3), "bad_words": ([], ["x"]), "truncate_prompt_tokens": (None, 4), "user": ("me", 3),
    "priority": (0, "high"), "cache_salt": ("s",), "spaces_between_special_tokens": (True,),
}  # fmt: skip
_STREAM: dict[str, tuple[Any, ...]] = {
    "model": (MODEL, "", None, "another"), "stream": (True, False), "return_token_ids": (True, False),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {}, None),
    "return_tokens_as_token_ids": (True, False),
}  # fmt: skip
_COMPLETION = (
    _SAMPLING | _STREAM | {"logprobs": (0, 1, 2, -1, None), "echo": (False, True), "suffix": (None, "s")}
)
_CHAT = _SAMPLING | _STREAM | {
    "logprobs": (True, False), "top_logprobs": (0, 1, 20), "max_completion_tokens": (1, 5, 0, 400),
    "tools": ([], [{"type": "function", "function": {"name": "f", "parameters": {}}}], [{}]),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
    "response_format": ({"type": "text"}, {"type": "json_object"}, {"type": "x"}),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"chat_template": "{{ 1 }}"}, {"self": 1},
        {"messages": 1}),
    "add_generation_prompt": (True, False), "continue_final_message": (True, False),
    "include_reasoning": (False,),
    "parallel_tool_calls": (True,), "reasoning_effort": ("low",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request. `has_key`: of the endpoint's."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    has_key: bool


def _prompt(dice: random.Random) -> Any:
    ids = [dice.randrange(0, 300) for _ in range(dice.randrange(0, 12))]
    texts = [dice.choice(_TEXTS) for _ in range(dice.randrange(1, 4))]
    return dice.choice((dice.choice(_TEXTS), ids, texts, [ids, ids], [ids], [ids, texts]))


def _message(dice: random.Random) -> dict[str, Any]:
    text = dice.choice(_TEXTS)
    message: dict[str, Any] = {"role": dice.choice(("user", "assistant", "system", "tool", "nobody", 3))}
    message["content"] = dice.choice(
        (text, None, [{"type": "text", "text": text}], [{"type": "image_url"}], [text])
    )
    if dice.random() < 0.2:
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": dice.choice(("{}", {}, None))},
        }
        message["tool_calls"] = dice.choice(([call], [], None, [{}], "x"))
    if dice.random() < 0.1:
        message[dice.choice(("reasoning", "reasoning_content", "tool_call_id", "name"))] = dice.choice(_ODD)
    return message


def _completion(dice: random.Random) -> dict[str, Any]:
    return {"model": MODEL, "prompt": _prompt(dice)} | _some(dice, _COMPLETION)


def _chat(dice: random.Random) -> dict[str, Any]:
    messages = [_message(dice) for _ in range(dice.randrange(0, 4))]
    return {"model": MODEL, "messages": messages, "max_tokens": 8} | _some(dice, _CHAT)


def _generate(dice: random.Random) -> dict[str, Any]:
    ids = [dice.randrange(0, 300) for _ in range(dice.randrange(0, 12))]
    return {
        "model": MODEL,
        "token_ids": ids,
        "sampling_params": _some(dice, _SAMPLING | {"logprobs": (0, 1, None)}),
    }


def _tokenize(dice: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "add_special_tokens": dice.random() < 0.5,
        "return_token_strs": dice.random() < 0.5,
    }
    if dice.random() < 0.7:
        body["prompt"] = dice.choice(_TEXTS)
    if dice.random() < 0.5:
        body["messages"] = [_message(dice) for _ in range(dice.randrange(0, 3))]
    return body


def _detokenize(dice: random.Random) -> dict[str, Any]:
    return {"tokens": [dice.randrange(0, dice.choice((200, 300))) for _ in range(dice.randrange(0, 9))]}


def _some(dice: random.Random, fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    names = dice.sample(sorted(fields), dice.randrange(0, 5))
    return {name: dice.choice(fields[name]) for name in names}


_BODIES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "/v1/completions": _completion, "/v1/chat/completions": _chat, "/inference/v1/generate": _generate,
    "/tokenize": _tokenize, "/detokenize": _detokenize,
}  # fmt: skip
_GETS = ("/v1/models", "/tokenizer_info", "/version", "/health")
_LOST = ("/", "/v1", "/v1/embeddings", "/docs", "/openapi.json", "/episodes", "/v1/models/../x", "/%00")


def _replaced(dice: random.Random, value: Any) -> Any:
    """Return a body with one place of it replaced by something odd."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(sorted(value))
        return value | {name: _replaced(dice, value[name])}
    if isinstance(value, list) and value and dice.random() < 0.5:
        at = dice.randrange(len(value))
        return [*value[:at], _replaced(dice, value[at]), *value[at + 1 :]]
    return dice.choice(_ODD)


def _damaged(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return dice.choice((
        data[:at], data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :], b"", b"null", b"[" * 100_000,
        b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}', b"NaN",
        b'{"prompt": "x", "max_tokens": 1e999}',
        b'{"prompt": "' + b"\xff" + b'"}', b'{"prompt": ' + b"9" * 5000 + b"}", data + data,
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}', b'{"tokens": [1], "tokens": [[[]]]}',
    ))  # fmt: skip


def made_request(seed: int, number: int, key: str) -> SentRequest:
    """Return request `number` of a seed."""
    dice = random.Random(f"{seed}/{number}")
    has_key = dice.random() < 0.9
    wrong = dice.choice(
        (None, "", "Bearer", "Bearer sk-none", f"bearer {key}x", f"Basic {key}", key[:-1], "Bearer ü")
    )
    authorization = f"Bearer {key}" if has_key else wrong
    headers = {} if authorization is None else {"authorization": authorization}
    if dice.random() < 0.1:
        headers["x-session-id"] = dice.choice(("s", "s" * 500, ""))
    if dice.random() < 0.05:
        headers["x-request-id"] = dice.choice(("r 1", "", "r" * 200, f"r{number}"))
    if dice.random() < 0.1:
        method, path = dice.choice(("GET", "POST", "PUT", "DELETE")), dice.choice((*_GETS, *_LOST, *_BODIES))
        return SentRequest(method, path, b"", headers, has_key)
    path = dice.choice(sorted(_BODIES))
    body: Any = _BODIES[path](dice)
    if path in ("/v1/completions", "/v1/chat/completions") and dice.random() < 0.4:
        body["stream"] = True
    while dice.random() < 0.25:
        body = _replaced(dice, body)
    data = json.dumps(body).encode()
    return SentRequest("POST", path, _damaged(dice, data) if dice.random() < 0.1 else data, headers, has_key)
