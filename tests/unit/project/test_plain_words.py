"""Users read plain English: phrases that a review found hard to read do not come back."""

from __future__ import annotations

import ast
import html
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


SCREENS = sorted(path.stem for path in (ROOT / "docs" / "screens").glob("*.svg"))


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


def lines_of_screen(path: Path) -> list[str]:
    """Lines of a captured terminal, which has an element per letter, 12.2 wide."""
    rows: dict[float, dict[int, str]] = {}
    letter = r'<text[^>]*\bx="([\d.]+)" y="([\d.]+)" textLength[^>]*>([^<]*)</text>'
    for x, y, text in re.findall(letter, path.read_text(encoding="utf-8")):
        rows.setdefault(float(y), {})[round(float(x) / 12.2)] = html.unescape(text)
    return ["".join(row.get(x, " ") for x in range(max(row) + 1)) for _, row in sorted(rows.items())]


@pytest.mark.parametrize("name", SCREENS)
def test_screens_show_what_is_said_today(name: str) -> None:
    lines = lines_of_screen(ROOT / "docs" / "screens" / f"{name}.svg")
    text = " ".join(" ".join(lines).split())
    assert "quickstart" in text or "rewards.py" in text, "read letter by letter"
    assert not PHRASES.search(text)
    assert not re.search(r"\$\d+\.\d{5}", text), "no amount has more than four decimals"


def test_the_phrases_are_found_where_they_are() -> None:
    old = '"""Nobody reads this."""\ndef f():\n    """It goes on."""\n    f"{n} responses go on elsewhere"\n'
    assert [text for text in strings(old) if PHRASES.search(text)] == [" responses go on elsewhere"]
