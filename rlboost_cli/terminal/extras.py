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

_PACKAGES = {"botocore": "boto3", "google": "google-cloud-compute"}
"""Packages by the name of a module, where the two differ."""
_ORDER = ("run", "ssh", "aws", "gcp", "sky", "train", "track", "plot")
"""Extras for users; where several bring a package, the first is named."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*extra == ['\"](\w+)['\"]")


def explained(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the explanation of a missing package; None where none of our extras would bring it."""
    module = (error.name or "").partition(".")[0]
    extra = _extras().get(_PACKAGES.get(module, module).replace("_", "-").lower())
    return None if extra is None else _missing("this command", module, extra)


def require(job: Job) -> None:
    """Raise `ConfigError` where this machine is to be the job's head and lacks what a head runs."""
    if job.trainer.is_elsewhere:
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
    return {package: extra for known in reversed(_ORDER) for extra, package in found if extra == known}
