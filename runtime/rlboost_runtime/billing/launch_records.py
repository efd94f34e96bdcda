"""Machines on record from their offer to their bill: those bought for a run's head, and spot machines.

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

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from rlboost_providers.base.provider import MachineView, Offer
from rlboost_providers.base.traits import provider_traits
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """One machine as it was bought. Times in seconds since the Unix epoch, kept to the microsecond; prices in
    micro-dollars per hour."""

    machine: str
    """Our id of it, and the client token by which its cloud recognises a repeated launch."""
    provider: str
    zone: str
    accelerator: str
    price_micro_usd_per_hour: int
    price_source: str
    intended_at: float
    launched_at: float | None = None
    ended_at: float | None = None
    """When its cloud reported it gone; None: it may cost money."""
    detail: str = ""
    storage_micro_usd_per_hour: int = 0
    """Price of its disk and public address, billed beside the machine."""
    pool: str = Pool.SPOT
    min_billed_s: int | None = None
    """Shortest time that it is billed for; None: recorded by a version that went by the provider alone."""

    @classmethod
    def of(cls, machine: str, offer: Offer, intended_at: float) -> Self:
        """Return the intent to buy `machine` at the most that the offer may cost: its cloud may yet choose a
        cheaper zone."""
        return cls(
            machine=machine,
            provider=offer.provider,
            zone=offer.zone,
            accelerator=offer.accelerator,
            price_micro_usd_per_hour=offer.most_micro_usd_per_hour,
            price_source=offer.source,
            intended_at=intended_at,
            storage_micro_usd_per_hour=offer.storage_micro_usd_per_hour,
            min_billed_s=offer.min_billed_s,
        )

    @property
    def min_billed_ns(self) -> int:
        """Shortest time that it is billed for, in nanoseconds."""
        recorded = self.min_billed_s
        seconds = provider_traits(self.provider).min_billed_s if recorded is None else recorded
        return seconds * 1_000_000_000

    @property
    def all_micro_usd_per_hour(self) -> int:
        """The price including storage."""
        return self.price_micro_usd_per_hour + self.storage_micro_usd_per_hour

    def launched(self, view: MachineView, now: float) -> Self:
        """Return the record of a machine that exists: its zone, and its start by the provider's clock, else
        as recorded before, else now."""
        started_at = self.launched_at if view.started_at is None else view.started_at
        return replace(
            self, zone=view.zone or self.zone, launched_at=now if started_at is None else started_at
        )

    def may_be_unlisted(self, now: float, lag_s: float) -> bool:
        """Return True if the machine may exist although its cloud, whose lists lag by `lag_s`, lacks it."""
        asked_at = self.intended_at if self.launched_at is None else self.launched_at
        return now - asked_at < lag_s


def start_of(view: MachineView, now: float) -> float:
    """Return when the provider started the machine; now, where it does not report that."""
    return now if view.started_at is None else view.started_at


def end_of(view: MachineView | None, now: float) -> float:
    """Return when the machine ended by the provider's clock; now, where it does not report that."""
    return now if view is None or view.ended_at is None else view.ended_at


def price_paid(offer: Offer, view: MachineView) -> int | None:
    """Return the hourly price now, at most the bid, which caps what a cloud charges; None: not reported."""
    price, bid = view.price_micro_usd_per_hour, offer.max_price_micro_usd_per_hour
    return price if price is None or bid is None else min(price, bid)


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
    except RuntimeFault as error:
        raise RuntimeFault(
            f"{error.problem}; it does not say what was rented for {run.name}",
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
    except (ValueError, RuntimeFault) as problem:
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
        from rlboost_runtime.run.bucket import open_output

        assert self._output is not None
        return open_output(self._run, self._output, PUT_S)
