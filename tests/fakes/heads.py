"""A run's folder as its head leaves it, with a copy at an output that is a folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlboost_runtime.backup.layout import HeadState, state_key
from rlboost_runtime.backup.streamer import Streamer
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.storage.journal import EventLog
from rlboost_runtime.core.base.messages import Tick
from rlboost_runtime.job import Job
from rlboost_runtime.run.bucket import open_output
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import write_resolved
from rlboost_runtime.seams import SystemDisk
from rlboost_runtime.trainer.artifacts.output import OutputCopies

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SPEC = {"name": "r", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["spell_backward"], "size": 8}}


class Head:
    """A run's folder and its copy."""

    def __init__(self, folder: Path, output: Path, **job: Any) -> None:
        self.run = RunFolder(folder / "runs" / "r")
        self.output = output
        for path in (self.run.path, self.run.journal, self.run.files, self.run.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        self.job = Job.model_validate({**SPEC, "output": str(output), **job})
        write_resolved(self.run.job_json, self.job)
        self.bucket: ObjectStore = open_output(self.run, str(output), 5.0)
        self.events = EventLog(self.run.events, SystemDisk())

    @property
    def url(self) -> str:
        return f"file://{self.output}/r"

    def streamer(self) -> Streamer:
        found = Streamer.for_run(self.run, self.job)
        assert found is not None
        return found

    def there(self, key: str) -> Path:
        return self.output / "r" / key

    def state(self, head: int = 1) -> HeadState:
        return msgspec.json.decode(self.there(state_key(head)).read_bytes(), type=HeadState)

    def ticks(self, *times: float) -> None:
        for at in times:
            self.events.append(Tick(at))

    def checkpoint(self, step: int, content: bytes = b"weights", *, copied: bool = True) -> Path:
        folder = self.run.checkpoints / f"step-{step:06d}"
        folder.mkdir()
        (folder / "weights.bin").write_bytes(content * 1000)
        (folder / "digests.json").write_text(json.dumps({"weights.bin": hashlib.sha256(content).hexdigest()}))
        if copied:
            copies = OutputCopies(str(self.output), self.run, keep=2)
            copies.begin(is_new=False)
            copies.checkpoint(folder)
            copies.close()
        return folder

    def book(self) -> None:
        ledger = Ledger(self.run.ledger)
        ledger.intend(MachineRecord("spot-1", "local", "local-0", "cpu", 1_000_000, "test", 100.0))
        ledger.launched("spot-1", 100.0)
        ledger.close()
