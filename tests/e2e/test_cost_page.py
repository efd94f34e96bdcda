"""The worked example of docs/cost.md is what its command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.e2e_rig import Cli

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())


def rows() -> dict[str, tuple[list[float], list[float]]]:
    """The numbers of the table, by the first words of each row: without spot machines, and with them."""
    found = {}
    for row in re.findall(r"^\| ([^|]+?) \| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.M):
        numbers = [
            [float(n.replace(",", "")) for n in re.findall(r"[\d,]*\d(?:\.\d+)?", cell)] for cell in row[1:]
        ]
        found[re.split("[,:]", row[0])[0]] = (numbers[0], numbers[1])
    return found


def test_the_worked_example_is_what_the_command_prints(cli: Cli) -> None:
    command = re.search(r"^rlboost (simulate .*)$", PAGE, flags=re.M)
    assert command is not None
    found = cli.json(*shlex.split(command[1]))["policies"]
    alone, spot = (found[policy] for policy in ("on_demand", "rlboost"))
    table, hours = rows(), 2
    for column, policy in enumerate((alone, spot)):
        steps, per_hour = policy["steps"], policy["usd_per_hour"]
        assert table["machines"][column][0] == pytest.approx(per_hour, abs=0.01)
        assert table["tokens per second"][column] == [pytest.approx(policy["tokens_per_s"], abs=1)]
        millions = policy["tokens_per_s"] * 3600 / 1e6
        assert table["million tokens per hour"][column] == [pytest.approx(millions, abs=0.06)]
        assert table["$ per million tokens"][column] == [pytest.approx(per_hour / millions, abs=0.006)]
        assert table["steps in two hours"][column] == [steps]
        minutes, usd = table["one step"][column]
        assert minutes == pytest.approx(60 * hours / steps, abs=0.06)
        assert usd == pytest.approx(per_hour * hours / steps, abs=0.01)
    rise, dearer = spot["tokens_per_s"] / alone["tokens_per_s"], spot["usd_per_hour"] / alone["usd_per_hour"]
    assert f"{rise:.2f} times the speed for {dearer:.2f} times the cost" in PROSE
    most = (rise - 1) * alone["usd_per_hour"]
    assert f"${most:.0f} an hour: ({rise:.3f} - 1) x ${alone['usd_per_hour']:.2f}" in PROSE
