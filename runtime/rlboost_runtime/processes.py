"""Processes of a run, found again by what their environment says, whoever started them.

Every process of ours carries RLBOOST_RUN, the run's folder. A process of a machine also carries
RLBOOST_MACHINE, one under the supervisor RLBOOST_ROLE; children inherit the tags, also in sessions of their
own. Only processes of this user are looked at. A process is signalled only while it is the one that was found
(by its pid and `process_start`).

`end_all` ends what is left of a run on this machine, also after the parents are gone: politely first, then
for certain. The caller and its ancestors are never touched. With the processes go their temporary files, of
which torch, vLLM and others leave some behind when they are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rlboost_runtime.errors import RuntimeFault

RUN_TAG = "RLBOOST_RUN"
MACHINE_TAG = "RLBOOST_MACHINE"
ROLE_TAG = "RLBOOST_ROLE"

SAME_START_S = 0.005 if sys.platform == "linux" else 2.0
"""Two readings of a process's start may differ by so much: Linux says it to 0.01 s, always the same."""
_START = 19  # field 22 of /proc/PID/stat, counted after the command's name

_TEMPORARY = "rlboost-"
"""Begins the name of a run's temporary folder; nothing else is deleted through the link to it."""

TAG_SEEN_S = 10.0
"""How long a process that was started may take until others can read its tags."""

_RESCAN_S = 0.02  # between two looks at what a SIGKILL left: processes vanish within milliseconds
_TAG_POLL_S = 0.001


def tags(run: Path, *, machine: str | None = None, role: str | None = None) -> dict[str, str]:
    """Return the environment variables that mark a process."""
    marked = {RUN_TAG: str(run.absolute()), MACHINE_TAG: machine, ROLE_TAG: role}
    return {name: value for name, value in marked.items() if value is not None}


def untagged(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without our tags."""
    return {
        name: value for name, value in environment.items() if name not in (RUN_TAG, MACHINE_TAG, ROLE_TAG)
    }


def temporary_folder(run: Path) -> Path:
    """Return the folder for temporary files of the run's processes; makes it where there is none.

    It is in the system's temporary folder because names of sockets may have at most 107 bytes; a link in the
    run's folder says where. Raises `OSError`.
    """
    link = _temporary_link(run)
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix=_TEMPORARY, dir=os.environ.get("TMPDIR")))
    return link.readlink()


def temporary_folders() -> list[Path]:
    """Return the folders of this process's run and of others beside it; none where it is of no run."""
    return sorted(Path(tempfile.gettempdir()).parent.glob(f"{_TEMPORARY}*"))


def delete_temporary_folder(run: Path) -> None:
    """Delete the temporary files of the run's processes, which must have ended."""
    link = _temporary_link(run)
    with contextlib.suppress(OSError):
        if link.is_symlink() and link.readlink().name.startswith(_TEMPORARY):
            shutil.rmtree(link.readlink(), ignore_errors=True)
            link.unlink(missing_ok=True)


def _temporary_link(run: Path) -> Path:
    return run / "processes" / "tmp"


def tagged(run: Path, *, machine: str | None = None, role: str | None = None) -> list[psutil.Process]:
    """Return the living processes of `run`, only those of `machine` and `role` where given; never this one or
    one of its ancestors."""
    return [process for process, found in _tagged(run) if _matches(found, machine, role)]


def tagged_by_machine(run: Path) -> dict[str, list[psutil.Process]]:
    """Return the living processes of the run's machines, by machine."""
    machines: dict[str, list[psutil.Process]] = {}
    for process, found in _tagged(run):
        if MACHINE_TAG in found:
            machines.setdefault(found[MACHINE_TAG], []).append(process)
    return machines


def kill_tagged(
    run: Path, *, machine: str | None = None, role: str | None = None, timeout_s: float = 10.0
) -> int:
    """SIGKILL what `tagged` returns until nothing is left; return how many processes that took.

    Blocks, usually for some ten milliseconds. Raises `RuntimeFault` if something is left after `timeout_s`.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while left := tagged(run, machine=machine, role=role):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise RuntimeFault(f"processes {pids} outlive SIGKILL", "look at them with ps -l")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.add(process.pid)
        time.sleep(_RESCAN_S)
    return len(killed)


def start_session(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own so that it survives us, its output appended to `log`.

    `environment` has the run's tag; the process carries it visibly when this returns. Raises `OSError`.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    await_tags(child.pid)
    return child


def await_tags(pid: int, timeout_s: float = TAG_SEEN_S) -> None:
    """Return once others can read the tags of process `pid`, which was just started with some, or it is dead.

    `Popen` returns while the kernel still lays out the new program: its environment reads as empty for some
    microseconds, or for as long as a busy machine does not let it go on, and whoever looks takes it for dead.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        while RUN_TAG not in process.environ() and time.monotonic() < deadline:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(_TAG_POLL_S)


ENGINE_SOCKET = "RLBOOST_ENGINE_SOCKET"
"""Environment of a local agent: the socket of the process that forks engines."""
_ROOM_NAME, _ROOM = "RLBOOST_STANDBY", "x" * 80  # as long a name as `MACHINE_TAG`
_ENV_START, _ENV_END = 47, 48  # fields 50 and 51 of /proc/PID/stat, counted after the command's name


def room_for_tag() -> dict[str, str]:
    """Return the environment of a process whose forked children call `tag_as_machine`."""
    return {_ROOM_NAME: _ROOM}


def tag_as_machine(machine: str) -> None:
    """Overwrite the room in this process's environment, as others read it, by the machine's tag. Linux only.

    Raises `ValueError`.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    entry = f"{_ROOM_NAME}={_ROOM}".encode()
    at = ctypes.string_at(start, end - start).index(entry)
    tag = f"{MACHINE_TAG}={machine}".encode() + b"\0_="  # a second entry: two zeros would end the block
    tag += b"x" * (len(entry) - len(tag))
    if len(tag) != len(entry):
        raise ValueError(f"machine id {machine} is too long")
    ctypes.memmove(start + at, tag, len(tag))
    os.environ[MACHINE_TAG] = machine


def process_start(pid: int) -> float:
    """Return when the process `pid` started, which with its number tells it from every other.

    On Linux in seconds since the machine's boot: whoever sets the wall clock moves what is counted since the
    epoch, and living processes would pass for gone. Elsewhere in seconds since the epoch. Raises
    `psutil.NoSuchProcess`.
    """
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as gone:
        raise psutil.NoSuchProcess(pid) from gone
    return int(fields[_START]) / os.sysconf("SC_CLK_TCK")


def process_age(start: float) -> float:
    """Return the age in seconds of what started at `start`, as `process_start` has it."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()
    return max(0.0, now - start)


def identify(pid: int, start: float, run: Path) -> psutil.Process | None:
    """Return the living process `pid` if it started at `start` (`process_start`) and carries the run's tag;
    None if that process is gone, even where another one has its number now."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or abs(process_start(pid) - start) > SAME_START_S:
            return None
        return process if _is_of_run(process.environ(), run) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _tagged(run: Path) -> list[tuple[psutil.Process, dict[str, str]]]:
    ours = _self_and_ancestors()
    found = []
    for pid in psutil.pids():
        if pid in ours:
            continue
        try:
            process = psutil.Process(pid)
            if process.uids().real != os.getuid():
                continue
            environment = process.environ()  # that of a zombie is empty or refused
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        if _is_of_run(environment, run):
            found.append((process, environment))
    return found


def _self_and_ancestors() -> set[int]:
    me = psutil.Process()
    return {me.pid, *(parent.pid for parent in me.parents())}


def _is_of_run(environment: Mapping[str, str], run: Path) -> bool:
    tag = environment.get(RUN_TAG)
    return tag is not None and (tag == str(run) or os.path.realpath(tag) == os.path.realpath(run))


def _matches(environment: Mapping[str, str], machine: str | None, role: str | None) -> bool:
    return (machine is None or environment.get(MACHINE_TAG) == machine) and (
        role is None or environment.get(ROLE_TAG) == role
    )


def run_environment(run_folder: Path) -> dict[str, str]:
    """Return this process's environment with the run's tag: what a process of the run is started with."""
    return os.environ | tags(run_folder)


def end_all(run_folder: Path, grace_s: float) -> list[int]:
    """End every process of the run: SIGTERM, `grace_s` seconds to clean up, then SIGKILL. Blocks.

    Returns the pids of those that were there; once it returns none is left, also none that a dying process
    started meanwhile. Raises `RuntimeFault`, naming them, where some outlive SIGKILL.
    """
    found: dict[int, None] = {}
    deadline = time.monotonic() + grace_s
    while (processes := tagged(run_folder)) and time.monotonic() < deadline:
        for process in processes:
            if process.pid not in found:  # a second SIGTERM would mean "now"
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        found.update(dict.fromkeys(p.pid for p in processes))
        psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    found.update(dict.fromkeys(p.pid for p in tagged(run_folder)))
    kill_tagged(run_folder)
    delete_temporary_folder(run_folder)
    return list(found)
