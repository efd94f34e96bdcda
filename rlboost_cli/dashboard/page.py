"""The page as HTML: with its parts beside it, or in one file that opens from a disk without any network."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Any

from rlboost_cli.dashboard.data import encoded

STYLES = ("vendor/uPlot.min.css", "app.css")
LIST_SCRIPT = "runs.js"
SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/htm-preact.umd.js", "app.js")
SERVED_POLICY = (
    "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""What a browser may load for the served page: nothing of any other host, and no script in the page."""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
"""
_BODY = """</head>
<body>
<div id="app"><main><p>Loading {name} ...</p></main></div>
<noscript>This page needs JavaScript. `rlboost status` and `rlboost cost` print its figures.</noscript>
"""
_END = "</body>\n</html>\n"


def asset(name: str) -> str:
    """Return a file of `static`, such as "app.js"."""
    return (files("rlboost_cli.dashboard") / "static" / name).read_text(encoding="utf-8")


def served_page(run: str) -> str:
    """Return the page of a run whose parts and figures come from the server."""
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/static/{name}"></script>\n' for name in SCRIPTS)
    return _head(run) + styles + _BODY.format(name=escape(run)) + scripts + _END


def frozen_page(data: dict[str, Any]) -> str:
    """Return the page with everything in it. Its own policy forbids any request and any script but these."""
    scripts = [asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    parts = [
        _head(data["run"]),
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        *(f"<style>{asset(name)}</style>\n" for name in STYLES),
        _BODY.format(name=escape(data["run"])),
        f'<script type="application/json" id="data">{encoded(data).decode()}</script>\n',
        *(f"<script>{script}</script>\n" for script in scripts),
        _END,
    ]
    return "".join(parts)


def runs_page(rows: list[dict[str, Any]]) -> str:
    """Return the list of all runs, newest first; the browser asks for it again every 5 s."""
    lines = "".join(_row(row) for row in reversed(rows))
    titles = ("Run", "State", "Step", "Reward", "Spent")
    head = "<tr>" + "".join(f'<th scope="col">{title}</th>' for title in titles) + "</tr>"
    body = f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>" if rows else "<p>No runs yet.</p>"
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in STYLES)
    compare = '<p><a href="/compare">Compare runs</a></p>' if len(rows) > 1 else ""
    main = f"<body><main><h1>RLBoost runs</h1><section>{body}{compare}</section></main>\n"
    script = f'<script src="/static/{LIST_SCRIPT}" defer></script>\n'
    return _head("RLBoost runs") + styles + script + "</head>\n" + main + _END


def _row(row: dict[str, Any]) -> str:
    name, answered = escape(row["run"]), row.get("requests_answered")
    cells = (
        f'<a href="/runs/{name}/">{name}</a>',
        escape(row["state"]),
        f"{row['step']} / {_shown(row['steps'])}" if answered is None else f"{answered:,} answered",
        _shown(row["reward_mean"]),
        _shown(row["spent_usd"], "$"),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _head(title: str) -> str:
    return _HEAD.format(title=escape(title))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _shown(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{sign}{value:,.2f}" if isinstance(value, float) else str(value)
