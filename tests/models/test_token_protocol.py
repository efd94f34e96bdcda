"""SPIN tries every order of every fault on the model of acknowledgement, epoch, assignment and lease.

`make test` installs SPIN where apt can; without it and a C compiler these tests are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("token_protocol.pml")
TIMEOUT_S = 100.0

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("spin", "gcc"))), reason="needs SPIN and gcc (make spin)"
)


def check(folder: Path, *defines: str) -> tuple[int, str]:
    """Search all states of the model; return how many there are, and what the checker says."""
    flags = [f"-D{define}" for define in defines]
    subprocess.run(["spin", *flags, "-a", MODEL], cwd=folder, check=True, capture_output=True)
    subprocess.run(
        ["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", "-o", "pan", "pan.c"],
        cwd=folder,
        check=True,
    )
    ran = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    states = re.search(r"(\d+) states, stored", ran.stdout)
    assert states, ran.stdout + ran.stderr
    return int(states[1]), ran.stdout


def test_every_life_with_two_faults_ends_with_the_whole_response_once(tmp_path: Path) -> None:
    states, told = check(tmp_path, "FAULTS=2")
    assert "errors: 0" in told, told
    assert "max search depth too small" not in told
    assert states > 1_000_000


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("BUG_ACKNOWLEDGES_BEFORE_THE_SYNC", "length>=promised"),
        ("BUG_FINISHES_BEFORE_THE_SYNC", "journal_text==text"),
        ("BUG_LATE_FRAMES_ARE_ACCEPTED", "a_text==text"),
    ],
)
def test_the_checker_notices_a_rule_that_is_missing(tmp_path: Path, rule: str, broken: str) -> None:
    _, told = check(tmp_path, "FAULTS=2", rule)
    assert "assertion violated" in told, told
    assert broken in told, told
