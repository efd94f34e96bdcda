"""Our images at Google: of a project, for machines in all its regions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlboost_providers.base import images, tags
from rlboost_providers.base.images import MachineImage
from rlboost_providers.base.provider import absent
from rlboost_providers.gcp.errors import explained, failed
from rlboost_providers.gcp.machines import machine_of, time_of
from rlboost_providers.gcp.provider import GcpClients, default_clients
from rlboost_providers.gcp.traits import NAME
from rlboost_runtime.errors import NotFound, RuntimeFault

LOOK_S = 5.0
CALL_S = 20.0
"""Longest wait for one answer."""


class GcpImages:
    """The `ImageStore` of a project."""

    def __init__(self, clients: GcpClients | None = None, look_s: float = LOOK_S) -> None:
        self._clients = default_clients() if clients is None else clients
        self._look_s = look_s

    def save(
        self, run: str, machine: str, label: str, marks: Mapping[str, str], say: Callable[[str], None]
    ) -> MachineImage:
        """See `ImageStore`. The machine goes on: its disk was synced before."""
        from google.cloud import compute_v1 as compute

        disk = self._disk_of(run, machine)
        image = compute.Image(
            name=label,
            source_disk=disk,
            description="RLBoost: machines boot with everything installed",
            labels=dict(marks),
        )
        deadline = time.monotonic() + images.SAVE_S
        with explained(f"make an image of {machine}"):
            request = compute.InsertImageRequest(
                project=self._clients.project, image_resource=image, force_create=True
            )
            self._await(self._clients.images.insert_unary(request, timeout=CALL_S), deadline, say)
            return self._image(self._clients.images.get(project=self._clients.project, image=label))

    def images(self) -> list[MachineImage]:
        """See `ImageStore`."""
        from google.cloud import compute_v1 as compute

        request = compute.ListImagesRequest(project=self._clients.project, filter=f"labels.{images.IMAGE}:*")
        with explained("list images"):
            found = [self._image(each) for each in self._clients.images.list(request, timeout=CALL_S)]
        return sorted(found, key=lambda image: image.made_at or 0.0, reverse=True)

    def delete(self, name: str) -> None:
        """See `ImageStore`."""
        label = name.rpartition("/")[2]
        if label not in {image.label for image in self.images()}:
            raise NotFound(
                f"the project has no image {label} that RLBoost made", f"rlboost image list {NAME}"
            )
        with explained(f"delete image {label}"):
            done = self._clients.images.delete_unary(
                project=self._clients.project, image=label, timeout=CALL_S
            )
            self._await(done, time.monotonic() + images.SAVE_S, lambda words: None)

    def _disk_of(self, run: str, machine: str) -> str:
        """Return the URL of the disk that the machine boots from."""
        from google.cloud import compute_v1 as compute

        request = compute.AggregatedListInstancesRequest(
            project=self._clients.project,
            filter=f'labels.{tags.RUN} = "{run}" AND labels.{tags.MACHINE} = "{machine}"',
        )
        with explained(f"look for {machine}"):
            scopes = self._clients.instances.aggregated_list(request, timeout=CALL_S)
            found = [each for _, scope in scopes for each in scope.instances]
        for instance in found:
            boots = [disk.source for disk in instance.disks if disk.boot]
            if machine_of(instance).is_alive and boots:
                return str(boots[0])
        raise absent(run, machine)

    def _await(self, operation: Any, deadline: float, say: Callable[[str], None]) -> None:
        """Wait for an operation of the project. Raises what it failed with."""
        name = operation.name
        while str(getattr(operation.status, "name", operation.status)) != "DONE":
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"Google has not stored the image within {images.SAVE_S:.0f} s",
                    f"rlboost image list {NAME}",
                )
            say("waiting until Google has stored the image")
            time.sleep(self._look_s)
            operation = self._clients.operations.get(
                project=self._clients.project, operation=name, timeout=CALL_S
            )
        if operation.error.errors:
            raise failed("store the image", list(operation.error.errors))

    def _image(self, found: Any) -> MachineImage:
        labels = dict(found.labels)
        return MachineImage(
            cloud=NAME,
            place="",
            name=f"projects/{self._clients.project}/global/images/{found.name}",
            label=found.name,
            version=labels.get(images.IMAGE, ""),
            engine=labels.get(images.ENGINE, ""),
            made_at=time_of(found.creation_timestamp),
            is_ready=str(found.status) == "READY",
            size_gb=int(found.disk_size_gb),
        )
