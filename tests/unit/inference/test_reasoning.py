"""The reasoning in a response, found wherever the pieces of the text end."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from rlboost_runtime.inference.reasoning import ReasoningText, Tags, tags_of

TAGS = Tags("<think>", "</think>")


def divided(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    text = ReasoningText(TAGS, is_open=is_open)
    found = [*map(text.add, pieces), text.finish()]
    return "".join(thoughts for thoughts, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("written", "is_open", "thoughts", "answer"),
    [
        ("<think>a < b</think>\n\nyes", False, "a < b", "\n\nyes"),
        ("\n<think>a</think>b</think>", False, "a", "b</think>"),
        ("a</thin</think>b", True, "a</thin", "b"),
        ("it is cut off </thi", True, "it is cut off </thi", ""),
        ("no thoughts <think>", False, "", "no thoughts <think>"),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", "  "),
        ("</think>", True, "", ""),
        ("", False, "", ""),
    ],
)
def test_reasoning_and_answer_are_told_apart_wherever_pieces_end(
    written: str, is_open: bool, thoughts: str, answer: str, seed: int
) -> None:
    dice, pieces, rest = random.Random(seed), [], written
    while rest:
        size = dice.randint(1, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert divided(pieces, is_open=is_open) == (thoughts, answer)


@pytest.mark.parametrize(
    ("added", "special", "template", "tags"),
    [
        ({"<think>": 1, "</think>": 2}, [], None, TAGS),
        ({"<think>": 1, "</think>": 2}, ["<think>", "</think>"], None, None),
        ({}, [], "{{ content.split('</think>')[-1] }}", TAGS),
        ({}, [], "{{ content }}", None),
        ({"<think>": 1}, [], None, None),
    ],
)
def test_a_model_reasons_if_its_tokenizer_or_template_has_the_tags(
    added: dict[str, int], special: list[str], template: str | None, tags: Tags | None
) -> None:
    tokenizer = SimpleNamespace(
        added_tokens_encoder=added, all_special_tokens=special, chat_template=template
    )
    assert tags_of(tokenizer) == tags
