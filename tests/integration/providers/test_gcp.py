"""Google Cloud without SkyPilot: stock-outs, refusals, what a machine is given; its REST API on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import resources

import pytest
from google.api_core.retry import Retry as GoogleRetry
from google.auth.exceptions import GoogleAuthError, OAuthError, RefreshError, TransportError
from google.cloud import compute_v1
from google.protobuf import json_format

from rlboost_providers.base.provider import CanShowConsole, LaunchRequest, MachineStatus
from rlboost_providers.base.tags import head_of
from rlboost_providers.gcp import provider as gcp
from rlboost_providers.gcp.errors import explained
from rlboost_providers.gcp.machines import ALL_SCOPES, GcpPool
from rlboost_providers.gcp.provider import CONSOLE_BYTES, GcpProvider
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    Retry,
    Throttled,
)
from tests.fakes.gce import PROJECT, HttpRefusal, fake_gce
from tests.fakes.hypervisor import wait_until

pytestmark = pytest.mark.integration

HYPERDISK = "zones/us-central1-b/diskTypes/hyperdisk-balanced"
RUN, OWNER = "r1", "0123456789ab"
POOL = GcpPool("us-central1", "L4:1", "g2-standard-4", 300_000, "test")


@pytest.fixture
def gce():
    with fake_gce() as fake:
        yield fake


@pytest.fixture
def provider(gce):
    return GcpProvider([POOL], OWNER, clients=lambda: gce.clients)


def request(provider, machine="spot-0", zone=None):
    offer = next(o for o in provider.offers() if zone in (None, o.zone))
    bootstrap = {"machine": machine, "instances": (f"{machine}/0",), "token": "the run's token"}
    return LaunchRequest(RUN, machine, offer, bootstrap)


def test_every_zone_of_the_region_with_the_machine_type_is_offered(gce, provider):
    offers = provider.offers()
    assert [offer.zone for offer in offers] == ["us-central1-a", "us-central1-b", "us-central1-f"]
    assert all(offer.spot and offer.price_micro_usd_per_hour == 300_000 for offer in offers)
    with pytest.raises(ConfigError, match="no machine type x9-mega"):
        GcpProvider([replace(POOL, machine_type="x9-mega")], OWNER, clients=lambda: gce.clients).offers()


@pytest.mark.parametrize(
    "code", ["ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"]
)
def test_a_stock_out_is_read_from_the_operation_and_another_zone_is_asked(gce, provider, code):
    gce.errors = {"us-central1-a": code}
    with pytest.raises(NoCapacity, match=code) as told:
        provider.launch(request(provider, zone="us-central1-a"))
    assert told.value.retry is Retry.ELSEWHERE
    assert provider.describe(RUN) == []
    view = provider.launch(request(provider, "spot-1", zone="us-central1-b"))
    assert (view.state, view.zone) == (MachineStatus.RUNNING, "us-central1-b")


def test_a_quota_of_zero_says_what_to_ask_for(gce, provider):
    gce.errors = {"us-central1-a": "QUOTA_EXCEEDED"}
    with pytest.raises(QuotaExceeded, match="Preemptible GPUs") as told:
        provider.launch(request(provider))
    assert told.value.exit_code == 6


@pytest.mark.parametrize(
    ("status", "reason", "kind", "words"),
    [
        (403, "quotaExceeded", QuotaExceeded, "IAM & Admin"),
        (403, "rateLimitExceeded", Throttled, "retried automatically"),
        (401, "authError", CredentialsRejected, "gcloud auth application-default login"),
        (403, "accessNotConfigured", CredentialsRejected, "gcloud services enable"),
        (400, "invalid", ConfigError, "instance_type and image"),
        (404, "notFound", ConfigError, "instance_type and image"),
    ],
)
def test_a_refused_launch_is_explained(gce, provider, status, reason, kind, words):
    asked = request(provider)
    gce.refusals.append(HttpRefusal("^POST .*/instances$", status, reason))
    with pytest.raises(kind, match=words):
        provider.launch(asked)
    assert gce.living() == []


def test_a_clock_that_is_wrong_is_said_before_the_sign_in():
    said = "invalid_grant: Invalid JWT: Token must be a short-lived token and in a reasonable timeframe."
    with (
        pytest.raises(CredentialsRejected, match=r"set this machine's clock.*gcloud auth"),
        explained("list"),
    ):
        raise RefreshError(said)
    with pytest.raises(CredentialsRejected, match=r"type `gcloud auth"), explained("list"):
        raise RefreshError("invalid_grant: Token has been expired or revoked.")


@pytest.mark.parametrize("kind", [OAuthError, GoogleAuthError])
def test_whatever_the_sign_in_fails_with_is_a_refusal_of_the_credentials(kind):
    with pytest.raises(CredentialsRejected, match=r"invalid_grant.*gcloud auth"), explained("list"):
        raise kind("invalid_grant")
    with pytest.raises(ProviderError, match="cannot be reached to list") as told, explained("list"):
        raise TransportError("connection reset")
    assert told.value.retry is Retry.LATER


def test_a_short_outage_is_waited_out_and_a_long_one_is_said_in_bounded_time(gce, provider, monkeypatch):
    patience = gcp._patience()
    short = GoogleRetry(predicate=patience["retry"]._predicate, initial=0.01, timeout=1.0)
    monkeypatch.setattr(gcp, "_patience", lambda: patience | {"retry": short})
    gce.refusals.append(HttpRefusal("", 503, "backendError", times=3))
    assert provider.describe(RUN) == []
    gce.refusals.append(HttpRefusal("", 503, "backendError", times=10_000))
    began = time.monotonic()
    with pytest.raises(ProviderError) as told:
        provider.describe(RUN)
    assert time.monotonic() - began < 10
    assert told.value.retry is Retry.LATER
    assert told.value.exit_code == 7


def test_a_launch_repeated_after_a_lost_answer_is_the_same_operation(gce, provider):
    asked = request(provider)
    gce.refusals.append(HttpRefusal("^GET .*/operations/operation-", 401, "authError"))
    with pytest.raises(CredentialsRejected):
        provider.launch(asked)
    assert provider.launch(asked).state is MachineStatus.RUNNING
    assert len(gce.living()) == 1


def test_an_operation_that_does_not_end_is_given_up_and_its_machine_found(gce):
    gce.never_done = True
    provider = GcpProvider([POOL], OWNER, clients=lambda: gce.clients, operation_s=0.3)
    with pytest.raises(ProviderError, match="did not confirm within"):
        provider.launch(request(provider))
    assert [view.state for view in provider.describe(RUN)] == [MachineStatus.RUNNING]


def test_a_launch_that_takes_longer_than_one_answer_may_is_waited_for(gce, provider, monkeypatch):
    monkeypatch.setattr(gcp, "CALL_S", 0.3)
    gce.operation_s = 1.2
    assert provider.launch(request(provider)).state is MachineStatus.RUNNING
    gce.errors = {"us-central1-b": "ZONE_RESOURCE_POOL_EXHAUSTED"}
    with pytest.raises(NoCapacity):
        provider.launch(request(provider, "spot-1", zone="us-central1-b"))
    assert len(gce.bodies) == 2


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "backendError"), (403, "rateLimitExceeded"), (404, "notFound")]
)
def test_a_refused_look_at_a_launch_under_way_is_not_taken_for_a_refused_launch(
    gce, provider, status, reason
):
    gce.refusals.append(HttpRefusal("^(GET|POST) .*/operations/operation-", status, reason, times=3))
    assert provider.launch(request(provider)).state is MachineStatus.RUNNING
    gce.refusals.append(HttpRefusal("^(GET|POST) .*/operations/operation-", status, reason, times=10_000))
    other = GcpProvider([POOL], OWNER, clients=lambda: gce.clients, operation_s=0.3)
    with pytest.raises(ProviderError, match=f"did not confirm within 0.3 s .*{reason}") as told:
        other.launch(request(other, "spot-1"))
    assert told.value.retry is Retry.LATER


def test_a_reclaimed_machine_is_known_from_the_cloud_alone(gce, provider):
    provider.launch(request(provider))
    gce.reclaim("spot-0")
    fresh = GcpProvider([POOL], OWNER, clients=lambda: gce.clients)
    [gone] = fresh.describe(RUN)
    assert (gone.state, gone.detail) == (MachineStatus.GONE, "reclaimed")
    assert gone.started_at is not None
    assert gone.ended_at is not None
    assert gone.ended_at >= gone.started_at


def test_a_machine_that_shut_itself_down_is_deleted_when_it_is_seen(gce, provider):
    provider.launch(request(provider))
    gce.powered_off("spot-0")
    [gone] = provider.describe(RUN)
    assert (gone.state, gone.detail) == (MachineStatus.GONE, "shut itself down")
    wait_until(lambda: not gce.instances)


@pytest.mark.parametrize(("status", "reason"), [(400, "resourceNotReady"), (403, "forbidden")])
def test_what_shut_itself_down_is_seen_to_be_gone_also_where_its_deletion_is_refused(
    gce, provider, caplog, status, reason
):
    for machine in ("spot-0", "spot-1"):
        provider.launch(request(provider, machine))
    gce.powered_off("spot-0")
    gce.refusals.append(HttpRefusal("^DELETE", status, reason))
    with caplog.at_level("INFO"):
        views = provider.describe(RUN)
    assert [(view.machine, view.state) for view in views] == [
        ("spot-0", MachineStatus.GONE),
        ("spot-1", MachineStatus.RUNNING),
    ]
    assert "machine.delete_failed" in caplog.messages
    provider.describe(RUN)
    wait_until(lambda: len(gce.instances) == 1)


def test_a_machine_that_another_operation_is_at_work_on_is_asked_about_later(gce, provider):
    provider.launch(request(provider))
    gce.refusals.append(HttpRefusal("^DELETE", 400, "resourceNotReady"))
    with pytest.raises(ProviderError, match="resourceNotReady") as told:
        provider.terminate(RUN, "spot-0")
    assert told.value.retry is Retry.LATER


def test_what_a_machine_is_given(gce, provider):
    provider.launch(request(provider))
    [body] = gce.bodies
    assert body["scheduling"]["provisioningModel"] == "SPOT"
    assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert body["labels"] == {"rlboost-run": RUN, "rlboost-machine": "spot-0", "rlboost-owner": OWNER}
    assert body["disks"][0]["autoDelete"] is True
    assert not body.get("serviceAccounts")
    items = {item["key"]: item["value"] for item in body["metadata"]["items"]}
    assert items["block-project-ssh-keys"] == "true"
    assert "ssh-keys" not in items


def bought(gce, **changes):
    """What Google is asked for by a head in the pool with such changes."""
    pool = replace(POOL, spot=False, **changes)
    provider = GcpProvider([pool], OWNER, clients=lambda: gce.clients)
    assert provider.launch(request(provider)).state is MachineStatus.RUNNING
    (body,) = gce.bodies
    return body


def test_a_machine_is_bought_by_flex_start_for_a_limited_time(gce):
    body = bought(gce, flex_start_s=7200)
    scheduling = body["scheduling"]
    assert (scheduling["provisioningModel"], scheduling["automaticRestart"]) == ("FLEX_START", False)
    assert scheduling["instanceTerminationAction"] == "DELETE"
    assert scheduling["maxRunDuration"]["seconds"] == "7200"
    assert body["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}


def test_a_machine_is_launched_into_a_reservation(gce):
    name = "projects/other/reservations/h100s"
    assert bought(gce, reservation=name)["reservationAffinity"] == {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [name],
    }


def test_a_machine_on_demand_asks_for_neither(gce):
    body = bought(gce)
    assert "reservationAffinity" not in body
    assert "provisioningModel" not in body["scheduling"]


def test_a_machine_with_h100s_is_given_a_disk_that_it_takes(gce):
    pool = GcpPool("us-central1", "H100:8", "a3-highgpu-8g", 20_000_000, "test")
    provider = GcpProvider([pool], OWNER, clients=lambda: gce.clients)
    assert provider.launch(request(provider, zone="us-central1-b")).state is MachineStatus.RUNNING
    [body] = gce.bodies
    [disk] = body["disks"]
    assert disk["initializeParams"]["diskType"] == "zones/us-central1-b/diskTypes/pd-balanced"


@pytest.mark.parametrize(
    ("machine_type", "mib_per_s", "disk"),
    [
        (
            "a3-highgpu-8g",
            939,
            {"diskType": HYPERDISK, "provisionedThroughput": "939", "provisionedIops": "3756"},
        ),
        (
            "a3-highgpu-8g",
            200,
            {"diskType": HYPERDISK, "provisionedThroughput": "200", "provisionedIops": "3000"},
        ),
        ("a3-ultragpu-8g", None, {"diskType": HYPERDISK}),  # takes no persistent disk
        ("g2-standard-4", None, {"diskType": "zones/us-central1-b/diskTypes/pd-balanced"}),
    ],
)
def test_the_disk_has_the_throughput_that_is_asked_for_and_the_runs_labels(
    gce, machine_type, mib_per_s, disk
):
    pool = GcpPool("us-central1", "H100:8", machine_type, 20_000_000, "test", disk_mib_per_s=mib_per_s)
    provider = GcpProvider([pool], OWNER, clients=lambda: gce.clients)
    provider.launch(request(provider, zone="us-central1-b"))
    [body] = gce.bodies
    asked = body["disks"][0]["initializeParams"]
    of_disk = {name: value for name, value in asked.items() if name.startswith(("diskType", "provisioned"))}
    assert of_disk == disk
    assert asked["labels"] == body["labels"]
    assert body["labels"]["rlboost-run"] == RUN


def test_every_field_that_is_asked_for_is_one_of_googles_api(gce):
    """The request as it is sent, against the types that Google generates from its discovery document."""
    pool = GcpPool(
        "us-central1", "H100:8", "a3-highgpu-8g", 20_000_000, "test", spot=False, disk_mib_per_s=939,
        reservation="mine", service_account="me@p.iam.gserviceaccount.com",
    )  # fmt: skip
    provider = GcpProvider([pool], OWNER, clients=lambda: gce.clients)
    provider.launch(request(provider, zone="us-central1-b"))
    [body] = gce.bodies
    known = json_format.Parse(json.dumps(body), compute_v1.Instance.pb()(), ignore_unknown_fields=False)
    assert known.disks[0].initialize_params.provisioned_throughput == 939
    assert known.reservation_affinity.values == ["mine"]


def test_another_owners_run_of_the_same_name_is_another_run(gce, provider):
    other = GcpProvider([POOL], "ba9876543210", clients=lambda: gce.clients)
    provider.launch(request(provider))
    assert other.describe(RUN) == []
    other.terminate(RUN, "spot-0")
    other.launch(request(other))
    assert len(gce.living()) == 2
    assert {each.owner for each in other.sweep()} == {OWNER, "ba9876543210"}


def test_the_end_of_what_a_machine_wrote_to_its_console_is_read(gce, provider):
    gce.console = "x" * CONSOLE_BYTES + "panic\n"
    assert isinstance(provider, CanShowConsole)
    assert provider.console(RUN, "spot-0") == ""
    provider.launch(request(provider))
    assert provider.console(RUN, "spot-0") == gce.console[-CONSOLE_BYTES:]


def test_the_console_of_a_machine_that_shut_itself_down_is_kept_when_that_is_deleted(gce, provider):
    gce.console = "no such image\n"
    provider.launch(request(provider))
    gce.powered_off("spot-0")
    provider.describe(RUN)
    wait_until(lambda: not gce.instances)
    provider.describe(RUN)
    assert provider.console(RUN, "spot-0") == gce.console


def test_the_shipped_role_covers_every_call(gce, provider):
    provider.launch(request(provider))
    provider.console(RUN, "spot-0")
    provider.preempt(RUN, "spot-0", None)
    provider.describe(RUN)
    provider.sweep()
    text = resources.files("rlboost_templates").joinpath("policies/gcp.yaml").read_text(encoding="utf-8")
    needed = {
        ("GET", "aggregated/machineTypes"): "compute.machineTypes.list",
        ("GET", "aggregated/instances"): "compute.instances.list",
        ("GET", "aggregated/operations"): "compute.globalOperations.list",
        ("POST", "instances"): "compute.instances.create",
        ("GET", "instances"): "compute.instances.get",
        ("GET", "serialPort"): "compute.instances.getSerialPortOutput",
        ("DELETE", "instances"): "compute.instances.delete",
        ("GET", "operations"): "compute.zoneOperations.get",
    }
    for call in set(gce.calls):
        method, _, path = call.partition(" ")
        parts = path.removeprefix(f"/compute/v1/projects/{PROJECT}/").split("/")
        key = (method, "/".join(parts)) if parts[0] == "aggregated" else (method, parts[2])
        key = (method, parts[4]) if parts[-1] == "serialPort" else key
        assert f"- {needed[key]}\n" in text, key


def test_the_sdk_is_loaded_when_it_is_needed_and_named_when_it_is_missing():
    code = """
import sys
sys.modules["google.cloud.compute_v1"] = None
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_providers.gcp.errors import explained
try:
    GcpProvider([GcpPool("us-central1", "L4:1", "g2-standard-4", 1, "t")], "0").offers()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "ConfigError" in done.stdout
    assert "pip install 'rlboost[gcp]'" in done.stdout


def test_the_nodes_of_a_trainer_have_a_tag_that_a_rule_lets_in_one_another_by(gce):
    head = replace(POOL, spot=False, meets_nodes=True)
    node = replace(head, is_for_trainer=True)
    provider = GcpProvider([head, node, POOL], OWNER, clients=lambda: gce.clients)
    offers = {(offer.spot, offer.is_for_trainer): offer for offer in provider.offers()}
    told = replace(
        request(provider), offer=offers[False, False], run=head_of(RUN), head_script="#!/bin/bash\n"
    )
    provider.launch(told)
    for machine, offer in (("reserved-1", offers[False, True]), ("spot-0", offers[True, False])):
        provider.launch(replace(request(provider, machine), offer=offer))
    assert [instance["tags"]["items"] for instance in gce.living()] == [
        ["rlboost-head", "rlboost-trainer"],
        ["rlboost-worker", "rlboost-trainer"],
        ["rlboost-worker"],
    ]


def test_a_head_is_known_by_its_own_tag_and_run_and_its_end_is_read_from_the_operations(gce):
    pool = replace(POOL, spot=False, service_account="head@project.iam")
    provider = GcpProvider([pool], OWNER, clients=lambda: gce.clients)
    asked = replace(request(provider, "head-1"), run=head_of(RUN), head_script="#!/bin/bash\n")
    view = provider.launch(asked)
    assert (view.public_address, view.private_address) == ("203.0.113.2", "10.128.0.2")
    assert provider.launch(asked).machine == "head-1"
    (instance,) = gce.living()
    assert instance["tags"]["items"] == ["rlboost-head"]
    assert instance["serviceAccounts"][0]["scopes"] == [ALL_SCOPES]
    assert {item["key"]: item["value"] for item in instance["metadata"]["items"]}["startup-script"] == (
        "#!/bin/bash\n"
    )
    assert provider.describe(RUN) == [], "a fleet never sees the head of its run"
    provider.terminate(head_of(RUN), "head-1")
    wait_until(lambda: gce.living() == [])
    (gone,) = provider.describe(head_of(RUN))
    assert (gone.machine, gone.state, gone.ended_at is not None) == ("head-1", MachineStatus.GONE, True)
    assert provider.describe(RUN) == []
