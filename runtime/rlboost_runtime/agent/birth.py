"""How an agent came to be, as far as its own machine knows: what its hello says for `rlboost status`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlboost_runtime.run_folder import read_json
from rlboost_runtime.seams import Clock


@dataclass(frozen=True, slots=True)
class Birth:
    """`began_at` on the agent's clock, None: not known."""

    install_s: dict[str, float] = field(default_factory=dict)
    """Seconds of `deploy/install.sh` on this machine by phase, where it put us here."""
    began_at: float | None = None
    """When the agent's process began."""

    def age_s(self, now: float) -> float:
        """Return for how long the process has been there."""
        return 0.0 if self.began_at is None else max(0.0, now - self.began_at)


def birth_of_this_process(clock: Clock, venv: Path = Path(sys.prefix)) -> Birth:
    """Return ours; `install.sh` leaves its phases beside the `venv` that it made."""
    found = read_json(venv.parent / "install.json")
    phases = found if isinstance(found, dict) else {}
    age_s = time.time() - psutil.Process().create_time()
    return Birth({str(name): float(took) for name, took in phases.items()}, clock.now() - age_s)
