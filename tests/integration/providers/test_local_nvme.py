"""The script that gives a bought machine's local NVMe to RLBoost, on real block devices (loop), as root."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlboost_runtime.deploy.shipment import template
from rlboost_runtime.run import in_memory

pytestmark = pytest.mark.integration

LOCAL = "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS0123"


def typed(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout.strip()


class Machine:
    """Its disks by id, where its image mounts local NVMe, and where RLBoost wants it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids, self.image, self.nvme = folder / "by-id", folder / "dlami" / "nvme", folder / "rlboost-nvme"
        self.ids.mkdir()
        self.disks: list[str] = []

    def attach(self, name: str) -> str:
        """Attach a blank disk of 64 MB under this id; return its device."""
        file = self.folder / f"{name}.img"
        with file.open("wb") as disk:
            disk.truncate(64 << 20)
        try:
            device = typed("losetup", "--find", "--show", file)
        except (AssertionError, FileNotFoundError) as problem:
            pytest.skip(f"no loop device can be had here: {problem}")
        self.disks.append(device)
        (self.ids / name).symlink_to(device)
        return device

    def boot(self) -> None:
        """Run the script as the machine's start-up does."""
        environment = {
            **os.environ, "RLBOOST_NVME": str(self.nvme), "RLBOOST_DISK_IDS": str(self.ids),
            "RLBOOST_IMAGE_NVME": str(self.image),
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-u", "-c", template("local_nvme.sh")], env=environment, capture_output=True, text=True
        )
        assert done.stderr == ""

    def detach(self) -> None:
        for mounted in (self.nvme, self.image):
            subprocess.run(["umount", "--lazy", str(mounted)], capture_output=True)
        for device in self.disks:
            subprocess.run(["losetup", "--detach", device], capture_output=True)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path)
    yield found
    found.detach()


def test_a_blank_local_disk_takes_the_versions_that_memory_has_no_room_for(
    machine: Machine, tmp_path: Path
) -> None:
    device = machine.attach(LOCAL)
    machine.boot()
    assert typed("findmnt", "-no", "SOURCE", machine.nvme) == device
    assert machine.nvme.stat().st_mode & 0o7777 == 0o1777
    assert in_memory.room_in(machine.nvme) > 40 << 20
    versions = tmp_path / "run" / "weights"
    versions.parent.mkdir()
    in_memory.move_out(versions, machine.nvme)
    (versions / "kept").write_text("a version")
    machine.boot()
    assert (versions / "kept").read_text() == "a version", "formatted once"
    in_memory.free(versions)


def written(machine: Machine) -> None:
    typed("mkfs.ext4", "-q", machine.disks[0])


def partitioned(machine: Machine) -> None:
    """Write a table with one partition of 32 MB."""
    entry = struct.pack("<B3sB3sII", 0, b"\0\x21\0", 0x83, b"\xfe\xff\xff", 2048, 65536)
    with Path(machine.disks[0]).open("r+b") as disk:
        disk.write(entry.rjust(462, b"\0").ljust(510, b"\0") + b"\x55\xaa")


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("nvme-Amazon_Elastic_Block_Store_vol0123", lambda machine: None),
        ("google-persistent-disk-1", lambda machine: None),
        (LOCAL, written),
        (LOCAL, partitioned),
    ],
    ids=["ebs", "persistent disk", "has a filesystem", "has partitions"],
)
def test_whatever_else_is_attached_stays_as_it_is(
    machine: Machine, name: str, before: Callable[[Machine], None]
) -> None:
    device = machine.attach(name)
    before(machine)
    content = Path(device).read_bytes()
    machine.boot()
    assert Path(device).read_bytes() == content
    assert not machine.nvme.exists()


def test_what_the_image_has_mounted_is_used(machine: Machine) -> None:
    machine.attach(LOCAL)
    machine.image.mkdir(parents=True)
    typed("mount", "-t", "tmpfs", "-o", "size=8m", "rlboost-test", machine.image)
    machine.boot()
    assert machine.nvme.resolve() == machine.image / "rlboost"
    assert in_memory.is_memory(machine.nvme), "by where it really lies"


def test_a_machine_without_local_disks_has_none(machine: Machine) -> None:
    machine.boot()
    assert not machine.nvme.exists()
