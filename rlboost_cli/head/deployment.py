"""Bringing a run to its head: our runtime, and the job with all that it names.

The runtime is our own wheel with pinned requirements, installed by `deploy/install.sh` into `FOLDER/venv`
with a Python 3.11 of its own; a repetition takes seconds. The job is sent as it is for that machine:
`infra: local`, with its files and its model folder beside it. A transfer that was cut off begins again.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlboost_cli.head.connection import Head, Say
from rlboost_providers.registry import head_offer
from rlboost_providers.ssh.connection import address_of
from rlboost_runtime.billing.launch_records import HeadMachine, current_head_machine
from rlboost_runtime.deploy.shipment import Software, common_part, requirements_of
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job import BOUGHT_MACHINE, After, CloudOffer, Job, LocalOffer, Trainer
from rlboost_runtime.run.create import files_of
from rlboost_runtime.run.folder import RunFolder

INSTALL_S = 1500.0
"""Longest installation: torch for CUDA is some gigabytes."""
ROOM_BYTES = 12_000_000_000
"""Space that the runtime takes on the head's disk with torch for CUDA, about; less only causes a note."""
_BLOCK = 1 << 20
_PORTABLE_MODEL = "model"


def install(head: Head, there: dict[str, Any], job: Job, say: Say) -> None:
    """Install the runtime on the head, unless another run that is going on uses it.

    `there`: the answer of `look`. Raises `RuntimeFault` with the last lines of an installation that failed.
    """
    if head.place.python is not None:
        if not there["has_python"]:
            raise ConfigError(
                f"trainer.python: {head.place.host} has no program {head.place.python}",
                "name a Python 3.11 there that has rlboost[train], or remove the line to have it installed",
            )
        return
    with tempfile.TemporaryDirectory() as folder:
        shipment = common_part(Path(folder) / "shipment", Software.for_head(job))
        lines = requirements_of(job)
        (shipment / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if there["busy"] and there["wheel"] != _digest(shipment):
            raise RuntimeFault(
                f"{', '.join(there['busy'])} on {head.place.host} runs with another version of RLBoost",
                "wait until that has ended, or end it; or give this job another trainer.folder",
            )
        if not there["has_python"] and there["free_bytes"] < ROOM_BYTES:
            say(f"note: {head.place.host} has only {there['free_bytes'] / 1e9:.1f} GB free")
        say(f"installing the runtime on {head.place.host}")
        answer, _ = head.ask(
            "install",
            say=lambda words: say(f"{head.place.host}: {words}"),
            payload=packed({path.name: path for path in sorted(shipment.iterdir())}),
            seconds=INSTALL_S,
        )
    if answer["status"] != 0:
        said = "\n".join(f"  {line}" for line in answer["lines"])
        late = " in time" if answer["status"] == 124 else f" (status {answer['status']})"
        raise RuntimeFault(
            f"the runtime could not be installed on {head.place.host}{late}; its last lines:\n{said}",
            "the machine needs bash, Python 3.8 or later and a way to PyPI (docs/head.md); or install"
            " rlboost[train] there yourself and name its Python: trainer.python",
        )


def ship(head: Head, job: Job, say: Say) -> str:
    """Send the run's job and all files that it names; return the path of its job file there."""
    say(f"copying the job's files to {head.place.host}")
    name = f"{job.name}.head.yaml"
    here = dict(_files(head.run, job))
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / name
        there = on_its_head(job, head).model_dump_json(exclude_defaults=True)  # JSON is YAML
        job_file.write_text(there, encoding="utf-8")
        answer, _ = head.ask("ship", payload=packed({**here, name: job_file}), seconds=INSTALL_S)
    return f"{answer['folder']}/{name}"


def on_its_head(job: Job, head: Head) -> Job:
    """Return the job as it is for the machine of its head: a run there, reached at that machine's address."""
    plain: dict[str, object] = {
        "infra": "local",
        "hosts": [],
        "jump_host": None,
        "identity_file": None,
        "python": None,
        "folder": "~/.rlboost",
        **{name: Trainer.model_fields[name].default for name in BOUGHT_MACHINE},
        **{
            name: port or None
            for name, port in zip(("control_port", "bytes_port"), job.trainer.head_ports, strict=True)
        },
    }
    if (bought := current_head_machine(head.run)) is not None:
        plain["price_usd_per_hour"] = bought.price_micro_usd_per_hour / 1e6
        plain["location"] = _location(job.trainer, bought)
        if job.trainer.bought_nodes:
            plain |= {name: getattr(job.trainer, name) for name in ("reservation", "flex_start_hours")}
            plain["node_offer"] = _beside(head_offer(job.trainer), bought)
    if job.trainer.address is None and not all(isinstance(o, LocalOffer) for o in job.rollout.spot.any_of):
        plain["address"] = address_of(head.place.host).name
    changes: dict[str, object] = {
        "trainer": job.trainer.model_copy(update=plain),
        "requirements": [],
        "after": After(),
    }
    if _model_folder(job) is not None:
        changes["model"] = f"./{job.name}.{_PORTABLE_MODEL}"
    return job.model_copy(update=changes)


def _location(trainer: Trainer, bought: HeadMachine) -> str | None:
    """Return where a bought head is, as its egress is billed; None where only SkyPilot knows."""
    told = (trainer.infra, bought.zone)
    return next((each for each in told if each.startswith(f"{trainer.cloud}/")), None)


def _beside(offer: CloudOffer, bought: HeadMachine) -> CloudOffer:
    """Return the offer of the head, in the zone that its cloud chose for it."""
    zone = bought.zone.rpartition("/")[2]
    is_zone = zone != offer.region
    return offer.model_copy(update={"infra": f"{offer.cloud}/{offer.region}/{zone}"} if is_zone else {})


def _files(run: RunFolder, job: Job) -> Iterator[tuple[str, Path]]:
    """Yield what the job names: (name there, file here)."""
    for name in files_of(job):
        path = run.files / name
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if each.is_file():
                yield each.relative_to(run.files).as_posix(), each
    if (model := _model_folder(job)) is not None:
        for each in sorted(model.rglob("*")):
            if each.is_file():
                yield f"{job.name}.{_PORTABLE_MODEL}/{each.relative_to(model).as_posix()}", each


def _model_folder(job: Job) -> Path | None:
    if isinstance(job.model, str) and Path(job.model).is_dir():
        return Path(job.model)
    return None


def packed(files: dict[str, Path]) -> Iterator[bytes]:
    """Yield a tar archive of `files` (by name) in blocks, without holding it."""
    for name, path in files.items():
        with path.open("rb") as file:
            entry = tarfile.TarInfo(name)
            entry.size = left = path.stat().st_size
            yield entry.tobuf(tarfile.PAX_FORMAT)
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise RuntimeFault(f"{path} shrank while it was copied", "repeat the command")
                left -= len(block)
                yield block
            yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _digest(shipment: Path) -> str:
    import hashlib

    (wheel,) = shipment.glob("rlboost-*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()
