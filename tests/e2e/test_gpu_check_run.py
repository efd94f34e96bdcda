"""The whole run of `python -m benchmarks.gpu --tiny`: lease, kills and reward, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.benchmarks.test_gpu_check import check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_whole_run_in_miniature(tmp_path: Path) -> None:
    line = check(tmp_path / "result.json", "whole_run")
    assert line["pass"] is True
    assert line["parts"]["whole_run"]["figures"]["steps"] == 2
