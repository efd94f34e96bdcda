"""Compute Engine's instances in our words, and what an instance of ours is asked to be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rlboost_providers.base import tags
from rlboost_providers.base.provider import MachineStatus

_STATES = {
    "PROVISIONING": MachineStatus.STARTING,
    "STAGING": MachineStatus.STARTING,
    "TERMINATED": MachineStatus.GONE,  # a disk is left, which its provider deletes when it sees it
    "STOPPED": MachineStatus.GONE,
    "SUSPENDED": MachineStatus.GONE,
}
ALL_SCOPES = "https://www.googleapis.com/auth/cloud-platform"
"""Its roles alone then say what a service account may do."""
DISK_TYPE = "pd-balanced"
"""Every machine type with GPUs takes it up to A3, which refuses pd-standard, what Google takes unasked."""
ENDS = {
    "delete": "terminated",
    "compute.instances.preempted": "reclaimed",
    "compute.instances.guestTerminate": "shut itself down",
    "stop": "stopped",
}
"""Operations that end a machine, and how we call it."""


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
        """Whether it may cost something beyond its disk."""
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
    name: str,
    zone: str,
    *,
    machine_type: str,
    labels: dict[str, str],
    script: str,
    spot: bool,
    image: str,
    disk_gb: int,
    network: str,
    service_account: str | None,
    network_tag: str = "rlboost-worker",
) -> Any:
    """Return the `compute_v1.Instance` of a machine that dials out and has no identity unless given one.

    `network_tag`: what firewall rules know it by.
    """
    from google.cloud import compute_v1 as compute

    scheduling = compute.Scheduling(automatic_restart=not spot, on_host_maintenance="TERMINATE")
    if spot:
        scheduling.provisioning_model = "SPOT"
        scheduling.instance_termination_action = "DELETE"
    disk = compute.AttachedDiskInitializeParams(
        source_image=image, disk_size_gb=disk_gb, disk_type=f"zones/{zone}/diskTypes/{DISK_TYPE}"
    )
    accounts = (
        []
        if service_account is None
        else [compute.ServiceAccount(email=service_account, scopes=[ALL_SCOPES])]
    )
    return compute.Instance(
        name=name,
        machine_type=f"zones/{zone}/machineTypes/{machine_type}",
        labels=labels,
        scheduling=scheduling,
        disks=[compute.AttachedDisk(boot=True, auto_delete=True, initialize_params=disk)],
        network_interfaces=[
            compute.NetworkInterface(
                network=network,
                access_configs=[compute.AccessConfig(name="out", type_="ONE_TO_ONE_NAT")],  # to dial out
            )
        ],
        metadata=compute.Metadata(
            items=[
                compute.Items(key="startup-script", value=script),
                compute.Items(key="block-project-ssh-keys", value="true"),
            ]
        ),
        tags=compute.Tags(items=[network_tag]),
        service_accounts=accounts,
    )
