"""What we know of each machine that SkyPilot has for a run: one JSON file each, so that a restart forgets
nothing. Written under a lock; whoever reads sees a whole one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_runtime.run.folder import locked, write_atomically


class SkyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine. Times in seconds since the Unix epoch."""

    machine: str
    cluster: str
    zone: str
    price_micro_usd_per_hour: int
    intended_at: float
    launching_at: float | None = None
    """When SkyPilot asked its cloud for the machine: money may run from then on."""
    running_at: float | None = None
    """When its setup was over."""
    request: str = ""
    """SkyPilot's id of the launch."""
    address: str = ""
    """In its cloud's own network, where that is known."""
    public_address: str = ""
    port: int = 22
    ended_at: float | None = None
    detail: str = ""

    @property
    def view(self) -> MachineView:
        """What our caller is told."""
        if self.ended_at is not None:
            state = MachineStatus.GONE
        elif self.running_at is not None:
            state = MachineStatus.RUNNING
        else:
            state = MachineStatus.STARTING
        return MachineView(
            self.machine, state, self.launching_at, self.ended_at, self.detail, zone=self.zone,
            price_micro_usd_per_hour=self.price_micro_usd_per_hour,
            public_address=self.public_address, private_address=self.address,
        )  # fmt: skip


class SkyRecords:
    """The records below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launches: dict[str, int] = {}

    def folder(self, machine: str) -> Path:
        """Return the machine's own folder."""
        return self._folder / machine

    def read(self, machine: str) -> SkyRecord | None:
        """Return its record, None where there is none."""
        try:
            return msgspec.json.decode((self.folder(machine) / "machine.json").read_bytes(), type=SkyRecord)
        except FileNotFoundError:
            return None

    def all(self) -> list[SkyRecord]:
        """Return all, in the order in which they were intended."""
        found = (self.read(path.parent.name) for path in self._folder.glob("*/machine.json"))
        return sorted((record for record in found if record is not None), key=lambda r: r.intended_at)

    def write(self, record: SkyRecord) -> SkyRecord:
        """Store it."""
        folder = self.folder(record.machine)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / "machine.json", msgspec.json.encode(record))
        return record

    def change(self, machine: str, **changes: object) -> SkyRecord:
        """Change an open record; an ended one stays as it is. Returns what is stored then."""
        with self.locked():
            record = self.read(machine)
            assert record is not None, machine
            if record.ended_at is not None:
                return record
            return self.write(msgspec.structs.replace(record, **changes))

    def begin_launch(self, machine: str) -> None:
        """Note that a launch of this process knows more of the machine than its cloud, until `end_launch`, or
        until this process ends, however it does."""
        self._launches[machine] = fd = self._launch_lock(machine)
        fcntl.flock(fd, fcntl.LOCK_EX)

    def end_launch(self, machine: str) -> None:
        """Note that it knows no more than its cloud; nothing to do where that is known."""
        fd = self._launches.pop(machine, None)
        if fd is not None:
            os.close(fd)

    def is_launching(self, machine: str) -> bool:
        """Return True if a launch of a living process, this or another, knows more of it than its cloud."""
        fd = self._launch_lock(machine)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _launch_lock(self, machine: str) -> int:
        folder = self.folder(machine)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / ".launching", os.O_RDWR | os.O_CREAT, 0o600)

    def locked(self) -> contextlib.AbstractContextManager[bool]:
        """Keep other processes and threads from changing records."""
        return locked(self._folder / ".lock")
