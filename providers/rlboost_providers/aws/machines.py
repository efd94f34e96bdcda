"""What a job's offers mean on EC2, its instances in our terms, and what a launch template of ours says.

The security groups of our machines: what EC2 lets through to them.

Two first callers at once end with the same group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rlboost_providers.aws.errors import code_of, explained
from rlboost_providers.aws.reservations import Reservation
from rlboost_providers.aws.traits import NAME
from rlboost_providers.base import tags
from rlboost_providers.base.prices import PriceBook, on_demand_prices, shipped_book
from rlboost_providers.base.provider import MachineStatus
from rlboost_providers.base.startup import software
from rlboost_providers.base.traits import cloud_traits, egress_micro_usd_per_gb
from rlboost_runtime.errors import ConfigError, ProviderError
from rlboost_runtime.job import CloudOffer, Trainer
from rlboost_runtime.money import parse_usd

DEFAULT_IMAGE = (
    "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""Where the job names no image: Amazon's newest with the GPU's driver, Ubuntu and nothing of ours."""
_STATES = {
    "pending": MachineStatus.STARTING,
    "running": MachineStatus.RUNNING,
    "stopping": MachineStatus.RUNNING,  # somebody stopped it by hand: there, though of no use
    "stopped": MachineStatus.RUNNING,
    "shutting-down": MachineStatus.GONE,  # no longer billed
    "terminated": MachineStatus.GONE,
}
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: \w+)?\)")
RECLAIMED = "Server.SpotInstanceTermination"


@dataclass(frozen=True, slots=True)
class AwsPool:
    """One offer of a job: machines of equal worth in one region, or in one zone of it.

    Prices in micro-dollars per hour.
    """

    region: str
    accelerator: str
    """As the job file says it, such as H100:8."""
    instance_types: tuple[str, ...]
    image: str
    """AMI id, or `resolve:ssm:` and a parameter."""
    max_price_micro_usd_per_hour: int | None = None
    """The bid for a machine; None: the on-demand price."""
    on_demand_micro_usd_per_hour: int | None = None
    """Known price on demand, against which spot prices are held."""
    spot: bool = True
    subnets: tuple[str, ...] = ()
    """Empty: the default network's, in every zone."""
    instance_profile: str | None = None
    reservation: str | None = None
    """Capacity that was reserved before, as `cr-...`."""
    inbound: tuple[tuple[int, str], ...] = ()
    """For a head: (TCP port, network) pairs that are let in."""
    meets_nodes: bool = False
    """For a head and its trainer's further nodes: each lets in what comes from the others."""
    is_for_trainer: bool = False
    """For the trainer's further nodes."""
    disk_gb: int = 200
    disk_mib_per_s: int | None = None
    """Throughput that is asked for; None: the volume's own."""
    install: str = ""
    """Shell text for `startup.startup_script`."""
    egress_micro_usd_per_gb: int = 0
    storage_micro_usd_per_hour: int = 0
    zone: str | None = None
    """None: every zone of the region."""

    @property
    def place(self) -> str:
        """What its offers have as their zone."""
        return self.zone or self.region


def pools_of(offers: Sequence[CloudOffer], *, spot: bool = True, head: str | None = None) -> list[AwsPool]:
    """Return the pools of a job's offers of AWS. Raises `ConfigError` where machine types are not known.

    `head`: the place of the job's head, as CLOUD/REGION[/ZONE]; None: in no cloud.
    """
    book = shipped_book()
    return [_pool(book, offer, spot, head) for offer in offers]


def inbound_to(ports: tuple[int, int], ssh_from: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return what a head lets in: SSH from `ssh_from`; its two ports from anywhere, over IPv4 only, because
    its servers listen on IPv4 only."""
    return (*((SSH_PORT, network) for network in ssh_from), *((port, "0.0.0.0/0") for port in ports))


def head_pool(offer: CloudOffer, trainer: Trainer) -> AwsPool:
    """Return the pool that a job's head is bought from, by `offer`. Raises `ConfigError` where its machine
    type or price is not known."""
    (pool,) = pools_of([offer], spot=False)
    paid = _micro(trainer.price_usd_per_hour or None)
    price = paid or pool.on_demand_micro_usd_per_hour or pool.max_price_micro_usd_per_hour
    if price is None:
        raise ConfigError(
            f"no price of {offer.accelerators} in {offer.infra} is known to this version",
            "set trainer.max_price_usd_per_hour to the price of such a machine; the bill will use it",
        )
    return replace(
        pool,
        on_demand_micro_usd_per_hour=price,
        instance_profile=trainer.role,
        inbound=inbound_to(trainer.head_ports, trainer.ssh_from),
        reservation=trainer.reservation,
        meets_nodes=trainer.bought_nodes > 0,
    )


def node_pool(offer: CloudOffer, trainer: Trainer) -> AwsPool:
    """Return the pool of the trainer's further nodes, bought from `offer`. Raises like `head_pool`."""
    head = head_pool(offer, trainer)
    return replace(head, instance_profile=None, inbound=(), is_for_trainer=True)


def _pool(book: PriceBook, offer: CloudOffer, spot: bool, head: str | None) -> AwsPool:
    image, install = software(offer.image, DEFAULT_IMAGE)
    on_demand = max(on_demand_prices(offer), default=None)
    traits = cloud_traits(NAME)
    return AwsPool(
        region=str(offer.region),
        accelerator=offer.accelerators,
        instance_types=book.machine_types(offer),
        image=image,
        max_price_micro_usd_per_hour=_micro(offer.max_price_usd_per_hour),
        on_demand_micro_usd_per_hour=_micro(on_demand),
        spot=spot,
        disk_gb=offer.disk_gb,
        disk_mib_per_s=offer.disk_mib_per_s,
        install=install,
        egress_micro_usd_per_gb=egress_micro_usd_per_gb(head, offer.infra, offer.egress_usd_per_gb),
        storage_micro_usd_per_hour=traits.storage_micro_usd_per_hour(
            offer.disk_gb, spot=spot, mib_per_s=offer.disk_mib_per_s
        ),
        zone=offer.zone,
    )


def _micro(usd: float | None) -> int | None:
    return None if usd is None else parse_usd(usd)


@dataclass(frozen=True, slots=True)
class Ec2Machine:
    """One EC2 instance of ours."""

    run: str
    machine: str
    owner: str
    instance: str
    instance_type: str
    region: str
    zone: str
    is_spot: bool
    state: MachineStatus
    launched_at: float
    ended_at: float | None
    detail: str
    public_address: str
    private_address: str

    @property
    def is_alive(self) -> bool:
        """True if it may cost something."""
        return self.state is not MachineStatus.GONE


def console_of(ec2: Any, region: str, instance: str) -> str:
    """Return what an instance wrote to its serial console, as far as EC2 has it: 64 KB at most; of machines
    of older kinds (not Nitro) only what was written some minutes ago."""
    with explained(f"read the console of {instance} in {region}"):
        try:
            answer = ec2.get_console_output(InstanceId=instance, Latest=True)
        except ec2.exceptions.ClientError as error:
            if code_of(error) != "UnsupportedOperation":
                raise
            answer = ec2.get_console_output(InstanceId=instance)
    return str(answer.get("Output") or "")


def list_machines(
    ec2: Any, region: str, *, run: str | None = None, machine: str | None = None, owner: str | None = None
) -> Iterator[Ec2Machine]:
    """Yield the region's instances with our tags; those that ended stay listed for about an hour."""
    wanted = {tags.RUN: run, tags.MACHINE: machine, tags.OWNER: owner}
    filters = [
        {"Name": f"tag:{tag}", "Values": [value]} for tag, value in wanted.items() if value is not None
    ]
    with explained(f"list the machines in {region}"):
        pages = ec2.get_paginator("describe_instances").paginate(
            Filters=filters or [{"Name": "tag-key", "Values": [tags.RUN]}]
        )
        found = [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
    for instance in found:
        yield _machine(instance, region)


def template_data(
    pool: AwsPool,
    user_data: str,
    marks: Mapping[str, str],
    *,
    groups: Sequence[str],
    device: str,
    reserved: Reservation | None = None,
) -> dict[str, Any]:
    """Return the `LaunchTemplateData` of one machine; `user_data` in base64."""
    named = [{"Key": key, "Value": value} for key, value in marks.items()]
    named.append({"Key": "Name", "Value": f"rlboost {marks[tags.RUN]} {marks[tags.MACHINE]}"})
    data: dict[str, Any] = {
        "ImageId": pool.image,
        "UserData": user_data,
        "SecurityGroupIds": list(groups),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,  # containers on the machine do not reach it
            "HttpEndpoint": "enabled",
            "InstanceMetadataTags": "disabled",
        },
        "BlockDeviceMappings": [
            {"DeviceName": device, "Ebs": _volume(pool)},
        ],
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": named},
            {"ResourceType": "volume", "Tags": named},
        ],
    }
    if pool.instance_profile is not None:
        data["IamInstanceProfile"] = {"Name": pool.instance_profile}
    if reserved is not None:
        target = {"CapacityReservationId": reserved.name}
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
        if reserved.is_block:
            data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    return data


def _volume(pool: AwsPool) -> dict[str, Any]:
    volume: dict[str, Any] = {"VolumeSize": pool.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    sold = cloud_traits(NAME).disk_throughput
    if pool.disk_mib_per_s is not None and sold is not None:
        volume |= {"Throughput": pool.disk_mib_per_s, "Iops": sold.iops(pool.disk_mib_per_s)}
    return volume


def _machine(instance: Mapping[str, Any], region: str) -> Ec2Machine:
    marks = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    reason = instance.get("StateReason", {})
    state = _STATES.get(instance["State"]["Name"], MachineStatus.RUNNING)
    told = instance.get("StateTransitionReason", "")
    return Ec2Machine(
        run=marks.get(tags.RUN, ""),
        machine=marks.get(tags.MACHINE, ""),
        owner=marks.get(tags.OWNER, ""),
        instance=instance["InstanceId"],
        instance_type=instance["InstanceType"],
        region=region,
        zone=instance.get("Placement", {}).get("AvailabilityZone", region),
        is_spot=instance.get("InstanceLifecycle") == "spot",
        state=state,
        launched_at=instance["LaunchTime"].timestamp(),
        ended_at=_when(told) if state is MachineStatus.GONE else None,
        detail=_detail(state, reason.get("Code", "")),
        public_address=instance.get("PublicIpAddress", ""),
        private_address=instance.get("PrivateIpAddress", ""),
    )


def _detail(state: MachineStatus, code: str) -> str:
    if state is not MachineStatus.GONE:
        return ""
    return "reclaimed" if code.startswith(RECLAIMED) else code


def _when(told: str) -> float | None:
    """Return the time in `User initiated (2026-11-21 16:00:00 GMT)`, where there is one."""
    match = _WHEN.search(told)
    if match is None:
        return None
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


WORKERS = "rlboost-outbound-only"
HEADS = "rlboost-head"
NODES = "rlboost-trainer-nodes"
SSH_PORT = 22

_ABOUT = {
    WORKERS: "RLBoost workers: they dial out, nothing comes in",
    HEADS: "RLBoost heads: SSH with a key, and TLS of their agents",
    NODES: "RLBoost trainers of several nodes: anything from one another",
}


def security_group(ec2: Any, subnets: Sequence[str], inbound: Sequence[tuple[int, str]] = ()) -> str:
    """Return the id of the group in the subnets' network, by default the default one.

    Workers only dial out. To a head `inbound` comes in, (TCP port, network) pairs. Each set of them has a
    group of its own, so that no other job's rules, nor an earlier version's, open more.
    """
    if not inbound:
        return str(_group(ec2, WORKERS, _ABOUT[WORKERS], _network(ec2, subnets))["GroupId"])
    rules = hashlib.sha256(repr(sorted(inbound)).encode()).hexdigest()[:12]
    group = _group(ec2, f"{HEADS}-{rules}", _ABOUT[HEADS], _network(ec2, subnets))
    if not group["IpPermissions"]:
        _open(ec2, str(group["GroupId"]), inbound)
    return str(group["GroupId"])


def node_group(ec2: Any, subnets: Sequence[str]) -> str:
    """Return the id of the group whose members let in whatever comes from one another."""
    group = _group(ec2, NODES, _ABOUT[NODES], _network(ec2, subnets))
    if not group["IpPermissions"]:
        members = [{"GroupId": str(group["GroupId"])}]
        _authorize(ec2, str(group["GroupId"]), [{"IpProtocol": "-1", "UserIdGroupPairs": members}])
    return str(group["GroupId"])


def _group(ec2: Any, name: str, about: str, vpc: str) -> dict[str, Any]:
    which = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    for _ in range(3):
        found: list[dict[str, Any]] = ec2.describe_security_groups(Filters=which)["SecurityGroups"]
        if found:
            return found[0]
        try:
            ec2.create_security_group(GroupName=name, Description=about, VpcId=vpc)
        except ec2.exceptions.ClientError as error:
            if code_of(error) != "InvalidGroup.Duplicate":
                raise
    raise ProviderError(f"security group {name} of {vpc} comes and goes", "try again")


def _network(ec2: Any, subnets: Sequence[str]) -> str:
    if subnets:
        return str(ec2.describe_subnets(SubnetIds=list(subnets[:1]))["Subnets"][0]["VpcId"])
    default = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not default:
        raise ConfigError(
            "this AWS region has no default network, which machines are launched in",
            "make one: aws ec2 create-default-vpc --region REGION",
        )
    return str(default[0]["VpcId"])


def _open(ec2: Any, group: str, inbound: Sequence[tuple[int, str]]) -> None:
    rules = []
    for port, network in inbound:
        where: dict[str, Any] = (
            {"Ipv6Ranges": [{"CidrIpv6": network}]} if ":" in network else {"IpRanges": [{"CidrIp": network}]}
        )
        rules.append({"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **where})
    _authorize(ec2, group, rules)


def _authorize(ec2: Any, group: str, rules: Sequence[Mapping[str, Any]]) -> None:
    try:
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    except ec2.exceptions.ClientError as error:
        if code_of(error) != "InvalidPermission.Duplicate":
            raise


def ec2_client(region: str) -> Any:
    """Return boto3's EC2 client. Raises `ConfigError` where boto3 is not installed."""
    return client("ec2", region)


def client(service: str, region: str) -> Any:
    """Return boto3's client of a service. Raises `ConfigError` where boto3 is not installed."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as missing:
        raise ConfigError(
            "AWS without SkyPilot needs boto3, which is not installed", "type: pip install 'rlboost[aws]'"
        ) from missing
    retries: Any = {"mode": "standard", "max_attempts": 4}  # boto3's types are not installed everywhere
    config = Config(retries=retries, connect_timeout=5, read_timeout=25, user_agent_extra="rlboost")
    return boto3.session.Session().client(service, region_name=region, config=config)


def root_device(ec2: Any, image: str) -> str:
    """Return what the image calls its disk. Raises `ConfigError` for an image that is not there."""
    if not image.startswith("ami-"):
        return "/dev/sda1"  # a parameter of the deep-learning images: Ubuntu, which calls it so
    found = ec2.describe_images(ImageIds=[image])["Images"]
    if not found:
        raise ConfigError(f"image {image} is not in this region", "name an image of the region, or none")
    return str(found[0].get("RootDeviceName") or "/dev/sda1")
