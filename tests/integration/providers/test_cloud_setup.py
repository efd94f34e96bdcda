"""Setting up a cloud takes five commands, and Google's own tool understands its part of them.

What AWS's tool does with the others is in tests/cloud/test_aws_setup.py, against an API that answers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.setup_commands import set_up

pytestmark = pytest.mark.integration

GCLOUD = shutil.which("gcloud")
NO_ACCOUNT = "You do not currently have an active account selected"


def google(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type a command as somebody who has never signed in."""
    return subprocess.run(
        ["bash", "-c", command.replace("PROJECT", "a-project-1")],
        env={**os.environ, "CLOUDSDK_CONFIG": str(folder), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("section", "extra"), [("AWS", "aws"), ("Google Cloud", "gcp")])
def test_five_commands_and_the_first_installs_what_there_is(section: str, extra: str) -> None:
    commands = set_up(section)
    assert 0 < len(commands) <= 5
    assert commands[0] == f"pip install 'rlboost[{extra}]'"
    assert extra in (metadata.metadata("rlboost").get_all("Provides-Extra") or [])


@pytest.mark.skipif(GCLOUD is None, reason="gcloud is not on PyPI: install Google's SDK to have this checked")
def test_gcloud_understands_its_part_and_wants_nothing_but_an_account(tmp_path: Path) -> None:
    typed = [command for command in set_up("Google Cloud") if command.startswith("gcloud ")]
    sign_in, *others = typed
    assert len(others) == 2
    help_text = google(f"{sign_in.partition(' --')[0]} --help", tmp_path)
    assert help_text.returncode == 0
    for flag in re.findall(r"--[a-z-]+", sign_in):
        assert re.search(rf"{flag}\b", re.sub(r"\x1b\[[0-9;]*m", "", help_text.stdout)), flag
    for command in others:
        done = google(command, tmp_path)
        assert NO_ACCOUNT in done.stderr, f"{command}\n{done.stderr}"
    wrong = google(others[0].replace("--project", "--projekt"), tmp_path)
    assert "unrecognized arguments" in wrong.stderr, "a mistake would have been told"
