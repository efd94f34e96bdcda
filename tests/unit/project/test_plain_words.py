"""Users read plain English: phrases that a review found hard to read do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PHRASES = re.compile(
    r"\b(is|are) to be had|\bgo(es)? on\b(?! (a|the|its|his|one) )|\bgoing on\b|\b(is|are) told\b|\bnobody\b"
    r"|\bfor want of\b|\banew\b|\bmeanwhile\b|\bof ours\b|\btaken? away\b|\blet us in\b|\bmay not act\b"
    r"|\bfor certain\b|\bside by side\b|\bwhat becomes of\b|\b(is|are) no folder\b|\bmiddling\b"
    r"|\bwhat its \w+ said\b|\bit is asked again\b|\brefused, at no cost\b|\bin all, done\b"
    r"|\bended by (stop|length)\b|\bnone yet\b|\beverybody on the way\b|\bdid not let\b",
    re.IGNORECASE,
)
"""From the review's list of phrases and the pattern words that it names."""


def strings(source: str) -> Iterator[str]:
    """Texts of a module that are no docstrings: help, messages, lines of screens."""
    tree = ast.parse(source)
    held = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, held)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


@pytest.mark.parametrize("folder", ["rlboost_cli", "providers", "runtime", "templates"])
def test_messages_are_plain(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in strings(path.read_text(encoding="utf-8"))
        if PHRASES.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("pattern", ["README.md", "docs/*.md", "templates/**/*.yaml", "examples/**/*.yaml"])
def test_pages_and_templates_are_plain(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in sorted(ROOT.glob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PHRASES.search(line)
    ]
    assert found == []


def test_the_phrases_are_found_where_they_are() -> None:
    old = '"""Nobody reads this."""\ndef f():\n    """It goes on."""\n    f"{n} responses go on elsewhere"\n'
    assert [text for text in strings(old) if PHRASES.search(text)] == [" responses go on elsewhere"]
