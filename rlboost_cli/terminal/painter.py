"""Lines painted in place on a terminal, sending only what changed.

For slow links: a frame that equals the one before sends nothing; a line that differs in three figures sends
the part from the first to the last of them. rich's Live sends whole frames, which is why this is our own.

The painter owns the block of lines that it has painted; the cursor rests below it, at column 1. Who writes
to the terminal meanwhile calls `leave` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rlboost_cli.terminal.screen import Line, Size

_SGR = {"title": "1", "header": "1", "warn": "33", "dim": "2"}
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
    """Whether every sign of both is one column wide, so that columns can be counted."""
    from rich.cells import cell_len

    return cell_len(first) == len(first) and cell_len(second) == len(second)
