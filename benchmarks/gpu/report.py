"""What a part reports: figures, checks that have to hold, and why something was left out."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class PartReport:
    """Figures and checks of one part, on disk after each change."""

    def __init__(self, path: Path, size: str, tiny: bool, deadline: float) -> None:
        self.size = size
        self.tiny = tiny
        self.deadline = deadline
        """On `time.monotonic`'s clock."""
        self._path = path
        self._content: dict[str, Any] = {"figures": {}, "checks": {}}

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    def add(self, **figures: Any) -> None:
        """Add figures."""
        self._content["figures"] |= figures
        self.write()

    def check(self, name: str, holds: bool) -> None:
        """Add something that has to hold."""
        self._content["checks"][name] = bool(holds)
        self.write()

    def skip(self, why: str) -> None:
        """Report that there is nothing to measure here."""
        self._content["skipped"] = why
        self.write()

    def failed(self, why: str) -> None:
        """Report what ended the part."""
        self._content["failed"] = why
        self.write()

    def write(self) -> None:
        """Write all of it."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._content))
        os.replace(new, self._path)
