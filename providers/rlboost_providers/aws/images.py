"""Our images at EC2: AMIs of one region, each with the snapshots that it is stored in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from rlboost_providers.aws.errors import explained
from rlboost_providers.aws.machines import ec2_client, list_machines
from rlboost_providers.aws.traits import NAME
from rlboost_providers.base import images
from rlboost_providers.base.images import MachineImage
from rlboost_providers.base.provider import absent
from rlboost_runtime.errors import NotFound, RuntimeFault

LOOK_S = 5.0


class AwsImages:
    """The `ImageStore` of a region."""

    def __init__(self, region: str, client: Any = None, look_s: float = LOOK_S) -> None:
        self._region = region
        self._ec2 = ec2_client(region) if client is None else client
        self._look_s = look_s

    def save(
        self, run: str, machine: str, label: str, marks: Mapping[str, str], say: Callable[[str], None]
    ) -> MachineImage:
        """See `ImageStore`. The machine is not rebooted: its disk was synced before."""
        found = [m for m in list_machines(self._ec2, self._region, run=run, machine=machine) if m.is_alive]
        if not found:
            raise absent(run, machine)
        named = [{"Key": key, "Value": value} for key, value in marks.items()]
        with explained(f"make an image of {machine}"):
            made = self._ec2.create_image(
                InstanceId=found[0].instance,
                Name=label,
                Description="RLBoost: machines boot with everything installed",
                NoReboot=True,
                TagSpecifications=[
                    {"ResourceType": "image", "Tags": named},
                    {"ResourceType": "snapshot", "Tags": named},
                ],
            )["ImageId"]
        deadline = time.monotonic() + images.SAVE_S
        while True:
            image = next((each for each in self.images() if each.name == made), None)
            if image is not None and image.is_ready:
                return image
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"image {made} is not ready after {images.SAVE_S:.0f} s",
                    f"rlboost image rm {NAME} {made}",
                )
            say(f"waiting until {self._region} has stored {made}")
            time.sleep(self._look_s)

    def images(self) -> list[MachineImage]:
        """See `ImageStore`."""
        with explained(f"list the images in {self._region}"):
            found = self._ec2.describe_images(
                Owners=["self"], Filters=[{"Name": "tag-key", "Values": [images.IMAGE]}]
            )["Images"]
        made = [self._image(each) for each in found]
        return sorted(made, key=lambda image: image.made_at or 0.0, reverse=True)

    def delete(self, name: str) -> None:
        """See `ImageStore`."""
        with explained(f"delete image {name}"):
            found = self._ec2.describe_images(
                Owners=["self"], Filters=[{"Name": "image-id", "Values": [name]}]
            )["Images"]
            ours = [each for each in found if images.IMAGE in _marks(each)]
            if not ours:
                raise NotFound(
                    f"{self._region} has no image {name} that RLBoost made",
                    f"rlboost image list {NAME}/{self._region}",
                )
            self._ec2.deregister_image(ImageId=name)
            for snapshot in filter(None, map(_snapshot, ours[0].get("BlockDeviceMappings", []))):
                self._ec2.delete_snapshot(SnapshotId=snapshot)

    def _image(self, found: Mapping[str, Any]) -> MachineImage:
        marks = _marks(found)
        made = found.get("CreationDate")
        disks = found.get("BlockDeviceMappings", [])
        return MachineImage(
            cloud=NAME,
            place=self._region,
            name=found["ImageId"],
            label=found.get("Name", ""),
            version=marks.get(images.IMAGE, ""),
            engine=marks.get(images.ENGINE, ""),
            made_at=datetime.fromisoformat(made).timestamp() if made else None,
            is_ready=found.get("State") == "available",
            size_gb=sum(int(each.get("Ebs", {}).get("VolumeSize", 0)) for each in disks),
        )


def _marks(found: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}


def _snapshot(disk: Mapping[str, Any]) -> str | None:
    snapshot = disk.get("Ebs", {}).get("SnapshotId")
    return None if snapshot is None else str(snapshot)
