"""The YAML file by which SkyPilot is asked for one machine, and the folder of files that goes with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost_providers.base.provider import LaunchRequest, Offer
from rlboost_runtime.deploy.shipment import Software, common_part, worker_shipment
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import RunFolder, write_atomically
from rlboost_templates import shipped


def write_task(folder: Path, run: RunFolder, request: LaunchRequest, more: Mapping[str, Any]) -> Path:
    """Write what a spot machine needs into `folder`; return the task's path. `more` has NAME and RESOURCES.
    Raises `ConfigError`."""
    instances = request.bootstrap.get("instances")
    if not isinstance(instances, list | tuple) or not instances:
        raise ConfigError(f"the bootstrap of {request.machine} names no instances", "give at least one")
    # the cloud whose notices the agents listen to
    bootstrap = {**request.bootstrap, "cloud": request.offer.zone.partition("/")[0]}
    common = common_part(run.cloud / "shipment", _software(bootstrap))
    shipment = worker_shipment(folder / "shipment", common, bootstrap)
    values = {
        "SHIPMENT": json.dumps(str(shipment)),
        "INSTANCES": " ".join(shlex.quote(str(instance)) for instance in instances),
    }
    return _write(folder, "worker.yaml", request.offer, more, values)


def write_head_task(folder: Path, request: LaunchRequest, more: Mapping[str, Any]) -> Path:
    """Write what a head needs into `folder`, see `write_task`; its script holds a private key."""
    assert request.head_script is not None
    script = folder / "start.sh"
    write_atomically(script, request.head_script.encode())
    return _write(folder, "head.yaml", request.offer, more, {"SCRIPT": json.dumps(str(script))})


def _write(folder: Path, name: str, offer: Offer, more: Mapping[str, Any], values: dict[str, str]) -> Path:
    machine = {"infra": offer.zone, "instance_type": offer.instance_type, "use_spot": offer.spot}
    resources = json.dumps({**machine, **more["RESOURCES"]})
    path = folder / "task.yaml"
    text = filled(name, {"NAME": json.dumps(more["NAME"]), "RESOURCES": resources, **values})
    write_atomically(path, text.encode())
    return path


def _software(bootstrap: Mapping[str, Any]) -> Software:
    engine = bootstrap.get("engine") or {}
    return Software.for_engine(engine.get("kind", ""), (engine.get("vllm") or {}).get("python"))


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return a template of `templates/rlboost_templates/skypilot`, each @NAME@ replaced; JSON is YAML too."""
    text = shipped(f"skypilot/{name}")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text
