"""A few of the random requests of `make soak-endpoint-fuzz`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.endpoint.fuzz import fuzzed


async def test_random_requests_give_no_500_and_no_key_learns_nothing(tmp_path: Path) -> None:
    findings = await fuzzed(tmp_path, 300, seed=1)
    assert not findings.problems
    assert findings.statuses.total() == 300
    assert findings.statuses[401] > 10
    assert findings.statuses[200] > 50
    assert findings.num_streams > 5
