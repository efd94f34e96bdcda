"""docs/variables.md has every environment variable that the code reads or sets for others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "variables.md").read_text(encoding="utf-8")
PACKAGES = ("rlboost_cli", "runtime/rlboost", "runtime/rlboost_runtime", "providers/rlboost_providers")
SOURCES = [
    path.read_text(encoding="utf-8") for each in PACKAGES for path in sorted((ROOT / each).rglob("*.py"))
]
OURS = re.compile(r"RLBOOST_[A-Z_]+")


def named(tree: ast.AST) -> Iterator[str]:
    """Yield what is read from `os.environ` by a literal name, and every name of ours that is a literal."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) if OURS.fullmatch(name):
                yield name
            case (
                ast.Subscript(value=mapping, slice=ast.Constant(value=str(name)))
                | ast.Call(func=ast.Attribute(value=mapping), args=[ast.Constant(value=str(name)), *_])
            ) if ast.unparse(mapping) == "os.environ":
                yield name
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if (
                ast.unparse(function) == "os.getenv"
            ):
                yield name


def test_the_page_names_every_variable() -> None:
    readers = [text for text in SOURCES if re.search(r"environ|getenv|RLBOOST_", text)]
    found = {name for text in readers for name in named(ast.parse(text))}
    assert len(found) > 25
    assert sorted(name for name in found if f"`{name}`" not in PAGE) == []


def test_the_page_names_no_variable_of_ours_that_is_gone() -> None:
    known = set(OURS.findall("".join(SOURCES)))
    assert set(OURS.findall(PAGE)) - known == set()


def test_reading_a_variable_is_seen() -> None:
    source = (
        'os.environ.get("A", "")\nos.environ["B"]\nos.getenv("C")\nos.environ.pop("D")\nX = "RLBOOST_E"\n'
    )
    assert sorted(named(ast.parse(source))) == ["A", "B", "C", "D", "RLBOOST_E"]
