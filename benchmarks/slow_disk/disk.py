"""A file system on a disk that the kernel throttles: ext4 on a loop device, and the block layer's limit.

Needs root on Linux. The limit is that of cgroups: blkio's of the root (version 1),
which holds for whoever writes to the device, or `io.max` of this process's own cgroup (version 2).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

V1 = Path("/sys/fs/cgroup/blkio")
V2 = Path("/sys/fs/cgroup")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


class LoopDisk:
    """A mounted disk, and its throughput."""

    def __init__(self, folder: Path, device: str) -> None:
        """`folder`: where it is mounted."""
        self.folder = folder
        status = os.stat(device)
        self._number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"

    def throttle(self, bytes_per_s: int | None) -> None:
        """Limit what is written to it; None: no limit."""
        if (V1 / "blkio.throttle.write_bps_device").exists():
            (V1 / "blkio.throttle.write_bps_device").write_text(f"{self._number} {bytes_per_s or 0}\n")
            return
        own = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        (V2 / own / "io.max").write_text(f"{self._number} wbps={bytes_per_s or 'max'}\n")


@contextmanager
def loop_disk(num_bytes: int) -> Iterator[LoopDisk]:
    """Make a disk of so many bytes, whose content is in main memory; unmount and delete it at last."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slow-disk-") as name:
        image, folder = Path(name) / "image", Path(name) / "disk"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(num_bytes)
        device = _run("losetup", "--find", "--show", str(image))
        try:
            _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
            _run("mount", device, str(folder))
            disk = LoopDisk(folder, device)
            try:
                yield disk
            finally:
                disk.throttle(None)
                _run("umount", str(folder))
        finally:
            _run("losetup", "--detach", device)
