"""EC2 capacity that was reserved before: On-Demand Capacity Reservations and Capacity Blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlboost_providers.aws.errors import explained
from rlboost_runtime.errors import ConfigError, NoCapacity

_OVER = frozenset({"expired", "cancelled", "failed", "payment-failed", "unsupported"})


@dataclass(frozen=True, slots=True)
class Reservation:
    """One of the account's capacity reservations, as EC2 describes it."""

    name: str
    """Its id, `cr-...`."""
    instance_type: str
    zone: str
    is_block: bool
    """True for a Capacity Block: paid in advance, for a time that was agreed."""
    state: str
    starts: str
    """When it begins, in UTC; empty where it has no fixed beginning."""
    free: int
    """Machines that it can still give."""

    def require_free(self) -> None:
        """Raise `NoCapacity` where it has no machine now but may have one later."""
        if self.state != "active":
            begins = f", and begins at {self.starts} UTC" if self.starts else ""
            raise NoCapacity(
                f"{self.name} is {self.state}{begins}",
                "launch again once it is active, or set trainer.max_wait_minutes",
            )
        if self.free < 1:
            raise NoCapacity(
                f"every machine of {self.name} is in use",
                "end one, enlarge the reservation, or set trainer.max_wait_minutes",
            )


def find_reservation(ec2: Any, region: str, name: str, kinds: Sequence[str], zone: str | None) -> Reservation:
    """Return the reservation `name`. Raises `ConfigError` where it is unknown or over, or is for other
    machines than `kinds`, or for another zone than `zone`."""
    with explained(f"look at {name} in {region}"):
        answer = ec2.describe_capacity_reservations(CapacityReservationIds=[name])
    found = next(iter(answer["CapacityReservations"]), None)
    if found is None:
        raise ConfigError(f"{region} has no capacity reservation {name}", "correct trainer.reservation")
    begins = found.get("StartDate")
    here = Reservation(
        name,
        found["InstanceType"],
        found["AvailabilityZone"],
        found.get("ReservationType") == "capacity-block",
        found["State"],
        "" if begins is None else f"{begins:%Y-%m-%d %H:%M}",
        found["AvailableInstanceCount"],
    )
    if here.state in _OVER:
        raise ConfigError(f"{name} is {here.state}", "name another one in trainer.reservation")
    if here.instance_type not in kinds:
        raise ConfigError(
            f"{name} is for {here.instance_type}, but the job wants {' or '.join(kinds)}",
            f"write trainer.instance_type: {here.instance_type} and its accelerators",
        )
    if zone not in (None, here.zone):
        raise ConfigError(f"{name} is in {here.zone}, but infra names {zone}", f"write {here.zone}")
    return here
