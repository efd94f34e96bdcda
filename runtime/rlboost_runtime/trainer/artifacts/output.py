"""Copies of checkpoints and of the final model at the job's `output`: a bucket, or a folder on another disk.

::

    OUTPUT/RUN/job.json                         the resolved job: written before anything is trained
    OUTPUT/RUN/checkpoints/step-000012/FILE     the newest ones, as many as on the head's disk
    OUTPUT/RUN/model/FILE                       the final model; metrics.jsonl, samples.jsonl and
                                                evaluations.jsonl beside it
    OUTPUT/RUN/.../complete.json                size and SHA-256 of each file of its folder

Guarantees: `complete.json` is written last and deleted first, so a folder that has it is whole; training
never waits for the copy of a checkpoint, and none that fails ends a run (it is said, and the next checkpoint
is copied instead); a copy that was cut off goes on with the files that are missing. A run is done only once
its final model has arrived: that is tried for `FINAL_S`. Each request has a deadline. What cannot be written
before the first step is a `ConfigError`.

Credentials are those that the head has: the SDKs' usual environment variables, files and instance roles.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import obstore
from obstore import exceptions

from rlboost_runtime.errors import ConfigError, ProtocolError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event
from rlboost_runtime.run.bucket import COMPLETE, first_line, open_output
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

log = logging.getLogger(__name__)

REQUEST_S = 120.0
"""Longest time of one request, a part of a large file being one, with the library's own retries."""
FINAL_S = 1800.0
"""So long is the final model tried anew, from its first failure on."""
PAUSE_S = 10.0
"""Between two tries of the final model."""
LEAST_KEPT = 2
"""Checkpoints that stay there at least: a lost head is resumed from the newest that its event log covers."""
_SNAPSHOT = ".output-"


class OutputCopies:
    """The copies of one run. `checkpoint` may be called from any thread, the rest from one."""

    def __init__(self, url: str, run: RunFolder, *, keep: int, request_s: float = REQUEST_S) -> None:
        """`keep`: newest checkpoints that stay there. Nothing is sent yet. Raises `ConfigError`."""
        self.url = url
        self._run = run
        self._keep = keep
        try:
            self._bucket = open_output(run, url, request_s)
        except (ProtocolError, exceptions.BaseError, OSError) as exc:
            raise ConfigError(
                f"output: {url} cannot be used: {first_line(exc)}",
                "give s3://BUCKET/PREFIX, gs://..., az://..., or a folder that can be written",
            ) from exc
        self._sent: dict[str, str] = read_json(self._record) or {}
        self._changed = threading.Condition()  # guards the two below
        self._waiting: tuple[str, Path] | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="output")

    @classmethod
    def for_run(cls, run: RunFolder, job: Job) -> OutputCopies | None:
        """Return what the job asks for; None: nothing."""
        return None if job.output is None else cls(job.output, run, keep=job.trainer.keep_checkpoints)

    @property
    def _record(self) -> Path:
        return self._run.path / "output.json"

    def begin(self, *, is_new: bool) -> None:
        """Write the job and start. Raises `ConfigError` where a new run cannot write there; a run that goes
        on does so, and says it."""
        for left in self._run.path.glob(f"{_SNAPSHOT}*"):
            shutil.rmtree(left, ignore_errors=True)  # of a killed process
        try:
            obstore.put(self._bucket, "job.json", self._run.job_json)
        except (exceptions.BaseError, OSError) as exc:
            if is_new:
                raise ConfigError(
                    f"output: {self.url} cannot be written: {first_line(exc)}",
                    "check its name, and the permissions of the head's credentials there",
                ) from exc
            self._say_failed("job.json", exc)
        self._thread.start()

    def checkpoint(self, folder: Path) -> None:
        """Copy a complete checkpoint in the background, instead of one that still waits."""
        try:
            snapshot = _linked(folder, self._run.path)
        except OSError as exc:
            self._say_failed(folder.name, exc)
            return
        with self._changed:
            if self._waiting is not None:
                shutil.rmtree(self._waiting[1], ignore_errors=True)
            self._waiting = (folder.name, snapshot)
            self._changed.notify()

    def finish(self, model: Path, *, within_s: float = FINAL_S, pause_s: float = PAUSE_S) -> None:
        """Copy the final model and what was measured; return once all has arrived. After `close`. Raises
        `RuntimeFault`."""
        until = time.monotonic() + within_s
        while True:
            try:
                self._copy(model, "model")
                for path in (self._run.metrics, self._run.samples, self._run.evaluations):
                    if path.exists():
                        obstore.put(self._bucket, path.name, path)
            except (exceptions.BaseError, OSError) as exc:
                self._say_failed("model", exc)
                if time.monotonic() + pause_s > until:
                    raise RuntimeFault(
                        "every step is trained, but the final model cannot be written to output"
                        f" {self.url}: {first_line(exc)}",
                        f"it is kept in {model}; make sure that {self.url} can be written, then type"
                        f" rlboost launch {self._run.name} --resume: only what is missing is sent",
                    ) from exc
                time.sleep(pause_s)
            else:
                return

    def close(self, *, drop: bool = False) -> None:
        """End the copying of checkpoints once what is under way and what waits has been copied; `drop` what
        waits. Idempotent."""
        with self._changed:
            self._is_closing = True
            if drop and self._waiting is not None:
                shutil.rmtree(self._waiting[1], ignore_errors=True)
                self._waiting = None
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # --- copying ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
                if self._waiting is None:
                    return
                (name, snapshot), self._waiting = self._waiting, None
            try:
                started = time.monotonic()
                self._copy(snapshot, f"checkpoints/{name}")
                self._forget_old()
                event(log, "output.copied", what=name, seconds=round(time.monotonic() - started, 3))
            except (exceptions.BaseError, OSError) as exc:
                self._say_failed(name, exc)
            finally:
                shutil.rmtree(snapshot, ignore_errors=True)

    def _say_failed(self, what: str, exc: Exception) -> None:
        event(
            log, "output.failed", level=logging.WARNING, what=what, output=self.url, problem=first_line(exc)
        )

    def _copy(self, folder: Path, prefix: str) -> None:
        """Send what is missing of a folder."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): (path.stat().st_size, _digest(path)) for path in paths}
        complete = msgspec.json.encode(
            {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
        )
        there = self._sizes(prefix)
        if COMPLETE in there:
            if bytes(obstore.get(self._bucket, f"{prefix}/{COMPLETE}").bytes()) == complete:
                return
            obstore.delete(self._bucket, f"{prefix}/{COMPLETE}")
        for name, (size, digest) in files.items():
            key = f"{prefix}/{name}"
            if there.get(name) != size or self._sent.get(key) != digest:
                obstore.put(self._bucket, key, folder / name)
                self._sent[key] = digest
                write_json(self._record, self._sent)
        for name in there.keys() - files.keys() - {COMPLETE}:
            obstore.delete(self._bucket, f"{prefix}/{name}")
        obstore.put(self._bucket, f"{prefix}/{COMPLETE}", complete)

    def _sizes(self, prefix: str) -> dict[str, int]:
        found = (entry for batch in obstore.list(self._bucket, prefix) for entry in batch)
        return {entry["path"].partition(f"{prefix}/")[2]: entry["size"] for entry in found}

    def _forget_old(self) -> None:
        """Delete all but the newest checkpoints."""
        found = obstore.list_with_delimiter(self._bucket, "checkpoints")["common_prefixes"]
        names = sorted((each.strip("/").rpartition("/")[2] for each in found), key=lambda n: (len(n), n))
        for name in names[: -max(LEAST_KEPT, self._keep)]:
            prefix = f"checkpoints/{name}"
            for file in sorted(self._sizes(prefix), key=lambda each: each != COMPLETE):
                obstore.delete(self._bucket, f"{prefix}/{file}")
            self._sent = {key: d for key, d in self._sent.items() if not key.startswith(f"{prefix}/")}


@contextmanager
def copying(output: OutputCopies | None, *, is_new: bool) -> Iterator[Callable[[Path], None]]:
    """Yield what copies a checkpoint, or does nothing where there is no output."""
    if output is None:
        yield lambda folder: None
        return
    output.begin(is_new=is_new)
    try:
        yield output.checkpoint
    except BaseException:
        output.close(drop=True)
        raise
    output.close()


def _linked(folder: Path, parent: Path) -> Path:
    """Return a folder with the same files, which stay where the original is deleted."""
    made = Path(tempfile.mkdtemp(dir=parent, prefix=_SNAPSHOT))
    shutil.copytree(folder, made, copy_function=_link, dirs_exist_ok=True)
    return made


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
