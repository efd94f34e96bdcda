"""What every run needs of this machine, whatever the job.

Judgements are functions of plain values (`judge_...`), so that a test can show each of them a bad machine;
the checks look at this one.
"""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import rlboost_runtime
from rlboost_cli.doctor.findings import DoctorContext, Finding, fail, ok
from rlboost_runtime.run.folder import sync_path, write_atomically
from rlboost_runtime.run.index import all_runs

OLDEST_PYTHON = (3, 11)
NAMED_PACKAGES = ("torch", "transformers")
"""Packages that get a line of their own: a wrong one of these is the usual trouble."""
TRAIN_EXTRAS = ("run", "train")
CLOCK_SLACK_S = 60.0
"""Files that are newer than now by more than this mean that the clock went back."""
FILES_PER_CONNECTION = 16
FILES_BESIDE = 256
"""Open files: sockets, logs and journal segments; per agent of a run, and of everything else."""
LOOPBACK_TIMEOUT_S = 5.0
INSTALL = 'pip install "rlboost[train]"'


def python(context: DoctorContext) -> Iterator[Finding]:
    """This Python."""
    yield judge_python(sys.version_info[:3])


def judge_python(version: tuple[int, ...]) -> Finding:
    """Judge a version of Python."""
    shown, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST_PYTHON))
    if version < OLDEST_PYTHON:
        return fail("python", shown, f"install Python {oldest} or newer and make a new environment with it")
    return ok("python", shown)


def packages(context: DoctorContext) -> Iterator[Finding]:
    """Installed packages against what this version of RLBoost was tried with."""
    wanted = wanted_packages(metadata.requires("rlboost") or [])
    yield from judge_packages(wanted, {name: _installed(name) for name in wanted})


def wanted_packages(requirements: list[str]) -> dict[str, str]:
    """Return what training needs as name to version range, out of a distribution's requirements.

    Those of other extras are left out, and so is the distribution itself.
    """
    found = {}
    for line in requirements:
        wanted, _, marker = line.partition(";")
        extra = re.search(r"""extra\s*==\s*["'](\w+)["']""", marker)
        match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*?)\s*$", wanted)
        if match and match[1] != "rlboost" and (extra is None or extra[1] in TRAIN_EXTRAS):
            found[match[1]] = match[2]
    return found


def judge_packages(wanted: Mapping[str, str], installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """Judge installed versions: the named packages one by one, the rest on one line."""
    problems = {name: _package_problem(name, wanted[name], installed.get(name)) for name in wanted}
    for name in NAMED_PACKAGES:
        if name in wanted and (problem := problems.pop(name)):
            yield fail(name, problem, INSTALL)
        elif name in wanted:
            yield ok(name, f"{installed[name]} (wanted {wanted[name] or 'any'})")
    wrong = [problem for problem in problems.values() if problem]
    if wrong:
        yield fail("packages", "\n".join(wrong), INSTALL)
    else:
        yield ok("packages", f"{len(problems)} others as required")


def _package_problem(name: str, wanted: str, installed: str | None) -> str:
    if installed is None:
        return f"{name} is not installed (wanted {wanted or 'any'})"
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(wanted).contains(installed, prereleases=True):
        return f"{name} {installed} is installed, wanted {wanted}"
    return ""


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def home(context: DoctorContext) -> Iterator[Finding]:
    """Check that runs can be kept: write, sync and rename a file, and make a database like a ledger."""
    remedy = "set RLBOOST_HOME to a writable folder on a local disk"
    try:
        context.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=context.home, prefix=".doctor-") as folder:
            write_atomically(Path(folder) / "file", b"x" * 4096)
            sync_path(Path(folder) / "file")
            mode = _journal_mode(Path(folder) / "books.sqlite")
    except OSError as exc:
        yield fail("home", f"{context.home} cannot be written: {exc.strerror}", remedy)
    except sqlite3.Error as exc:
        yield fail("home", f"{context.home} cannot hold a database: {exc}", remedy)
    else:
        if mode == "wal":
            yield ok("home", f"{context.home} can be written")
        else:
            yield fail("home", f"{context.home} does not support SQLite's WAL (a network disk?)", remedy)


def _journal_mode(path: Path) -> str:
    database = sqlite3.connect(path)
    try:
        mode = str(database.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        database.execute("CREATE TABLE probe (x INTEGER) STRICT")
        return mode
    finally:
        database.close()


def clock(context: DoctorContext) -> Iterator[Finding]:
    """Check that the clock is later than the files that it dated: bills and certificates depend on it."""
    dated = [Path(rlboost_runtime.__file__)]
    with contextlib.suppress(OSError):  # a home that cannot be read was told above
        dated += [run.job_json for run in all_runs()[-1:]]
    newest = max(dated, key=lambda path: path.stat().st_mtime)
    yield judge_clock(time.time(), newest.stat().st_mtime, str(newest))


def judge_clock(now: float, newest: float, path: str) -> Finding:
    """Judge the time `now` against that of a file that exists already; seconds since the Unix epoch."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if now < newest - CLOCK_SLACK_S:
        behind = f"{shown} is {newest - now:,.0f} s before the date of {path}"
        return fail(
            "clock", behind, "set the clock (timedatectl set-ntp true): billing and certificates depend on it"
        )
    return ok("clock", shown)


def open_files(context: DoctorContext) -> Iterator[Finding]:
    """The limit on open files, which the run's processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agents = 4
    if context.job is not None:
        agents = context.job.trainer.local_engines + context.job.rollout.most_spot_engines()
    yield judge_open_files(soft, hard, agents)


def judge_open_files(soft: int, hard: int, agents: int) -> Finding:
    """Judge limits on open files for so many agents; -1 is no limit."""
    needed = FILES_BESIDE + FILES_PER_CONNECTION * agents
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft >= needed:
        return ok("open files", f"limit {soft:,} (wanted {needed:,})")
    can_raise = hard == resource.RLIM_INFINITY or hard >= needed
    remedy = f"ulimit -n {needed}" if can_raise else f"raise the hard limit {hard:,} in limits.conf"
    return fail("open files", f"limit {soft:,}, {agents} agents need {needed:,}", remedy)


def loopback(context: DoctorContext) -> Iterator[Finding]:
    """Check that processes of this machine can talk: a port is opened, dialled and used."""
    try:
        said = _converse()
    except OSError as exc:
        yield fail(
            "loopback",
            f"127.0.0.1 cannot be used: {exc.strerror or exc}",
            "bring it up (ip link set lo up), and allow local traffic in the firewall",
        )
    else:
        yield ok("loopback", f"port {said} of 127.0.0.1 opened, dialled and answered")


def _converse() -> int:
    """Return the port that a byte travelled through. Raises `OSError`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LOOPBACK_TIMEOUT_S)
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), timeout=LOOPBACK_TIMEOUT_S) as caller:
            answering, _ = listener.accept()
            with answering:
                answering.settimeout(LOOPBACK_TIMEOUT_S)
                caller.sendall(b"?")
                if answering.recv(1) != b"?":
                    raise OSError("what was sent did not arrive")
    return port
