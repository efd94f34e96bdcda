"""The attached view: one block of lines on a terminal that shows how a run is doing, until it ends.

It never scrolls, sends only what changed, and not oftener than statuses come (about once a second).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TextIO

from rlboost_cli.live.run_view import live_lines
from rlboost_cli.runs.run_status import RunStatus
from rlboost_cli.terminal.painter import Painter
from rlboost_cli.terminal.screen import Size, glyphs_for, has_style

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def watch(statuses: Iterable[RunStatus], stream: TextIO) -> None:
    """Show statuses on the terminal `stream` until they end, or until Ctrl-C; the last one stays."""
    painter, glyphs = Painter(stream, has_style=has_style(stream)), glyphs_for(stream)
    last: RunStatus | None = None

    def paint(found: RunStatus, *, is_last: bool = False) -> None:
        size = Size(*shutil.get_terminal_size())
        painter.paint(live_lines(found, size, glyphs, is_last=is_last), size)

    stream.write(_HIDE_CURSOR)
    try:
        for last in statuses:
            paint(last)
    except KeyboardInterrupt:
        if last is not None:
            paint(last, is_last=True)
        raise
    finally:
        stream.write("\r" + _SHOW_CURSOR)
        stream.flush()
