"""Where SkyPilot itself lives: a venv of its own, and how it is told to keep credentials at home.

SkyPilot's pins are narrow, so it shares no venv with anything. `RLBOOST_SKYPILOT_PYTHON` names the Python of
a venv that has it; otherwise one is made in `$RLBOOST_HOME` at first use, from a locked list.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.run.folder import home, write_atomically

VARIABLE = "RLBOOST_SKYPILOT_PYTHON"
INSTALL_S = 900.0
_LOCK = "skypilot/lock.txt"
AWS_ROLE = "rlboost-worker"
"""The role (instance profile) of machines on AWS, unless the user's SkyPilot names another; docs/skypilot.md
says how to make one that may do nothing."""


def skypilot_python(say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the Python of SkyPilot's venv; makes the venv where there is none, which takes a minute or two.

    Raises `ConfigError` where the variable names no SkyPilot, `RuntimeFault` where it cannot be installed.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not (Path(named).parent / "sky").exists():
            raise ConfigError(
                f"{VARIABLE}={named}: no SkyPilot is installed there", "pip install skypilot there"
            )
        return Path(named)
    lock = resources.files("rlboost_templates").joinpath(_LOCK).read_text(encoding="utf-8")
    folder = home() / f"skypilot-{hashlib.sha256(lock.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home() / ".skypilot.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            say("installing SkyPilot into a venv of its own (once)")
            _install(folder, lock)
    return python


def child_environment(folder: Path, python: Path) -> dict[str, str]:
    """Return what SkyPilot's child is started with; the configuration that it names is written by the child
    and lies over the user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    configuration = folder / "skypilot.yaml"
    write_atomically(configuration, b"aws: {remote_identity: NO_UPLOAD}\n")
    return {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "SKYPILOT_PROJECT_CONFIG": str(configuration),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }


def _install(folder: Path, lock: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise RuntimeFault("uv is missing, which makes SkyPilot's venv", "pip install 'rlboost[sky]'")
    listed = folder.with_suffix(".txt")
    write_atomically(listed, lock.encode())
    python = folder / "bin" / "python"
    _run([uv, "venv", "--quiet", "--python", "3.11", str(folder)])
    _run(
        [
            uv,
            "pip",
            "install",
            "--quiet",
            "--compile-bytecode",
            "--python",
            str(python),
            "--requirement",
            str(listed),
        ]
    )
    (folder / ".complete").touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise RuntimeFault(
            f"SkyPilot cannot be installed: {done.stderr.strip()[-800:]}", "mend that, then try again"
        )
