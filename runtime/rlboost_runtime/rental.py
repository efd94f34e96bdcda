"""The machines that were rented for a run's head: kept on the laptop, and told to the head for its books.

`rentals.json` of the run's folder on the laptop has them all, the current one last; each is noted before its
cloud is asked for it, so that none is ever rented unnoted. `rental.json` in the home of `rlboost` on the head
is the machine that this home lies on.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder, read_json, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rental:
    """One machine. Times in seconds since the Unix epoch, the price in micro-dollars per hour."""

    machine: str
    """Our id of it, and what the cloud knows a repeated launch by."""
    provider: str
    zone: str
    accelerator: str
    price_micro_usd_per_hour: int
    price_source: str
    intended_at: float
    launched_at: float | None = None
    ended_at: float | None = None
    """When its cloud said that it was gone; None: it may cost money."""
    is_end_guessed: bool = False
    """Its cloud did not say when it ended: `ended_at` is when that was seen, or the latest that it can be."""
    detail: str = ""
    storage_micro_usd_per_hour: int = 0
    """What its disk and public address cost beside the price."""
    stays_s: float = 0.0
    """How long it stays, and is billed, after a run that was stopped by its budget."""


def kept_rentals(run: RunFolder) -> list[Rental]:
    """Return the machines that were rented for the run's head, the current one last. Raises
    `RuntimeFault`."""
    try:
        return msgspec.convert(read_json(run.rentals) or [], list[Rental])
    except msgspec.ValidationError as error:
        raise RuntimeFault(
            f"{run.rentals} does not say what was rented for {run.name}: {error}",
            "use the RLBoost version that the run was started with; rlboost gc finds the machine itself",
        ) from error
    except ValueError as error:
        raise RuntimeFault(
            f"{run.rentals} is cut off or no JSON, and does not say what was rented for {run.name}: {error}",
            "rlboost gc finds the machine itself; once it has ended that, remove the file",
        ) from error


def current_rental(run: RunFolder) -> Rental | None:
    """Return the machine that is or was the run's head; None: none was ever rented."""
    return next(iter(kept_rentals(run)[::-1]), None)


def keep_rental(run: RunFolder, rental: Rental) -> None:
    """Note a machine, or what became of it: also a power cut does not undo that."""
    others = [each for each in kept_rentals(run) if each.machine != rental.machine]
    write_json(run.rentals, [asdict(each) for each in [*others, rental]], durably=True)


def own_rental(run: RunFolder) -> Rental | None:
    """Return what the machine was rented as that the run's folder lies on; None: nobody rents it, or what was
    told of that cannot be read."""
    try:
        told = read_json(_own(run))
        return None if told is None else msgspec.convert(told, Rental)
    except ValueError as problem:
        event(log, "rental.unreadable", level=logging.WARNING, path=str(_own(run)), problem=str(problem))
        return None


def _own(run: RunFolder) -> Path:
    return run.path.parents[1] / "rental.json"
