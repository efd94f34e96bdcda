"""The commands by which our pages have a new user set up a cloud."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def set_up(section: str) -> list[str]:
    """Return the commands of a section of docs/clouds.md, such as "AWS"."""
    found = re.search(rf"^## {section}, set up in five commands\n\n```bash\n(.*?)^```", *_in("clouds.md"))
    assert found is not None, f"docs/clouds.md says nothing of {section}"
    return found[1].splitlines()


def role_of_workers() -> list[str]:
    """Return the commands of docs/skypilot.md that make the role of machines on AWS."""
    found = re.search(r"^```\n(aws iam create-role .*?)^```", *_in("skypilot.md"))
    assert found is not None
    return found[1].replace("\\\n", "").splitlines()


def role_of_heads() -> list[str]:
    """Return the commands of docs/head.md that make the role of a head on AWS."""
    found = re.search(r"^```bash\n(aws iam create-role .*?)^```", *_in("head.md"))
    assert found is not None
    return found[1].splitlines()


def _in(page: str) -> tuple[str, int]:
    return (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
