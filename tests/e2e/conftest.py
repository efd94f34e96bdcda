"""The CLI as a user types it, on a home of its own; whatever a test leaves behind is found and ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.e2e_rig import Cli, cli_of_its_own

HERE = Path(__file__).parent
HUNG_S = 1500.0
"""A run's own waits end long before; a machine that is shared may be several times as slow as a quiet one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(HUNG_S))


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with cli_of_its_own(tmp_path) as tool:
        yield tool
