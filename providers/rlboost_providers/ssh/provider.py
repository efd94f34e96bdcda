"""`infra: ssh`: machines of the user's own as a pool that may vanish, one machine of ours per host.

Nothing is bought and nobody sends a bill: the price is the job file's, for the report. A host that cannot be
reached is not offered; what runs there is taken to be as last seen for `ABSENT_S`, and gone after that. All
that is known of a machine lies on its host, so any launcher finds it again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlboost_providers.base.provider import (
    Ability,
    LaunchRequest,
    MachineStatus,
    MachineView,
    Offer,
    Owned,
    PollTimer,
    absent,
)
from rlboost_providers.base.traits import egress_micro_usd_per_gb
from rlboost_providers.ssh.connection import SshHost
from rlboost_runtime.errors import ConfigError, NoCapacity, ProviderError
from rlboost_runtime.job import SshOffer
from rlboost_runtime.logs import event
from rlboost_runtime.money import MICRO_USD_PER_USD

log = logging.getLogger(__name__)

NAME = "ssh"
WATCH_EVERY_S = 3.0
"""Pause between two looks at all hosts."""
ABSENT_S = 120.0
"""Silence of a host after which what ran there counts as gone."""
_RETRY_S = 10.0  # until a busy host is asked again


AS_IT_IS = "as it is"
"""What is said of the devices of a machine of which nothing is known."""


class SshProvider:
    """The `Provider`, `CanPreempt` and `CanSweep` of `infra: ssh`, for one owner."""

    def __init__(self, offers: Sequence[SshOffer], owner: str, head_place: str | None = None) -> None:
        """`head_place`: where the head is, as CLOUD/REGION[/ZONE]; None: in no cloud."""
        self._offers = {host: offer for offer in offers for host in offer.hosts}
        self._hosts = {
            host: SshHost(host, jump_host=offer.jump_host, identity_file=offer.identity_file)
            for host, offer in self._offers.items()
        }
        self._owner = owner
        self._egress_micro_usd_per_gb = egress_micro_usd_per_gb(head_place, None, None)
        self._pace = PollTimer(WATCH_EVERY_S)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        """By host: when it last answered, and its machines (`ssh_host`'s records)."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """Machines are found on their hosts; an agent that nobody talks to ends by itself."""
        return frozenset({Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE})

    def offers(self) -> list[Offer]:
        """Return the hosts that answer and are free, cheapest first; blocks for up to some 10 s. Raises what
        the first host said where none lets us in."""
        answers, problems = self._ask_all()
        if problems and not answers:
            raise next(iter(problems.values()))
        free = [host for host, machines in answers.items() if all(m["ended_at"] for m in machines)]
        offers = [
            Offer(
                provider=NAME,
                zone=host,
                accelerator=self._offers[host].accelerators or AS_IT_IS,
                price_micro_usd_per_hour=round(self._offers[host].price_usd_per_hour * MICRO_USD_PER_USD),
                spot=True,
                source="job file",
                egress_micro_usd_per_gb=self._egress_micro_usd_per_gb,
            )
            for host in free
        ]
        return sorted(offers, key=lambda offer: offer.price_micro_usd_per_hour)

    def launch(self, request: LaunchRequest) -> MachineView:
        """Start the agents on the host; blocks for a second. Raises `NoCapacity` if it is busy or away."""
        host = request.offer.zone
        if request.offer.provider != NAME or host not in self._hosts:
            raise ConfigError(f"{host} is not a host of this job", "add it to hosts in rollout.spot.any_of")
        if not request.bootstrap.get("instances"):
            raise ConfigError(f"the bootstrap of {request.machine} names no instances", "give one")
        for view in self.describe(request.run):
            if view.machine == request.machine:
                return view
        said = self._ask(host, "launch", request.run, request.machine, bootstrap=request.bootstrap)
        if "busy" in said:
            refusal = NoCapacity(f"{host} is in use by {said['busy']}", "wait, or add a host")
            refusal.retry_after_s = _RETRY_S
            raise refusal
        if "problem" in said:
            raise ConfigError(
                f"{host}: {said['problem']}", "name a Python there that has rlboost[run]: python: PATH"
            )
        return _view(said["machine"], host)

    def describe(self, run: str) -> list[MachineView]:
        """Return the run's machines on all hosts, also ended ones."""
        self._ask_all()
        found: dict[str, MachineView] = {}
        with self._lock:
            for host, (answered_at, machines) in self._seen.items():
                lost_at = answered_at + ABSENT_S
                for record in machines:
                    if (record["run"], record["owner"]) == (run, self._owner):
                        view = _view(record, host, lost_at)
                        known = found.get(view.machine)
                        if known is None or known.state is MachineStatus.GONE:
                            found[view.machine] = view
        return sorted(found.values(), key=lambda view: view.machine)

    def watch(self, run: str) -> list[MachineView] | None:
        """Describe every `WATCH_EVERY_S`."""
        return self.describe(run) if self._pace.is_due() else None

    def terminate(self, run: str, machine: str) -> None:
        """SIGKILL it on whatever host it is; returns once nothing of it is left. Raises `NoCapacity` where
        the host that has it cannot be reached: it ends by itself in 15 minutes."""
        self._ask_all()
        for host in self._where(run, machine):
            self._ask(host, "end", run, machine)

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Take the machine at once, or `notice_s` seconds after a notice."""
        self._ask_all()
        for host in self._where(run, machine):
            if self._ask(host, "preempt", run, machine, notice_s=notice_s)["machine"] is not None:
                return
        raise absent(run, machine)

    def sweep(self) -> list[Owned]:
        """Return every living machine of ours on the hosts, of any run."""
        answers, _ = self._ask_all()
        return [
            Owned(m["run"], m["machine"], NAME, host, m["owner"], m["started_at"], host)
            for host, machines in answers.items()
            for m in machines
            if m["ended_at"] is None
        ]

    def end(self, owned: Owned) -> None:
        """End what `sweep` found, also another owner's."""
        self._ask(owned.handle, "end", owned.run, owned.machine, owner=owned.owner)

    def close(self) -> None:
        """Close all connections."""
        for host in self._hosts.values():
            host.close()

    def _ask_all(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, ProviderError]]:
        """Ask every host for its machines; return what they say, and who does not answer."""
        answers: dict[str, list[dict[str, Any]]] = {}
        problems: dict[str, ProviderError] = {}
        with ThreadPoolExecutor(max(1, min(16, len(self._hosts)))) as pool:
            asked = {host: pool.submit(self._ask, host, "list", "", "") for host in self._hosts}
            for host, answer in asked.items():
                try:
                    answers[host] = answer.result()["machines"]
                except ProviderError as problem:
                    event(log, "host.silent", host=host, problem=problem.problem)
                    problems[host] = problem
        with self._lock:
            for host, machines in answers.items():
                self._seen[host] = time.time(), machines
        return answers, problems

    def _where(self, run: str, machine: str) -> list[str]:
        with self._lock:
            return [
                host
                for host, (_, machines) in self._seen.items()
                if any((m["run"], m["machine"], m["owner"]) == (run, machine, self._owner) for m in machines)
            ]

    def _ask(self, host: str, do: str, run: str, machine: str, **more: object) -> dict[str, Any]:
        offer = self._offers[host]
        request = {
            "do": do,
            "owner": self._owner,
            "run": run,
            "machine": machine,
            "folder": offer.folder,
            "python": offer.python,
            **more,
        }
        return self._hosts[host].ask(request)


def _view(record: dict[str, Any], host: str, lost_at: float = math.inf) -> MachineView:
    is_lost = record["ended_at"] is None and time.time() > lost_at
    ended_at = lost_at if is_lost else record["ended_at"]
    return MachineView(
        machine=record["machine"],
        state=MachineStatus.RUNNING if ended_at is None else MachineStatus.GONE,
        started_at=record["started_at"],
        ended_at=ended_at,
        detail="its host does not answer" if is_lost else record["detail"],
        zone=host,
    )
