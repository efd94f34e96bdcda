"""Making a machine image: a machine is bought, all is installed on it, its disk is kept, it is given back.

Guarantees: the machine is the head of a run of its own, so that it is in the books, ends itself if this
command is killed, and is found by `gc`; it is given back whatever fails; nothing of its owner stays in it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlboost_cli.acceptance.trial_job import merged
from rlboost_cli.head.connection import Head
from rlboost_cli.head.deployment import INSTALL_S, packed
from rlboost_cli.head.renting import rent
from rlboost_cli.images.recipe import image_part
from rlboost_cli.planning.launching import prepared
from rlboost_cli.runs.teardown import end_without_head
from rlboost_providers.base.images import ENGINE, IMAGE, MachineImage, tag_value
from rlboost_providers.base.prices import shipped_book
from rlboost_providers.base.tags import head_of
from rlboost_providers.registry import image_store
from rlboost_runtime.billing.launch_records import current_head_machine
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.folder import RunFolder, home, write_atomically

DISK_GB = 60
"""Of the image: the cloud's own with its driver, torch and vLLM take some 40."""
MOST_HOURS = 2.0
IDLE_MINUTES = 20.0
Json = dict[str, Any]  # fields of a job file


def build(
    infra: str, engine: str, changes: Mapping[str, Any], say: Callable[[str], None], *, yes: bool
) -> MachineImage:
    """Make an image in `infra` (CLOUD/REGION) and return it. `changes`: fields of the job for the machine.

    Raises what renting and installing raise, `ConfigError` for a cloud that keeps none.
    """
    store = image_store(infra)
    fields = merged(job_fields(infra, engine), changes)
    path = home() / "images" / f"{fields['name']}.yaml"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(fields, indent=2).encode())  # which is YAML, too
    load_job(path)
    question = f"buy a machine with {fields['trainer']['accelerators']} in {infra} for some minutes?"
    run = prepared(str(path), question, resume=False, yes=yes)
    try:
        rent(run, say)
        _install(run, engine, say)
        machine = current_head_machine(run)
        assert machine is not None
        ours = tag_value(version("rlboost"))
        label = f"rlboost-{ours[:24]}-{engine}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        marks = {IMAGE: ours, ENGINE: engine}
        say(f"storing {label}")
        return store.save(head_of(run.name), machine.machine, label, marks, say)
    finally:
        end_without_head(run, say)


def job_fields(infra: str, engine: str) -> Json:
    """Return the job whose head is the machine. Raises `ConfigError` where no machine is known there."""
    quotes = [
        quote
        for quote in shipped_book().find(count=1, infra="/".join(infra.split("/")[:2]))
        if quote.on_demand_usd_per_hour
    ]
    cheapest = min(quotes, key=lambda quote: quote.on_demand_usd_per_hour or 0.0, default=None)
    if cheapest is None:
        raise ConfigError(
            f"no machine with a GPU is known in {infra}", "name a region with one: rlboost prices lists them"
        )
    gpu = f"{cheapest.accelerator}:1"
    return {
        "name": f"image-{infra.partition('/')[0]}",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["basic_arithmetic"], "size": 64},
        "trainer": {"infra": infra, "accelerators": gpu, "disk_gb": DISK_GB, "local_engines": 1},
        "rollout": {
            "engine": engine,
            "spot": {"max_instances": 1, "any_of": [{"infra": infra, "accelerators": gpu, "via": "direct"}]},
        },
        "after": {"idle_minutes": IDLE_MINUTES, "max_hours": MOST_HOURS},
        "budget": {"max_usd": round(MOST_HOURS * (cheapest.on_demand_usd_per_hour or 0.0) + 1, 2)},
    }


def _install(run: RunFolder, engine: str, say: Callable[[str], None]) -> None:
    with Head(run) as head, tempfile.TemporaryDirectory() as name:
        part = image_part(Path(name) / "image", engine)
        say(f"installing {engine} and torch on {head.place.host}")
        answer, _ = head.ask(
            "install",
            say=lambda words: say(f"{head.place.host}: {words}"),
            payload=_files(part),
            seconds=INSTALL_S,
        )
    if answer["status"] != 0:
        said = "\n".join(f"  {line}" for line in answer["lines"])
        raise RuntimeFault(
            f"the image could not be installed (status {answer['status']}); the last lines:\n{said}",
            "the machine needs Python 3.8 or later, sudo and a way to PyPI; type the command again",
        )


def _files(part: Path) -> Iterator[bytes]:
    return packed({path.name: path for path in sorted(part.iterdir())})
