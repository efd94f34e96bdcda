"""The troubleshooting page quotes what the program says, and leaves out nothing that a person may meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = ("rlboost_cli", "runtime/rlboost_runtime", "providers/rlboost_providers")
HOLE = "…"
COVERED = (  # modules whose errors a user of the local product meets: each must be on the page
    "rlboost_cli/commands/end.py",
    "rlboost_cli/runs/client.py",
    "rlboost_cli/terminal/errors.py",
    "rlboost_cli/runs/teardown.py",
    "runtime/rlboost_runtime/run/create.py",
    "runtime/rlboost_runtime/run/index.py",
    "runtime/rlboost_runtime/supervisor/supervisor.py",
    "runtime/rlboost_runtime/trainer/rewards/outcome.py",
)
NOT_FOR_USERS = (
    "; the last one ",  # put together from what the page quotes
    "answered … with something that is not JSON",  # another program on the port
    "lies outside the job file's folder",  # told by the job's check, in its own words
    "cannot be copied from",  # likewise
    "machines … may still run",  # in the supervisor's log
    "the disk refuses",  # likewise
)
ERRORS = {"ConfigError", "NotFound", "RuntimeFault", "ProviderError", "ProtocolError", "NotAnswering"}


def _text(node: ast.expr) -> str | None:
    """A string as written, with holes for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or HOLE for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left) or HOLE) + (_text(right) or HOLE)
    return None


def _trees(files: Iterator[Path] | list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in files:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


@cache
def _said() -> tuple[str, ...]:
    """Every string of the product."""
    files = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    nodes = (node for _, tree in _trees(files) for node in ast.walk(tree) if isinstance(node, ast.expr))
    return tuple({text for node in nodes if (text := _text(node))})


def _fragments(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(HOLE)) if part]


def _quotes() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def _is_said(quote: str) -> bool:
    parts = _fragments(quote)
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    return any(parts[0] in text and pattern.search(text) for text in _said())


@pytest.mark.parametrize("quote", _quotes())
def test_what_the_page_quotes_is_said_by_the_program(quote: str) -> None:
    assert _is_said(quote)


def test_the_check_notices_a_text_that_nobody_says() -> None:
    assert not _is_said("the disk of … is empty")


def _problems(path: Path) -> Iterator[str]:
    for _, tree in _trees([path]):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        names = [(call, call.func.id) for call in calls if isinstance(call.func, ast.Name)]
        texts = [_text(call.args[0]) or "" for call, name in names if name in ERRORS]
        yield from (text for text in texts if max(map(len, _fragments(text)), default=0) > 8)


@pytest.mark.parametrize("module", COVERED)
def test_the_page_has_every_error_of_the_modules_that_users_meet(module: str) -> None:
    page = [" ".join(_fragments(quote)) for quote in _quotes()]
    missing = []
    for problem in _problems(ROOT / module):
        if any(" ".join(_fragments(known)) in " ".join(_fragments(problem)) for known in NOT_FOR_USERS):
            continue
        if not any(_overlap(problem, quote) for quote in _quotes()):
            missing.append(problem)
    assert missing == [], page


def _overlap(problem: str, quote: str) -> bool:
    """Whether the page's quote is about this problem: one of its longer fragments stands in it."""
    return any(len(part) > 4 and part in problem for part in _fragments(quote))
