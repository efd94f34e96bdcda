"""What a dependency's sources make Python say is not for the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_compiling_reasoning_gym_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("made = 1 is 'dubious'\n")
    code = (
        "import warnings\n"
        "from rlboost_runtime.trainer.data.reading import import_reasoning_gym\n"
        "before = list(warnings.filters)\n"
        "assert import_reasoning_gym().made is False\n"
        "assert warnings.filters == before, 'only for that import'\n"
    )
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-B", "-W", "default::SyntaxWarning", "-c", path + code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
