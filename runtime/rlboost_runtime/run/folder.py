"""The one folder that a run keeps on disk, and the names in it.

Everything about run NAME lies in `$RLBOOST_HOME/runs/NAME` (default `~/.rlboost`). Whoever writes a file
there is named at the end of its line; everybody else only reads it. docs/run-folder.md is written from this
table.

::

    job.yaml          the job file as the user gave it                      CLI
    job_source        where that file was, one line: read again on resume   CLI
    job.json          the job with every default                            CLI
    files/            copies of the user's files that the job names         CLI
    files.previous/   the same before the last resume with changed files    CLI
    secrets/          token, api_keys, key.pem, cert.pem, environment.json; folder 700, files 600          CLI
    revoked.json      credentials of machines that are no longer accepted   coordinator
    address.json      {"host", ...}: where machines elsewhere reach the head                               CLI
    endpoint.json     {"url"}: where the coordinator listens; kept through restarts      coordinator
    weights_endpoint.json  {"url"}: where the weight server listens; likewise       weight server
    api_endpoint.json {"url"}: where the endpoint listens; likewise         endpoint
    sockets/          endpoint.sock: where environments reach the endpoint  endpoint
    episodes.json     {"url"}: where environments' programs reach it; likewise     endpoint
    episodes/         step-000012.msgpack: episodes that are over, until a checkpoint has the step  trainer
    dashboard.json    {"url"}: where the run's page is served; likewise     dashboard
    tokenizer/        the model's, for the endpoint                         trainer
    reserved/         the reserved agents' working folders                  supervisor
    plan.json         what the plan said of time and cost at the first launch                 CLI
    wanted.json       {"train": bool}: what the supervisor is to run; watched by it           CLI
    status.json       last status, once a second and at the end             coordinator
    ending.json       {"state", "problem", "remedy", "exit_code"} once it is decided how the run ends; its
                      machines are ended then                               coordinator
    generation.json   {"head"}: which head of the run this machine is, from 1               backup, CLI
    backup.json       how the copying of the head to the `output` goes      backup
    restored.json     {"url", "at", "taken"}: from which copy the run was restored here, and as of when    CLI
    outcome.json      {"state", "problem", "remedy", "exit_code", "warning"} once the run has ended; the
                      warning: why machines may still cost money, or ""     coordinator
    outcome.previous.json  how the run had ended before it was resumed  CLI
    notified.json     which notifications were sent to whom                 supervisor
    ledger.sqlite     machines, steps, events in words                      coordinator
    ledger.mark       how many durable transactions the ledger has had      coordinator
    events.log        the core's events                                     coordinator
    events.damaged.log  the same as found where a part could not be read; not read again           coordinator
    events.snapshot   the core after some of them; may be deleted           coordinator
    journal/          step-000012.seg: tokens                               coordinator
    requests/         the same of requests to the endpoint, until they are delivered; what the audit needs
                      of them stays in past/                                coordinator
    weights/          v000012/: immutable versions                          trainer
    former_versions/  v000012.json: manifests of versions whose files may be gone    trainer
    checkpoints/      step-000012/, and `model/` at the end                 trainer
    metrics.jsonl     a line per step                                       trainer
    forked.json       {"ancestors"}: the checkpoints that a fork goes back to       CLI
    samples.jsonl     a few responses per step, for people                  trainer
    evaluations.jsonl a line per response of an evaluation                  trainer
    tensorboard/      event files, if the job asks for them                 trainer
    preparing.json    {"doing", "done", "of", "unit", "since"}: what the trainer does before its first step;
                      absent otherwise                                      trainer
    processes/        supervisor.json, coordinator.json, ...: {"pid", "start"};            supervisor
                      tmp: a link to their temporary files
    logs/             a file per process; logs/machines/ID/ per machine     each process
    head.json         {"host", ...}: where the run's head is, if not here; the rest of the folder is then
                      what was last seen of the one there                   CLI
    mirror.json       there once the run was to be started there: what of it was fetched, and when       CLI
    rentals.json      the machines that were bought for that head           CLI
    output.json       what of the run was copied to the job's `output`      trainer
    safe.json         all of the ended run is at the job's `output`         supervisor
    trainer_nodes.json  {"joined"}: the trainer's further nodes that are there           coordinator
    cloud/            what providers keep of their machines, the local market's state; bought.json: the offer
                      that each machine was bought as                       providers, coordinator

Saying how a run ended even where its disk is full.

A run keeps a reserve, a file of a megabyte that nobody reads. Where the outcome cannot be written the reserve
is given up first: there is room then for the outcome and for closing the books, so that the run has ended
for everybody who looks, and can be resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlboost_runtime.errors import DISK_ERRNOS, RuntimeFault
from rlboost_runtime.logs import event


def home() -> Path:
    """Return `$RLBOOST_HOME`, by default `~/.rlboost`."""
    return Path(os.environ.get("RLBOOST_HOME") or Path.home() / ".rlboost").absolute()


@dataclass(frozen=True, slots=True)
class _Place:
    """A path in a run's folder, as an attribute of `RunFolder`."""

    name: str

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run: the files of the table above."""

    path: Path

    @classmethod
    def named(cls, name: str) -> RunFolder:
        """Return the folder of run `name`; it need not exist."""
        return cls(home() / "runs" / name)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def place_in(self, url: str) -> str:
        """Return the URL of the run's own place in a bucket, which other runs may use, too."""
        return f"{url.rstrip('/')}/{self.name}"

    job_yaml = _Place("job.yaml")
    job_source = _Place("job_source")
    job_json = _Place("job.json")
    files = _Place("files")
    former_files = _Place("files.previous")
    plan = _Place("plan.json")
    token = _Place("secrets/token")
    """The run's bearer token."""
    key = _Place("secrets/key.pem")
    certificate = _Place("secrets/cert.pem")
    """TLS certificate; clients trust this one and no other."""
    environment = _Place("secrets/environment.json")
    """Environment variables of the run's processes, secrets among them."""
    head = _Place("head.json")
    """Where the run's head is; absent where it is this machine."""
    mirror = _Place("mirror.json")
    head_machines = _Place("rentals.json")
    safe = _Place("safe.json")
    endpoint = _Place("endpoint.json")
    weights_endpoint = _Place("weights_endpoint.json")
    api_endpoint = _Place("api_endpoint.json")
    sockets = _Place("sockets")
    episodes_endpoint = _Place("episodes.json")
    episodes = _Place("episodes")
    api_keys = _Place("secrets/api_keys")
    """Keys of the endpoint's clients, one a line."""
    dashboard = _Place("dashboard.json")
    tokenizer = _Place("tokenizer")
    reserved = _Place("reserved")
    trainer_nodes = _Place("trainer_nodes.json")
    """The trainer's further nodes that are there; absent where it has none."""
    wanted = _Place("wanted.json")
    """What the supervisor is to run; absent means everything but the trainer."""
    status = _Place("status.json")
    ending = _Place("ending.json")
    """How the run is to end, from the decision on; without an outcome it is still being wound up."""
    outcome = _Place("outcome.json")
    """How the run ended; absent while it is open."""
    former_outcome = _Place("outcome.previous.json")
    generation = _Place("generation.json")
    """Which head of the run this machine is; absent until it has copied anything."""
    backup = _Place("backup.json")
    restored = _Place("restored.json")
    """From which copy of a lost head the run was restored; absent where it was not."""
    notified = _Place("notified.json")
    ledger = _Place("ledger.sqlite")
    events = _Place("events.log")
    damaged_events = _Place("events.damaged.log")
    snapshot = _Place("events.snapshot")
    """The core as of a place in the event log."""
    journal = _Place("journal")
    requests = _Place("requests")
    weights = _Place("weights")
    checkpoints = _Place("checkpoints")
    forked = _Place("forked.json")
    metrics = _Place("metrics.jsonl")
    samples = _Place("samples.jsonl")
    evaluations = _Place("evaluations.jsonl")
    tensorboard = _Place("tensorboard")
    preparing = _Place("preparing.json")
    processes = _Place("processes")
    logs = _Place("logs")
    cloud = _Place("cloud")


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600, durably: bool = False) -> None:
    """Replace `path` by `data` so that a reader sees the old content or the new, never a part; `durably`: the
    new also after a power cut, once this has returned."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durably:
        sync_path(path.parent)


UNFINISHED = re.compile(r"[.].+[.][a-z0-9_]{8}")
"""Name of a file that `write_atomically` has not put into its place: a process that was killed leaves it."""
UNFINISHED_S = 60.0
"""Nobody takes so long to write one."""


def sweep_unfinished(run: RunFolder) -> int:
    """Delete what killed processes had not finished to write; return how many files that were."""
    num_deleted = 0
    for folder in (run.path, run.processes, run.cloud):
        for path in folder.iterdir() if folder.is_dir() else ():
            if not (UNFINISHED.fullmatch(path.name) and path.is_file()):
                continue
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    path.unlink()
                    num_deleted += 1
    return num_deleted


@contextlib.contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`, made where there is none, against other threads and processes; it is freed
    with the process, too. Yields False where another has it and `waits` is False."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Bring a file's content, or a folder's names, to stable storage: they survive a power cut then."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any, *, durably: bool = False) -> None:  # any JSON value
    """Replace `path` by `value` as JSON, like `write_atomically`; an object gets a checksum."""
    written = {**value, _CHECKSUM: _checksum(value)} if isinstance(value, dict) else value
    try:
        data = msgspec.json.format(json.dumps(written).encode(), indent=1)  # four times as fast as `json`
    except msgspec.DecodeError:  # NaN or an infinity, which only `json` reads
        data = json.dumps(written, indent=1).encode()
    write_atomically(path, data, durably=durably)


_CHECKSUM = "crc32"


def _checksum(value: dict[str, Any]) -> str:
    plain = {name: each for name, each in value.items() if name != _CHECKSUM}
    return f"{zlib.crc32(json.dumps(plain).encode()):08x}"


def _checked(value: Any) -> Any:  # any JSON value
    """Return the value without its checksum, which files of earlier versions lack. Raises `ValueError`."""
    if isinstance(value, dict) and (written := value.pop(_CHECKSUM, None)) not in (None, _checksum(value)):
        raise ValueError(f"its checksum is {_checksum(value)}, not {written}: it is not as it was written")
    return value


def parse_json(data: bytes) -> Any:  # any JSON value
    """Return what `write_json` wrote into a file with this content. Raises `ValueError` for anything else."""
    return _checked(json.loads(data))


_RENEWED = frozenset(
    f"{name}.json"
    for name in (
        *("endpoint", "weights_endpoint", "wanted", "status", "ending", "outcome"),
        *("preparing", "mirror", "safe", "plan", "install", "notified", "backup"),
    )
)
"""Files that are written anew where they are absent, or can be missed, as can all in `processes` and
`priors`."""


def read_json(path: Path) -> Any | None:  # any JSON value
    """Return the JSON in `path`, or None where there is no such file.

    One that is damaged (no JSON, or not as `write_json` wrote it) counts as absent where it is written anew
    then, and is kept as NAME.damaged. Raises `RuntimeFault` for any other.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as problem:
        if path.name not in _RENEWED and path.parent.name not in ("processes", "priors"):
            raise RuntimeFault(
                f"{path} is damaged: {problem}", "restore it from a backup, or start a new run"
            ) from problem
        event(log, "file.damaged", path=str(path), problem=str(problem))
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        return None


def restore_outcome(run: RunFolder) -> None:
    """Where the outcome is damaged, take it from what was decided before it was written; where that is gone,
    too, the run is open and comes to its end again."""
    if not run.outcome.exists() or read_json(run.outcome) is not None:
        return
    decided = read_json(run.ending)
    if decided is not None:
        write_json(run.outcome, decided | ({"state": "stopped"} if decided["state"] == "budget" else {}))


log = logging.getLogger(__name__)

_RESERVE_BYTES = 1 << 20
"""The outcome takes less than 4 KiB; SQLite writes whole pages, some of them twice, to close the books."""


def reserve(run: RunFolder) -> None:
    """Take the reserve, unless it is there; a disk that is full already has none to give."""
    path = _reserve(run)
    if path.exists():
        return
    try:
        path.write_bytes(os.urandom(_RESERVE_BYTES))  # zeros might be stored as nothing
    except OSError as problem:
        path.unlink(missing_ok=True)  # a part of it would only take room
        event(log, "reserve.not_taken", level=logging.WARNING, problem=str(problem))


def give_up_reserve(run: RunFolder) -> None:
    """Make room for last words; idempotent, never raises."""
    with contextlib.suppress(OSError):
        _reserve(run).unlink(missing_ok=True)


def write_outcome(run: RunFolder, outcome: Mapping[str, object]) -> bool:
    """Write how the run ended, giving up the reserve where it must; return whether that could be done."""
    try:
        write_json(run.outcome, dict(outcome), durably=True)
    except OSError as problem:
        if problem.errno not in DISK_ERRNOS:
            raise
    else:
        return True
    give_up_reserve(run)
    try:
        write_json(run.outcome, dict(outcome), durably=True)
    except OSError as problem:
        event(log, "outcome.not_written", level=logging.ERROR, problem=str(problem))
        return False
    return True


def _reserve(run: RunFolder) -> Path:
    return run.processes / ".reserve"
