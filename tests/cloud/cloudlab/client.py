"""The lab, started and steered from a test; ends with `close`, and also with the test's process."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

START_S = 900.0
"""Longest start: the image may have to be made first."""
ANSWER_S = 90.0
CLOSE_S = 180.0
"""Longest end: gigabytes of its machines' memory are given back, on a host that may be busy."""


class Lab:
    """One lab with its moto API at `url`, and the home of a user who has an account there."""

    def __init__(self, folder: Path, cache: Path, lock: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lab.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "cloudlab", str(folder), str(cache), str(lock)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                text=True,
                start_new_session=True,
            )
        self.url: str = self._answer(START_S)["url"]

    def machines(self) -> list[dict[str, Any]]:
        """Every instance that ever was, oldest first."""
        return self.ask("machines")

    def ask(self, action: str, **arguments: Any) -> Any:
        """Have the lab do something; `AssertionError` where it cannot."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._answer(ANSWER_S)
        assert "error" not in answer, f"{action}: {answer['error']}"
        return answer["ok"]

    def close(self) -> None:
        """End every machine and the API."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout_s), f"the lab is silent for {timeout_s:g} s:\n{self._log()}"
        line = self._process.stdout.readline()
        assert line, f"the lab has ended:\n{self._log()}"
        return json.loads(line)

    def _log(self) -> str:
        return (self.folder / "lab.log").read_text(errors="replace")[-4000:]
