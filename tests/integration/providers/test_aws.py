"""EC2 without SkyPilot: bids, stock-outs, refusals, and what a machine is given; against EC2 on loopback."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import resources

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_providers.aws.errors import fleet_problem
from rlboost_providers.aws.images import AwsImages
from rlboost_providers.aws.machines import AwsPool, inbound_to
from rlboost_providers.aws.prices import PriceHistory, SpotPrices
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.images import IMAGE as IMAGE_TAG
from rlboost_providers.base.prices import ShippedTable, price_book
from rlboost_providers.base.provider import CanShowConsole, LaunchRequest, MachineStatus, PartlyListed
from rlboost_providers.base.tags import head_of, run_of
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    NotFound,
    ProviderError,
    QuotaExceeded,
    Retry,
    Throttled,
)
from tests.fakes.ec2 import IMAGE, REGION, Refusal, fake_ec2
from tests.fakes.hypervisor import wait_until

pytestmark = pytest.mark.integration

KIND = "g5.xlarge"
A, B = f"{REGION}a", f"{REGION}b"
RUN, OWNER = "r1", "0123456789ab"
INBOUND = inbound_to((7410, 7411), ("0.0.0.0/0",))
POOL = AwsPool(REGION, "A10G:1", (KIND,), IMAGE, 500_000, 1_006_000, inbound=INBOUND)


@pytest.fixture
def ec2(monkeypatch):
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    with fake_ec2() as fake:
        fake.sign_in(monkeypatch)
        fake.prices = {(KIND, A): 0.30, (KIND, B): 0.40}
        yield fake


@pytest.fixture
def provider(ec2):
    return AwsProvider([POOL], OWNER, client=ec2.client)


def request(provider, machine="spot-0", **more):
    bootstrap = {"machine": machine, "instances": (f"{machine}/0",), "token": "the run's token", **more}
    return LaunchRequest(RUN, machine, provider.offers()[0], bootstrap)


def test_an_offer_is_at_the_price_of_the_cheapest_zone_that_the_bid_reaches(ec2, provider):
    [offer] = provider.offers()
    assert (offer.zone, offer.price_micro_usd_per_hour) == (REGION, 300_000)
    assert offer.max_price_micro_usd_per_hour == 500_000
    assert offer.min_billed_s == 60


def test_what_no_zone_sells_at_the_bid_is_not_offered(ec2, provider):
    ec2.prices = {(KIND, A): 0.51, (KIND, B): 0.60}
    assert provider.offers() == []


def test_a_price_above_on_demand_is_nobodys(ec2):
    ec2.prices = {(KIND, A): 1.50}
    assert (
        AwsProvider([replace(POOL, max_price_micro_usd_per_hour=None)], OWNER, client=ec2.client).offers()
        == []
    )


def test_a_price_that_rises_above_the_bid_before_the_launch_launches_nothing(ec2, provider):
    asked = request(provider)
    ec2.prices = {(KIND, A): 0.51, (KIND, B): 0.52}
    with pytest.raises(NoCapacity, match="at or below the bid") as told:
        provider.launch(asked)
    assert told.value.retry is Retry.ELSEWHERE
    assert ec2.instances() == []


def test_a_price_that_rises_in_the_very_moment_is_refused_by_ec2_itself(ec2, provider, monkeypatch):
    asked = request(provider)
    reached = provider._reached(POOL)
    monkeypatch.setattr(provider, "_reached", lambda pool: reached)  # as of a moment ago
    ec2.prices = {(KIND, A): 0.51, (KIND, B): 0.52}
    with pytest.raises(NoCapacity, match="SpotMaxPriceTooLow"):
        provider.launch(asked)
    assert ec2.instances() == []


def test_a_machine_whose_bid_is_passed_is_taken_and_said_to_be_reclaimed(ec2, provider):
    view = provider.launch(request(provider))
    assert (view.zone, view.price_micro_usd_per_hour) == (A, 300_000)
    ec2.set_price(KIND, A, 0.49)
    assert provider.describe(RUN)[0].state is MachineStatus.RUNNING
    ec2.set_price(KIND, A, 0.51)
    [gone] = provider.describe(RUN)
    assert (gone.state, gone.detail) == (MachineStatus.GONE, "reclaimed")
    assert gone.started_at is not None
    assert gone.ended_at is not None
    assert provider.describe(RUN) == [gone], "its end does not move"


@pytest.mark.parametrize("spot", [True, False])
def test_a_zone_that_the_job_names_is_the_only_one_that_is_bought_in(ec2, spot):
    pool = replace(POOL, spot=spot, max_price_micro_usd_per_hour=None)
    provider = AwsProvider([replace(pool, zone=zone) for zone in (A, B)], OWNER, client=ec2.client)
    cheap, dear = provider.offers()
    assert (cheap.zone, cheap.price_micro_usd_per_hour) == (A, 300_000 if spot else 1_006_000)
    assert (dear.zone, dear.price_micro_usd_per_hour) == (B, 400_000 if spot else 1_006_000)
    asked = replace(request(provider), offer=dear)
    assert provider.launch(asked).zone == B
    ec2.capacity = {B: 0}
    with pytest.raises(NoCapacity):
        provider.launch(replace(asked, machine="spot-1"))
    assert len(ec2.instances()) == 1


def test_of_several_subnets_those_in_the_zone_are_bought_in(ec2):
    found = ec2.client(REGION).describe_subnets()["Subnets"]
    subnets = tuple(each["SubnetId"] for each in found)
    provider = AwsProvider([replace(POOL, subnets=subnets, zone=B)], OWNER, client=ec2.client)
    assert provider.launch(request(provider)).zone == B


def test_a_zone_without_machines_is_left_for_another_in_the_same_call(ec2, provider):
    ec2.capacity = {A: 0}
    view = provider.launch(request(provider))
    assert (view.zone, view.price_micro_usd_per_hour) == (B, 400_000)
    assert ec2.calls.count("CreateFleet") == 1


def test_no_zone_with_machines_is_a_stock_out(ec2, provider):
    ec2.capacity = {A: 0, B: 0}
    with pytest.raises(NoCapacity, match="InsufficientInstanceCapacity"):
        provider.launch(request(provider))
    assert provider.describe(RUN) == []


def test_a_quota_of_zero_says_what_to_ask_for(ec2, provider):
    ec2.fleet_errors = {A: "MaxSpotInstanceCountExceeded", B: "MaxSpotInstanceCountExceeded"}
    with pytest.raises(QuotaExceeded, match="Service Quotas") as told:
        provider.launch(request(provider))
    assert told.value.exit_code == 6
    assert told.value.retry is Retry.ELSEWHERE


def test_a_little_throttling_is_waited_out_and_much_of_it_is_said(ec2, provider):
    ec2.refusals.append(Refusal("DescribeInstances", "RequestLimitExceeded", 503, times=2))
    assert provider.describe(RUN) == []
    ec2.refusals.append(Refusal("DescribeInstances", "RequestLimitExceeded", 503, times=9))
    with pytest.raises(Throttled) as told:
        provider.describe(RUN)
    assert told.value.retry is Retry.LATER
    assert told.value.retry_after_s is not None


@pytest.mark.parametrize("code", ["RequestExpired", "AuthFailure", "InvalidClientTokenId"])
def test_refused_credentials_are_named_as_such(ec2, provider, code):
    ec2.refusals.append(Refusal("", code, 401))
    with pytest.raises(CredentialsRejected, match="aws sts get-caller-identity") as told:
        provider.offers()
    assert told.value.exit_code == 6
    assert told.value.retry is Retry.NEVER


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("RequestExpired", "Request has expired."),
        ("SignatureDoesNotMatch", "Signature not yet current: 20990101T000000Z is still later than ..."),
    ],
)
def test_a_clock_that_is_wrong_is_said_before_the_sign_in(ec2, provider, code, message):
    ec2.refusals.append(Refusal("", code, 403, message))
    with pytest.raises(CredentialsRejected, match=r"set this machine's clock.*aws configure"):
        provider.offers()


def test_a_missing_permission_points_to_the_policy(ec2, provider):
    ec2.refusals.append(Refusal("CreateFleet", "UnauthorizedOperation", 403))
    with pytest.raises(CredentialsRejected, match=r"policy in docs/clouds\.md"):
        provider.launch(request(provider))


TO_COME = [
    (["InvalidGroup.NotFound"], Retry.LATER),
    (["InvalidSubnetID.NotFound", "InternalError"], Retry.LATER),
    (["InvalidLaunchTemplateName.NotFoundException"], Retry.LATER),
    (["InvalidFleetConfiguration"], Retry.ELSEWHERE),
    (["InvalidFleetConfiguration", "MaxSpotInstanceCountExceeded"], Retry.ELSEWHERE),
    (["InvalidFleetConfiguration", "RequestLimitExceeded"], Retry.LATER),
    (["InvalidParameterValue", "InternalError"], Retry.LATER),
    (["UnauthorizedOperation", "InsufficientInstanceCapacity"], Retry.ELSEWHERE),
]


@pytest.mark.parametrize(("codes", "retry"), TO_COME, ids=[" ".join(codes) for codes, _ in TO_COME])
def test_what_may_be_had_later_is_not_taken_for_a_mistake_in_the_job_file(codes, retry):
    problem = fleet_problem("launch", [{"ErrorCode": code, "ErrorMessage": "m"} for code in codes])
    assert isinstance(problem, ProviderError)
    assert problem.retry is retry
    assert isinstance(problem, QuotaExceeded) is ("MaxSpotInstanceCountExceeded" in codes)


def test_what_every_zone_refuses_as_wrong_is_the_job_files_fault():
    wrong = [{"ErrorCode": "InvalidParameterValue", "ErrorMessage": "m"}] * 2
    assert isinstance(fleet_problem("launch", wrong), ConfigError)


def test_a_security_group_that_is_gone_is_made_again(ec2, provider):
    provider.launch(request(provider))
    provider._groups = dict.fromkeys(provider._groups, "sg-00000000")
    ec2.fleet_errors = {A: "InvalidGroup.NotFound", B: "InvalidGroup.NotFound"}
    with pytest.raises(ProviderError, match="may not list new machines yet"):
        provider.launch(request(provider, "spot-1"))
    ec2.fleet_errors = {}
    provider.launch(request(provider, "spot-2"))
    first, stale, last = [template["SecurityGroupIds"] for template in ec2.templates]
    assert stale == ["sg-00000000"]
    assert last == first


def test_no_credentials_at_all_are_said_before_anything_is_sent(ec2, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsRejected, match="no usable AWS credentials"):
        AwsProvider([POOL], OWNER).offers()
    assert ec2.calls == []


def test_an_api_that_is_away_is_said_within_seconds(monkeypatch, ec2):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    provider = AwsProvider([POOL], OWNER)
    with pytest.raises(ProviderError, match="us-east-2") as told:
        provider.describe(RUN)
    assert told.value.exit_code == 7
    assert told.value.retry is Retry.LATER


def test_a_region_that_is_none_and_an_image_that_is_none_are_the_job_files_fault(ec2):
    with pytest.raises(ConfigError, match="aws/REGION"):
        AwsProvider([replace(POOL, region="not a region")], OWNER).offers()
    provider = AwsProvider([replace(POOL, image="ami-00000000000000000")], OWNER, client=ec2.client)
    with pytest.raises(ConfigError, match="image"):
        provider.launch(request(provider))
    assert ec2.instances() == []


def test_a_region_that_is_denied_keeps_nothing_from_being_done_in_the_others(ec2):
    provider = AwsProvider(
        [replace(POOL, region=name) for name in ("ca-west-1", REGION)], OWNER, client=ec2.client
    )
    ec2.refusals.append(Refusal("", "UnauthorizedOperation", 403, times=1000, region="ca-west-1"))
    assert [offer.zone for offer in provider.offers()] == [REGION]
    assert provider.launch(request(provider)).state is MachineStatus.RUNNING
    with pytest.raises(
        PartlyListed, match="left in aws is unknown: cannot list the machines in ca-west-1"
    ) as told:
        provider.describe(RUN)
    assert [view.machine for view in told.value.views] == ["spot-0"]
    assert (told.value.silent, told.value.exit_code) == ({"aws"}, CredentialsRejected.exit_code)
    with pytest.raises(CredentialsRejected, match="ca-west-1"):
        provider.terminate(RUN, "spot-0")
    assert ec2.instances() == []
    ec2.prices = {(KIND, A): 0.51}
    provider._prices_of(REGION).forget()
    with pytest.raises(CredentialsRejected, match="ca-west-1"):
        provider.offers()


def test_a_machine_that_is_not_listed_yet_is_there_and_can_be_ended(ec2, provider):
    ec2.lists_lag = True
    launched = provider.launch(request(provider))
    assert launched.state is MachineStatus.STARTING
    assert provider.describe(RUN) == [launched]
    assert provider.launch(request(provider)) == launched
    provider.terminate(RUN, "spot-0")
    ec2.lists_lag = False
    assert ec2.instances() == []
    assert [view.state for view in provider.describe(RUN)] == [MachineStatus.GONE]


def test_a_machine_that_a_list_lacks_stays_until_lists_would_show_its_end(ec2, provider, monkeypatch):
    provider.launch(request(provider))
    [there] = provider.describe(RUN)
    ec2.lists_lag = True
    assert provider.describe(RUN) == [there]
    monkeypatch.setattr("rlboost_providers.aws.provider.LIST_LAG_S", 0.0)
    assert provider.describe(RUN) == []


def test_an_answer_that_is_lost_does_not_buy_a_second_machine(ec2, provider):
    ec2.lose_answers = 2
    view = provider.launch(request(provider))
    assert len(ec2.instances()) == 1
    assert view.state is MachineStatus.RUNNING
    assert ec2.calls.count("CreateFleet") == 3


def test_a_launch_whose_answers_are_all_lost_is_found_again(ec2, provider):
    ec2.lose_answers = 99
    asked = request(provider)
    with pytest.raises(ProviderError):
        provider.launch(asked)
    assert [view.state for view in provider.describe(RUN)] == [MachineStatus.RUNNING]
    assert provider.launch(asked).state is MachineStatus.RUNNING
    assert len(ec2.instances()) == 1


def test_what_a_machine_is_given(ec2, provider):
    provider.launch(request(provider))
    [data] = ec2.templates
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert int(data["MetadataOptions"]["HttpPutResponseHopLimit"]) == 1
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert "IamInstanceProfile" not in data
    [group] = data["SecurityGroupIds"]
    assert ec2.backend.get_security_group_from_id(group).ingress_rules == []
    instance = ec2.machine("spot-0")
    assert {tag["key"]: tag["value"] for tag in instance.get_tags()} == {
        "Name": "rlboost r1 spot-0",
        "rlboost-machine": "spot-0",
        "rlboost-owner": OWNER,
        "rlboost-run": RUN,
    }
    assert ec2.backend.launch_templates == {}, "its template, with the run's token in it, is gone"


def test_the_shipped_policy_allows_what_the_provider_does_and_no_other_call(ec2, provider):
    provider.launch(request(provider))
    provider.launch(replace(request(provider, "head-1"), head_script="#!/bin/bash\n"))
    images = AwsImages(REGION, ec2.client(REGION))
    images.delete(images.save(RUN, "head-1", "an image", {IMAGE_TAG: "1"}, lambda words: None).name)
    provider.console(RUN, "head-1")
    provider.preempt(RUN, "spot-0", None)
    provider.describe(RUN)
    provider.sweep()
    reserved(ec2).offers()
    policy = json.loads(
        resources.files("rlboost_templates").joinpath("policies/aws.json").read_text(encoding="utf-8")
    )
    allowed = set()
    for statement in policy["Statement"]:
        actions = statement["Action"]
        allowed |= {actions} if isinstance(actions, str) else set(actions)
    called = {f"ec2:{action}" for action in ec2.calls}
    not_seen_here = {  # made by EC2 in our name, or where the job names subnets or no image
        *("ec2:RunInstances", "ec2:CreateTags", "ec2:DescribeSubnets"),
        *("iam:CreateServiceLinkedRole", "iam:PassRole", "ssm:GetParameters"),
    }
    assert called == allowed - not_seen_here
    ending = next(s for s in policy["Statement"] if "ec2:TerminateInstances" in s["Action"])
    assert ending["Condition"] == {"Null": {"aws:ResourceTag/rlboost-run": "false"}}
    deleting = next(s for s in policy["Statement"] if "ec2:DeregisterImage" in s["Action"])
    assert deleting["Condition"] == {"Null": {"aws:ResourceTag/rlboost-image": "false"}}


def test_a_head_is_reached_by_ssh_and_on_its_runs_ports_and_runs_its_own_script(ec2, provider):
    script = "#!/bin/bash\necho a head\n"
    for name in ("head-1", "head-2"):
        provider.launch(replace(request(provider, name), head_script=script))
    provider.launch(request(provider))
    template = ec2.templates[0]
    assert base64.b64decode(str(template["UserData"])).decode() == script
    assert template["InstanceInitiatedShutdownBehavior"] == "terminate"
    rules = ec2.backend.get_security_group_from_id(template["SecurityGroupIds"][0]).ingress_rules
    opened = sorted((int(rule.from_port), int(rule.to_port), rule.ip_protocol) for rule in rules)
    assert opened == [(port, port, "tcp") for port in (22, 7410, 7411)]
    assert {rule.ip_range["CidrIp"] for rule in rules} == {"0.0.0.0/0"}
    assert ec2.templates[2]["SecurityGroupIds"] != template["SecurityGroupIds"], "workers stay closed"
    assert ec2.calls.count("AuthorizeSecurityGroupIngress") == 1
    (view, *_) = provider.describe(RUN)
    assert view.private_address == ec2.machine("head-1").private_ip


def test_the_nodes_of_a_trainer_let_in_one_another_and_nobody_else(ec2):
    head = replace(POOL, spot=False, max_price_micro_usd_per_hour=None, meets_nodes=True)
    node = replace(head, inbound=(), is_for_trainer=True)
    spot = replace(POOL, inbound=())
    selling = AwsProvider([head, node, spot], OWNER, client=ec2.client)
    offers = {(offer.spot, offer.is_for_trainer): offer for offer in selling.offers()}
    assert [offer.is_of_pool for offer in offers.values()].count(True) == 1, (
        "the pool buys spot machines only"
    )

    def launch(machine, offer, script=None):
        told = {"machine": machine, "instances": (f"{machine}/0",), "token": "its own"}
        selling.launch(LaunchRequest(RUN, machine, offer, told, head_script=script))
        return ec2.templates[-1]["SecurityGroupIds"]

    first = launch("head-1", offers[False, False], "#!/bin/bash\n")
    second, third = launch("reserved-1", offers[False, True]), launch("spot-0", offers[True, False])
    assert len(first) == len(second) == 2
    assert (first[1], len(third)) == (second[1], 1)
    assert second[0] == third[0], "from elsewhere nothing comes in, as to a spot machine"
    [rule] = ec2.backend.get_security_group_from_id(second[1]).ingress_rules
    assert (rule.ip_protocol, rule.source_group["GroupId"]) == ("-1", second[1])
    assert ec2.calls.count("AuthorizeSecurityGroupIngress") == 2, "the head's ports, and the nodes' own"


@pytest.mark.parametrize(
    ("mib_per_s", "asked"),
    [(None, {}), (521, {"Throughput": 521, "Iops": 3000}), (1000, {"Throughput": 1000, "Iops": 4000})],
)
def test_a_disk_is_asked_for_with_its_throughput(ec2, mib_per_s, asked):
    provider = AwsProvider([replace(POOL, disk_gb=500, disk_mib_per_s=mib_per_s)], OWNER, client=ec2.client)
    provider.launch(request(provider))
    (disk,) = ec2.templates[0]["BlockDeviceMappings"]
    ebs = {name: value for name, value in disk["Ebs"].items() if name in ("Throughput", "Iops")}
    assert {name: int(value) for name, value in ebs.items()} == asked


BLOCK = "cr-0123456789abcdef0"


def reserved(ec2, **told):
    """A provider that buys a head in reserved capacity of which EC2 tells so."""
    ec2.reservations[BLOCK] = {
        "instanceType": KIND,
        "availabilityZone": B,
        "reservationType": "capacity-block",
        "state": "active",
        "startDate": "2026-11-24T11:30:00.000Z",
        "availableInstanceCount": 1,
        **told,
    }
    pool = replace(POOL, spot=False, max_price_micro_usd_per_hour=None, reservation=BLOCK)
    return AwsProvider([pool], OWNER, client=ec2.client)


@pytest.mark.parametrize("kind", ["capacity-block", "default"])
def test_a_machine_is_launched_into_capacity_that_was_reserved(ec2, kind):
    provider = reserved(ec2, reservationType=kind)
    (offer,) = provider.offers()
    assert BLOCK in offer.source
    assert provider.launch(request(provider)).zone == B, "the reservation's, though a costs less"
    (template,) = ec2.templates
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": BLOCK}
    is_block = kind == "capacity-block"
    assert ec2.fleet_kinds == ["capacity-block" if is_block else "on-demand"]
    assert template.get("InstanceMarketOptions") == ({"MarketType": kind} if is_block else None)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"state": "scheduled"}, "is scheduled, and begins at 2026-11-24 11:30 UTC"),
        ({"availableInstanceCount": 0}, f"every machine of {BLOCK} is in use"),
    ],
)
def test_reserved_capacity_that_is_not_free_yet_may_be_waited_for(ec2, told, words):
    provider = reserved(ec2, **told)
    asked = request(provider)
    with pytest.raises(NoCapacity, match=words) as refusal:
        provider.launch(asked)
    assert "max_wait_minutes" in refusal.value.remedy
    assert ec2.instances() == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"state": "expired"}, "is expired"),
        ({"instanceType": "p5.48xlarge"}, f"is for p5.48xlarge, but the job wants {KIND}"),
        (None, "does not exist"),
    ],
)
def test_reserved_capacity_that_cannot_serve_is_refused_before_anything_is_bought(ec2, told, words):
    provider = reserved(ec2, **(told or {}))
    if told is None:
        ec2.reservations.clear()
    with pytest.raises(ConfigError, match=words):
        provider.offers()


@pytest.mark.parametrize("old_kinds", [False, True])
def test_what_a_machine_wrote_to_its_console_is_read_of_new_and_old_kinds(ec2, provider, old_kinds):
    ec2.console, ec2.old_kinds = "Booting Linux\n\u00fcber: out of memory\n", old_kinds
    assert isinstance(provider, CanShowConsole)
    assert provider.console(RUN, "head-1") == ""
    provider.launch(request(provider, "head-1"))
    assert provider.console(RUN, "head-1") == ec2.console
    assert ec2.calls.count("GetConsoleOutput") == 1 + old_kinds


def test_a_fleet_never_sees_the_head_of_its_run(ec2, provider):
    head = replace(request(provider, "head-1"), run=head_of(RUN), head_script="#!/bin/bash\n")
    provider.launch(head)
    provider.launch(request(provider))
    assert [view.machine for view in provider.describe(RUN)] == ["spot-0"]
    assert [view.machine for view in provider.describe(head_of(RUN))] == ["head-1"]
    assert {run_of(owned.run) for owned in provider.sweep()} == {RUN}
    with pytest.raises(ConfigError, match="too long a name"):
        head_of("r" * 59)


def test_another_owners_run_of_the_same_name_is_another_run(ec2, provider):
    other = AwsProvider([POOL], "ba9876543210", client=ec2.client)
    provider.launch(request(provider))
    assert other.describe(RUN) == []
    other.terminate(RUN, "spot-0")
    with pytest.raises(NotFound):
        other.preempt(RUN, "spot-0", None)
    other.launch(request(other))
    assert len(ec2.instances()) == 2
    assert {each.owner for each in other.sweep()} == {OWNER, "ba9876543210"}


def test_a_machine_that_its_agents_left_ends_itself(monkeypatch, tmp_path):
    with fake_ec2(tmp_path / "machines") as ec2:
        ec2.sign_in(monkeypatch)
        ec2.prices = {(KIND, A): 0.30}
        provider = AwsProvider([POOL], OWNER, client=ec2.client)
        provider.launch(request(provider, note="abandoned"))
        wait_until(lambda: ec2.instances() == [])
        assert provider.describe(RUN)[0].state is MachineStatus.GONE
        assert ec2.hypervisor.num_agents("") == 0


def test_a_node_of_the_trainer_runs_its_ranks_beside_its_agents_and_ends_with_them(monkeypatch, tmp_path):
    with fake_ec2(tmp_path / "machines") as ec2:
        ec2.sign_in(monkeypatch)
        ec2.prices = {(KIND, A): 0.30}
        provider = AwsProvider([POOL], OWNER, client=ec2.client)
        place = ("10.0.0.5:7412", "r1", "1", "2", "8")
        provider.launch(request(provider, "reserved-1", trainer_node=place))
        starts = ec2.hypervisor.root("reserved-1") / "node-starts"
        wait_until(lambda: starts.exists() and len(starts.read_text().splitlines()) == 2)
        assert starts.read_text().splitlines() == [" ".join(place)] * 2, "started again after it had broken"
        assert ec2.hypervisor.num_agents("reserved-1") == 3, "the agent, its engine, the node"
        provider.launch(request(provider, "reserved-2", trainer_node=place, note="abandoned"))
        wait_until(lambda: len(ec2.instances()) == 1)


def test_a_machine_whose_installation_fails_ends_itself_and_says_why(monkeypatch, tmp_path):
    with fake_ec2(tmp_path / "machines") as ec2:
        ec2.sign_in(monkeypatch)
        ec2.prices = {(KIND, A): 0.30}
        provider = AwsProvider(
            [replace(POOL, install="echo no such wheel; exit 9")], OWNER, client=ec2.client
        )
        provider.launch(request(provider))
        wait_until(lambda: ec2.instances() == [])
        root = ec2.hypervisor.root("spot-0")
        assert "no such wheel" in (root / "install.log").read_text()
        assert ec2.hypervisor.num_agents("") == 0


def test_the_bootstrap_reaches_the_machine_in_a_file_for_its_owner_only(monkeypatch, tmp_path):
    with fake_ec2(tmp_path / "machines") as ec2:
        ec2.sign_in(monkeypatch)
        ec2.prices = {(KIND, A): 0.30}
        provider = AwsProvider([POOL], OWNER, client=ec2.client)
        asked = request(provider)
        provider.launch(asked)
        wait_until(lambda: ec2.hypervisor.num_agents("spot-0") == 2)
        path = ec2.hypervisor.root("spot-0") / "bootstrap.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_bytes()) == json.loads(json.dumps({**asked.bootstrap, "cloud": "aws"}))


def test_live_prices_are_a_source_that_is_checked_and_kept_for_a_minute(ec2, provider):
    history = PriceHistory(
        {REGION: SpotPrices(lambda: provider._ec2(REGION), REGION)}, ShippedTable().quotes()
    )
    book = price_book([history, ShippedTable()])
    [quote] = book.find(accelerator="A10G")
    assert book.is_live
    assert quote.spot_usd_per_hour == pytest.approx(0.35)
    assert quote.as_of == time.strftime("%Y-%m-%d", time.gmtime())
    num_calls = len(ec2.calls)
    price_book([history])
    assert len(ec2.calls) == num_calls
    ec2.refusals.append(Refusal("", "RequestExpired", 401))
    later = PriceHistory({REGION: SpotPrices(lambda: provider._ec2(REGION), REGION)}, ShippedTable().quotes())
    fallen_back = price_book([later, ShippedTable()])
    assert not fallen_back.is_live
    assert "RequestExpired" in fallen_back.silent[0].problem


def test_the_prices_command_asks_ec2_only_when_told_to_and_says_what_is_from_where(ec2, monkeypatch):
    ec2.sign_in(monkeypatch)
    shown = CliRunner().invoke(app, ["prices", "--gpu", "A10G", "--infra", f"aws/{REGION}", "--json"])
    assert json.loads(shown.stdout)["is_live"] is False
    assert ec2.calls == []
    live = CliRunner().invoke(
        app, ["prices", "--live", "--gpu", "A10G", "--infra", f"aws/{REGION}", "--json"]
    )
    [offer] = json.loads(live.stdout)["offers"]
    assert offer["spot_usd_per_hour"] == pytest.approx(0.35)
    assert "EC2's spot price history" in offer["source"]
    ec2.refusals.append(Refusal("", "RequestExpired", 401, times=9))
    table = CliRunner().invoke(app, ["prices", "--live", "--gpu", "A10G", "--infra", f"aws/{REGION}"])
    assert table.exit_code == 6
    assert "error: cannot read the spot prices of" in table.output
    assert "offline: the table shipped with rlboost" in table.output


def test_boto3_is_loaded_when_it_is_needed_and_named_when_it_is_missing():
    code = """
import sys
sys.modules["boto3"] = None
from rlboost_cli.main import app
from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
assert "botocore" not in sys.modules
try:
    AwsProvider([AwsPool("us-east-2", "A10G:1", ("g5.xlarge",), "ami-1")], "0").offers()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "ConfigError" in done.stdout
    assert "pip install 'rlboost[aws]'" in done.stdout
