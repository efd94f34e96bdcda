"""Our end of tasksets of verifiers: their Python environment, their tasks as rows, and what `verifiers_child`
is told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job.environment import VerifiersTaskset
from rlboost_runtime.run.folder import home, locked

VERSION = "0.4.0"
"""Of verifiers that is installed; its API moves with every release."""
CHILD = Path(__file__).with_name("verifiers_child.py")
INSTALL_S = 1800.0
TASKS_S = 900.0
"""A taskset may have to load its data set first."""


@dataclass(frozen=True, slots=True)
class TasksetSetup:
    """What plays a taskset: `python`, a tokenizer's folder, and what its process is told, as JSON."""

    python: str
    tokenizer: str
    told: dict[str, Any]  # JSON


def taskset_setup(settings: VerifiersTaskset, folder: Path, tokenizer: Path) -> TasksetSetup:
    """Return how a taskset is played; its modules may lie in `folder`. Raises as `verifiers_python` does."""
    told = {
        "taskset": settings.taskset, "config": settings.config, "folder": str(folder.absolute()),
        "harness": settings.harness, "harness_config": settings.harness_config,
        "renderer": settings.renderer, "tokenizer": str(tokenizer),
    }  # fmt: skip
    return TasksetSetup(str(verifiers_python(settings)), str(tokenizer), told)


def verifiers_python(settings: VerifiersTaskset, say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the Python that has verifiers; makes its environment where the job names none and there is none
    yet, which takes some minutes. Raises `ConfigError` for a Python that is missing, `RuntimeFault` where it
    cannot be installed."""
    if settings.python is not None:
        python = Path(settings.python).expanduser()
        if not python.is_file():
            raise ConfigError(
                f"environment.verifiers.python: {settings.python} does not exist",
                "write the full path of a Python that has verifiers, or remove python",
            )
        return python.absolute()
    wanted = [f"verifiers=={VERSION}", *settings.packages]
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder = home() / f"verifiers-{digest}"
    with locked(home() / ".verifiers.lock"):
        if not (folder / ".complete").exists():
            say(f"installing {', '.join(wanted)} into a Python environment of its own (once)")
            _install(folder, wanted)
    return folder / "bin" / "python"


def _install(folder: Path, packages: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise RuntimeFault(
            "uv is missing, which makes verifiers' Python environment",
            "pip install uv, or write environment.verifiers.python",
        )
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    options = ["--quiet", "--compile-bytecode", "--python", str(folder / "bin" / "python")]
    _run([uv, "pip", "install", *options, *packages])
    (folder / ".complete").touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise RuntimeFault(
            f"verifiers cannot be installed: {done.stderr.strip()[-800:]}", "correct that, then try again"
        )


def task_rows(settings: VerifiersTaskset, folder: Path, most: int, python: Path) -> Iterator[str]:
    """Yield a taskset's first `most` tasks as lines of a data file. Raises `ConfigError` for a taskset that
    cannot be loaded."""
    told = json.dumps(
        {"taskset": settings.taskset, "config": settings.config, "folder": str(folder.absolute())}
    )
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-P", str(CHILD), "--tasks", str(most)], input=told, capture_output=True, text=True,
        timeout=TASKS_S, check=False, env=ours,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ConfigError(
            f"taskset {settings.taskset} cannot be loaded: {said[-1] if said else 'it printed nothing'}",
            "install it beside verifiers (--package), or run this where its module is",
        )
    yield from done.stdout.splitlines()
