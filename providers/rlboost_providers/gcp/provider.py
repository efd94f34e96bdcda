"""Google Cloud without anything in between: SPOT machines of Compute Engine that only dial out.

Launches carry a request id made from the machine's, so that a repeated one is the same one to Google; a
stock-out comes as a code in the operation, and so fails over to the next zone. A machine has no service
account unless the offer names one, and is deleted, not stopped, when it is reclaimed. What shut itself down
is deleted as soon as it is seen. What ended lately is read from the project's operations, so that it is known
from the cloud alone. The smallest role is templates/rlboost_templates/policies/gcp.yaml.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlboost_providers.base import tags
from rlboost_providers.base.provider import (
    Ability,
    LaunchRequest,
    MachineStatus,
    MachineView,
    Offer,
    Owned,
    PollTimer,
    absent,
    check_is_unannounced,
)
from rlboost_providers.base.startup import script_of
from rlboost_providers.gcp.errors import explained, failed
from rlboost_providers.gcp.machines import (
    ENDS,
    GceMachine,
    GcpPool,
    beginning,
    instance_resource,
    machine_in,
    machine_of,
    time_of,
)
from rlboost_providers.gcp.traits import MIN_BILLED_S, NAME
from rlboost_runtime.errors import ConfigError, CredentialsRejected, ProviderError, RLBoostError
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

WATCH_EVERY_S = 5.0
"""Pause between two lists: a reclaim reaches us through its notice and its agents first."""
CALL_S = 20.0
"""Longest wait for one answer; also the total of its retries."""
OPERATION_S = 90.0
"""Longest wait for a launch: Google answers at once, and says some 10 s later whether there is one."""
FIRST_LOOK_S, LOOK_EVERY_S = 0.1, 2.0
"""Pauses between two looks at an operation: the first one, doubled up to the last."""
MAX_SCRIPT_BYTES = 262_144
"""Google's limit of one metadata value."""
CONSOLE_BYTES = 65_536
"""So much is read of a machine's console, from its end; Google keeps a megabyte."""


@dataclass(frozen=True, slots=True)
class GcpClients:
    """Google's clients of one project (google-cloud-compute, REST)."""

    project: str
    instances: Any  # compute_v1's classes, which have no useful types
    machine_types: Any
    zone_operations: Any
    operations: Any
    images: Any


class GcpProvider:
    """The `Provider` and `CanSweep` of Compute Engine, for one owner. Any thread may call any method.

    `clients` is called once, when something is first asked; the default is `default_clients`.
    """

    def __init__(
        self,
        pools: Sequence[GcpPool],
        owner: str,
        *,
        clients: Callable[[], GcpClients] | None = None,
        watch_every_s: float = WATCH_EVERY_S,
        operation_s: float = OPERATION_S,
    ) -> None:
        self._pools = tuple(pools)
        self._owner = owner
        self._make_clients = default_clients if clients is None else clients
        self._made: GcpClients | None = None
        self._zones: dict[tuple[str, str], tuple[str, ...]] = {}
        self._consoles: dict[tuple[str, str], str] = {}
        """By run and machine: of those that stopped themselves; deleting them deletes it in the cloud."""
        self._operation_s = operation_s
        self._lock = threading.Lock()
        self._pace = PollTimer(watch_every_s)

    @property
    def abilities(self) -> frozenset[Ability]:
        """Labels, and machines that end themselves (`startup`)."""
        return frozenset({Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE, Ability.HOSTS_HEADS})

    # --- buying -------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """Return one offer per zone that has the machine type; blocks for a second the first time."""
        found = [self._offer(pool, zone) for pool in self._pools for zone in self._zones_of(pool)]
        return sorted(found, key=lambda offer: (offer.price_micro_usd_per_hour, offer.zone))

    def launch(self, request: LaunchRequest) -> MachineView:
        """Ask for the machine and wait some 10 s for Google's answer; after a `ProviderError` it may come."""
        pool, zone = self._pool_of(request.offer)
        for found in self._list(request.run, request.machine):
            return self._view(found)
        for view in self._ended(request.run):
            if view.machine == request.machine:
                return view
        name = tags.machine_name(request.run, request.machine, self._owner)
        self._insert(pool, zone, name, request)
        return self._view_of(zone, name, request.machine)

    def _insert(self, pool: GcpPool, zone: str, name: str, request: LaunchRequest) -> None:
        clients = self._clients  # says what is missing, before its parts are imported
        from google.api_core.exceptions import Conflict
        from google.cloud import compute_v1 as compute

        resource = instance_resource(
            pool,
            zone,
            name,
            labels=tags.tags(request.run, request.machine, self._owner),
            script=script_of(request, NAME, pool.install, MAX_SCRIPT_BYTES),
            network_tags=_network_tags(pool, is_head=request.head_script is not None),
        )
        token = tags.client_token(request.run, request.machine, self._owner)
        what = f"launch {request.machine} in {zone}"
        ask = compute.InsertInstanceRequest(
            project=clients.project,
            zone=zone,
            instance_resource=resource,
            request_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{token}/{zone}")),
        )
        try:
            with explained(what):
                operation = clients.instances.insert_unary(ask, **_patience())
        except ProviderError as error:
            if isinstance(error.__cause__, Conflict):  # another launcher's, under the same name
                return
            raise
        self._wait(zone, operation, what)

    def _wait(self, zone: str, operation: Any, what: str) -> None:
        """Look at an operation until it ends. Raises what it failed with, `ProviderError` at the deadline.

        Not `wait`, which Google holds for minutes. A look that fails says nothing of the machine: it is
        repeated, but where nobody of ours may look.
        """
        deadline, pause_s, refusal = time.monotonic() + self._operation_s, FIRST_LOOK_S, ""
        while str(getattr(operation.status, "name", operation.status)) != "DONE":
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ProviderError(
                    f"Google did not confirm within {self._operation_s:g} s that it could {what}{refusal}",
                    "terminated automatically if it appears",
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LOOK_EVERY_S)
            try:
                with explained(f"check whether Google could {what}"):
                    operation = self._clients.zone_operations.get(
                        project=self._clients.project,
                        zone=zone,
                        operation=operation.name,
                        timeout=min(CALL_S, left_s + 1),
                        retry=None,
                    )
            except CredentialsRejected:
                raise
            except RLBoostError as problem:
                refusal = f": {problem.problem}"
        errors = list(operation.error.errors)
        if errors:
            raise failed(what, errors)

    def _view_of(self, zone: str, name: str, machine: str) -> MachineView:
        from google.api_core.exceptions import NotFound as Absent

        try:
            with explained(f"look at {machine} in {zone}", may_be_absent=True):
                found = self._clients.instances.get(
                    project=self._clients.project, zone=zone, instance=name, **_patience()
                )
        except Absent:  # it ended before we looked
            return MachineView(machine, MachineStatus.GONE, None, time.time(), "gone at once", zone)
        return self._view(machine_of(found))

    def _offer(self, pool: GcpPool, zone: str) -> Offer:
        return Offer(
            provider=NAME,
            zone=zone,
            accelerator=pool.accelerator,
            price_micro_usd_per_hour=pool.price_micro_usd_per_hour,
            spot=pool.spot,
            is_for_trainer=pool.is_for_trainer,
            source=pool.price_source,
            instance_type=pool.machine_type,
            egress_micro_usd_per_gb=pool.egress_micro_usd_per_gb,
            storage_micro_usd_per_hour=pool.storage_micro_usd_per_hour,
            min_billed_s=MIN_BILLED_S,
        )

    def _zones_of(self, pool: GcpPool) -> tuple[str, ...]:
        if pool.zones:
            return pool.zones
        key = pool.region, pool.machine_type
        with self._lock:
            known = self._zones.get(key)
        if known is None:
            known = self._ask_zones(pool)
            with self._lock:
                self._zones[key] = known
        if not known:
            raise ConfigError(
                f"{pool.region} of Google Cloud has no machine type {pool.machine_type}",
                "write another region or instance_type; `gcloud compute machine-types list` shows them",
            )
        return known

    def _ask_zones(self, pool: GcpPool) -> tuple[str, ...]:
        clients = self._clients
        from google.cloud import compute_v1 as compute

        ask = compute.AggregatedListMachineTypesRequest(
            project=clients.project, filter=f'name = "{pool.machine_type}"'
        )
        with explained(f"see which zones of {pool.region} have {pool.machine_type}"):
            scopes = list(clients.machine_types.aggregated_list(ask, **_patience()))
        zones = (scope.removeprefix("zones/") for scope, found in scopes if found.machine_types)
        return tuple(sorted(zone for zone in zones if zone.rpartition("-")[0] == pool.region))

    def _pool_of(self, offer: Offer) -> tuple[GcpPool, str]:
        for pool in self._pools:
            wanted = (NAME, pool.accelerator, pool.machine_type, pool.spot, pool.is_for_trainer)
            asked = (
                offer.provider,
                offer.accelerator,
                offer.instance_type,
                offer.spot,
                offer.is_for_trainer,
            )
            if asked == wanted and offer.zone in self._zones_of(pool):
                return pool, offer.zone
        raise ConfigError(
            f"{offer.zone} with {offer.accelerator} is not an offer of this job",
            "add it to rollout.spot.any_of",
        )

    # --- looking ------------------------------------------------------------------------------------------

    def describe(self, run: str) -> list[MachineView]:
        """Return the run's machines, for a while also those that ended; deletes what stopped itself."""
        views = {view.machine: view for view in self._ended(run)}
        for machine in self._list(run):
            if not machine.is_alive:
                self._keep_console(run, machine)
                self._clear_away(machine)
            views[machine.machine] = self._view(machine)
        return sorted(views.values(), key=lambda view: view.machine)

    def watch(self, run: str) -> list[MachineView] | None:
        """Describe every `WATCH_EVERY_S`."""
        return self.describe(run) if self._pace.is_due() else None

    def console(self, run: str, machine: str) -> str:
        """Return the end of what it wrote to its first serial port; nothing once it is deleted, but of one
        that `describe` found stopped and deleted."""
        if (run, machine) in self._consoles:
            return self._consoles[run, machine]
        for found in self._list(run, machine):
            return self._console(found.zone, found.name)
        return ""

    def _keep_console(self, run: str, machine: GceMachine) -> None:
        if (run, machine.machine) not in self._consoles:
            with contextlib.suppress(RLBoostError):  # its end matters more than what it said
                self._consoles[run, machine.machine] = self._console(machine.zone, machine.name)

    def _clear_away(self, machine: GceMachine) -> None:
        """Delete what stopped; a refusal is logged, for the next look tries again and this one goes on."""
        try:
            self._delete(machine.zone, machine.name)
        except RLBoostError as refusal:
            event(log, "machine.delete_failed", machine=machine.machine, problem=refusal.problem)

    def _console(self, zone: str, name: str) -> str:
        clients = self._clients
        from google.api_core.exceptions import NotFound as Absent
        from google.cloud import compute_v1 as compute

        ask = compute.GetSerialPortOutputInstanceRequest(
            project=clients.project, zone=zone, instance=name, port=1, start=-CONSOLE_BYTES
        )
        try:
            with explained(f"read the console of {name} in {zone}", may_be_absent=True):
                return str(clients.instances.get_serial_port_output(ask, **_patience()).contents)
        except Absent:
            return ""

    def sweep(self) -> list[Owned]:
        """Return every machine of ours in the project that has not been deleted."""
        return [
            Owned(m.run, m.machine, NAME, m.zone, m.owner, m.created_at, f"{m.zone}/{m.name}")
            for m in self._instances(f"labels.{tags.RUN}:*")
        ]

    def _list(self, run: str, machine: str | None = None) -> list[GceMachine]:
        wanted = {tags.RUN: run, tags.OWNER: self._owner, tags.MACHINE: machine}
        terms = [f'labels.{label} = "{text}"' for label, text in wanted.items() if text is not None]
        return list(self._instances(" AND ".join(terms)))

    def _instances(self, condition: str) -> Iterator[GceMachine]:
        clients = self._clients
        from google.cloud import compute_v1 as compute

        ask = compute.AggregatedListInstancesRequest(project=clients.project, filter=condition)
        with explained("list the machines"):
            scopes = list(clients.instances.aggregated_list(ask, **_patience()))
        for _, found in scopes:
            yield from (machine_of(instance) for instance in found.instances)

    def _ended(self, run: str) -> list[MachineView]:
        """Return the machines of the run that the project's operations tell the end of."""
        clients = self._clients
        from google.cloud import compute_v1 as compute

        ask = compute.AggregatedListGlobalOperationsRequest(
            project=clients.project,
            filter=f'targetLink eq ".*/instances/{beginning(run)}.*"',  # a regular expression stands alone
        )
        with explained("read past operations of the machines"):
            scopes = list(clients.operations.aggregated_list(ask, **_patience()))
        starts: dict[str, float | None] = {}
        ends: dict[str, tuple[float, str, str]] = {}
        for operation in (each for _, found in scopes for each in found.operations):
            machine = machine_in(operation.target_link.rpartition("/")[2], run, self._owner)
            if machine is None or operation.error.errors:
                continue
            at = time_of(operation.insert_time)
            if operation.operation_type == "insert":
                starts[machine] = at
            elif operation.operation_type in ENDS and at is not None:
                end = (at, ENDS[operation.operation_type], operation.zone.rpartition("/")[2])
                ends[machine] = min(ends.get(machine, end), end)
        return [
            MachineView(machine, MachineStatus.GONE, starts.get(machine), at, told, zone)
            for machine, (at, told, zone) in ends.items()
        ]

    def _view(self, machine: GceMachine) -> MachineView:
        ended_at = None if machine.is_alive else machine.stopped_at
        detail = "" if machine.is_alive else "shut itself down"
        return MachineView(
            machine.machine,
            machine.state,
            machine.created_at,
            ended_at,
            detail,
            machine.zone,
            public_address=machine.public_address,
            private_address=machine.private_address,
        )

    # --- terminating---------------------------------------------------------------------------------------

    def terminate(self, run: str, machine: str) -> None:
        """Delete it with its disk, in whatever zone it is; Google stops billing within a minute or so."""
        for found in self._list(run, machine):
            self._delete(found.zone, found.name)

    def end(self, owned: Owned) -> None:
        """Delete what `sweep` found, by its own name."""
        zone, _, name = owned.handle.partition("/")
        self._delete(zone, name)

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Delete it, as a reclaim without a notice does: Google announces nothing on demand."""
        check_is_unannounced("Google Cloud", notice_s)
        if not any(found.is_alive for found in self._list(run, machine)):
            raise absent(run, machine)
        self.terminate(run, machine)

    def _delete(self, zone: str, name: str) -> None:
        from google.api_core.exceptions import NotFound as Absent

        with contextlib.suppress(Absent), explained(f"delete {name} in {zone}", may_be_absent=True):
            self._clients.instances.delete_unary(
                project=self._clients.project, zone=zone, instance=name, **_patience()
            )

    # --- helpers ------------------------------------------------------------------------------------------

    @property
    def _clients(self) -> GcpClients:
        with self._lock:
            if self._made is None:
                self._made = self._make_clients()
            return self._made


def _network_tags(pool: GcpPool, *, is_head: bool) -> list[str]:
    role = "rlboost-head" if is_head else "rlboost-worker"
    return [role, "rlboost-trainer"] if pool.meets_nodes else [role]


def default_clients() -> GcpClients:
    """Return clients with the user's credentials. Raises `ConfigError`, `CredentialsRejected`."""
    credentials, project = default_credentials()
    return make_clients(project, credentials)


def default_credentials() -> tuple[Any, str]:
    """Return the user's credentials and project. Raises `ConfigError`, `CredentialsRejected`."""
    try:
        import google.auth
        from google.cloud import compute_v1  # noqa: F401 takes seconds: an absence is said before
    except ImportError as missing:
        raise ConfigError(
            "Google Cloud without SkyPilot needs google-cloud-compute, which is not installed",
            "type: pip install 'rlboost[gcp]'",
        ) from missing
    with explained("sign in"):
        credentials, project = google.auth.default()
    if not project:
        raise ConfigError("no Google Cloud project is set", "type: export GOOGLE_CLOUD_PROJECT=MY-PROJECT")
    return credentials, str(project)


def make_clients(project: str, credentials: Any, endpoint: str | None = None) -> GcpClients:
    """Return clients of `project`; `endpoint` None: Google's own."""
    from google.api_core.client_options import ClientOptions
    from google.cloud import compute_v1 as compute

    options: dict[str, Any] = {"credentials": credentials}
    if endpoint is not None:
        options["client_options"] = ClientOptions(api_endpoint=endpoint)
    return GcpClients(
        project,
        compute.InstancesClient(**options),
        compute.MachineTypesClient(**options),
        compute.ZoneOperationsClient(**options),  # the clients' own `result()` asks Google whatever was set
        compute.GlobalOperationsClient(**options),
        compute.ImagesClient(**options),
    )


def _patience() -> dict[str, Any]:
    """Return how long a call may take, and which errors the client waits out; each may be repeated."""
    import requests
    from google.api_core import exceptions as google
    from google.api_core.retry import Retry, if_exception_type

    passing = if_exception_type(
        google.ServiceUnavailable,
        google.InternalServerError,
        google.BadGateway,
        google.TooManyRequests,
        requests.ConnectionError,
        requests.Timeout,
    )
    return {"timeout": CALL_S, "retry": Retry(passing, initial=0.5, maximum=5.0, timeout=CALL_S)}
