"""Which sources a benchmark ran on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("runtime", "providers", "rlboost_cli", "examples")


def python_path() -> str:
    """Return the PYTHONPATH with which child processes run this checkout."""
    roots = [REPOSITORY, *(REPOSITORY / name for name in ("runtime", "providers", "templates"))]
    return os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])


def commit() -> str:
    """Return the checkout's commit; of the sources that runs are made of, a changed one is said to be."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()  # fmt: skip

    changed = git("status", "--porcelain", "--", *SOURCES)
    return git("rev-parse", "--short=7", "HEAD") + ("+changes" if changed else "")
