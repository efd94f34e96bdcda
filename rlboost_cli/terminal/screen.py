"""What a terminal can show: its size, lines with a style, the signs that charts are drawn with.

Lines painted in place on a terminal, sending only what changed.

For slow links: a frame that equals the one before sends nothing; a line that differs in three figures sends
the part from the first to the last of them. rich's Live sends whole frames, which is why this is our own.

The painter owns the block of lines that it has painted; the cursor rests below it, at column 1. Who writes
to the terminal meanwhile calls `leave` first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO


class Line(NamedTuple):
    """One line and the name of its style: title, header, good, busy, warn, bad, dim or none."""

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
    """Return True if lines on `stream` can be painted over: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def has_style(stream: TextIO) -> bool:
    """Return True if bold and colour are wanted on `stream`."""
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


_SGR = {"title": "1", "header": "1", "good": "32", "busy": "36", "warn": "33", "bad": "31", "dim": "2"}
_UP, _DOWN, _COLUMN = "\x1b[{}A", "\x1b[{}B", "\x1b[{}G"
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[K", "\x1b[J"


class Painter:
    """Paints blocks of lines, each over the one before. Lines must be narrower than the terminal."""

    def __init__(self, stream: TextIO, *, has_style: bool) -> None:
        self._stream = stream
        self._has_style = has_style
        self._painted: list[Line] = []
        self._size: Size | None = None

    def paint(self, lines: Sequence[Line], size: Size) -> int:
        """Show `lines` on a terminal of `size`; return how many characters were sent."""
        sent = self._anew(lines, size) if self._size not in (None, size) else self._changes(lines)
        self._painted, self._size = list(lines), size
        if sent:
            self._stream.write(sent)
            self._stream.flush()
        return len(sent)

    def leave(self) -> None:
        """Let what is painted stay where it is; the next block goes below it."""
        self._painted = []

    # --- what to send -------------------------------------------------------------------------------------

    def _anew(self, lines: Sequence[Line], size: Size) -> str:
        """Everything again, after the terminal's size changed: it has wrapped what is too wide for it now."""
        rows = sum(max(1, -(-len(line.text) // max(1, size.width))) for line in self._painted)
        up = _UP.format(rows) if rows else ""  # stops at the top by itself
        return "\r" + up + _CLEAR_BELOW + "".join(self._whole(line) + "\r\n" for line in lines)

    def _changes(self, lines: Sequence[Line]) -> str:
        old = self._painted
        if list(lines) == old:
            return ""
        parts = ["\r"]  # whoever pressed a key has moved the cursor: Ctrl-C shows as ^C
        at = len(old)  # the line that the cursor is on
        for index, line in enumerate(lines[: len(old)]):
            change = self._change(old[index], line)
            if change:
                parts.append(_move(index - at) + change + "\r")
                at = index
        keep = min(len(old), len(lines))
        parts.append(_move(keep - at))
        if len(lines) < len(old):
            parts.append(_CLEAR_BELOW)
        parts += [self._whole(line) + "\r\n" for line in lines[keep:]]
        return "".join(parts)

    def _change(self, old: Line, new: Line) -> str:
        """Return what turns one line into another, from column 1; empty where they are the same."""
        if old == new:
            return ""
        plain = old.text.isascii() and new.text.isascii()
        if old.style != new.style or not (plain or _same_widths(old.text, new.text)):
            return self._whole(new) + _CLEAR_LINE
        first = _common_prefix(old.text, new.text)
        last = len(new.text)
        if len(old.text) == last:
            last -= _common_prefix(old.text[first:][::-1], new.text[first:][::-1])
        start = _COLUMN.format(first + 1) if first else ""
        end = _CLEAR_LINE if len(old.text) > len(new.text) else ""
        return start + self._whole(Line(new.text[first:last], new.style)) + end

    def _whole(self, line: Line) -> str:
        code = _SGR.get(line.style) if self._has_style else None
        return f"\x1b[{code}m{line.text}\x1b[0m" if code and line.text else line.text


def _move(lines: int) -> str:
    if lines == 0:
        return ""
    return _DOWN.format(lines) if lines > 0 else _UP.format(-lines)


def _common_prefix(first: str, second: str) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _same_widths(first: str, second: str) -> bool:
    """Return True if every sign of both is one column wide, so that columns can be counted."""
    from rich.cells import cell_len

    return cell_len(first) == len(first) and cell_len(second) == len(second)
