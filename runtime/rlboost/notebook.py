"""A run in a notebook: the live view of the terminal as HTML, repainted in its cell."""

from __future__ import annotations

import sys
from html import escape

from rlboost_cli.runs.run_status import RunStatus
from rlboost_cli.terminal.screen import UNICODE, Line, Size
from rlboost_cli.views.live import follow
from rlboost_cli.views.run_view import WIDEST, live_lines
from rlboost_runtime.run.folder import RunFolder

_SIZE = Size(WIDEST, 45)
_CSS = {
    "title": "font-weight:bold",
    "header": "font-weight:bold",
    "good": "color:#2a8a4a",
    "busy": "color:#1f86a0",
    "warn": "color:#b07800",
    "bad": "color:#d03a3a",
    "dim": "opacity:.65",
}
"""Of the styles of `Line`; readable on white and on black."""


def live_html(found: RunStatus) -> str:
    """Return the view of a status; all text is escaped."""
    lines = "\n".join(_span(line) for line in live_lines(found, _SIZE, UNICODE, is_last=True))
    return f'<pre style="line-height:1.3">{lines}</pre>'


def follow_in_notebook(run: RunFolder) -> bool:
    """Show the run in the current cell until it ends, and return True; False at once outside a notebook."""
    if not _is_notebook():
        return False
    from IPython.display import HTML, display

    shown = None
    for found in follow(run):
        view = HTML(live_html(found))
        if shown is None:
            shown = display(view, display_id=True)
        else:
            shown.update(view)
    return True


def _is_notebook() -> bool:
    """Return True where cells are run by a kernel, whose output a browser or an editor shows."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def _span(line: Line) -> str:
    text = escape(line.text)
    css = _CSS.get(line.style)
    return f'<span style="{css}">{text}</span>' if css else text
