"""Every line of docs/tutorial.md, typed into one shell in an empty folder; what comes back must match."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
ANYTHING = "…"
EXIT_CODE = re.compile(r"\s+# exits with (\d+)$")


def commands() -> list[tuple[str, int, list[str]]]:
    """Each command of the page, its exit code, and the lines that are shown for it."""
    found: list[tuple[str, int, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", TUTORIAL.read_text(), flags=re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                code = EXIT_CODE.search(line)
                found.append((EXIT_CODE.sub("", line[2:]), int(code[1]) if code else 0, []))
            elif line.startswith("> "):  # the command goes on
                found[-1] = (f"{found[-1][0]}\n{line[2:]}", *found[-1][1:])
            else:
                found[-1][2].append(line)
    return found


def matches(shown: list[str], said: str) -> bool:
    """Whether `said` is what is `shown`: a line of only an ellipsis stands for any lines, also none; spaces
    count as one, and none before and after."""
    lines = said.splitlines()
    ends = {0}  # how many lines of `said` the lines shown so far can have matched
    for line in shown:
        if line == ANYTHING:
            ends = set(range(min(ends), len(lines) + 1)) if ends else set()
            continue
        words = (re.escape(word).replace(ANYTHING, ".*") for word in line.split(" ") if word)
        pattern = re.compile(r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*")
        ends = {end + 1 for end in ends if end < len(lines) and pattern.fullmatch(lines[end])}
    return len(lines) in ends


def test_a_page_that_says_something_else_is_noticed() -> None:
    assert matches(["a … c", ANYTHING, "end"], "a  b c\nx\ny\nend\n")
    assert matches([ANYTHING], "")
    assert not matches(["a", "end"], "a\nx\nend\n")
    assert not matches(["done: 6 of 6"], "done: 5 of 6\n")


def test_what_the_tutorial_says_is_what_happens(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tutorial"
    folder.mkdir()
    environment = {
        **cli.environment,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    typed = commands()
    assert len(typed) > 15
    for command, code, shown in typed:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{{ {command}\n}} 2>&1"],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        told = f"$ {command}\n{done.stdout}\nexit {done.returncode}"
        assert done.returncode == code, told
        assert matches(shown, done.stdout), f"{told}\n--- docs/tutorial.md shows:\n" + "\n".join(shown)
    for run in ("my-run", "words"):
        cli.assert_gone(run)
