"""Which extra of `pip install rlboost[...]` brings a package that is not installed.

The bare install has the command line alone. A command that needs more says which extra has it, whether it
checks beforehand (`require`) or an import fails (`explained`).
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlboost_runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlboost_runtime.job import Job

_PACKAGES = {"botocore": "boto3"}
"""Packages by the name of a module, where that does not begin the package's."""
_FIRST = "run"
"""The extra that is named where several bring a package: whoever is to run anything needs it."""
_INTERNAL = frozenset({"dev", "vllm"})
"""Extras that bring no command anything."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*extra == ['\"](\w+)['\"]")


def explained(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the explanation of a missing package; None where none of our extras would bring it."""
    module = (error.name or "").partition(".")[0]
    name = _PACKAGES.get(module, module).replace("_", "-").lower()
    for package, extra in _extras().items():
        if package == name or package.startswith(f"{name}-"):
            return _missing("this", module, extra)
    return None


def require(job: Job) -> None:
    """Raise `ConfigError` where this machine lacks what a head runs, or what reaches a head elsewhere."""
    if job.trainer.is_elsewhere:
        if find_spec("paramiko") is None:
            raise _missing("a run whose head is another machine", "paramiko", "ssh")
        return
    needed: dict[str, tuple[str, ...]] = {"run": ("aiohttp", "cryptography", "numba", "uvicorn")}
    if job.trainer.script is None:
        needed["train"] = ("torch", "transformers", "peft")
    for extra, modules in reversed(needed.items()):
        absent = next((module for module in modules if find_spec(module) is None), None)
        if absent is not None:
            raise _missing("a run whose head is this machine", absent, extra)


def _missing(what: str, module: str, extra: str) -> ConfigError:
    return ConfigError(
        f"{what} needs {module}, which is not installed", f"type: pip install 'rlboost[{extra}]'"
    )


@cache
def _extras() -> dict[str, str]:
    """Return the extra of each package."""
    try:
        lines = requires("rlboost") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return {}
    found = [(match[2], match[1].lower()) for match in map(_REQUIREMENT.match, lines) if match is not None]
    named = sorted((extra != _FIRST, extra, package) for extra, package in found if extra not in _INTERNAL)
    return {package: extra for _, extra, package in reversed(named)}
