"""What a terminal can show: its size, lines with a style, the signs that charts are drawn with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO


class Line(NamedTuple):
    """One line and the name of its style: title, header, warn, dim or none."""

    text: str
    style: str = ""


class Size(NamedTuple):
    """Of a terminal, in characters."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of signs, each one column wide."""

    sparks: str
    """Bars from the least to the greatest."""
    done: str
    left: str
    more: str
    """Ends a line that was cut off."""

    def sparkline(self, values: Sequence[float | None], width: int = 40) -> str:
        """Return the last `width` values as bars, from the least to the greatest among them."""
        shown = [v for v in values if v is not None][-width:]
        if not shown:
            return ""
        low, span = min(shown), (max(shown) - min(shown)) or 1.0
        top = len(self.sparks) - 1
        return "".join(self.sparks[min(top, int((v - low) / span * len(self.sparks)))] for v in shown)

    def bar(self, share: float, width: int) -> str:
        """Return a bar of `width` columns, `share` (0 to 1) of it done; full only where all is done."""
        filled = min(width, int(max(0.0, share) * width))
        return self.done * filled + self.left * (width - filled)

    def cut(self, text: str, width: int) -> str:
        """Return `text` on at most `width` columns and one line."""
        from rich.cells import cell_len, set_cell_size

        line = " ".join(text.splitlines()) if "\n" in text else text
        if (len(line) if line.isascii() else cell_len(line)) <= width:
            return line
        return set_cell_size(line, max(0, width - len(self.more))).rstrip() + self.more[:width]


UNICODE = Glyphs(sparks="▁▂▃▄▅▆▇█", done="━", left="╌", more="…")
ASCII = Glyphs(sparks="_.-=+*#@", done="#", left=".", more="...")


def can_redraw(stream: TextIO) -> bool:
    """Whether lines on `stream` can be painted over: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def has_style(stream: TextIO) -> bool:
    """Whether bold and colour are wanted on `stream`."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def between_words(words: str, stream: TextIO) -> str:
    """Return `words` as they suit `stream`: on a terminal, lines too long for it are broken between words,
    never inside a path or an option; in a file they stay whole for whoever searches it."""
    if not stream.isatty():
        return words
    import shutil
    import textwrap

    width = max(40, shutil.get_terminal_size().columns - 1)
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        for line in words.split("\n")
    )


def glyphs_for(stream: TextIO) -> Glyphs:
    """Return the signs that `stream` can show."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    # Python takes the locale C for UTF-8, which only a terminal set to it on purpose may contradict
    is_plain = os.environ.get("LC_ALL", "") in ("C", "POSIX") or os.environ.get("TERM") == "dumb"
    return UNICODE if encoding.startswith("utf") and not is_plain else ASCII
