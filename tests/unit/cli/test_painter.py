"""What the painter sends, as a terminal understands it: pyte stands in for the terminal."""

from __future__ import annotations

import io
import random

import pyte
import pytest

from rlboost_cli.terminal.screen import Line, Painter, Size

SIZE = Size(40, 12)


class Screen:
    def __init__(self, *, has_style: bool = True) -> None:
        self.screen = pyte.Screen(*SIZE)
        self.stream = pyte.Stream(self.screen)
        self.out = io.StringIO()
        self.painter = Painter(self.out, has_style=has_style)

    def paint(self, *lines: Line | str, size: Size = SIZE) -> str:
        self.out.truncate(0)
        self.out.seek(0)
        sent = self.painter.paint([x if isinstance(x, Line) else Line(x) for x in lines], size)
        text = self.out.getvalue()
        assert sent == len(text)
        self.stream.feed(text)
        return text

    @property
    def shown(self) -> list[str]:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")


def test_the_same_frame_again_sends_nothing() -> None:
    screen = Screen()
    assert screen.paint("one", "two") != ""
    assert screen.paint("one", "two") == ""


def test_one_figure_costs_a_few_bytes() -> None:
    screen = Screen()
    screen.paint("demo: rollout, 90 s", "step 4/12", "cost $1.50 so far, $18.00 per hour")
    sent = screen.paint("demo: rollout, 91 s", "step 4/12", "cost $1.51 so far, $18.00 per hour")
    assert len(sent) < 40, sent
    assert screen.shown == ["demo: rollout, 91 s", "step 4/12", "cost $1.51 so far, $18.00 per hour"]


def test_blocks_grow_shrink_and_stay_in_place() -> None:
    screen = Screen()
    screen.stream.feed("$ rlboost\r\n")
    for frame in (["a", "b"], ["a", "b", "c", "d"], ["x"], ["x", "y"], []):
        screen.paint(*frame)
        assert screen.shown == ["$ rlboost", *frame]
        assert (screen.screen.cursor.y, screen.screen.cursor.x) == (len(frame) + 1, 0)


def test_a_key_that_was_echoed_moves_nothing() -> None:
    screen = Screen()
    screen.paint(Line("14:00 one", "warn"), "14:01 two")
    screen.stream.feed("^C")
    screen.paint("13:59 zero", "14:00 one")
    assert screen.shown[:2] == ["13:59 zero", "14:00 one"]


def test_a_block_at_the_bottom_scrolls_what_was_before() -> None:
    screen = Screen()
    screen.stream.feed("".join(f"old {n}\r\n" for n in range(10)))
    screen.paint("a", "b", "c", "d")
    assert screen.paint("a", "b", "c", "e") == "\r\x1b[1Ae\r\x1b[1B"
    assert screen.shown[-4:] == ["a", "b", "c", "e"]


def test_a_new_size_paints_everything_anew() -> None:
    screen = Screen()
    screen.paint("abcdef", "ghi")
    screen.paint("abc", "ghi", size=Size(30, 12))
    assert screen.shown == ["abc", "ghi"]


def test_styles_are_only_for_those_who_want_them() -> None:
    plain, styled = Screen(has_style=False), Screen()
    assert "\x1b[" not in plain.paint(Line("title", "title"), Line("careful", "warn"))
    assert "\x1b[33mcareful\x1b[0m" in styled.paint(Line("title", "title"), Line("careful", "warn"))
    assert plain.shown == styled.shown


def test_leaving_puts_the_next_block_below() -> None:
    screen = Screen()
    screen.paint("first")
    screen.painter.leave()
    screen.paint("second")
    assert screen.shown == ["first", "second"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_changes_the_screen_shows_the_last_frame(seed: int) -> None:
    draw = random.Random(seed)
    screen = Screen()
    styles = ["", "title", "warn", "dim"]

    def line() -> Line:
        signs = draw.choice(["abc ", "ab▁█", "漢a", "0123456789"])
        return Line("".join(draw.choices(signs, k=draw.randrange(18))).rstrip(), draw.choice(styles))

    frame = [line() for _ in range(5)]
    for _ in range(30):
        frame = [line() if draw.random() < 0.4 else old for old in frame]
        if draw.random() < 0.3:
            frame = frame[: draw.randrange(1, 6)] + [line() for _ in range(draw.randrange(3))]
        screen.paint(*frame)
        wanted = [line.text for line in frame]
        while wanted and not wanted[-1]:
            wanted.pop()
        shown = ["".join(x).rstrip() for x in screen.screen.display][: len(wanted)]
        assert shown == wanted
