"""Images of ours in the clouds: made of a machine's disk, found by tag, deleted with their snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlboost_providers.aws.images import AwsImages
from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.images import ENGINE, IMAGE, tag_value
from rlboost_providers.base.provider import LaunchRequest
from rlboost_providers.gcp.images import GcpImages
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_runtime.errors import NotFound
from tests.fakes.ec2 import IMAGE as AMI
from tests.fakes.ec2 import REGION, FakeEc2, fake_ec2
from tests.fakes.gce import FakeGce, fake_gce

MARKS = {IMAGE: "1-0", ENGINE: "vllm"}
TOLD: dict[str, object] = {"machine": "head-1", "instances": ["head-1/0"]}


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEc2]:
    with fake_ec2() as fake:
        fake.sign_in(monkeypatch)
        fake.prices = {("g5.xlarge", f"{REGION}a"): 0.30}
        yield fake


@pytest.fixture
def gce() -> Iterator[FakeGce]:
    with fake_gce() as fake:
        yield fake


def test_an_ami_is_made_listed_and_deleted_with_its_snapshots(ec2: FakeEc2) -> None:
    pool = AwsPool(REGION, "A10G:1", ("g5.xlarge",), AMI, on_demand_micro_usd_per_hour=1_006_000, spot=False)
    provider = AwsProvider([pool], "me")
    provider.launch(LaunchRequest("image-aws_head", "head-1", provider.offers()[0], TOLD, "#!/bin/bash\n"))
    store = AwsImages(REGION, look_s=0.01)
    client = ec2.client(REGION)
    snapshots = {each["SnapshotId"] for each in client.describe_snapshots(OwnerIds=["self"])["Snapshots"]}
    made = store.save("image-aws_head", "head-1", "rlboost-1-0-vllm", MARKS, lambda words: None)
    assert made.name.startswith("ami-")
    assert (made.version, made.engine, made.is_ready, made.place) == ("1-0", "vllm", True, REGION)
    assert store.images() == [made]
    (image,) = client.describe_images(ImageIds=[made.name])["Images"]
    assert image["Public"] is False
    store.delete(made.name)
    assert store.images() == []
    left = {each["SnapshotId"] for each in client.describe_snapshots(OwnerIds=["self"])["Snapshots"]}
    assert left == snapshots, "snapshots cost money"


def test_an_ami_that_is_not_ours_is_not_deleted(ec2: FakeEc2) -> None:
    with pytest.raises(NotFound, match="no image"):
        AwsImages(REGION).delete(AMI)
    with pytest.raises(NotFound, match="no machine head-7"):
        AwsImages(REGION).save("image-aws_head", "head-7", "x", MARKS, lambda words: None)


def test_an_image_at_google_is_made_listed_and_deleted(gce: FakeGce) -> None:
    pool = GcpPool("us-central1", "L4:1", "g2-standard-4", 700_000, "the test", spot=False)
    provider = GcpProvider([pool], "me", clients=lambda: gce.clients)
    provider.launch(LaunchRequest("image-gcp_head", "head-1", provider.offers()[0], TOLD, "#!/bin/bash\n"))
    store = GcpImages(gce.clients, look_s=0.01)
    made = store.save("image-gcp_head", "head-1", "rlboost-1-0-vllm", MARKS, lambda words: None)
    assert made.name.endswith("/global/images/rlboost-1-0-vllm")
    (body,) = gce.image_bodies
    assert body["sourceDisk"].endswith("/disks/" + gce.living()[0]["name"])
    assert body["labels"] == MARKS
    assert store.images() == [made]
    assert made.is_ready
    store.delete(made.name)
    assert store.images() == []
    with pytest.raises(NotFound, match="no image"):
        store.delete("ubuntu-2204")


def test_versions_become_values_that_every_cloud_takes() -> None:
    assert tag_value("1.2.dev0+gAB") == "1-2-dev0-gab"
