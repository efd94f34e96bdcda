"""What a head elsewhere needs: looked at over the connection by which a run is brought there.

Guarantees: nothing is installed or changed there; every wait has a deadline; of credentials only where they
are is told. Judgements are functions of what `remote/doctor.py` says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any, BinaryIO

from rlboost_cli.doctor.findings import ACCOUNT, DoctorContext, Finding, Verdict, fail, failed, ok, warn
from rlboost_cli.doctor.local import judge_disk, judge_gpu_memory
from rlboost_cli.doctor.machine import OLDEST_PYTHON
from rlboost_cli.head.connection import ssh_to
from rlboost_cli.head.deployment import ROOM_BYTES
from rlboost_providers.base.traits import cloud_traits, known_clouds
from rlboost_providers.ssh.connection import address_of
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.fit.plan import BESIDE_BYTES, fit_plan_here
from rlboost_runtime.job import CloudOffer, Job, LocalOffer
from rlboost_runtime.run.create import gather, kept, newest_run
from rlboost_runtime.run.head import HeadPlace, kept_place
from rlboost_runtime.run.index import is_open

Json = Mapping[str, Any]

QUIET_S = 90.0
"""Longest silence of the machine; its own waits are shorter."""
LOOK_S = 180.0
DIAL_S = 5.0
CLOCK_SLACK_S = 60.0
"""A certificate made there counts from then on: machines that are this far behind refuse it."""
CLOCK_DOUBT_S = 5.0


def head(patient: DoctorContext) -> Iterator[Finding]:
    """All of it, over one connection."""
    job = patient.wanted
    place = place_of(job)
    assert place is not None
    began = time.monotonic()
    try:
        facts = look(place, listen=_is_dialled_by_machines(job) and place.jump_host is None)
    except RLBoostError as error:
        yield failed("head", error)
        return
    yield ok("head", f"{place.host} answered in {time.monotonic() - began:.1f} s")
    yield judge_python(facts["python"], place)
    yield judge_gpu(facts["gpu"], facts["python"])
    if facts["gpu"]["gpus"] and fit_plan_here(job) is not None:
        yield judge_gpu_memory(job, facts["gpu"]["gpus"][0]["mib"] << 20, "head gpu memory")
    yield from judge_room(facts["disk"], wanted_bytes(job, facts["python"]))
    yield judge_clock(facts["clock"]["ahead_s"], place.host)
    if _is_dialled_by_machines(job):
        yield judge_ports(facts.get("ports"), place)
    yield from judge_credentials(facts["credentials"]["found"], job)


def secrets(patient: DoctorContext) -> Iterator[Finding]:
    """Whether what the run takes from this environment is in it."""
    job = patient.wanted
    if not job.secrets:
        return
    run = newest_run(job.name)
    try:
        gather(job, kept(run) if run is not None and is_open(run) else None)
    except RLBoostError as error:
        yield failed("secrets", error)
        return
    yield ok("secrets", f"{', '.join(job.secrets)}: set here")


def can_train_here() -> bool:
    """Whether this machine can look at models, prompts and rewards: a laptop need not."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "aiohttp"))


def not_here(patient: DoctorContext) -> Iterator[Finding]:
    """In place of a look at model, prompts and reward."""
    yield warn(
        "job",
        "prompts and reward were not checked: the training packages are not installed on this machine",
        "pip install 'rlboost[train]' here to check them before you pay for the head",
    )


def place_of(job: Job) -> HeadPlace | None:
    """Return where the head of the job's open run is, or would be; None while no machine is known."""
    run = newest_run(job.name)
    if run is not None and run.head.exists() and is_open(run):
        place = kept_place(run)
        return place if place.host else None
    trainer = job.trainer
    if not trainer.hosts:
        return None
    return HeadPlace(
        trainer.hosts[0], trainer.jump_host, trainer.identity_file, trainer.python, trainer.folder
    )


def look(place: HeadPlace, *, listen: bool, measure: bool = False) -> dict[str, Any]:
    """Return what `remote/doctor.py` says there, by what it looked at. `measure`: its disk, too, by a file of
    half a GiB. Raises `RLBoostError`."""
    program = resources.files("rlboost_runtime.remote").joinpath("doctor.py").read_bytes()
    request = {
        "folder": place.folder,
        "python": place.python,
        "listen": listen,
        "measure": measure,
        "clouds": credential_places(known_clouds()),
    }
    with contextlib.closing(ssh_to(place)) as ssh:
        return ssh.talk(
            program, request, lambda said: _hear(said, lambda port: _dial(place, port)), quiet_s=QUIET_S
        )


def credential_places(clouds: Iterable[str]) -> dict[str, Json]:
    """Return where `remote/doctor.py` is to look for credentials of each cloud, as far as that is known."""
    places = {cloud: cloud_traits(cloud).credential_places for cloud in clouds}
    return {cloud: asdict(each) for cloud, each in places.items() if each is not None}


def _hear(said: BinaryIO, dial: Callable[[int], str]) -> dict[str, Any]:
    """Read what it says to its end. Raises `ValueError` where it ends early."""
    facts: dict[str, Any] = {}
    deadline = time.monotonic() + LOOK_S
    problem = ""
    for line in iter(said.readline, b""):
        told = json.loads(line)
        match told["what"]:
            case "clock":
                facts["clock"] = {"ahead_s": told["at"] - time.time()}
            case "listening":
                problem = dial(told["port"])
            case "ports":
                facts["ports"] = {**told, "problem": told["problem"] or problem}
            case "end":
                return facts
            case what:
                facts[what] = told
        if time.monotonic() > deadline:
            break
    raise ValueError("its answer was cut off")


def _dial(place: HeadPlace, port: int) -> str:
    """Dial a port there; return why it cannot be reached, nothing where it can."""
    try:
        socket.create_connection((address_of(place.host).name, port), DIAL_S).close()
    except OSError as error:
        return str(error)
    return ""


def judge_python(said: Json, place: HeadPlace) -> Finding:
    """Judge the Python that the run will use there."""
    check = "head python"
    if not said["is_there"]:
        if place.python is not None:
            return fail(
                check,
                f"{place.host} has no program {place.python}",
                "name a Python 3.11 there that has rlboost[train], or remove trainer.python to have it"
                " installed",
            )
        return ok(check, f"{said['system']} runs these checks; `rlboost up` installs RLBoost with its own")
    remedy = (
        "remove trainer.python to have one installed"
        if place.python is not None
        else f"remove {place.folder}/venv there: the next `rlboost up` reinstalls it"
    )
    if said.get("problem"):
        return fail(check, f"{said['path']} does not work: {said['problem']}", remedy)
    version = tuple(int(part) for part in said["python"].split(".")[:2] if part.isdigit())
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return fail(check, f"{said['path']} is {said['python']}; wanted {oldest} or newer", remedy)
    return ok(check, f"{said['python']}, rlboost {said['rlboost']}, torch {said['torch']}")


def judge_gpu(said: Json, python: Json) -> Finding:
    """Judge GPUs and driver, and whether torch sees them."""
    check = "head gpu"
    if said["problem"]:
        return fail(
            check,
            f"nvidia-smi failed: {said['problem']}",
            "repair the driver there; after a driver update the machine often needs a reboot",
        )
    gpus = said["gpus"]
    if not gpus:
        return warn(
            check, "none: it would train on its CPUs", "fine for a small model; otherwise use another machine"
        )
    words = f"{len(gpus)} x {gpus[0]['name']} ({gpus[0]['mib'] / 1024:.0f} GiB), driver {said['driver']}"
    if not python["is_there"] or python.get("problem"):
        return ok(check, f"{words}; torch is not installed yet")
    if not python["gpus"]:
        built = f"CUDA {python['cuda']}" if python["cuda"] else "CPUs only"
        return fail(
            check,
            f"{words}; torch {python['torch']} (for {built}) sees none of them",
            "install a driver there that is new enough for that CUDA"
            if python["cuda"]
            else "install a torch with CUDA there, or remove trainer.python to have one installed",
        )
    if python["gpus"] != len(gpus):
        return warn(
            check, f"{words}; torch sees {python['gpus']}", "check CUDA_VISIBLE_DEVICES of that account"
        )
    return ok(check, f"{words}; torch sees them")


def judge_room(said: Json, wanted: int) -> Iterator[Finding]:
    """Judge the disk where everything is kept there."""
    if not said["can_write"]:
        yield fail(
            "head disk",
            f"{said['place']} cannot be written",
            "set trainer.folder to a folder that you may write to",
        )
        return
    found = judge_disk(said["free_bytes"], wanted, f"{said['place']} of the head")
    if found.verdict is Verdict.FAIL:
        remedy = "free disk space there, set trainer.folder to a folder on a larger disk, or lower"
        yield fail("head disk", found.found, f"{remedy} trainer.keep_checkpoints")
    else:
        yield ok("head disk", found.found)


def judge_clock(ahead_s: float, host: str) -> Finding:
    """Judge by how much the head's clock is ahead of ours."""
    check = "head clock"
    off = f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    remedy = (
        f"set the wrong one (timedatectl set-ntp true, here or on {host}):"
        " billing and certificates depend on it"
    )
    if abs(ahead_s) > CLOCK_SLACK_S:
        return fail(check, off, remedy)
    if abs(ahead_s) > CLOCK_DOUBT_S:
        return warn(check, off, remedy)
    return ok(check, "agrees with this machine's")


def judge_ports(said: Json | None, place: HeadPlace) -> Finding:
    """Judge whether a port that was opened there for a moment was reached from here."""
    check = "head ports"
    if said is None:
        return warn(
            check,
            "not tested: the head is reached through a jump host",
            "make sure that spot machines can connect to the head",
        )
    if said["was_dialled"]:
        return ok(check, "one was opened there and reached from here")
    return warn(
        check,
        f"one was opened there, but could not be reached from here: {said['problem'] or 'nothing arrived'}",
        f"let TCP from the spot machines into {place.host}, or name an address that they reach in"
        " trainer.address",
    )


def judge_credentials(found: Json, job: Job) -> Iterator[Finding]:
    """Judge what the head has for the clouds that it is to launch machines in."""
    check = "head cloud"
    for cloud in dict.fromkeys(offer.cloud for offer in _offers(job) if isinstance(offer, CloudOffer)):
        variables = cloud_traits(cloud).credential_variables
        keys = [name for name in variables if name in job.secrets]
        if not variables:
            yield warn(check, f"{cloud}: not checked", f"make sure that the head has credentials for {cloud}")
        elif keys:
            yield ok(check, f"{cloud}: {', '.join(keys)} of this machine, named in secrets")
        elif found[cloud]:
            yield ok(check, f"{cloud}: {found[cloud]}")
        else:
            yield Finding(
                check,
                Verdict.FAIL,
                f"{cloud}: the head has no credentials; it launches the machines of rollout.spot",
                f"give the machine a role, or name scoped keys: secrets: [{', '.join(variables)}]",
                ACCOUNT,
            )


def _offers(job: Job) -> Iterable[object]:
    return job.rollout.spot.any_of if job.rollout.spot.max_instances else ()


def _is_dialled_by_machines(job: Job) -> bool:
    return any(not isinstance(offer, LocalOffer) for offer in _offers(job))


def wanted_bytes(job: Job, python: Json) -> int:
    """Return the room that the run needs on the head's disk. `python`: what is installed there."""
    runtime, plan = 0 if python["is_there"] else ROOM_BYTES, fit_plan_here(job)
    return runtime + (BESIDE_BYTES if plan is None else plan.disk)
