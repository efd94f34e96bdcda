"""Every `rlboost …` and `make …` in the pages that people read is one that there is, with options it has."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from rlboost_cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("**/README.md")]
CODE = re.compile(r"^```(?:sh|console)\n(.*?)^```|`([^`\n]+)`", flags=re.M | re.S)
OMITTED = "…"
UsageError: Any = typer.BadParameter.__mro__[1]


def written(page: Path) -> Iterator[str]:
    """The lines of code of a page, blocks and inline."""
    for block, inline in CODE.findall(page.read_text(encoding="utf-8")):
        for line in (block or inline).splitlines():
            yield line.removeprefix("$ ").partition("  #")[0].strip()


def documented(program: str) -> list[tuple[str, str]]:
    pages = [
        p for p in dict.fromkeys(PAGES) if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
    ]
    found = [
        (page.relative_to(ROOT).as_posix(), match[1])
        for page in pages
        for line in written(page)
        if OMITTED not in line
        for match in re.finditer(rf"(?:^|[/ ])({program} [^|>&;)]+?)(?=\s\s|\s*[|>&;)]|\s*$)", line)
    ]
    return list(dict.fromkeys(found))


def parse(command: str) -> None:
    """Parse as the program would, without running. Raises `UsageError`."""
    _, name, *arguments = shlex.split(command)
    group: Any = typer.main.get_command(app)
    if name not in group.commands:
        raise UsageError(f"no command {name}")
    group.commands[name].make_context(name, arguments)


def num_required(name: str) -> int:
    group: Any = typer.main.get_command(app)
    return sum(parameter.required for parameter in group.commands[name].params)


def test_the_pages_have_commands() -> None:
    assert len(documented("rlboost")) > 30
    assert len(documented("make")) > 5


@pytest.mark.parametrize(("page", "command"), documented("rlboost"))
def test_a_documented_command_can_be_typed(page: str, command: str) -> None:
    words = [word for word in shlex.split(command) if not word.startswith("-")]
    if words == ["rlboost"]:  # `rlboost --help`
        return
    if len(words) == 2:  # perhaps only the command's name is mentioned
        command += " SOMETHING" * num_required(words[1])
    with contextlib.suppress(typer.Exit):  # --help
        parse(command)


@pytest.mark.parametrize("command", ["rlboost lunch job.yaml", "rlboost launch job.yaml --detached"])
def test_one_that_cannot_is_noticed(command: str) -> None:
    with pytest.raises(UsageError):
        parse(command)


@pytest.mark.parametrize(("page", "command"), documented("make"))
def test_a_documented_target_is_in_the_makefile(page: str, command: str) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for word in command.split()[1:]:
        assert "=" in word or word in targets, f"{page}: {command}"
