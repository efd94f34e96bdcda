"""Text of a growing response: characters, stop strings and seams."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rlboost_runtime.inference.text import Words

END = 256


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = bytes(i for i in token_ids if i < END)
        tail = "" if skip_special_tokens or END not in token_ids else "<end>"
        return kept.decode(errors="replace") + tail


def said(text: str, stops: Sequence[str] = (), seed: int = 0, ids: Sequence[int] = ()) -> tuple[str, Words]:
    """Return what comes of a text whose tokens arrive in random portions."""
    words, rng, left = Words(Bytes(), stops), random.Random(seed), list(text.encode()) + list(ids)
    out = ""
    while left:
        size = rng.randint(1, 5)
        out += words.add(left[:size])
        assert "\ufffd" not in out, "half a character is shown"
        left = left[size:]
    return out + words.flush(), words


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("text", ["plain", "naïve ☃ 漢字", "👩‍👩‍👧 family", ""])
def test_characters_come_whole(text: str, seed: int) -> None:
    assert said(text, seed=seed)[0] == text


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("text", "stops", "wanted", "used"),
    [
        ("one\n\ntwo", ["\n\n"], "one", 5),
        ("one\n two\n", ["\n\n"], "one\n two\n", 9),
        ("a STOP b", ["STOP", "ST"], "a ", 4),
        ("aaab", ["aab"], "a", 4),
        ("ends ENDE", ["ENDER"], "ends ENDE", 9),
        ("ünd", ["n", "ü"], "", 2),
    ],
)
def test_a_stop_string_ends_the_text_wherever_portions_end(
    text: str, stops: list[str], wanted: str, used: int, seed: int
) -> None:
    found, words = said(text, stops, seed)
    assert found == wanted
    assert words.num_tokens == used
    assert words.is_stopped == (used < len(text.encode()) or wanted != text)
    assert words.stopped_by in (stops if words.is_stopped else [None])


def test_what_may_begin_a_stop_string_waits() -> None:
    words = Words(Bytes(), ["END"])
    assert words.add(b"a E") == "a "
    assert words.add(b"N") == ""
    assert words.add(b"d") == "ENd"
    assert words.add(b"E") == ""
    assert words.flush() == "E"


def test_the_token_that_ends_a_response_counts_and_has_no_text() -> None:
    words = Words(Bytes(), stop_token_ids=[ord("3"), END], skip_special_tokens=False)
    assert words.add(list(b"sold ")) + words.add(list(b"3")) + words.flush() == "sold "
    assert words.num_tokens == 6
    assert not words.is_stopped, "it was the engine that stopped"


def test_the_end_token_is_no_text_unless_it_is_asked_for() -> None:
    assert said("done", ids=[END])[0] == "done"
    words = Words(Bytes(), skip_special_tokens=False)
    assert words.add([*b"done", END]) + words.flush() == "done<end>"


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    words = Words(Bytes())
    assert words.add([0xFF] * 3) == ""
    assert words.flush() == "\ufffd" * 3
    words = Words(Bytes())
    assert "\ufffd" in words.add([0xFF] * 20), "a response of nonsense is not held back for ever"
