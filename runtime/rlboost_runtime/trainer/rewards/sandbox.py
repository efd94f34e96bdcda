"""The sandbox of a reward's process: namespaces that bubblewrap (`bwrap`) makes, where the machine has it.

Inside, a user's function sees the system's files, Python's packages, the files that the job names, the cached
models and data sets of the Hub, and nothing of the home folders, of runs, their temporary files or /tmp;
it can write to an empty /tmp of its own alone; it sees no other process; it has no network unless the job
gives it one; and of the trainer's environment it has what `_KEPT` lists and the job's own variables. The
kernel keeps these rules.

It does not protect the CPU or the GPU from being used up.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlboost_providers.base.traits import known_clouds
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.processes import temporary_folders
from rlboost_runtime.run import folder as run_folder

Mode = Literal["auto", "required", "off"]

INSTALL = "install bubblewrap (apt-get install bubblewrap), or write reward_sandbox: off"
_HIDDEN = ("/home", "/root", "/tmp", "/var/tmp", "/run", "/mnt", "/media")  # noqa: S108 - covered, not used
_KEPT = ("HOME", "LANG", "LOGNAME", "PATH", "TERM", "TZ", "USER", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
_KEPT_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_")
_OURS = ("rlboost_runtime", "rlboost_providers", "rlboost_templates")
_SCRATCH_BYTES = 1 << 30
_TRIAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How a job wants its reward's processes kept apart."""

    mode: Mode = "off"
    has_network: bool = False
    variables: tuple[str, ...] = ()
    """Names of the job's own environment variables."""
    program: str = ""
    """Of the job's environment, where that is a command; its Python environment is there to read."""
    folders: tuple[str, ...] = ()
    """What else is there to read."""

    @classmethod
    def of(cls, job: Job) -> Sandbox:
        """Return what the job asks for. Its secrets are of use with a network only; those that sign in to a
        cloud are the fleet's, not the reward's."""
        of_clouds = {name for cloud in known_clouds().values() for name in cloud.credential_variables}
        secrets = [name for name in job.secrets if name not in of_clouds] if job.reward_network else []
        program = job.episodes.program if job.episodes else ""
        return cls(job.reward_sandbox, job.reward_network, (*job.env, *secrets), program)

    def problem(self) -> str:
        """Return why this machine has no such sandbox; "" if it has, or if none is asked for.

        Raises `ConfigError` where the job requires one.
        """
        found = "" if self.mode == "off" else _problem()
        if found and self.mode == "required":
            raise ConfigError(f"reward_sandbox: required, but {found}", INSTALL)
        return found

    def or_off(self, say: Callable[[str], None]) -> Sandbox:
        """Return it, or `OFF` where this machine has no such sandbox; `say` is then told why. Raises as
        `problem` does."""
        problem = self.problem()
        if problem:
            say(problem)
        return OFF if problem else self

    def around(
        self, command: list[str], files: Path, environment: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of a process in the folder `files`, inside if it is on."""
        if self.mode == "off":
            return command, environment
        return self.wrapped(command, files), self.environment(environment)

    def wrapped(self, command: list[str], files: Path) -> list[str]:
        """Return the command that runs `command` inside, in the folder `files`."""
        network = ["--share-net"] if self.has_network else []
        return [
            *_namespaces(),
            *network,
            *_mounts(files, self.program, self.folders),
            "--chdir",
            str(files),
            "--",
            *command,
        ]

    def environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Return what the processes inside get of `ours`."""
        return {
            name: value
            for name, value in ours.items()
            if name in _KEPT or name in self.variables or name.startswith(_KEPT_PREFIXES)
        }


OFF = Sandbox()


def _namespaces() -> list[str]:
    return ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]


def _mounts(files: Path, program: str, folders: Iterable[str]) -> Iterator[str]:
    """Yield options: all is there to read, then the hidden folders are covered, then what a process needs is
    uncovered again."""
    yield from ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
    for device in sorted(Path("/dev").glob("nvidia*")):
        yield from ("--dev-bind", str(device), str(device))
    hidden = _outermost([*map(Path, _HIDDEN), Path.home(), run_folder.home(), *temporary_folders()])
    for each in hidden:
        yield from ("--size", str(_SCRATCH_BYTES), "--tmpfs", str(each))
    for each in _outermost([*_needed(files), *_needed_by(program), *map(Path, folders)]):
        if any(each.is_relative_to(covered) for covered in hidden):
            yield from ("--ro-bind", str(each), str(each))


def _needed(files: Path) -> Iterator[Path]:
    yield files
    yield from (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).parent)
    yield from (Path(each) for each in sys.path if each)
    for name in _OURS:  # those of a checkout, which sys.path need not hold
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    yield from (hub / "hub", hub / "datasets", Path("/run/systemd/resolve"))


def _needed_by(program: str) -> Iterator[Path]:
    """Yield what a program by its full path needs: its folder, or its Python environment and the Python that
    this was made of."""
    if not program or not Path(program).is_absolute():
        return
    folder = Path(program).parent
    settings = folder.parent / "pyvenv.cfg"
    yield folder.parent if settings.is_file() or (folder.parent / "conda-meta").is_dir() else folder
    if settings.is_file():
        found = re.search(r"^home *= *(.+)$", settings.read_text(errors="replace"), re.MULTILINE)
        if found is not None:
            yield Path(found[1].strip()).parent


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that exist, absolute, without those that lie in another of them."""
    found: list[Path] = []
    for path in sorted({Path(os.path.abspath(each)) for each in paths}):
        if path.exists() and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


@functools.cache
def _problem() -> str:
    """Return why this machine cannot make such namespaces; "" if it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    trial = [*_namespaces(), "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--", "true"]
    try:
        found = subprocess.run(
            trial, capture_output=True, text=True, timeout=_TRIAL_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here: {error}"
    if found.returncode == 0:
        return ""
    said = found.stderr.strip().splitlines()
    return f"bubblewrap does not work here: {said[-1] if said else f'exit code {found.returncode}'}"
