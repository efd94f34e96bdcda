"""Tool calls in the text of a response, as OpenAI's clients want them.

Two ways to write one are known: between `<tool_call>` and `</tool_call>` (Hermes, Qwen), and a response that
is JSON and nothing else, an object or a list of them (Llama, Mistral). A call is an object with a `name` and
its `arguments` (or `parameters`). What looks like a call and is none stays text: the client sees it, and a
policy that is trained is not told that it was right.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple

from rlboost_runtime.inference.reasoning import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|\Z)", re.DOTALL)
_BARE = ("{", "[")


class ToolCall(NamedTuple):
    """One call; `arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Return it in OpenAI's shape; with its `index` in a stream."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return place | {"id": self.call_id, "type": "function", "function": function}


def find_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its tool calls, and these."""
    calls: list[ToolCall] = []

    def cut(match: re.Match[str]) -> str:
        found = _calls_of(match[1])
        calls.extend(found)
        return "" if found else match[0]

    if OPEN in text:
        rest = _TAGGED.sub(cut, text)
        return (rest.strip(), calls) if calls else (text, [])
    if text.strip().startswith(_BARE):
        calls = _calls_of(text)
    return ("", calls) if calls else (text, [])


def _calls_of(text: str) -> list[ToolCall]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    objects = found if isinstance(found, list) else [found]
    calls = [_call(each) for each in objects]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(value: object) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        text = arguments
    elif isinstance(arguments, dict):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], text)


class ToolText:
    """The text of a stream, held back from where a tool call may begin."""

    def __init__(self) -> None:
        self.text = ""
        """All of it so far."""
        self._shown = 0

    def add(self, text: str) -> str:
        """Return the text that is certainly no part of a call."""
        self.text += text
        if self.text.lstrip().startswith(_BARE):
            return ""
        end = self.text.find(OPEN)
        if end < 0:
            end = len(self.text) - overlap(self.text, OPEN)
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the text that is left once all has come, and the calls."""
        rest = self.text[self._shown :]
        return find_tool_calls(rest)
