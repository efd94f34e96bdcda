"""The part that runs on a head elsewhere: sent over the connection, nothing of it is installed there.

Standard library only, Python 3.8 and later, Linux. It reads one line of JSON from standard input, then a tar
archive where the request has one, and answers in lines of JSON: {"say": ...} while it works, so that a long
wait is told from a lost connection, and {"answer": ..., "bytes": N} last, followed by N bytes.

Under `FOLDER` (default ~/.rlboost) lie the runtime (`venv/`) and one home of `rlboost` for each laptop,
`heads/OWNER/`, with `shipped/RUN/` beside the runs: the job as it is for that machine, and the files that it
names.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import queue
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Optional, Tuple  # noqa: UP035 the host's Python may be 3.8

Json = Dict[str, Any]  # noqa: UP006
Answer = Tuple[Json, bytes]  # noqa: UP006

SAY_S = 5.0
"""Longest silence while something is under way."""
MOST_BYTES = 4 << 20
"""Of one answer, about; what is longer comes in several."""
WHOLE = ("status.json", "outcome.json", "ending.json", "preparing.json", "cloud/bought.json")
"""Files that are replaced whole."""
BLOCK = 1 << 20
LEDGER = "ledger.sqlite"
PLAIN = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")
TOLD_LINES = 15
SYSTEMD = Path("/run/systemd/system")
"""There where systemd is the first process."""
UNITS = Path("/etc/systemd/system")
MEMORY = Path("/dev/shm")  # noqa: S108
"""A folder in memory: there is room also where the disk is full."""


class RunPlace:
    """Where one run's files are."""

    def __init__(self, request: Json) -> None:
        self.root = Path(os.path.expanduser(request["folder"]))
        self.home = self.root / "heads" / request["owner"]
        self.run = self.home / "runs" / request["run"]
        self.shipped = self.home / "shipped" / request["run"]
        python = request["python"]
        self.python = os.path.expanduser(python) if python else str(self.root / "venv" / "bin" / "python")


def main() -> None:
    """Carry out the request on standard input."""
    source = sys.stdin.buffer
    request = json.loads(source.readline())
    os.umask(0o077)
    place = RunPlace(request)
    Asked.file = place.root / "asked" if (place.home / "rental.json").exists() else None
    Asked.note()
    try:
        answer, more = DO[request["do"]](place, request, source)
    except OSError as error:
        answer, more = {"problem": f"{error.filename or 'its disk'}: {error.strerror or error}"}, b""
    except sqlite3.Error as error:
        answer, more = {"problem": f"{place.run / LEDGER}: {error}"}, b""
    sys.stdout.buffer.write(json.dumps({"answer": answer, "bytes": len(more)}).encode() + b"\n" + more)
    sys.stdout.buffer.flush()


class Asked:
    """That somebody asks something: a machine that was rented ends itself when nobody does (`watch`)."""

    file: Optional[Path] = None  # noqa: UP045
    """None: nobody rents it."""

    @classmethod
    def note(cls) -> None:
        """Note that it is so now."""
        if cls.file is not None:
            with contextlib.suppress(OSError):  # a full disk says so elsewhere
                cls.file.touch()


def say(words: str = "") -> None:
    """Show that something is under way."""
    Asked.note()
    sys.stdout.buffer.write(json.dumps({"say": words}).encode() + b"\n")
    sys.stdout.buffer.flush()


# --- bringing it there -------------------------------------------------------------------------------------


def look(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Say what is there: the run, who looks after it, which runtime."""
    place.home.mkdir(parents=True, exist_ok=True)
    put(place.home / "owner", request["owner"])  # what it launches is then found by the laptop's `gc` too
    if request.get("rental") is not None:
        put(place.home / "rental.json", json.dumps(request["rental"]))
    outcome = place.run / "outcome.json"
    return {
        "exists": (place.run / "job.json").exists(),
        "ended": outcome.exists(),
        "outcome": mark_of(outcome) if outcome.exists() else None,
        "supervised": is_supervised(place.run),
        "has_python": os.access(place.python, os.X_OK),
        "wheel": text_of(place.root / "wheel.sha256").split(" ")[0].strip(),
        "busy": [each.name for each in place.root.glob("heads/*/runs/*") if is_supervised(each)],
        "free_bytes": shutil.disk_usage(str(place.root)).free,
    }, b""


def install(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Unpack the shipment and run its install.sh."""
    place.root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=str(place.root), prefix=".shipment-"))
    try:
        unpack(source, folder)
        environment = dict(os.environ, RLBOOST_ROOT=str(place.root))
        status, lines = told(["bash", str(folder / "install.sh")], environment, request["seconds"])
    finally:
        shutil.rmtree(str(folder), ignore_errors=True)
    return {"status": status, "lines": lines}, b""


def ship(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Put the job and its files in their place, whole; what was there before goes."""
    place.shipped.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=str(place.shipped.parent), prefix=".new-"))
    try:
        unpack(source, draft)
        shutil.rmtree(str(place.shipped), ignore_errors=True)
        os.rename(str(draft), str(place.shipped))
    finally:
        shutil.rmtree(str(draft), ignore_errors=True)
    return {"folder": str(place.shipped)}, b""


def unpack(source: BinaryIO, folder: Path) -> None:
    """Write the files of the archive, whose names lie below `folder`."""
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while block := content.read(BLOCK):
                        file.write(block)
                        Asked.note()  # a model may be under way for longer than the machine waits


def told(command: List[str], environment: Json, seconds: float) -> Tuple[int, List[str]]:  # noqa: UP006
    """Run `command`, saying what it says; return its status (124: not in time) and its last lines."""
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=drain, args=(child.stdout, lines), daemon=True)
    reader.start()
    last: List[str] = []  # noqa: UP006
    deadline, status = time.monotonic() + seconds, None
    try:
        while True:
            try:
                line = lines.get(timeout=SAY_S)
            except queue.Empty:
                say()
            else:
                if line is None:
                    status = child.wait()
                    return status, last
                last = [*last, line.decode(errors="replace").rstrip()][-TOLD_LINES:]
                say(last[-1])
            if time.monotonic() > deadline:
                return 124, last
    finally:
        if status is None:  # too late, or nobody listens any more
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def drain(stream: BinaryIO, lines: queue.Queue[bytes | None]) -> None:
    """Put every line of `stream` into `lines`, and None at its end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


# --- asking it ---------------------------------------------------------------------------------------------


def rlboost(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Type a command of `rlboost` there; return what it prints and its exit code (124: not in time)."""
    environment = dict(os.environ, **request["environment"])
    environment.update(RLBOOST_HOME=str(place.home), NO_COLOR="1", COLUMNS="100")
    child = subprocess.Popen(
        [place.python, "-m", "rlboost_cli.main", *request["arguments"]],
        cwd=str(place.home),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + request["seconds"]
    while True:
        try:
            out, err = child.communicate(timeout=SAY_S)
            break
        except subprocess.TimeoutExpired:
            say()
            if time.monotonic() > deadline:
                child.kill()
                return {"status": 124, "out": "", "err": ""}, b""
    return {"status": child.returncode, "out": out.decode(), "err": err.decode()}, b""


def is_supervised(run: Path) -> bool:
    """Return True if the run's supervisor lives."""
    try:
        pid = json.loads((run / "processes" / "supervisor.json").read_text())["pid"]
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"RLBOOST_RUN=" + os.fsencode(str(run)) in file.read().split(b"\0")
    except (OSError, ValueError, KeyError):
        return False


def put(path: Path, text: str) -> None:
    """Have a small file say `text`; where the disk takes it not, it says what it said."""
    if text_of(path) == text:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        os.replace(str(draft), str(path))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def text_of(path: Path) -> str:
    """Return a small file's text; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


# --- after a restart of the machine ------------------------------------------------------------------------


def keep(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Have systemd go on with the run when the machine starts again, or (`on` false) not any more.

    `kept`: whether it will. Needs systemd, and root or sudo without a password; else nothing is done.
    """
    unit = UNITS / f"rlboost-{request['owner']}-{request['run']}.service"
    if not SYSTEMD.exists() or (not request["on"] and not unit.exists()):
        return {"kept": False}, b""
    if request["on"]:
        steps = [(["tee", str(unit)], unit_text(place)), (["systemctl", "enable", unit.name], "")]
    else:
        steps = [(["systemctl", "disable", unit.name], ""), (["rm", "-f", str(unit)], "")]
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for command, text in steps:
        try:
            done = subprocess.run(
                [*as_root, *command],
                input=text.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return {"kept": False}, b""
        if done.returncode != 0:
            return {"kept": False}, b""
    return {"kept": bool(request["on"])}, b""


def unit_text(place: RunPlace) -> str:
    """Return the unit: the run's supervisor, which takes the run up where its disk has it; stopped, it ends
    the run's machines and processes by itself."""
    return f"""[Unit]
Description=RLBoost run {place.run.name}
Wants=network-online.target
After=network-online.target
ConditionPathExists=!{place.run}/outcome.json

[Service]
User={pwd.getpwuid(os.getuid()).pw_name}
WorkingDirectory={place.run}
Environment=RLBOOST_RUN={place.run} RLBOOST_HOME={place.home}
ExecStart={place.python} -m rlboost_runtime.supervisor {place.run}
StandardOutput=append:{place.run}/logs/supervisor.log
StandardError=append:{place.run}/logs/supervisor.log
KillMode=mixed
TimeoutStopSec=300

[Install]
WantedBy=multi-user.target
"""


# --- looking at it -----------------------------------------------------------------------------------------


def mirror(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Return what has changed of the files that the laptop keeps copies of; `known` are those it has.

    One entry per file: `name`, its `mark` ([size, mtime in ns]), its age in seconds, and where its `bytes`
    belong: at `offset`, or whole where that is null. `more`: not everything fitted in.
    """
    known, now = request["known"], time.time()
    answer: Json = {"supervised": is_supervised(place.run), "files": [], "more": False}
    blobs: List[bytes] = []  # noqa: UP006
    room = MOST_BYTES
    names = list(WHOLE) + ([LEDGER] if request["ledger"] else [])
    answer["gone"] = [name for name in WHOLE if name in known and not (place.run / name).exists()]
    for name in names + (growing(place.run) if request["logs"] else ["logs/supervisor.log"]):
        path = place.run / name
        try:
            mark = mark_of(path, wal=name == LEDGER)
        except FileNotFoundError:
            continue
        if known.get(name) == mark:
            continue
        if room <= 0:
            answer["more"] = True
            break
        offset = None
        if name == LEDGER:
            blob = ledger_copy(path)
        elif name in WHOLE:
            blob = path.read_bytes()
        else:
            had = known.get(name, [0, 0])[0]
            offset = had if had <= mark[0] else 0
            with path.open("rb") as file:
                file.seek(offset)
                blob = file.read(min(room, mark[0] - offset))
            mark[0] = offset + len(blob)  # a file that grew meanwhile is asked for again
        room -= len(blob)
        age = max(0.0, now - path.stat().st_mtime)
        answer["files"].append({"name": name, "mark": mark, "age": age, "offset": offset, "bytes": len(blob)})
        blobs.append(blob)
    return answer, b"".join(blobs)


def growing(run: Path) -> List[str]:  # noqa: UP006
    """Return the names of files that are only added to."""
    logs = (p.relative_to(run).as_posix() for p in sorted((run / "logs").rglob("*")) if p.is_file())
    return [
        "metrics.jsonl",
        "samples.jsonl",
        "evaluations.jsonl",
        *(name for name in logs if PLAIN.fullmatch(name)),
    ]


def mark_of(path: Path, wal: bool = False) -> List[int]:  # noqa: UP006
    """Return what tells one state of a file from another."""
    facts = path.stat()
    if wal:
        beside = path.with_name(path.name + "-wal")
        if beside.exists():
            facts = max(facts, beside.stat(), key=lambda each: each.st_mtime_ns)
    return [facts.st_size, facts.st_mtime_ns]


def ledger_copy(path: Path) -> bytes:
    """Return the ledger as of now, in one file that needs no other."""
    with tempfile.TemporaryDirectory(dir=str(MEMORY) if MEMORY.is_dir() else None) as folder:
        copy = os.path.join(folder, "copy")
        source = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10)
        target = sqlite3.connect(copy)
        try:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        finally:
            target.close()
            source.close()
        with open(copy, "rb") as file:
            return file.read()


# --- taking from it ----------------------------------------------------------------------------------------


def results(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """List the files of the final model and of the newest checkpoint: [name, size, mtime in ns]."""
    folder = place.run / "checkpoints"
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir())[-1:]
    found = []
    for part in [*steps, folder / "model"]:
        for path in sorted(part.rglob("*")):
            if path.is_file():
                facts = path.stat()
                found.append([path.relative_to(place.run).as_posix(), facts.st_size, facts.st_mtime_ns])
    return {"files": found}, b""


def fetch(place: RunPlace, request: Json, source: BinaryIO) -> Answer:
    """Return a part of one of those files."""
    with (place.run / request["name"]).open("rb") as file:
        file.seek(request["offset"])
        return {}, file.read(MOST_BYTES)


DO = {do.__name__: do for do in (look, install, ship, rlboost, keep, mirror, results, fetch)}

if __name__ == "__main__":
    main()
