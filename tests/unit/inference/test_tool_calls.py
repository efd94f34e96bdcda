"""Tool calls in the text of a response, whole and streamed."""

from __future__ import annotations

import json

import pytest

from rlboost_runtime.inference.tool_calls import ToolText, find_tool_calls

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
TWO = f'I add. {HERMES}<tool_call>{{"name": "stop", "arguments": {{}}}}</tool_call>'


def calls_of(text: str) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in find_tool_calls(text)[1]]


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (HERMES, [("add", {"a": 1, "b": "ü"})], ""),
        (TWO, [("add", {"a": 1, "b": "ü"}), ("stop", {})], "I add."),
        (HERMES.removesuffix("</tool_call>"), [("add", {"a": 1, "b": "ü"})], ""),
        ('{"name": "add", "parameters": {"a": 2}}', [("add", {"a": 2})], ""),
        ('[{"name": "f"}, {"name": "g", "arguments": {}}]', [("f", {}), ("g", {})], ""),
    ],
)
def test_calls_are_found_in_the_ways_in_which_models_write_them(
    text: str, calls: list[tuple[str, object]], rest: str
) -> None:
    assert find_tool_calls(text)[0] == rest
    assert calls_of(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "no call at all", '{"answer": 3}', '[1, 2]', "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 7}</tool_call>', '{"name": "f", "arguments": 3}', "[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    assert find_tool_calls(text) == (text, [])


def test_every_call_has_an_id_of_its_own() -> None:
    ids = [call.call_id for _ in range(3) for call in find_tool_calls(TWO)[1]]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", [TWO, "plain <tool text", "a <b", '{"name": "f"}', '{"a": 1}', HERMES])
def test_a_stream_shows_what_a_whole_answer_shows(text: str, size: int) -> None:
    held, shown = ToolText(), ""
    for at in range(0, len(text), size):
        shown += held.add(text[at : at + size])
    rest, calls = held.finish()
    whole, wanted = find_tool_calls(text)
    assert (shown + rest).strip() == whole.strip()
    assert [call[1:] for call in calls] == [call[1:] for call in wanted]
