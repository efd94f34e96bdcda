"""AWS without anything in between: EC2 Fleet for real bids, machines that only dial out.

A machine is asked for by an instant fleet of one, over all zones of the region whose price the bid reaches,
price-capacity-optimized: EC2 chooses the zone. Its launch template carries the start-up script and is deleted
once the machine is there. It has IMDSv2 only with a hop limit of 1, a security group that lets nothing in, no
role unless the offer names one, and is terminated, not stopped, when it shuts itself down. A head is bought
in the same way, on demand, and has another group (`machines`).

The smallest policy that these calls need is templates/rlboost_templates/policies/aws.json.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlboost_providers.aws.errors import RACES, code_of, explained, fleet_problem
from rlboost_providers.aws.machines import (
    AwsPool,
    Ec2Machine,
    console_of,
    ec2_client,
    list_machines,
    node_group,
    root_device,
    security_group,
    template_data,
)
from rlboost_providers.aws.prices import SpotPrice, SpotPrices
from rlboost_providers.aws.reservations import Reservation, find_reservation
from rlboost_providers.aws.traits import LIST_LAG_S, MIN_BILLED_S, NAME
from rlboost_providers.base import tags
from rlboost_providers.base.multi import ask_all
from rlboost_providers.base.provider import (
    Ability,
    LaunchRequest,
    MachineStatus,
    MachineView,
    Offer,
    Owned,
    PartlyListed,
    PartlySwept,
    PollTimer,
    absent,
    check_is_unannounced,
    retry_of,
)
from rlboost_providers.base.startup import script_of
from rlboost_runtime.errors import ConfigError, NoCapacity, ProviderError, Retry, RLBoostError
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

WATCH_EVERY_S = 5.0
"""Pause between two lists: a reclaim reaches us through its notice and its agents first."""
RACE_S = 15.0
"""Longest wait for a machine that another launcher of ours is launching under the same id."""
CLIENT_S = 600.0
"""A client keeps the keys that it began with, so it is made anew: who signs in again need not restart."""
MAX_SCRIPT_BYTES = 16_384
"""EC2's limit of user data."""


@dataclass(frozen=True, slots=True)
class _Created:
    """What EC2 says of a machine when it launches it."""

    instance: str
    instance_type: str
    zone: str
    """Empty: not said."""


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A machine that was launched, or last listed as alive, at `at` (Unix seconds)."""

    at: float
    view: MachineView
    region: str
    instance: str


class AwsProvider:
    """The `Provider` and `CanSweep` of EC2, for one owner. Any thread may call any method.

    `client` makes boto3's EC2 client of a region; the default is `ec2_client`.
    """

    def __init__(
        self,
        pools: Sequence[AwsPool],
        owner: str,
        *,
        client: Callable[[str], Any] | None = None,
        watch_every_s: float = WATCH_EVERY_S,
    ) -> None:
        self._pools = {
            _place(pool.place, pool.accelerator, pool.instance_types, pool.spot, pool.is_for_trainer): pool
            for pool in pools
        }
        self._owner = owner
        self._make_client = ec2_client if client is None else client
        self._clients: dict[str, tuple[float, Any]] = {}  # boto3 has no types of its own
        self._prices: dict[str, SpotPrices] = {}
        self._groups: dict[tuple[str, tuple[tuple[int, str], ...] | None], str] = {}
        """By region and what is let in; None: whatever comes from the trainer's other nodes."""
        self._recent: dict[tuple[str, str], _Sighting] = {}
        """By run and machine, of those that were launched or listed as alive lately."""
        self._ends: dict[str, float] = {}
        """By EC2 id: when it was first seen to be gone, for those of which EC2 does not say."""
        self._launching: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.RLock()
        self._pace = PollTimer(watch_every_s)

    @property
    def abilities(self) -> frozenset[Ability]:
        """Tags, bids that EC2 holds, heads, and machines that end themselves (`startup`)."""
        return frozenset({Ability.FINDS_BY_TAG, Ability.TIME_TO_LIVE, Ability.REAL_BID, Ability.HOSTS_HEADS})

    # --- buying -------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """Return one offer per pool that a zone sells at or below the bid, at its cheapest zone's price.

        Blocks for a second where prices are older than a minute. A pool whose region does not answer is left
        out; raises what it said where nothing else is offered.
        """
        answers, problems = ask_all(self._pools, lambda name: self._offer(self._pools[name]))
        for problem in problems.values():
            event(log, "provider.offers_failed", provider=NAME, problem=problem.problem)
        found = [offer for offer in answers.values() if offer is not None]
        if problems and not found:
            raise next(iter(problems.values()))
        return sorted(found, key=lambda offer: offer.price_micro_usd_per_hour)

    def launch(self, request: LaunchRequest) -> MachineView:
        """Ask for the machine; blocks for seconds. The view says in which zone it is and at what price."""
        pool = self._pool_of(request.offer)
        with self._only(request.run, request.machine):
            found = self._find(pool, request.run, request.machine)
            if found is not None:
                return found
            try:
                created = self._create(pool, request)
            except ProviderError as problem:
                if problem.retry is Retry.LATER:
                    self._forget_groups(pool.region)
                raise
            view = self._view_of_new(pool, request, created)
            with self._lock:
                seen = _Sighting(time.time(), view, pool.region, created.instance)
                self._recent[request.run, request.machine] = seen
            return view

    def _offer(self, pool: AwsPool) -> Offer | None:
        price: int | None = pool.on_demand_micro_usd_per_hour
        source, dearest = "on-demand price list", price
        if (reserved := self._reserved(pool)) is not None:
            source = f"on-demand price list or job file, for {reserved.name}"
        if pool.spot:
            reached = self._reached(pool)
            price = reached[0].micro_usd_per_hour if reached else None
            dearest = max((each.micro_usd_per_hour for each in reached), default=None)
            source = "EC2 spot price history, now"
        limit = pool.max_price_micro_usd_per_hour
        if price is None or (limit is not None and price > limit):
            return None
        return Offer(
            provider=NAME,
            zone=pool.place,
            accelerator=pool.accelerator,
            price_micro_usd_per_hour=price,
            spot=pool.spot,
            source=source,
            instance_type=",".join(pool.instance_types),
            max_price_micro_usd_per_hour=pool.max_price_micro_usd_per_hour,
            dearest_micro_usd_per_hour=_first_known(pool.max_price_micro_usd_per_hour, dearest),
            egress_micro_usd_per_gb=pool.egress_micro_usd_per_gb,
            storage_micro_usd_per_hour=pool.storage_micro_usd_per_hour,
            min_billed_s=MIN_BILLED_S,
            is_for_trainer=pool.is_for_trainer,
        )

    def _reached(self, pool: AwsPool) -> list[SpotPrice]:
        """Return the zones' prices that the bid reaches; those above the on-demand price are nobody's."""
        bounds = (pool.max_price_micro_usd_per_hour, pool.on_demand_micro_usd_per_hour)
        limit = min((bound for bound in bounds if bound is not None), default=None)
        prices = self._prices_of(pool.region).of(pool.instance_types)
        wanted = (price for price in prices if pool.zone in (None, price.zone))
        return [price for price in wanted if limit is None or price.micro_usd_per_hour <= limit]

    def _pool_of(self, offer: Offer) -> AwsPool:
        kinds = tuple(offer.instance_type.split(","))
        pool = self._pools.get(_place(offer.zone, offer.accelerator, kinds, offer.spot, offer.is_for_trainer))
        if pool is None or offer.provider != NAME:
            raise ConfigError(
                f"{offer.zone} with {offer.accelerator} is not an offer of this job",
                "add it to rollout.spot.any_of",
            )
        return pool

    def _create(self, pool: AwsPool, request: LaunchRequest) -> _Created:
        """Return the new machine, or the one that another launcher asked for just now."""
        token = tags.client_token(request.run, request.machine, self._owner)
        name = tags.machine_name(request.run, request.machine, self._owner, longest=100)
        what = f"launch {request.machine} in {pool.region}"
        reserved = self._reserved(pool)
        if reserved is not None:
            reserved.require_free()
        overrides = self._overrides(pool, reserved)
        ec2 = self._ec2(pool.region)
        self._make_template(pool, request, name, reserved)
        try:
            with explained(what):
                try:
                    answer = self._create_fleet(ec2, _market_of(pool, reserved), name, token, overrides)
                except ec2.exceptions.ClientError as error:
                    if code_of(error) not in RACES:
                        raise
                    return self._lost_race(pool, request)
        finally:
            self._delete_template(ec2, name)
        for group in answer.get("Instances", []):
            chosen = group.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
            for instance in group["InstanceIds"]:
                return _Created(
                    instance,
                    str(group.get("InstanceType") or chosen.get("InstanceType", "")),
                    str(group.get("AvailabilityZone") or chosen.get("AvailabilityZone", "")),
                )
        raise fleet_problem(what, answer.get("Errors", []))

    def _reserved(self, pool: AwsPool) -> Reservation | None:
        if pool.reservation is None:
            return None
        ec2 = self._ec2(pool.region)
        return find_reservation(ec2, pool.region, pool.reservation, pool.instance_types, pool.zone)

    def _overrides(self, pool: AwsPool, reserved: Reservation | None) -> list[dict[str, Any]]:
        if reserved is not None:
            return [{"InstanceType": reserved.instance_type, "AvailabilityZone": reserved.zone}]
        if not pool.spot:
            where = {} if pool.zone is None else {"AvailabilityZone": pool.zone}
            return [{"InstanceType": each, **where} for each in pool.instance_types]
        self._prices_of(pool.region).forget()
        reached = self._reached(pool)
        if not reached:
            raise NoCapacity(
                f"{pool.place} has no {pool.accelerator} at or below the bid",
                "wait, or raise max_price_usd_per_hour",
            )
        bid = _first_known(pool.max_price_micro_usd_per_hour, pool.on_demand_micro_usd_per_hour)
        price = {} if bid is None else {"MaxPrice": f"{bid / 1e6:.6f}"}
        zones = [{"AvailabilityZone": p.zone, "InstanceType": p.instance_type, **price} for p in reached]
        if not pool.subnets:
            return zones
        kinds = {p.instance_type for p in reached}
        subnets = self._subnets(pool)
        return [{"SubnetId": s, "InstanceType": k, **price} for s in subnets for k in sorted(kinds)]

    def _subnets(self, pool: AwsPool) -> list[str]:
        """Return those of the pool's subnets that are in its zone."""
        if pool.zone is None:
            return list(pool.subnets)
        with explained(f"see which subnets are in {pool.zone}"):
            found = self._ec2(pool.region).describe_subnets(SubnetIds=list(pool.subnets))["Subnets"]
        inside = [str(each["SubnetId"]) for each in found if each["AvailabilityZone"] == pool.zone]
        if not inside:
            raise ConfigError(f"no subnet of the pool is in {pool.zone}", "name one, or leave the zone out")
        return inside

    def _make_template(
        self, pool: AwsPool, request: LaunchRequest, name: str, reserved: Reservation | None
    ) -> None:
        script = script_of(request, NAME, pool.install, MAX_SCRIPT_BYTES)
        ec2 = self._ec2(pool.region)
        marks = tags.tags(request.run, request.machine, self._owner)
        with explained(f"prepare {request.machine} in {pool.region}"):
            try:
                ec2.create_launch_template(
                    LaunchTemplateName=name,
                    LaunchTemplateData=template_data(
                        pool,
                        base64.b64encode(script.encode()).decode(),
                        marks,
                        groups=self._groups_of(pool, is_head=request.head_script is not None),
                        device=root_device(ec2, pool.image),
                        reserved=reserved,
                    ),
                    TagSpecifications=[
                        {
                            "ResourceType": "launch-template",
                            "Tags": [{"Key": k, "Value": v} for k, v in marks.items()],
                        }
                    ],
                )
            except ec2.exceptions.ClientError as error:
                if code_of(error) != "InvalidLaunchTemplateName.AlreadyExistsException":
                    raise  # an earlier launch that was cut short left it: the same machine's, so it will do

    def _create_fleet(
        self, ec2: Any, market: str, name: str, token: str, overrides: list[dict[str, Any]]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = ec2.create_fleet(
            Type="instant",
            ClientToken=token,
            SpotOptions={
                "AllocationStrategy": "price-capacity-optimized",
                "InstanceInterruptionBehavior": "terminate",
            },
            TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": market},
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Latest"},
                    "Overrides": overrides,
                }
            ],
        )
        return answer

    def _delete_template(self, ec2: Any, name: str) -> None:
        try:
            with explained(f"delete launch template {name}"):
                ec2.delete_launch_template(LaunchTemplateName=name)
        except (ConfigError, ProviderError):  # it costs nothing; `terminate` and `gc` try again
            return

    def _lost_race(self, pool: AwsPool, request: LaunchRequest) -> _Created:
        deadline = time.monotonic() + RACE_S
        while time.monotonic() < deadline:
            for machine in self._in(pool.region, request.run, request.machine):
                return _Created(machine.instance, machine.instance_type, machine.zone)
            time.sleep(0.5)
        raise ProviderError(
            f"the launch of {request.machine} was refused as a duplicate, but no machine has its id",
            "retried under another id",
        )

    def _view_of_new(self, pool: AwsPool, request: LaunchRequest, created: _Created) -> MachineView:
        try:
            for machine in self._in(pool.region, request.run, request.machine):
                return self._view(machine)
        except RLBoostError:  # it is there, whatever the list says
            pass
        return MachineView(  # EC2's lists lag behind
            request.machine,
            MachineStatus.STARTING,
            time.time(),
            None,
            created.instance,
            created.zone or pool.region,
            self._price_now(pool.region, created.instance_type, created.zone) if pool.spot else None,
        )

    # --- looking ------------------------------------------------------------------------------------------

    def describe(self, run: str) -> list[MachineView]:
        """Return the run's machines in all regions of the job, for an hour also those that ended. Raises
        `PartlyListed` where some regions do not answer, and what the first said where none does."""
        found, silent = self._list(run)
        if len(silent) == len(self._regions):
            _raise_first(silent)
        now = time.time()
        found.sort(key=lambda each: each.is_alive)  # of those under one id the living is what counts
        views = {machine.machine: self._view(machine) for machine in found}
        with self._lock:
            for each in found:
                self._recent.pop((run, each.machine), None)
                if each.is_alive:
                    seen = _Sighting(now, views[each.machine], each.region, each.instance)
                    self._recent[run, each.machine] = seen
            for (of, machine), seen in list(self._recent.items()):
                if of != run or machine in views:
                    continue
                if now - seen.at > LIST_LAG_S and seen.region not in silent:
                    del self._recent[of, machine]
                else:
                    views[machine] = seen.view
        listed = sorted(views.values(), key=lambda view: view.machine)
        if silent:
            said = min(silent.values(), key=lambda each: retry_of(each) is not Retry.LATER)
            raise PartlyListed(listed, {NAME: said})
        return listed

    def watch(self, run: str) -> list[MachineView] | None:
        """Describe every `WATCH_EVERY_S`."""
        return self.describe(run) if self._pace.is_due() else None

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Terminate it, as a reclaim without a notice does: EC2 announces nothing on demand."""
        check_is_unannounced("EC2", notice_s)
        found, silent = self._list(run, machine)
        if not any(each.is_alive for each in found):
            _raise_first(silent)
            raise absent(run, machine)
        self.terminate(run, machine)

    def console(self, run: str, machine: str) -> str:
        """Return what it wrote to its serial console, for about an hour also after its end."""
        listed, silent = self._list(run, machine)
        for found in listed:
            return console_of(self._ec2(found.region), found.region, found.instance)
        _raise_first(silent)
        return ""

    def sweep(self) -> list[Owned]:
        """Return every machine of ours in the account that lives, in all its regions. Raises `PartlySwept`
        where some regions do not answer, and what the first said where none does."""
        with explained("list the account's regions"):
            regions = [r["RegionName"] for r in self._ec2(self._home()).describe_regions()["Regions"]]
        answers, silent = ask_all(regions, lambda region: list(list_machines(self._ec2(region), region)))
        if not answers:
            _raise_first(silent)
        owned = [
            Owned(m.run, m.machine, NAME, m.zone, m.owner, m.launched_at, f"{m.region}/{m.instance}")
            for found in answers.values()
            for m in found
            if m.is_alive
        ]
        if silent:
            raise PartlySwept(owned, list(silent.values()))
        return owned

    def _find(self, pool: AwsPool, run: str, machine: str) -> MachineView | None:
        """Return the machine where it was launched before: in the pool's region, or another that answers."""
        listed, silent = self._list(run, machine)
        for found in listed:
            return self._view(found)
        if pool.region in silent:
            raise silent[pool.region]
        seen = self._recent.get((run, machine))
        return None if seen is None else seen.view

    @property
    def _regions(self) -> list[str]:
        return sorted({pool.region for pool in self._pools.values()})

    def _list(self, run: str, machine: str | None = None) -> tuple[list[Ec2Machine], dict[str, RLBoostError]]:
        """Return machines of the run in all regions, and what those said that do not answer."""
        answers, silent = ask_all(self._regions, lambda region: self._in(region, run, machine))
        return [machine for found in answers.values() for machine in found], silent

    def _in(self, region: str, run: str, machine: str | None = None) -> list[Ec2Machine]:
        """Return machines of the run, the living before the ended where an id was used again."""
        found = list_machines(self._ec2(region), region, run=run, machine=machine, owner=self._owner)
        return sorted(found, key=lambda each: not each.is_alive)

    def _view(self, machine: Ec2Machine) -> MachineView:
        ended_at = machine.ended_at
        if not machine.is_alive and ended_at is None:
            ended_at = self._ends.setdefault(machine.instance, time.time())
        return MachineView(
            machine.machine,
            machine.state,
            machine.launched_at,
            ended_at,
            machine.detail,
            machine.zone,
            self._price_of(machine),
            machine.public_address,
            machine.private_address,
        )

    def _price_of(self, machine: Ec2Machine) -> int | None:
        if not machine.is_spot or not machine.is_alive:
            return None
        return self._price_now(machine.region, machine.instance_type, machine.zone)

    def _price_now(self, region: str, instance_type: str, zone: str) -> int | None:
        try:
            prices = self._prices_of(region).of((instance_type,))
        except ProviderError:  # what exists is known all the same
            return None
        return next((price.micro_usd_per_hour for price in prices if price.zone == zone), None)

    # --- terminating---------------------------------------------------------------------------------------

    def terminate(self, run: str, machine: str) -> None:
        """Terminate it in whatever region it is; EC2 stops billing at once. Raises once all were asked."""
        _, silent = ask_all(self._regions, lambda region: self._terminate_in(region, run, machine))
        _raise_first(silent)

    def _terminate_in(self, region: str, run: str, machine: str) -> None:
        with self._lock:
            seen = self._recent.get((run, machine))
        if seen is not None and seen.region == region:
            self._terminate_instance(region, seen.instance)
            with self._lock:
                self._recent.pop((run, machine), None)
        for found in self._in(region, run, machine):
            if found.is_alive:
                self._terminate_instance(region, found.instance)

    def end(self, owned: Owned) -> None:
        """Terminate what `sweep` found, by its own id."""
        region, _, instance = owned.handle.partition("/")
        self._terminate_instance(region, instance)

    def _terminate_instance(self, region: str, instance: str) -> None:
        ec2 = self._ec2(region)
        with explained(f"terminate {instance} in {region}"):
            try:
                ec2.terminate_instances(InstanceIds=[instance])
            except ec2.exceptions.ClientError as error:
                if code_of(error) != "InvalidInstanceID.NotFound":
                    raise

    # --- helpers ------------------------------------------------------------------------------------------

    def _home(self) -> str:
        return next((pool.region for pool in self._pools.values()), "us-east-1")

    def _only(self, run: str, machine: str) -> threading.Lock:
        """Return the lock of one machine's launch in this process; others' are told by the client token."""
        with self._lock:
            return self._launching.setdefault((run, machine), threading.Lock())

    def _ec2(self, region: str) -> Any:
        with self._lock:
            made_at, client = self._clients.get(region, (0.0, None))
            if client is None or time.monotonic() - made_at > CLIENT_S:
                with explained(f"use AWS in {region}"):
                    client = self._make_client(region)
                self._clients[region] = time.monotonic(), client
            return client

    def _prices_of(self, region: str) -> SpotPrices:
        with self._lock:
            return self._prices.setdefault(region, SpotPrices(lambda: self._ec2(region), region))

    def _forget_groups(self, region: str) -> None:
        """Look for the security groups again: one may be what EC2 does not find."""
        with self._lock:
            self._groups = {key: group for key, group in self._groups.items() if key[0] != region}

    def _groups_of(self, pool: AwsPool, *, is_head: bool) -> list[str]:
        """Return the machine's security groups, made where they are not there."""
        nodes = [None] if pool.meets_nodes else []
        return [self._group(pool, each) for each in (pool.inbound if is_head else (), *nodes)]

    def _group(self, pool: AwsPool, inbound: tuple[tuple[int, str], ...] | None) -> str:
        with self._lock:
            key = (pool.region, inbound)
            if key not in self._groups:
                ec2 = self._ec2(pool.region)
                self._groups[key] = (
                    node_group(ec2, pool.subnets)
                    if inbound is None
                    else security_group(ec2, pool.subnets, inbound)
                )
            return self._groups[key]


def _market_of(pool: AwsPool, reserved: Reservation | None) -> str:
    """Return CreateFleet's `DefaultTargetCapacityType`."""
    if reserved is not None and reserved.is_block:
        return "capacity-block"
    return "spot" if pool.spot else "on-demand"


def _place(
    where: str, accelerator: str, kinds: Sequence[str], spot: bool, is_for_trainer: bool
) -> tuple[str, ...]:
    """Return what tells the pools of a job apart."""
    market = "trainer" if is_for_trainer else "spot" if spot else "on demand"
    return (where, accelerator, ",".join(kinds), market)


def _raise_first(problems: Mapping[str, RLBoostError]) -> None:
    for problem in problems.values():
        raise problem


def _first_known(*prices: int | None) -> int | None:
    return next((price for price in prices if price is not None), None)
