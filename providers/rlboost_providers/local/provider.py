"""`infra: local`: spot machines as processes on this machine, with a market that gives and takes them.

Guarantees: a machine outlives its launcher; its end is real (SIGKILL of every process) and found again from
the process table alone; launching the same id twice starts nothing twice, also from two processes at once.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlboost_providers.base.provider import Ability, LaunchRequest, MachineStatus, MachineView, Offer, absent
from rlboost_providers.local.machines import (
    LocalMachine,
    LocalMachines,
    inherited_environment,
    start_detached,
)
from rlboost_providers.local.market_plan import MarketPlan, plan_for
from rlboost_runtime.errors import ConfigError, NoCapacity
from rlboost_runtime.job import LocalOffer
from rlboost_runtime.processes import tags
from rlboost_runtime.run.folder import RunFolder, write_atomically

_RETRY_S = 5.0  # how long to wait where the market cannot say when it will have something

Command = Callable[[Path, str], list[str]]
"""(path of the bootstrap file, instance) -> argv of that instance's first process."""


def agent_command(bootstrap: Path, instance: str) -> list[str]:
    """Return the command of an agent."""
    return [sys.executable, "-m", "rlboost_runtime.agent", str(bootstrap), instance]


@dataclass(frozen=True, slots=True)
class Zone:
    """One entry of `rollout.spot.any_of`; `plan` None: machines stay until they are preempted by hand."""

    name: str
    price_micro_usd_per_hour: int
    plan: MarketPlan | None
    accelerator: str
    preload: bool = False


def zones_of(offers: Sequence[LocalOffer], max_instances: int, files: Path) -> dict[str, Zone]:
    """Return the zones by name, `local-0` first. Raises `ConfigError` where a trace cannot be used."""
    zones = {}
    for index, offer in enumerate(offers):
        plan = None if offer.market is None else plan_for(offer.market, max_instances, files)
        name = f"local-{index}"
        price = round(offer.price_usd_per_hour * 1_000_000)
        zones[name] = Zone(name, price, plan, offer.accelerators, offer.preload)
    return zones


class LocalProvider:
    """The `Provider` and `CanPreempt` of `infra: local`, for one run. Any thread may call any method."""

    def __init__(
        self,
        run_folder: Path,
        offers: Sequence[LocalOffer],
        *,
        max_instances: int = 3,
        command: Command = agent_command,
    ) -> None:
        self._run = RunFolder(run_folder)
        self._zones = zones_of(offers, max_instances, self._run.files)
        self._machines = LocalMachines(self._run)
        self._command = command

    @property
    def abilities(self) -> frozenset[Ability]:
        """Machines are found in the process table; an agent that nobody talks to ends by itself."""
        return frozenset({Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE})

    def offers(self) -> list[Offer]:
        """Return the zones in which a machine could be launched now, cheapest first."""
        records = self._machines.all()
        now = time.time()
        there = [zone for zone in self._zones.values() if _free_node(zone, records, now)[1] <= now]
        return [self._offer(zone) for zone in sorted(there, key=lambda z: z.price_micro_usd_per_hour)]

    def launch(self, request: LaunchRequest) -> MachineView:
        """Start the machine's processes; blocks for some 10 ms. `NoCapacity` says when to ask again."""
        zone = self._zones.get(request.offer.zone)
        if zone is None or request.run != self._run.name:
            raise ConfigError(
                f"{request.offer.zone} of run {request.run} is not known here",
                f"ask for one of {', '.join(self._zones)} of {self._run.name}",
            )
        with self._machines.locked():
            record = self._machines.read(request.machine)
            if record is None:
                record = self._intend(request, zone)
            if record.launched_at is None and record.ended_at is None:
                record = self._complete(record, zone)
            return self._view(record, self._machines.lives(record.machine))

    def describe(self, run: str) -> list[MachineView]:
        """Return every machine of the run, also ended ones; records the end of those it finds gone."""
        if run != self._run.name:
            return []
        with self._machines.locked():
            living = self._machines.living()
            return [self._view(record, record.machine in living) for record in self._machines.all()]

    def watch(self, run: str) -> list[MachineView]:
        """Return what `describe` does: the process table bears any number of questions."""
        return self.describe(run)

    def terminate(self, run: str, machine: str) -> None:
        """SIGKILL the machine; returns once nothing of it is left, also where it never was."""
        if run != self._run.name:
            return
        with self._machines.locked():
            self._machines.kill(machine)
            record = self._machines.read(machine)
            if record is not None:
                self._machines.end(record, "terminated")

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Take the machine as its market would: at once, or `notice_s` seconds after a notice, whoever lives
        then. Where a market is, the machine's place is absent for a while. Raises `NotFound`."""
        with self._machines.locked():
            record = self._machines.read(machine) if run == self._run.name else None
            if record is None or record.ended_at is not None or not self._machines.lives(machine):
                raise absent(run, machine)
            if record.reclaim is None or notice_s is None:  # a second notice changes nothing
                self._reclaim(record, notice_s)

    def _reclaim(self, record: LocalMachine, notice_s: float | None) -> None:
        record = self._machines.begin_reclaim(record, "person", notice_s)
        if notice_s is None:
            self._machines.finish_reclaim(record)
            return
        self._machines.warn(record, by_signal=False)
        start_detached(  # without the machine's tag, or it would end itself
            [sys.executable, "-m", "rlboost_providers.local.provider", str(self._run.path), record.machine],
            {**inherited_environment(), **tags(self._run.path)},
            self._run.cloud,
            self._machines.logs(record.machine) / "reclaim.log",
        )

    def _intend(self, request: LaunchRequest, zone: Zone) -> LocalMachine:
        now = time.time()
        records = self._machines.all()
        node, free_at = _free_node(zone, records, now)
        if free_at > now:
            raise _no_capacity(zone, free_at - now)
        folder = self._machines.folder(request.machine)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / "bootstrap.json", msgspec.json.encode(request.bootstrap))
        record = LocalMachine(
            run=request.run,
            machine=request.machine,
            zone=zone.name,
            instances=_instances(request),
            intended_at=now,
            node=node,
            life=len(_lives(zone.name, node, records)),
        )
        return self._machines.write(record)

    def _complete(self, record: LocalMachine, zone: Zone) -> LocalMachine:
        """Start what was intended; whatever an earlier launcher started before it died goes first."""
        self._machines.kill(record.machine)
        bootstrap = self._machines.folder(record.machine) / "bootstrap.json"
        commands = {instance: self._command(bootstrap, instance) for instance in record.instances}
        processes = self._machines.start(record, commands, preload=zone.preload)
        now = time.time()
        record = msgspec.structs.replace(record, launched_at=now, processes=processes)
        if zone.plan is not None and record.node is not None:
            started_at = _started_at(zone.name, self._machines.all(), default=now)
            reclaim = zone.plan.reclaim(record.node, record.life, now, started_at)
            if reclaim is not None:
                record = msgspec.structs.replace(
                    record, reclaim_at=reclaim.at, reclaim_notice_s=reclaim.notice_s
                )
        return self._machines.write(record)

    def _view(self, record: LocalMachine, lives: bool) -> MachineView:
        if record.launched_at is None and record.ended_at is None:  # its launcher died: undo what there is
            self._machines.kill(record.machine)
            record = self._machines.end(record, "not launched")
        elif not lives:
            record = self._machines.end(record, "gone")
        state = MachineStatus.GONE if record.ended_at is not None else MachineStatus.RUNNING
        return MachineView(record.machine, state, record.launched_at, record.ended_at, record.detail)

    def _offer(self, zone: Zone) -> Offer:
        return Offer(
            provider="local",
            zone=zone.name,
            accelerator=zone.accelerator,
            price_micro_usd_per_hour=zone.price_micro_usd_per_hour,
            spot=True,
            source="job file",
        )


def _free_node(zone: Zone, records: list[LocalMachine], now: float) -> tuple[str | None, float]:
    """Return the first free node of `zone`, or else the next one to come, and the time from which it is free;
    infinite: not as far as anyone can tell. Without a market there is always room."""
    if zone.plan is None:
        return None, now
    started_at = _started_at(zone.name, records, default=now)
    best: tuple[str | None, float] = (None, math.inf)
    for node in zone.plan.nodes:
        lives = _lives(zone.name, node, records)
        if lives and lives[-1].ended_at is None:
            continue
        reclaimed_at = lives[-1].ended_at if lives and lives[-1].reclaim is not None else None
        free_at = zone.plan.available_from(node, len(lives), reclaimed_at, now, started_at)
        if free_at is not None and free_at < best[1]:
            best = (node, free_at)
        if best[1] <= now:
            break
    return best


def _lives(zone: str, node: str | None, records: list[LocalMachine]) -> list[LocalMachine]:
    return [record for record in records if record.zone == zone and record.node == node]


def _started_at(zone: str, records: list[LocalMachine], *, default: float) -> float:
    """Return when the market's time began: with its first accepted launch, by `default` not yet."""
    launches = [r.launched_at for r in records if r.zone == zone and r.launched_at is not None]
    return min(launches, default=default)


def _no_capacity(zone: Zone, wait_s: float) -> NoCapacity:
    retry_s = wait_s if math.isfinite(wait_s) else _RETRY_S
    error = NoCapacity(
        f"the spot market of {zone.name} has no capacity now",
        f"ask again in {retry_s:.1f} s, or add an entry to rollout.spot.any_of",
    )
    error.retry_after_s = retry_s
    return error


def _instances(request: LaunchRequest) -> tuple[str, ...]:
    instances = request.bootstrap.get("instances")
    if not isinstance(instances, list | tuple) or not instances:
        raise ConfigError(f"the bootstrap of {request.machine} names no instances", "give at least one")
    return tuple(str(instance) for instance in instances)


def finish_reclaim(run_folder: Path, machine: str) -> None:
    """Wait until the machine's announced reclaim is due, then carry it out, unless it is gone by then."""
    machines = LocalMachines(RunFolder(run_folder))
    while True:
        with machines.locked():
            record = machines.read(machine)
            if record is None or record.reclaim is None or record.ended_at is not None:
                return
            wait_s = record.reclaim.kill_at - time.time()
            if wait_s <= 0:
                machines.finish_reclaim(record)
                return
        time.sleep(wait_s)


def main() -> None:
    """Carry out the announced reclaim of MACHINE when it is due."""
    parser = argparse.ArgumentParser(prog="rlboost_providers.local.provider", description=main.__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("machine")
    arguments = parser.parse_args()
    finish_reclaim(arguments.run_folder, arguments.machine)


if __name__ == "__main__":
    main()
