"""The CLI as a user types it, on a home of its own; whatever a test leaves behind is found and ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.e2e_rig import Cli, cli_of_its_own


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with cli_of_its_own(tmp_path) as tool:
        yield tool
