"""What the rest of the project needs to know of each cloud, as data that the cloud's own folder gives.

Each folder beside this one has a module `traits` whose `PROVIDER` is found by the folder, not by name: to add
a cloud is to add a folder. Traits import neither a provider nor an SDK, so that checking a job file stays
cheap; what a job may say (`rlboost_runtime.job`) is read from them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlboost_providers.base.egress import FREE, EgressPrices, Location
from rlboost_runtime.money import parse_usd

if TYPE_CHECKING:
    from rlboost_providers.base.metadata import MetadataService

HOURS_PER_MONTH = 730.0
LAUNCH_LAG_S = 120.0


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """How a machine asks its cloud's metadata service at 169.254.169.254 who it is."""

    label: str
    """What the answer is called in messages, such as `role`."""
    path: str
    headers: dict[str, str]
    session_path: str = ""
    """Where a session token is requested by PUT beforehand; empty: none is needed."""
    session_headers: dict[str, str] | None = None
    session_token_header: str = ""
    """The header that carries the session token."""


@dataclass(frozen=True, slots=True)
class CredentialPlaces:
    """Where a machine may have credentials of a cloud. They are looked for, never read."""

    files: tuple[str, ...]
    """Where the cloud's own tools keep them."""
    file_variable: str
    """Environment variable that names such a file; empty: none."""
    identity: MachineIdentity


@dataclass(frozen=True, slots=True)
class SelfDeletion:
    """How a machine deletes itself with the token of its own identity, read from the metadata service."""

    metadata_url: str
    headers: dict[str, str]
    token_path: str
    """Answers JSON with an `access_token`."""
    name_paths: dict[str, str]
    """Paths of the names in `url`; of an answer with slashes the last part counts."""
    url: str
    """Where DELETE is sent, as a format string."""


@dataclass(frozen=True, slots=True)
class DiskThroughput:
    """What a cloud sells of a disk's throughput, in MiB/s, and the IOPS for it; list prices per month."""

    included: int
    most: int
    usd_per_mib_per_s: float
    """For what is above `included`."""
    included_iops: int
    iops_per_mib_per_s: int
    usd_per_iops: float
    """For what is above `included_iops`."""
    gpus: frozenset[str] = frozenset()
    """GPUs whose machines take such a disk; empty: all do."""

    def iops(self, mib_per_s: int) -> int:
        """Return the IOPS to ask for with this throughput."""
        return max(self.included_iops, self.iops_per_mib_per_s * mib_per_s)

    def usd_per_month(self, mib_per_s: int) -> float:
        """Return what it costs beside the disk's size."""
        above, iops = mib_per_s - self.included, self.iops(mib_per_s) - self.included_iops
        return self.usd_per_mib_per_s * max(0, above) + self.usd_per_iops * iops


@dataclass(frozen=True, slots=True)
class CloudTraits:
    """One cloud, under the name that `infra` of a job file begins with."""

    name: str
    min_billed_s: int = 0
    """Shortest time that a machine is billed for."""
    egress: EgressPrices = FREE
    """What it bills for traffic that leaves its machines."""
    disk_usd_per_gb_month: float = 0.0
    """List price of a machine's disk; 0: nothing is billed beside the machine."""
    disk_throughput: DiskThroughput | None = None
    """Throughput of disks bought direct; None: it goes with the size, or we do not ask for it."""
    address_usd_per_hour: float = 0.0
    """List price of a public IPv4 address in use."""
    spot_address_share: float = 1.0
    """Share of that price which a spot machine pays."""
    is_direct: bool = False
    """Machines are bought from the cloud's own API, too (`via: direct`)."""
    regions: tuple[str, ...] = ()
    """All that it has, the usual ones first; empty: not listed here."""
    zone_pattern: str | None = None
    """What follows the region in a zone's name, as a pattern; None: not checked."""
    first_zone: str = ""
    """The same of a zone that exists, for messages."""
    can_host_head: bool = True
    head_may_name_zone: bool = False
    """A head that is bought direct may name a zone."""
    reservation_pattern: str = ""
    """What names of reserved capacity match in full; empty: none is asked for."""
    reservation_example: str = ""
    has_flex_start: bool = False
    """Machines can be bought for a limited time from a queue for capacity."""
    head_ends_itself: bool = False
    """A head that SkyPilot bought can end itself without a credential of the user's."""
    skypilot_takes_role: bool = False
    """SkyPilot gives a machine the role that the job names."""
    skypilot_has_role: bool = False
    """SkyPilot gives its machines a role of its own, which may launch others."""
    credential_variables: tuple[str, ...] = ()
    """Environment variables, named in `secrets`, by which a head can sign in; empty: not known to us."""
    credential_places: CredentialPlaces | None = None
    self_deletion: SelfDeletion | None = None
    """For clouds in which a machine that shuts itself down stays, and its disk costs."""
    metadata: Callable[[], MetadataService] | None = None
    """Makes what reads the cloud's notices of reclaims on a machine; None: the cloud gives none."""

    def throughput_sold(self, accelerators: str | None) -> DiskThroughput | None:
        """Return what is sold for disks of machines with these GPUs, such as H100:8; None: nothing."""
        sold = self.disk_throughput
        if sold is None or not sold.gpus or (accelerators or "").partition(":")[0] in sold.gpus:
            return sold
        return None

    def storage_micro_usd_per_hour(self, disk_gb: int, *, spot: bool, mib_per_s: int | None = None) -> int:
        """Return micro-dollars per machine-hour for disk and public address, at list prices.

        `mib_per_s`: throughput that is asked for; None: what the disk has without.
        """
        sold = self.disk_throughput
        extra = 0.0 if sold is None or mib_per_s is None else sold.usd_per_month(mib_per_s)
        address = self.address_usd_per_hour * (self.spot_address_share if spot else 1.0)
        return parse_usd((self.disk_usd_per_gb_month * disk_gb + extra) / HOURS_PER_MONTH + address)


@dataclass(frozen=True, slots=True)
class ProviderTraits:
    """One provider, under the name that its offers have, and the clouds of which it knows the facts."""

    name: str
    clouds: tuple[CloudTraits, ...] = ()
    min_billed_s: int = 0
    """Shortest time that a machine is billed for of which the books do not record it."""
    launch_lag_s: float = LAUNCH_LAG_S
    """How long a launch of unknown outcome may still show up in the provider's lists."""
    list_lag_s: float = 0.0
    """How long its lists may lack a machine that it reported as launched."""


@cache
def _providers() -> dict[str, ProviderTraits]:
    folder = Path(__file__).parents[1]
    places = sorted(each.parent.name for each in folder.glob("*/traits.py") if each != Path(__file__))
    package = __name__.split(".")[0]
    found: list[ProviderTraits] = [
        importlib.import_module(f"{package}.{place}.traits").PROVIDER for place in places
    ]
    return {each.name: each for each in found}


@cache
def known_clouds() -> dict[str, CloudTraits]:
    """Return every cloud that a job file may name."""
    return {cloud.name: cloud for provider in _providers().values() for cloud in provider.clouds}


def cloud_traits(cloud: str) -> CloudTraits:
    """Return the traits of `cloud`; the defaults for one that nothing is known of."""
    return known_clouds().get(cloud) or CloudTraits(cloud)


def provider_traits(provider: str) -> ProviderTraits:
    """Return the traits of `provider`; the defaults for one that nothing is known of."""
    return _providers().get(provider) or ProviderTraits(provider)


def egress_micro_usd_per_gb(head: str | None, target: str | None, job_usd: float | None) -> int:
    """Return micro-dollars per GB of weights from the head to a machine: the job's price, or the list price.

    `head`, `target`: places as CLOUD/REGION[/ZONE]; None: in no cloud, where nobody bills traffic.
    """
    if job_usd is not None:
        return parse_usd(job_usd)
    if head is None:
        return 0
    source = Location.of(head)
    place = None if target is None else Location.of(target)
    return parse_usd(cloud_traits(source.cloud).egress.usd_per_gb(source, place))


def metadata_of(cloud: str) -> MetadataService | None:
    """Return what reads the notices of `cloud` on one of its machines; None where there are none."""
    made = cloud_traits(cloud).metadata
    return None if made is None else made()
