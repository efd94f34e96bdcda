"""A cloud whose answers come late, fail, or are lost although it did what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Protocol

import msgspec

from benchmarks.shells.loop import OUTSIDE
from rlboost_providers.base.provider import Ability, LaunchRequest, MachineStatus, MachineView, Offer
from rlboost_runtime.agent.bootstrap import Bootstrap
from rlboost_runtime.errors import NoCapacity, ProviderError

PRICE = 3_600_000_000
"""Micro-dollars per hour: a dollar a second."""
BOOT_S = (1.0, 15.0)
CLOUD, LAG_S = "aws", 60.0
"""Whose traits it has: its lists may lack a machine that was just launched for up to `LAG_S`."""


class Boots(Protocol):
    """What a machine's life means to the world."""

    def boot(self, bootstrap: Bootstrap) -> None:
        """Start the machine's agents."""

    def unplug(self, machine: str) -> None:
        """Take the machine away."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class PlayedCloud:
    """A `Provider`. Each failure has a probability while `fails` is set."""

    abilities: frozenset[Ability] = frozenset()

    def __init__(
        self, random: Random, world: Boots, count: Callable[[str], None], note: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._random = random
        self._world = world
        self._count = count
        self._note = note
        self.views: dict[str, MachineView] = {}
        self._unlisted_until: dict[str, float] = {}
        self._answered: set[str] = set()
        """Machines whose launch this coordinator knows to have succeeded: a provider lists them at once."""
        self.fails = True
        self.num_launches: dict[str, int] = {}
        """By machine: more than one means that two were paid for under one name."""

    def offers(self) -> list[Offer]:
        """One pool."""
        return [Offer(CLOUD, "zone", "L4:1", PRICE, True, "played")]

    def launch(self, request: LaunchRequest) -> MachineView:
        """Launch; idempotent by name."""
        machine = request.machine
        if machine not in self.views:
            if self._happens(0.1, "cloud has no capacity"):
                raise NoCapacity("sold out", "wait")
            self.num_launches[machine] = self.num_launches.get(machine, 0) + 1
            now = self._world.wall()
            self.views[machine] = MachineView(machine, MachineStatus.RUNNING, now, None)
            self._note(f"{machine} is launched")
            self._unlisted_until[machine] = now + self._random.choice((0.0, self._random.uniform(0.0, LAG_S)))
            bootstrap = msgspec.convert(request.bootstrap, Bootstrap)
            asyncio.get_running_loop().call_later(
                self._random.uniform(*BOOT_S), self._boot, bootstrap, context=OUTSIDE.copy()
            )
            if self._happens(0.1, "cloud loses the answer to a launch"):
                raise ProviderError("the answer was lost", "ask again")
        self._answered.add(machine)
        return self.views[machine]

    def forget(self) -> None:
        """Another coordinator begins: of what was launched before it knows what the cloud lists."""
        self._answered.clear()

    def describe(self, run: str) -> list[MachineView]:
        """Return all machines that the list has by now."""
        if self._happens(0.05, "cloud does not answer"):
            raise ProviderError("no answer", "ask again")
        now = self._world.wall()
        return [
            view
            for name, view in self.views.items()
            if name in self._answered or now >= self._unlisted_until[name]
        ]

    def watch(self, run: str) -> list[MachineView] | None:
        """Return the same."""
        return self.describe(run)

    def terminate(self, run: str, machine: str) -> None:
        """End a machine, sometimes without saying so."""
        if self._happens(0.1, "cloud refuses to end a machine"):
            raise ProviderError("throttled", "ask again")
        self.take(machine)
        if self._happens(0.1, "cloud loses the answer to an end"):
            raise ProviderError("the answer was lost", "ask again")

    def take(self, machine: str) -> None:
        """End a machine, as a reclaim does."""
        view = self.views.get(machine)
        if view is not None and view.state is not MachineStatus.GONE:
            self.views[machine] = replace(view, state=MachineStatus.GONE, ended_at=self._world.wall())
            self._note(f"{machine} is ended")
            self._world.unplug(machine)

    def running(self) -> list[str]:
        """Return the machines that cost money."""
        return [name for name, view in self.views.items() if view.state is not MachineStatus.GONE]

    def _boot(self, bootstrap: Bootstrap) -> None:
        if bootstrap.machine in self.running():
            self._world.boot(bootstrap)

    def _happens(self, probability: float, what: str) -> bool:
        happens = self.fails and self._random.random() < probability
        if happens:
            self._count(what)
        return happens
