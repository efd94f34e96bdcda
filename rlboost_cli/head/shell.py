"""The `ssh` command that opens a shell on a run's head or on one of its machines.

`ssh` itself does the work, with its agent and configuration. A rented head is known by the key that it was
given at its start, and by no other. Spot machines were launched by the head: where that is elsewhere, they
are reached from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlboost_providers.skypilot.records import SkyRecords
from rlboost_providers.skypilot.traits import NAME as SKYPILOT
from rlboost_providers.ssh.connection import address_of
from rlboost_runtime.billing.accounts import BilledState, MachineBill
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.job import CloudOffer, Job, SshOffer
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.head import HeadPlace, kept_place
from rlboost_runtime.run.reserved import RESERVED_MACHINE
from rlboost_runtime.run.resolved import read_resolved

HEAD = "head"
"""What the head is called beside machines and instances."""
_KNOWN_HOSTS = "head_known_hosts"


def shell_command(run: RunFolder, name: str, command: Sequence[str]) -> list[str]:
    """Return the `ssh` command for `HEAD`, or for a machine or instance of the run; `command` is what to run
    there, none for a shell. Raises `ConfigError` and `NotFound`."""
    is_elsewhere = run.head.exists()
    if name.partition("/")[0] in (HEAD, RESERVED_MACHINE):
        if not is_elsewhere:
            raise ConfigError(f"the head of {run.name} is this machine", f"its files are in {run.path}")
        return _to_head(run, kept_place(run), command)
    if is_elsewhere:  # its records, its network and its keys are there
        there = ["rlboost", "ssh", run.name, name, *(["--", *command] if command else [])]
        return _to_head(run, kept_place(run), there)
    return _to_machine(run, read_resolved(run.job_json), _bill_of(run, name), command)


def _to_head(run: RunFolder, place: HeadPlace, command: Sequence[str]) -> list[str]:
    if not place.host:
        raise NotFound(f"the head of {run.name} is not rented yet", f"rlboost launch {run.name} rents it")
    options = []
    if place.host_key is not None:
        known = run.cloud / _KNOWN_HOSTS
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known.write_text(f"rlboost-head {place.host_key}\n")
        options = [f"UserKnownHostsFile={known}", "HostKeyAlias=rlboost-head", "StrictHostKeyChecking=yes"]
    return _ssh(place.host, place.jump_host, place.identity_file, command, options)


def _to_machine(run: RunFolder, job: Job, bill: MachineBill, command: Sequence[str]) -> list[str]:
    machine = bill.machine
    if bill.state is not BilledState.RUNNING:
        raise NotFound(f"{machine} is not running", f"its logs are here: rlboost logs {run.name} {machine}")
    for offer in job.rollout.spot.any_of:
        if isinstance(offer, SshOffer) and bill.provider == "ssh" and bill.zone in offer.hosts:
            return _ssh(bill.zone, offer.jump_host, offer.identity_file, command)
    if bill.provider == "local":
        raise ConfigError(
            f"{machine} is a process of this machine", f"read its log: rlboost logs {run.name} {machine}"
        )
    record = SkyRecords(run.cloud / SKYPILOT / "machines").read(machine)
    if record is not None:
        return _ssh(record.cluster, None, None, command)  # a name that SkyPilot wrote into ~/.ssh/config
    direct = [offer for offer in job.rollout.spot.any_of if isinstance(offer, CloudOffer)]
    raise ConfigError(
        f"{machine} ({bill.provider}, {bill.zone}) takes no SSH connections: it has no key of yours",
        "read its log with rlboost logs; SkyPilot's machines take them (via: skypilot)"
        if direct
        else "read its log with rlboost logs",
    )


def _bill_of(run: RunFolder, name: str) -> MachineBill:
    machine = name.partition("/")[0]
    with closing(Ledger(run.ledger, read_only=True)) as ledger:
        bills = {bill.machine: bill for bill in ledger.machines(0.0)}
    if machine in bills:
        return bills[machine]
    living = [
        each.machine
        for each in bills.values()
        if each.state is BilledState.RUNNING and each.machine != RESERVED_MACHINE
    ]
    raise NotFound(
        f"{run.name} has no machine {machine}",
        f"choose one of: {', '.join(living)}" if living else "no spot machine is alive at the moment",
    )


def _ssh(
    host: str, jump: str | None, key: str | None, command: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """Return the command, with what the job says of the host; the rest is that of ~/.ssh/config."""
    address = address_of(host, jump_host=jump, identity_file=key)
    words = ["ssh", *(["-t"] if not command or command[0] == "rlboost" else [])]
    words += [word for option in options for word in ("-o", option)]
    if jump is not None:
        words += ["-J", jump]
    if key is not None:
        words += ["-i", str(Path(key).expanduser())]
    plain = host.rpartition("@")[2]
    if address.port != 22:
        words += ["-p", str(address.port)]
        plain = plain.rpartition(":")[0] if plain.rpartition(":")[2] == str(address.port) else plain
    user = host.rpartition("@")[0]
    return [*words, f"{user}@{plain}" if user else plain, *([shlex.join(command)] if command else [])]
