"""The script that a machine of a direct provider runs at its first boot: it dials out and needs no way in.

The bootstrap travels in it, and so does the machine's credential: clouds show a machine's start-up script to
whoever may describe the machine, and to the machine itself. Nothing else of the user's is in it.
"""

from __future__ import annotations

import base64
import gzip
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from rlboost_providers.base.provider import LaunchRequest
from rlboost_runtime.errors import ConfigError
from rlboost_templates import shipped

BOOT_S = 1200
"""Longest installation: a machine that is not ready by then ends itself (the head gave it up before)."""
_OURS = "[ -e image.json ] || exit 0 # an image of the user's own has everything"
_DONE_LINE = "END_OF_INSTALL"


def installation() -> str:
    """Return the shell text that brings the head's own runtime onto a machine whose image lacks it."""
    return shipped("startup/install.sh")


def software(image: str | None, default: str) -> tuple[str, str]:
    """Return a machine's image, and how rlboost and the engine are installed on it: where the job names an
    `image`, only the head's version of rlboost over that of an image of ours (`rlboost image`)."""
    return (default, installation()) if image is None else (image, f"{_OURS}\n{installation()}")


def script_of(request: LaunchRequest, cloud: str, install: str, longest: int) -> str:
    """Return what the machine of `request` runs at its first boot. Raises `ConfigError`."""
    if request.head_script is None:
        return startup_script({**request.bootstrap, "cloud": cloud}, install=install, longest=longest)
    _check_length(request.head_script, request.machine, longest)
    return request.head_script


def startup_script(bootstrap: Mapping[str, object], *, install: str = "", longest: int | None = None) -> str:
    """Return the script for `bootstrap` (`agent.bootstrap`); `install` is shell text that leaves the runtime
    in `venv/` of its working folder, empty where the image has it.

    Raises `ConfigError` where it is longer than the `longest` bytes that the cloud takes.
    """
    instances = bootstrap.get("instances")
    if not isinstance(instances, Sequence) or isinstance(instances, str) or not instances:
        raise ConfigError(f"the bootstrap of {bootstrap.get('machine')} names no instances", "give one")
    if _DONE_LINE in install.splitlines():
        raise ConfigError(f"the installation has a line {_DONE_LINE}", "write it otherwise")
    packed = gzip.compress(msgspec.json.encode(bootstrap), mtime=0)
    text = shipped("startup/worker.sh")
    for name, value in {
        "@LOCAL_NVME@": shipped("deploy/local_nvme.sh").rstrip(),
        "@INSTALL@": install,
        "@BOOT_S@": str(BOOT_S),
        "@INSTANCES@": " ".join(shlex.quote(str(instance)) for instance in instances),
        "@TRAINER_NODE@": " ".join(shlex.quote(str(each)) for each in _trainer_node(bootstrap)),
        "@BOOTSTRAP@": base64.encodebytes(packed).decode().rstrip(),
    }.items():
        text = text.replace(name, value, 1)
    if longest is not None:
        _check_length(text, str(bootstrap.get("machine")), longest)
    return text


def _trainer_node(bootstrap: Mapping[str, object]) -> Sequence[object]:
    """Return the arguments of `trainer.node` (`agent.bootstrap`); none where the machine is no node."""
    found = bootstrap.get("trainer_node", ())
    return found if isinstance(found, Sequence) and not isinstance(found, str) else ()


def _check_length(text: str, machine: str, longest: int) -> None:
    if len(text.encode()) > longest:
        raise ConfigError(
            f"the start-up script of {machine} has {len(text.encode())} bytes, this cloud takes {longest}",
            "bake the runtime into the image and leave the installation out",
        )
