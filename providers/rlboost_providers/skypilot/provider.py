"""Machines through SkyPilot: one cluster of one node per machine, found again by its name.

Guarantees:

- `launch` returns once SkyPilot has been given the machine by its cloud, or raises what the cloud said; the
  setup goes on in the background, and its end shows in `describe`: running, or gone with its reason;
- each launch names one zone, so that the ledger's price is the machine's; what to try next is the caller's;
- a machine is reported gone only after the cloud itself has said so, by a forced refresh. A closed or silent
  SSH port (looked at every few seconds) only decides when that is asked;
- a launch under way is left alone by all but `terminate`, also by other processes that look;
- a machine whose setup fails is ended, and counts as starting, with money running, until it is;
- an agent that hears nothing from its head gives its machine up (`deploy/agents.sh`); SkyPilot's own autodown
  comes after that.

SkyPilot cannot bid: a `max_price_usd_per_hour` only leaves dearer offers out.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlboost_providers.base.provider import (
    Ability,
    LaunchRequest,
    MachineView,
    Offer,
    PollTimer,
    absent,
    check_is_unannounced,
)
from rlboost_providers.base.tags import head_of, machine_name, owner_of, tags
from rlboost_providers.skypilot.errors import explained, fetch_logs
from rlboost_providers.skypilot.offers import Catalogue
from rlboost_providers.skypilot.records import SkyRecord, SkyRecords
from rlboost_providers.skypilot.session import AWS_ROLE, INSTALL_S, START_S, Session, SkyPilot
from rlboost_providers.skypilot.task import write_head_task, write_task
from rlboost_providers.skypilot.traits import NAME
from rlboost_runtime.errors import ConfigError, CredentialsRejected, NoCapacity, QuotaExceeded, RLBoostError
from rlboost_runtime.job import CloudOffer
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder, home

log = logging.getLogger(__name__)

LAUNCH_ANSWER_S = 90.0
"""How long `launch` waits for the cloud's yes or no; then the machine counts as starting."""
DOWN_S = 300.0
STATUS_S = 120.0
PROBE_EVERY_S = 3.0
PROBE_S = 2.0
FORCE_EVERY_S = 180.0
"""The cloud is asked at least so often, also while every machine answers."""
DOUBT_EVERY_S = 10.0
"""Pause between two questions about machines that stay silent: each costs seconds of CPU."""
SILENT_S = 120.0
"""Silence after which a machine that its cloud still has, and SkyPilot cannot reach either, is ended: the
network between may have been away for a moment, and a new machine takes minutes."""
AUTODOWN_MINUTES = 20
"""SkyPilot's second line, after the agents' own 15 minutes."""
_LONGEST_NAME = 40  # SkyPilot appends the user's hash, and clouds allow some 60 characters
_CAUSE = re.compile(r"an error occurred|handler error|exhausted|quota|limit", re.IGNORECASE)
_REQUEST = "request "
_ASKED = "Launching on"
_GIVEN = ("Instance is up", "Instances are up", "VM is up")


@dataclass(frozen=True, slots=True)
class HeadTerms:
    """What a head is given that a spot machine is not."""

    role: str | None
    """AWS: its instance profile; None: that of spot machines, which may do nothing."""
    ports: tuple[int, int]
    """The two that it lets in beside SSH."""


class SkyPilotProvider:
    """`Provider` and `CanPreempt` of `via: skypilot`, for one run: its fleet, or its head. Any thread may
    call any method.

    `offers` are what the job's `any_of` says; `skypilot` is made when first needed.
    """

    def __init__(
        self,
        run_folder: Path,
        offers: Sequence[CloudOffer],
        *,
        on_demand: bool = False,
        head: HeadTerms | None = None,
        head_place: str | None = None,
        skypilot: SkyPilot | None = None,
    ) -> None:
        """`on_demand`: offer machines on demand beside spot ones; `head`: for the run's head, on demand;
        `head_place`: where the head is, as CLOUD/REGION[/ZONE]; None: in no cloud."""
        self._run = RunFolder(run_folder)
        self._head = head
        self._told_run = self._run.name if head is None else head_of(self._run.name)
        self._folder = self._run.cloud / (NAME if head is None else f"{NAME}-head")
        self._records = SkyRecords(self._folder / "machines")
        self._owner = owner_of(home())
        self._session = Session(self._folder, skypilot, None if head is None else INSTALL_S + START_S)
        self._sky = self._session.sky
        kinds = (True, *((False,) if on_demand else ())) if head is None else (False,)
        self._catalogue = Catalogue(
            offers, lambda **asked: self._sky().ask("prices", STATUS_S, **asked), kinds, head_place
        )
        self._up: set[str] = set()
        """Machines that SkyPilot has called up: their launch may fail, their cloud gave them all the same."""
        self._silent_since: dict[str, float] = {}
        self._pace = PollTimer(PROBE_EVERY_S)
        self._force = PollTimer(FORCE_EVERY_S)
        self._doubt = PollTimer(DOUBT_EVERY_S)
        self._doubted: set[str] = set()

    @property
    def abilities(self) -> frozenset[Ability]:
        """Clusters are found by name; agents that hear nothing, and then SkyPilot, end their machines."""
        return frozenset({Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE})

    # --- the five verbs ------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """Return the zones that SkyPilot's catalogue has for the job's entries, cheapest first.

        Blocks for a minute or two when SkyPilot is started for the first time, else for seconds at most.
        """
        return self._catalogue.offers()

    def launch(self, request: LaunchRequest) -> MachineView:
        """Launch the machine's cluster; blocks until the cloud gave or refused it, `LAUNCH_ANSWER_S` at most.
        After an error the cluster is down again, or `describe` says that it may not be."""
        if request.run != self._told_run:
            raise ConfigError(f"{request.run} is not this provider's run", f"ask for {self._told_run}")
        sky = self._sky()
        entry = self._catalogue.entry_of(request.offer)
        with self._records.locked():
            known = self._records.read(request.machine)
            if known is not None:
                return known.view
            record = self._intend(request)
        answered = threading.Event()
        try:
            launching = self._begin(sky, record, entry, request, answered)
        except BaseException as failure:
            if isinstance(failure, OSError):  # its files could not be written: nothing was asked for
                self._records.change(record.machine, ended_at=time.time(), detail=str(failure))
            self._records.end_launch(record.machine)
            raise
        answered.wait(LAUNCH_ANSWER_S)
        if launching.done() and (problem := launching.exception()) is not None:
            raise self._in_the_clouds_words(record.machine, problem)
        stored = self._records.read(record.machine)
        assert stored is not None
        return stored.view

    def _begin(
        self,
        sky: SkyPilot,
        record: SkyRecord,
        entry: CloudOffer,
        request: LaunchRequest,
        answered: threading.Event,
    ) -> Future[Any]:
        folder = self._records.folder(record.machine)
        values = self._values(record, entry)
        if self._head is None:
            task = write_task(folder, self._run, request, values)
        else:
            task = write_head_task(folder, request, values)
        launching = sky.begin(
            "launch",
            lambda line: self._hear(record.machine, line, answered),
            cluster=record.cluster,
            task=str(task),
            idle_minutes=AUTODOWN_MINUTES,
            role=AWS_ROLE if self._head is None or self._head.role is None else self._head.role,
            only=self._head is not None and self._head.role is not None,
        )
        launching.add_done_callback(lambda done: self._launched(record.machine, done, answered))
        return launching

    def describe(self, run: str) -> list[MachineView]:
        """Return the run's machines as their clouds see them now; takes seconds. Raises `ProviderError`."""
        if run != self._told_run:
            return []
        settled = self._settled()
        if settled:
            self._confirm(settled)
        return [record.view for record in self._records.all()]

    def watch(self, run: str) -> list[MachineView] | None:
        """Look whether machines answer, every `PROBE_EVERY_S`; ask the cloud where one does not."""
        if run != self._told_run or not self._pace.is_due():
            return None
        running = [r for r in self._settled() if r.running_at is not None]
        silent = self._probe(running)
        adopted = [r for r in self._settled() if r.running_at is None]
        doubted = [*silent, *adopted]
        if doubted and self._are_to_be_asked_for({record.machine for record in doubted}):
            self._confirm(doubted)
        elif running and self._force.is_due():
            self._confirm(running)
        return [record.view for record in self._records.all()]

    def _are_to_be_asked_for(self, machines: set[str]) -> bool:
        """Return True if the cloud is to be asked: at once about new silence, then every `DOUBT_EVERY_S`."""
        is_news = not machines <= self._doubted
        self._doubted = machines
        return self._doubt.is_due() or is_news

    def terminate(self, run: str, machine: str) -> None:
        """Take the machine's cluster down, whether or not its launch has ended; blocks for some seconds."""
        if run != self._told_run:
            return
        record = self._records.read(machine)
        if record is None or record.ended_at is None:
            self._down(machine, "terminated")

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Take the machine away at once. Raises `NotFound`, and `ProviderError` where notice is asked for."""
        check_is_unannounced("SkyPilot", notice_s)
        record = self._records.read(machine) if run == self._told_run else None
        if record is None or record.ended_at is not None:
            raise absent(run, machine)
        self._down(machine, "preempted on purpose")

    def close(self) -> None:
        """End SkyPilot's child; machines and launches under way go on."""
        self._session.close()

    # --- launching -----------------------------------------------------------------------------------------

    def _intend(self, request: LaunchRequest) -> SkyRecord:
        record = SkyRecord(
            machine=request.machine,
            cluster=self._cluster(request.machine),
            zone=request.offer.zone,
            price_micro_usd_per_hour=request.offer.price_micro_usd_per_hour,
            intended_at=time.time(),
        )
        self._records.begin_launch(request.machine)  # before others see it
        try:
            return self._records.write(record)
        except OSError:
            self._records.end_launch(request.machine)
            raise

    def _values(self, record: SkyRecord, entry: CloudOffer) -> dict[str, object]:
        labels = tags(self._told_run, record.machine, self._owner)
        resources: dict[str, object] = {"disk_size": entry.disk_gb, "labels": labels}
        if self._head is not None:
            resources["ports"] = list(self._head.ports)
        resources["accelerators"] = entry.accelerators
        if entry.disk_tier is not None:
            resources["disk_tier"] = entry.disk_tier
        if entry.image is not None:
            resources["image_id"] = entry.image
        return {"NAME": record.cluster, "RESOURCES": resources}

    def _cluster(self, machine: str) -> str:
        return machine_name(self._told_run, machine, self._owner, longest=_LONGEST_NAME)

    def _hear(self, machine: str, line: str, answered: threading.Event) -> None:
        """Keep what SkyPilot says as the boot log, where the disk takes it, and see how far it is."""
        try:
            with (self._boot_log(machine)).open("a", encoding="utf-8") as boot_log:
                boot_log.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        except OSError as problem:
            event(log, "machine.boot_log_failed", machine=machine, problem=repr(problem))
        record = self._records.read(machine)
        if line.startswith(_REQUEST):
            self._records.change(machine, request=line.removeprefix(_REQUEST))
        elif record is not None and record.launching_at is None and _ASKED in line:
            self._records.change(machine, launching_at=time.time())
        if any(words in line for words in _GIVEN):
            self._up.add(machine)
            answered.set()

    def _boot_log(self, machine: str) -> Path:
        folder = self._run.logs / "machines" / machine
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / "boot.log"

    def _launched(self, machine: str, done: Future[Any], answered: threading.Event) -> None:
        """Note how a launch ended; one that failed is taken down, in a thread of its own."""
        problem = done.exception()
        if problem is None:
            where = done.result()
            self._records.end_launch(machine)
            ended = self._records.read(machine)
            if ended is not None and ended.ended_at is not None:  # by another process, meanwhile
                threading.Thread(target=self._clean_up, args=(machine, ended.detail, answered)).start()
                return
            now = time.time()
            record = self._records.read(machine)
            began = now if record is None or record.launching_at is None else record.launching_at
            self._records.change(machine, launching_at=began, running_at=now, detail="", **_addresses(where))
            answered.set()
            return
        is_refused = isinstance(problem, NoCapacity | QuotaExceeded | CredentialsRejected)
        problem = self._in_the_clouds_words(machine, problem)
        detail = problem.problem if isinstance(problem, RLBoostError) else repr(problem)
        event(log, "machine.setup_failed", machine=machine, problem=detail)
        if is_refused and machine not in self._up:
            self._records.change(machine, detail=detail, launching_at=None)  # its cloud gave nothing to bill
        else:
            self._records.change(machine, detail=detail)
        threading.Thread(target=self._clean_up, args=(machine, detail, answered)).start()

    def _in_the_clouds_words(self, machine: str, problem: BaseException) -> BaseException:
        """Return why a launch was refused, out of what SkyPilot said meanwhile: its error has no cause."""
        if not isinstance(problem, NoCapacity):
            return problem
        try:
            lines = self._boot_log(machine).read_text(encoding="utf-8").splitlines()
        except OSError:
            return problem
        told = [line.split(" ", 1)[1] for line in lines if _CAUSE.search(line)]
        return explained("ResourcesUnavailableError", "\n".join(told)) if told else problem

    def _clean_up(self, machine: str, detail: str, answered: threading.Event) -> None:
        try:
            self._down(machine, detail)
        except RLBoostError as problem:
            event(log, "machine.terminate_failed", machine=machine, problem=problem.problem)
        finally:
            self._records.end_launch(machine)
            answered.set()

    def _down(self, machine: str, detail: str) -> None:
        """Take the cluster down; what its machine has to say for itself is fetched before."""
        record = self._records.read(machine)
        if record is not None and record.running_at is not None and record.ended_at is None:
            fetch_logs(record.cluster, self._run.logs / "machines" / machine)
        request = "" if record is None or record.running_at is not None else record.request
        self._sky().ask("down", DOWN_S, cluster=self._cluster(machine), request=request)
        if self._records.read(machine) is not None:
            self._records.change(machine, ended_at=time.time(), detail=detail)

    # --- watching ------------------------------------------------------------------------------------------

    def _settled(self) -> list[SkyRecord]:
        """Return those that are open and of which no launch under way knows more than their cloud."""
        is_open = [record for record in self._records.all() if record.ended_at is None]
        return [record for record in is_open if not self._records.is_launching(record.machine)]

    def _probe(self, records: list[SkyRecord]) -> list[SkyRecord]:
        """Return those whose SSH port has not answered twice in a row."""
        if not records:
            return []
        with ThreadPoolExecutor(len(records)) as pool:
            probes = {pool.submit(_answers, record.address, record.port): record for record in records}
            wait_for(probes)
        silent = []
        now = time.time()
        for probe, record in probes.items():
            if probe.result():
                self._silent_since.pop(record.machine, None)
            elif self._silent_since.setdefault(record.machine, now) < now:
                silent.append(record)
        return silent

    def _confirm(self, records: list[SkyRecord]) -> None:
        """Ask the clouds about `records`, and note what they say."""
        names = [record.cluster for record in records]
        rows = {r["name"]: r for r in self._sky().ask("clusters", STATUS_S, names=names, force=True)}
        for record in records:
            row = rows.get(record.cluster)
            if row is None and record.running_at is None:
                self._down(record.machine, "its launch was lost")  # it may still come
            elif row is None:
                self._gone(record)
            elif row["status"] == "UP":
                self._adopt(record, row)
            elif row["status"] == "STOPPED" or self._silence_s(record.machine) > SILENT_S:
                self._down(record.machine, f"SkyPilot reports {row['status']}, and it does not answer")

    def _silence_s(self, machine: str) -> float:
        now = time.time()
        return now - self._silent_since.get(machine, now)

    def _gone(self, record: SkyRecord) -> None:
        ended_at = self._silent_since.pop(record.machine, time.time())
        event(log, "machine.gone_at_provider", machine=record.machine, cluster=record.cluster)
        self._records.change(record.machine, ended_at=ended_at, detail="preempted by its cloud")

    def _adopt(self, record: SkyRecord, row: Mapping[str, Any]) -> None:
        """Note that a machine is up whose launch another process has waited for."""
        self._silent_since.pop(record.machine, None)
        if record.running_at is None:
            began = record.launching_at if record.launching_at is not None else record.intended_at
            self._records.change(
                record.machine, launching_at=began, running_at=time.time(), **_addresses(row)
            )


def _addresses(where: Mapping[str, Any]) -> dict[str, object]:
    """Return how a machine is reached, as records have it: from its cloud's network, where it is in one."""
    inner, outer = where.get("internal") or "", where.get("address") or ""
    return {"address": inner or outer, "public_address": outer, "port": where.get("port", 22)}


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=PROBE_S) as connection:
            connection.settimeout(PROBE_S)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
