"""What the lab's cloud sells, and the home of a SkyPilot user who has an account there.

SkyPilot reads catalogues that it finds without a checksum beside them as they are, and asks nobody.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

IMAGE_ID = "ami-0a1b2c3d4e5f60001"
REGIONS = ("us-east-1", "us-west-2")
VPC = "rlboost-lab"
ROLE = "rlboost-lab-machine"
SECRET_KEY = "secret-key-of-the-user-of-the-lab"
_GPU = (
    "\"{'Gpus': [{'Name': '%s', 'Manufacturer': 'NVIDIA', 'Count': 1.0, 'MemoryInfo': {'SizeInMiB': 24576}}],"
    " 'TotalGpuMemoryInMiB': 24576}\""
)


@dataclass(frozen=True)
class Ware:
    """A machine type in a zone; prices in USD per hour, as in the cloud's own list, not anybody's bill."""

    instance_type: str
    accelerator: str
    vcpus: int
    memory_gib: int
    price: float
    spot_price: float
    region: str
    zone_id: str


WARES = (
    Ware("g5.xlarge", "A10G", 4, 16, 1.006, 0.410, "us-east-1", "use1-az4"),
    Ware("g5.xlarge", "A10G", 4, 16, 1.006, 0.430, "us-east-1", "use1-az6"),
    Ware("g5.xlarge", "A10G", 4, 16, 1.006, 0.350, "us-west-2", "usw2-az1"),
    Ware("g5.xlarge", "A10G", 4, 16, 1.006, 0.390, "us-west-2", "usw2-az2"),
    Ware("m6i.2xlarge", "", 8, 32, 0.384, 0.154, "us-east-1", "use1-az4"),
    Ware("m6i.2xlarge", "", 8, 32, 0.384, 0.124, "us-west-2", "usw2-az1"),
    Ware("m6i.large", "", 2, 8, 0.096, 0.034, "us-east-1", "use1-az4"),
)


def write_home(home: Path) -> None:
    """Make the home of a user whose SkyPilot knows the lab's cloud and nothing else."""
    _write(
        home / ".aws/credentials",
        f"[default]\naws_access_key_id = lab\naws_secret_access_key = {SECRET_KEY}\n",
    )
    _write(home / ".aws/config", "[default]\nregion = us-east-1\n")
    _write(home / ".sky/config.yaml", _CONFIG)
    catalogue = home / ".sky/catalogs/v8"
    _write(catalogue / "common/accelerators.csv", "AcceleratorName,Clouds\nA10G,['AWS']\n")
    _write(
        catalogue / "aws/instance_quota_mapping.csv",
        "InstanceType,QuotaName,OnDemandQuotaCode,SpotInstanceCode\n",
    )
    _write(catalogue / "aws/images.csv", _images())
    _write(catalogue / "aws/vms.csv", _vms())


def images_json() -> str:
    """The machine images that moto knows."""
    image = {
        "ami_id": IMAGE_ID, "name": "rlboost-lab", "description": "rlboost-lab", "owner_id": "801119661308",
        "image_location": "amazon/rlboost-lab", "state": "available", "public": True, "image_type": "machine",
        "platform": None, "architecture": "x86_64", "virtualization_type": "hvm", "hypervisor": "xen",
        "root_device_type": "ebs", "root_device_name": "/dev/sda1", "sriov": "simple",
    }  # fmt: skip
    return json.dumps([image])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def _vms() -> str:
    lines = [
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
        "AvailabilityZone,Arch"
    ]
    for w in WARES:
        count, info = ("1.0", _GPU % w.accelerator) if w.accelerator else ("", "")
        lines.append(
            f"{w.instance_type},{w.accelerator},{count},{w.vcpus:.1f},{w.memory_gib:.1f},{info},{w.price},"
            f"{w.spot_price},{w.region},{w.zone_id},x86_64"
        )
    return "\n".join(lines) + "\n"


def _images() -> str:
    kinds = [
        f"{kind}{suffix}"
        for kind in ("custom-cpu-ubuntu", "custom-gpu-ubuntu")
        for suffix in ("", "-arm64", "-2004", "-cuda13", "-arm64-cuda13")
    ] + ["k80-ubuntu-2004", "neuron-ubuntu-2204"]
    lines = ["Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId"]
    lines += [
        f"skypilot:{kind},{region},ubuntu,22.04,{IMAGE_ID},20260101," for kind in kinds for region in REGIONS
    ]
    return "\n".join(lines) + "\n"


_CONFIG = f"""\
aws:
  vpc_names: {VPC}
  use_internal_ips: true
  use_ssm: false
  remote_identity: {ROLE}
provision:
  ssh_timeout: 15
"""
