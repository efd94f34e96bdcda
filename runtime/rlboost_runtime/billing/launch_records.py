"""Machines on record before they are launched: those bought for a run's head, and spot machines.

Heads: `rentals.json` of the run's folder on the laptop lists them all, the current one last; each is recorded
before it is requested from its cloud, so none is ever bought unrecorded. `rental.json` in the home of
`rlboost` on the head is the machine that this home lies on; the head bills it.

Spot machines: `cloud/bought.json` has each one's offer, so that a restarted coordinator knows where its
machines are and what bytes to them cost. It is copied to the job's `output` (OUTPUT/RUN/cloud/bought.json)
before each launch: if the head is lost with its disk, `rlboost down` on the laptop also bills what was
launched after it last looked. A copy that fails is logged and delays nothing: clouds whose machines are
neither listed by tag nor end by themselves are refused beforehand.
"""

from __future__ import annotations

import datetime
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlboost_providers.base.provider import Offer
from rlboost_runtime.billing.machine_record import MachineRecord
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadMachine(MachineRecord):
    """A machine bought for a run's head."""

    pool: str = Pool.RESERVED
    is_end_guessed: bool = False
    """Its cloud did not report when it ended: `ended_at` is when that was seen, or its latest possible
    end."""
    stays_s: float = 0.0
    """How long it stays, and is billed, after a run that was stopped by its budget."""


def kept_head_machines(run: RunFolder) -> list[HeadMachine]:
    """Return the machines bought for the run's head, the current one last. Raises `RuntimeFault`."""
    path = run.head_machines
    try:
        return msgspec.convert(read_json(path) or [], list[HeadMachine])
    except msgspec.ValidationError as error:
        raise RuntimeFault(
            f"{path} does not say what was rented for {run.name}: {error}",
            "use the RLBoost version that the run was started with; rlboost gc finds the machine itself",
        ) from error
    except ValueError as error:
        raise RuntimeFault(
            f"{path} is cut off or no JSON, and does not say what was rented for {run.name}: {error}",
            "rlboost gc finds the machine itself; once it has ended that, remove the file",
        ) from error


def current_head_machine(run: RunFolder) -> HeadMachine | None:
    """Return the machine that is or was the run's head; None: none was ever bought."""
    return next(iter(kept_head_machines(run)[::-1]), None)


def keep_head_machine(run: RunFolder, head: HeadMachine) -> None:
    """Record a machine, or what became of it; survives a power cut."""
    others = [each for each in kept_head_machines(run) if each.machine != head.machine]
    write_json(run.head_machines, [asdict(each) for each in [*others, head]], durably=True)


def own_head_machine(run: RunFolder) -> HeadMachine | None:
    """Return the record of the machine that the run's folder lies on; None: it was not bought, or its record
    cannot be read."""
    try:
        told = read_json(_own(run))
        return None if told is None else msgspec.convert(told, HeadMachine)
    except ValueError as problem:
        event(log, "rental.unreadable", level=logging.WARNING, path=str(_own(run)), problem=str(problem))
        return None


def _own(run: RunFolder) -> Path:
    return run.path.parents[1] / "rental.json"


_FILE = msgspec.json.Decoder(dict[str, Offer])


class LaunchRecords:
    """Offers by machine, in `path`; None: in memory only. One thread at a time."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offers: dict[str, Offer] = {}
        if path is not None and path.exists():
            try:
                self._offers = _FILE.decode(path.read_bytes())
            except msgspec.DecodeError:  # another version's: then nothing is known, as before
                self._offers = {}

    def get(self, machine: str) -> Offer | None:
        """Return the offer that the machine was bought as; None if unknown."""
        return self._offers.get(machine)

    def offers(self) -> dict[str, Offer]:
        """Return all, by machine."""
        return dict(self._offers)

    def add(self, machine: str, offer: Offer) -> None:
        """Record it, also through a power cut, before its launch is requested. Raises `OSError`."""
        if self._offers.get(machine) == offer:
            return
        self._offers[machine] = offer
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(self._offers), durably=True)


PUT_S = 10.0
"""Longest time that a launch waits for its copy."""
_NAME = "cloud/bought.json"


class LaunchBackup:
    """Copies `cloud/bought.json` of one run to the job's output, if it has one. Any thread may call."""

    def __init__(self, run: RunFolder, output: str | None) -> None:
        self._run = run
        self._output = output

    def put(self) -> bool:
        """Copy it as it is now; return True if it was copied. Blocks for at most `PUT_S`."""
        if self._output is None:
            return False
        import obstore
        from obstore import exceptions

        try:
            obstore.put(self._bucket(), _NAME, self._run.path / _NAME)
        except (exceptions.BaseError, OSError, ValueError) as problem:
            told = str(problem).partition("\n")[0]
            event(log, "intent.not_copied", level=logging.WARNING, output=self._output, problem=told)
            return False
        return True

    def read(self) -> bytes | None:
        """Return the copy; None if there is none, or it cannot be read from here."""
        if self._output is None:
            return None
        try:
            import obstore
            from obstore import exceptions
        except ImportError:  # a laptop that never read a bucket
            return None
        try:
            return bytes(obstore.get(self._bucket(), _NAME).bytes())
        except (exceptions.BaseError, OSError, ValueError):
            return None

    def _bucket(self) -> ObjectStore:
        from obstore.store import from_url

        assert self._output is not None
        place = f"file://{self._output}" if self._output.startswith("/") else self._output
        url = f"{place.rstrip('/')}/{self._run.name}"
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        seconds = datetime.timedelta(seconds=PUT_S)
        options: Any = {"timeout": seconds, "connect_timeout": seconds, "allow_http": True}
        retries: Any = {"max_retries": 1, "retry_timeout": seconds}
        return from_url(url, client_options=options, retry_config=retries)
