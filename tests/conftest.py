"""What holds for every test."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rlboost_runtime.run import in_memory


def pytest_configure() -> None:
    """Take Ctrl-C as a terminal has it: a shell that starts the tests in the background has it ignored, and
    so would every process that they start.

    Tensors of tests are small, and two workers share the cores: more threads only wait for one another.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return `made(name, make)`: the path of a file that `make(path)` writes once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        path = folder / name / "made"
        path.parent.mkdir(exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be making it
            if not path.exists():
                make(path)
        return path

    return made


def pytest_sessionfinish() -> None:
    """Free the main memory that trainers within tests have put versions into: no supervisor does."""
    in_memory.free_held()
