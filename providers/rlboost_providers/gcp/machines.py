"""What a job's offers mean on Compute Engine, its instances in our terms, and what ours are to be.

Google's API tells no prices: they are the shipped table's, or the most that the job file allows. An offer
without either is refused: it would be bought blindly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rlboost_providers.base import tags
from rlboost_providers.base.prices import PriceBook, shipped_book
from rlboost_providers.base.provider import MachineStatus
from rlboost_providers.base.startup import software
from rlboost_providers.base.traits import cloud_traits, egress_micro_usd_per_gb
from rlboost_providers.gcp.traits import NAME
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import CloudOffer, Trainer
from rlboost_runtime.money import parse_usd

_STATES = {
    "PROVISIONING": MachineStatus.STARTING,
    "STAGING": MachineStatus.STARTING,
    "TERMINATED": MachineStatus.GONE,  # a disk is left, which its provider deletes when it sees it
    "STOPPED": MachineStatus.GONE,
    "SUSPENDED": MachineStatus.GONE,
}
DEFAULT_IMAGE = (
    "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580"
)
"""Driver 580 is the oldest that runs CUDA 13, for which PyPI's torch and vLLM are built."""
ALL_SCOPES = "https://www.googleapis.com/auth/cloud-platform"
"""Its roles alone then say what a service account may do."""
DISK_TYPE = "pd-balanced"
"""Every machine type with GPUs takes it up to A3, which refuses pd-standard, what Google takes unasked."""
HYPERDISK = "hyperdisk-balanced"
"""Where a throughput is asked for, and where Google takes no other."""
_ONLY_HYPERDISK = ("a3-ultragpu-", "a4-", "a4x-")
"""How machine types begin that have no persistent disks."""
ENDS = {
    "delete": "terminated",
    "compute.instances.preempted": "reclaimed",
    "compute.instances.guestTerminate": "shut itself down",
    "stop": "stopped",
}
"""Operations that end a machine, and how we call it."""


@dataclass(frozen=True, slots=True)
class GcpPool:
    """One offer of a job: one machine type in one region. Prices in micro-dollars per hour.

    The compute API tells no prices, so they come with the pool, and what they come from.
    """

    region: str
    accelerator: str
    machine_type: str
    price_micro_usd_per_hour: int
    price_source: str
    zones: tuple[str, ...] = ()
    """Empty: every zone of the region that has the machine type."""
    spot: bool = True
    image: str = DEFAULT_IMAGE
    disk_gb: int = 200
    disk_mib_per_s: int | None = None
    """Throughput that is asked for, of a Hyperdisk; None: what the disk has without."""
    network: str = "global/networks/default"
    service_account: str | None = None
    reservation: str | None = None
    """Capacity that was reserved before: a name, or projects/PROJECT/reservations/NAME."""
    flex_start_s: int | None = None
    """Bought by flex-start, for at most so long; None: not."""
    install: str = ""
    """Shell text for `startup.startup_script`."""
    egress_micro_usd_per_gb: int = 0
    storage_micro_usd_per_hour: int = 0
    meets_nodes: bool = False
    """For a head and its trainer's further nodes, which reach one another."""
    is_for_trainer: bool = False
    """For the trainer's further nodes."""


def pools_of(offers: Sequence[CloudOffer], *, spot: bool = True, head: str | None = None) -> list[GcpPool]:
    """Return the pools of a job's offers of Google Cloud. Raises `ConfigError` where type or price are not
    known.

    `head`: the place of the job's head, as CLOUD/REGION[/ZONE]; None: in no cloud.
    """
    book = shipped_book()
    found = (_pool(book, offer, spot, head) for offer in offers)
    return [pool for pool in found if pool is not None]


def head_pools(offer: CloudOffer, trainer: Trainer) -> list[GcpPool]:
    """Return what a job's head is bought from, by `offer`; empty where it costs more than it may. Raises
    `ConfigError` where type or price are not known."""
    hours = trainer.flex_start_hours
    pools = [
        replace(
            pool,
            service_account=trainer.role,
            reservation=trainer.reservation,
            flex_start_s=None if hours is None else round(3600 * hours),
            meets_nodes=trainer.bought_nodes > 0,
        )
        for pool in pools_of([offer], spot=False)
    ]
    if trainer.price_usd_per_hour:
        paid, source = parse_usd(trainer.price_usd_per_hour), "job file: trainer.price_usd_per_hour"
        pools = [replace(pool, price_micro_usd_per_hour=paid, price_source=source) for pool in pools]
    return pools


def node_pools(offer: CloudOffer, trainer: Trainer) -> list[GcpPool]:
    """Return what the trainer's further nodes are bought from, by `offer`. Raises like `head_pools`."""
    return [replace(pool, service_account=None, is_for_trainer=True) for pool in head_pools(offer, trainer)]


def _pool(book: PriceBook, offer: CloudOffer, spot: bool, head: str | None) -> GcpPool | None:
    image, install = software(offer.image, DEFAULT_IMAGE)
    (machine_type, *_) = book.machine_types(offer)
    quotes = [q for q in book.of(offer) if q.instance_type == machine_type]
    price = next((q.spot_usd_per_hour if spot else q.on_demand_usd_per_hour for q in quotes), None)
    source = f"{book.source}, {quotes[0].as_of}" if quotes else ""
    limit = offer.max_price_usd_per_hour
    if price is None:
        if limit is None:
            raise ConfigError(
                f"no price of {machine_type} in {offer.infra} is known, and Google's API has none",
                "write max_price_usd_per_hour: what such a machine costs at most",
            )
        price, source = limit, "the job file's max_price_usd_per_hour"
    if limit is not None and price > limit:
        return None  # Google takes no bids: what costs more is not bought
    traits = cloud_traits(NAME)
    return GcpPool(
        region=str(offer.region),
        accelerator=offer.accelerators,
        machine_type=machine_type,
        price_micro_usd_per_hour=parse_usd(price),
        price_source=source,
        zones=() if offer.zone is None else (offer.zone,),
        spot=spot,
        image=image,
        disk_gb=offer.disk_gb,
        disk_mib_per_s=offer.disk_mib_per_s,
        install=install,
        egress_micro_usd_per_gb=egress_micro_usd_per_gb(head, offer.infra, offer.egress_usd_per_gb),
        storage_micro_usd_per_hour=traits.storage_micro_usd_per_hour(
            offer.disk_gb, spot=spot, mib_per_s=offer.disk_mib_per_s
        ),
    )


@dataclass(frozen=True, slots=True)
class GceMachine:
    """One instance of ours. Times in seconds since the Unix epoch."""

    run: str
    machine: str
    owner: str
    name: str
    zone: str
    state: MachineStatus
    created_at: float | None
    stopped_at: float | None
    public_address: str
    private_address: str

    @property
    def is_alive(self) -> bool:
        """True if it may cost something beyond its disk."""
        return self.state is not MachineStatus.GONE


def machine_of(instance: Any) -> GceMachine:
    """Return the machine that `instance` (`compute_v1.Instance`) is."""
    labels = dict(instance.labels)
    inside = [each.network_i_p for each in instance.network_interfaces]
    outside = [c.nat_i_p for each in instance.network_interfaces for c in each.access_configs]
    return GceMachine(
        run=labels.get(tags.RUN, ""),
        machine=labels.get(tags.MACHINE, ""),
        owner=labels.get(tags.OWNER, ""),
        name=instance.name,
        zone=instance.zone.rpartition("/")[2],
        state=_STATES.get(str(instance.status), MachineStatus.RUNNING),
        created_at=time_of(instance.creation_timestamp),
        stopped_at=time_of(instance.last_stop_timestamp),
        public_address=next(iter(outside), ""),
        private_address=next(iter(inside), ""),
    )


def time_of(text: str) -> float | None:
    """Return RFC 3339 text as seconds since the Unix epoch; None for no text."""
    return datetime.fromisoformat(text).timestamp() if text else None


def machine_in(name: str, run: str, owner: str) -> str | None:
    """Return the machine whose instance has `name`, if that is one of the run's and not cut short."""
    match = re.fullmatch(rf"{re.escape(beginning(run))}(.+)-[0-9a-f]{{10}}", name)
    if match is None or tags.machine_name(run, match[1], owner) != name:
        return None
    return match[1]


def beginning(run: str) -> str:
    """Return how the names of the run's instances begin; others may begin so, too."""
    return f"rlboost-{run.replace('_', '-')}-"


def instance_resource(
    pool: GcpPool, zone: str, name: str, *, labels: dict[str, str], script: str, network_tags: Sequence[str]
) -> Any:
    """Return the `compute_v1.Instance` of a machine that dials out and has no identity unless given one.

    `network_tags`: what firewall rules know it by.
    """
    from google.cloud import compute_v1 as compute

    scheduling = compute.Scheduling(automatic_restart=not pool.spot, on_host_maintenance="TERMINATE")
    if pool.spot:
        scheduling.provisioning_model = "SPOT"
        scheduling.instance_termination_action = "DELETE"
    if pool.flex_start_s is not None:
        scheduling.automatic_restart = False
        scheduling.provisioning_model = "FLEX_START"
        scheduling.instance_termination_action = "DELETE"
        scheduling.max_run_duration = compute.Duration(seconds=pool.flex_start_s)
    disk = compute.AttachedDiskInitializeParams(
        source_image=pool.image, disk_size_gb=pool.disk_gb, labels=labels, **_disk_kind(pool, zone)
    )
    accounts = [] if pool.service_account is None else [pool.service_account]
    return compute.Instance(
        name=name,
        machine_type=f"zones/{zone}/machineTypes/{pool.machine_type}",
        labels=labels,
        scheduling=scheduling,
        disks=[compute.AttachedDisk(boot=True, auto_delete=True, initialize_params=disk)],
        network_interfaces=[
            compute.NetworkInterface(
                network=pool.network,
                access_configs=[compute.AccessConfig(name="out", type_="ONE_TO_ONE_NAT")],  # to dial out
            )
        ],
        metadata=compute.Metadata(
            items=[
                compute.Items(key="startup-script", value=script),
                compute.Items(key="block-project-ssh-keys", value="true"),
            ]
        ),
        tags=compute.Tags(items=list(network_tags)),
        reservation_affinity=_affinity(pool),
        service_accounts=[compute.ServiceAccount(email=each, scopes=[ALL_SCOPES]) for each in accounts],
    )


def _disk_kind(pool: GcpPool, zone: str) -> dict[str, Any]:
    """Return type, throughput and IOPS of a machine's disk, as Google names them."""
    sold, wanted = cloud_traits(NAME).disk_throughput, pool.disk_mib_per_s
    if wanted is None and not pool.machine_type.startswith(_ONLY_HYPERDISK):
        return {"disk_type": f"zones/{zone}/diskTypes/{DISK_TYPE}"}
    found: dict[str, Any] = {"disk_type": f"zones/{zone}/diskTypes/{HYPERDISK}"}
    if wanted is not None and sold is not None:
        found |= {"provisioned_throughput": wanted, "provisioned_iops": sold.iops(wanted)}
    return found


def _affinity(pool: GcpPool) -> Any:
    """Return the `compute_v1.ReservationAffinity`; None: Google's default, which takes open reservations."""
    from google.cloud import compute_v1 as compute

    if pool.reservation is not None:
        return compute.ReservationAffinity(
            consume_reservation_type="SPECIFIC_RESERVATION",
            key="compute.googleapis.com/reservation-name",
            values=[pool.reservation],
        )
    if pool.flex_start_s is not None:  # it must not, or Google refuses the machine
        return compute.ReservationAffinity(consume_reservation_type="NO_RESERVATION")
    return None
