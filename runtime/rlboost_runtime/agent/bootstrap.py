"""What a machine is given at its start so that its agents can connect: one JSON file of mode 600.

The run's token and certificate reach a machine in this file only, never in argv or the environment.

How old an agent's process is and how long its installation took, for its hello and `rlboost status`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from rlboost_runtime.engines.base import EngineSettings
from rlboost_runtime.run.folder import read_json, write_atomically
from rlboost_runtime.seams import Clock


class Bootstrap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that the agents of one machine need. URLs are of the head, as seen from the machine."""

    run: str
    machine: str
    pool: str
    instances: tuple[str, ...]
    coordinator_url: str
    token: str
    certificate: str
    """PEM text; the only certificate that the agents trust."""
    engine: EngineSettings
    weight_streams: int = 4
    cloud: str = ""
    """The cloud whose metadata service announces reclaims (aws, gcp, azure); empty: none."""
    weight_transfer: str = "auto"
    """How versions are fetched (`weights.child_pipe.TransferSettings`)."""
    weight_store: str = ""
    """The head's store, for agents on the head itself."""
    weights_in: str = "disk"
    """Where versions are kept (`weights.keep_in` of the job)."""
    weight_bucket: str = ""
    """URL of a bucket that has the versions too."""
    weight_peers: bool = False
    """True if instances of a zone pull from one another."""
    egress_usd_per_gb: float = 0.0
    """Price of a GB from the head to this machine."""
    price_usd_per_hour: float = 0.0
    """Price of the machine while it waits."""
    trainer_node: tuple[str, ...] = ()
    """Arguments of `trainer.node`, on a further node of the trainer; empty: on any other machine."""


def write_bootstrap(path: Path, bootstrap: Bootstrap) -> None:
    """Write with mode 600."""
    write_atomically(path, msgspec.json.encode(bootstrap))


def read_bootstrap(path: Path) -> Bootstrap:
    """Read what `write_bootstrap` wrote; unknown keys are ignored."""
    return msgspec.json.decode(path.read_bytes(), type=Bootstrap)


@dataclass(frozen=True, slots=True)
class ProcessAge:
    """Age of an agent's process. `began_at`: on the agent's clock, None: not known."""

    install_s: dict[str, float] = field(default_factory=dict)
    """Seconds of `deploy/install.sh` on this machine by phase, if it installed us."""
    began_at: float | None = None
    """When the agent's process began."""

    def age_s(self, now: float) -> float:
        """Return how long the process has run."""
        return 0.0 if self.began_at is None else max(0.0, now - self.began_at)


def age_of_this_process(clock: Clock, venv: Path = Path(sys.prefix)) -> ProcessAge:
    """Return our own; `install.sh` leaves its phases beside the `venv` that it made."""
    found = read_json(venv.parent / "install.json")
    phases = found if isinstance(found, dict) else {}
    age_s = time.time() - psutil.Process().create_time()
    return ProcessAge({str(name): float(took) for name, took in phases.items()}, clock.now() - age_s)
