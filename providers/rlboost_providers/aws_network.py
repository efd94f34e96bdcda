"""The security groups of our machines: what EC2 lets through to them.

Two first callers at once end with the same group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlboost_providers.aws_errors import code_of
from rlboost_runtime.errors import ConfigError, ProviderError

WORKERS = "rlboost-outbound-only"
HEADS = "rlboost-head"
SSH_PORT = 22
RUN_PORTS = (32768, 60999)
"""Where Linux takes free ports from, and so a run its two: TLS that wants the run's token guards both."""

_ABOUT = {
    WORKERS: "RLBoost workers: they dial out, nothing comes in",
    HEADS: "RLBoost heads: SSH with a key, and TLS of their agents",
}


def security_group(ec2: Any, subnets: Sequence[str], *, for_head: bool = False) -> str:
    """Return the id of the group in the subnets' network, by default the default one.

    Workers only dial out; to a head SSH comes in, and the agents of its run.
    """
    group = _group(ec2, HEADS if for_head else WORKERS, _network(ec2, subnets))
    if for_head and not group["IpPermissions"]:
        _open(ec2, str(group["GroupId"]))
    return str(group["GroupId"])


def _group(ec2: Any, name: str, vpc: str) -> dict[str, Any]:
    which = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    for _ in range(3):
        found: list[dict[str, Any]] = ec2.describe_security_groups(Filters=which)["SecurityGroups"]
        if found:
            return found[0]
        try:
            ec2.create_security_group(GroupName=name, Description=_ABOUT[name], VpcId=vpc)
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
            "this AWS region has no default network", "name subnets, or: aws ec2 create-default-vpc"
        )
    return str(default[0]["VpcId"])


def _open(ec2: Any, group: str) -> None:
    anywhere = [{"CidrIp": "0.0.0.0/0"}]
    ports = [(SSH_PORT, SSH_PORT), RUN_PORTS]
    rules = [{"IpProtocol": "tcp", "FromPort": a, "ToPort": b, "IpRanges": anywhere} for a, b in ports]
    try:
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    except ec2.exceptions.ClientError as error:
        if code_of(error) != "InvalidPermission.Duplicate":
            raise
