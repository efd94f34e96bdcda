"""The part of `infra: ssh` that runs on the host: sent over the connection, nothing of it is installed there.

Standard library only, Python 3.9 and later, Linux. It reads one JSON request from standard input and answers
with one JSON line. A machine is every process whose environment carries its tag; what is known of it lies in
`FOLDER/ssh/OWNER/RUN/MACHINE/machine.json`. One lock per host orders all changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List  # noqa: UP035 the host's Python may be 3.8

TAG = "RLBOOST_SSH"
Record = Dict[str, Any]  # noqa: UP006 JSON


def main(request: Record) -> Record:
    """Carry out `request` and return the answer."""
    base = Path(os.path.expanduser(request["folder"])) / "ssh"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if request["do"] == "launch":
            return launch(base, request)
        if request["do"] == "end":
            return {"machine": end(base, request, "terminated")}
        if request["do"] == "preempt":
            return preempt(base, request)
        return {"machines": listed(base)}


def launch(base: Path, request: Record) -> Record:
    """Start the machine unless it was started before, or the host has another one."""
    known = read(folder_of(base, request))
    if known is not None:
        return {"machine": settled(base, known)}
    for other in listed(base):
        if other["ended_at"] is None:
            return {"busy": other["run"] + "/" + other["machine"]}
    folder = folder_of(base, request)
    folder.mkdir(mode=0o700, parents=True)
    write(folder / "bootstrap.json", request["bootstrap"])
    record = {key: request[key] for key in ("owner", "run", "machine")}
    record.update(started_at=time.time(), ended_at=None, detail="")
    environment = dict(os.environ, **{TAG: tag_of(request)})
    for number, instance in enumerate(request["bootstrap"]["instances"]):
        command = [os.path.expanduser(request["python"]), "-m", "rlboost_runtime.agent"]
        with (folder / f"agent-{number}.log").open("ab") as log:
            try:
                agent = subprocess.Popen(
                    [*command, str(folder / "bootstrap.json"), instance],
                    cwd=str(folder),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                kill(request)
                shutil.rmtree(str(folder))
                return {"problem": f"cannot start {command[0]}: {error}"}
        await_tag(agent, record)
    write(folder / "machine.json", record)
    return {"machine": record}


def end(base: Path, request: Record, detail: str) -> Record | None:
    """Kill the machine and record its end; its secrets and weights go."""
    kill(request)
    folder = folder_of(base, request)
    record = read(folder)
    if record is not None and record["ended_at"] is None:
        record.update(ended_at=time.time(), detail=detail)
        write(folder / "machine.json", record)
        (folder / "bootstrap.json").unlink()
        forget(folder / "weights")
    return record


def forget(weights: Path) -> None:
    """Delete the machine's versions, also where an engine's folder is a link into main memory."""
    for each in weights.iterdir() if weights.is_dir() else ():
        if each.is_symlink() and each.resolve().parent.name == f"rlboost-{os.getuid()}":
            shutil.rmtree(str(each.resolve()), ignore_errors=True)
    shutil.rmtree(str(weights), ignore_errors=True)


def preempt(base: Path, request: Record) -> Record:
    """Take the machine at once, or leave a notice and come back by ourselves when it is due."""
    record = read(folder_of(base, request))
    if record is None or settled(base, record)["ended_at"] is not None:
        return {"machine": None}
    seconds = request["notice_s"]
    if seconds is None:
        return {"machine": end(base, request, "reclaimed")}
    write(folder_of(base, request) / "notice.json", {"seconds": seconds})
    if os.fork() == 0:  # without the tag: it would end itself
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, 64)
        time.sleep(seconds)
        with (base / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            end(base, request, "reclaimed")
        os._exit(0)
    return {"machine": record}


def listed(base: Path) -> List[Record]:  # noqa: UP006
    """Return all machines of this host, whoever started them; records the end of those that left."""
    found = [read(path.parent) for path in sorted(base.glob("*/*/*/machine.json"))]
    return [settled(base, record) for record in found if record is not None]


def settled(base: Path, record: Record) -> Record:
    """Return `record`, with its end where it has none and nothing of it lives."""
    if record["ended_at"] is None and not living(record):
        return end(base, record, "gone") or record
    return record


def await_tag(child: subprocess.Popen[bytes], record: Record) -> None:
    """Return once the tag of `child`, just started, can be read, or it has ended.

    `Popen` returns while the kernel still lays out the new program: who looks then takes it for gone.
    """
    deadline = time.monotonic() + 10
    while child.poll() is None and child.pid not in living(record) and time.monotonic() < deadline:
        time.sleep(0.001)


def living(record: Record) -> List[int]:  # noqa: UP006
    """Return the machine's processes."""
    wanted = (TAG + "=" + tag_of(record)).encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:  # ended meanwhile, or another user's
                continue
    return found


def kill(record: Record) -> None:
    """SIGKILL the machine until nothing of it lives."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pids = living(record)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def tag_of(record: Record) -> str:
    """Return what the machine's processes carry."""
    return "/".join((record["owner"], record["run"], record["machine"]))


def folder_of(base: Path, record: Record) -> Path:
    """Return the machine's folder."""
    return base.joinpath(*(str(record[key]) for key in ("owner", "run", "machine")))


def read(folder: Path) -> Record | None:
    """Return what is known of the machine in `folder`."""
    try:
        record: Record = json.loads((folder / "machine.json").read_text())
    except FileNotFoundError:
        return None
    return record


def write(path: Path, value: object) -> None:
    """Replace a file, readable by its owner only."""
    draft = path.with_name(path.name + ".draft")
    descriptor = os.open(str(draft), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
    os.replace(str(draft), str(path))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read()))), flush=True)
