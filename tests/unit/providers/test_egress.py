"""What a gigabyte of weights costs on its way: who bills it, and at which price."""

from __future__ import annotations

import re

import pytest

from rlboost_providers.base.traits import egress_micro_usd_per_gb, known_clouds
from rlboost_providers.registry import egress_usd_per_gb, providers_of
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder

CASES = [
    # from, to, USD per GB
    ("aws/us-east-2", "aws/us-east-2", 0.02),  # 0.01 out and 0.01 in, over public addresses
    ("aws/us-east-2/us-east-2a", "aws/us-east-2/us-east-2a", 0.02),
    ("aws/us-east-2", "aws/us-west-2", 0.02),
    ("aws/us-east-2", "aws", 0.02),  # SkyPilot picks the region
    ("aws/us-east-2", "gcp/us-central1", 0.09),
    ("aws/eu-west-1", "lambda", 0.09),
    ("aws/us-east-2", None, 0.09),
    ("aws/ap-northeast-1", "aws/us-east-2", 0.1105),
    ("aws/ap-northeast-1", "gcp/us-central1", 0.12),
    ("aws/sa-east-1", None, 0.154),
    ("gcp/us-central1", "gcp/us-central1", 0.01),
    ("gcp/us-central1", "gcp/us-east4", 0.02),
    ("gcp/us-central1", "gcp/northamerica-northeast1", 0.02),
    ("gcp/us-central1", "gcp/europe-west4", 0.14),
    ("gcp/europe-west4", "gcp/europe-west1", 0.02),
    ("gcp/us-central1", "aws/us-east-2", 0.12),
    ("gcp/australia-southeast1", None, 0.19),
    ("azure/eastus2", "azure/eastus2", 0.0),
    ("azure/eastus2", "azure/westus3", 0.02),
    ("azure/eastus2", "azure/westeurope", 0.05),
    ("azure/northeurope", "azure/uksouth", 0.02),
    ("azure/australiaeast", "azure/eastus", 0.08),
    ("azure/eastus", "runpod", 0.087),
    ("lambda/us-east-1", "aws/us-east-1", 0.0),
    ("nebius/eu-north1", "gcp/europe-west4", 0.0),
    ("runpod/US", "aws/us-east-1", 0.0),
    (None, "aws/us-east-2", 0.0),  # what comes in is free
    (None, None, 0.0),
]


@pytest.mark.parametrize(("head", "target", "usd"), CASES)
def test_the_cloud_that_the_bytes_leave_bills_them(head: str | None, target: str | None, usd: float) -> None:
    assert egress_micro_usd_per_gb(head, target, None) == round(usd * 1e6)


def test_the_jobs_own_price_counts_before_any_list() -> None:
    assert egress_micro_usd_per_gb("aws/us-east-2", None, 0.0) == 0
    assert egress_micro_usd_per_gb(None, "aws/us-east-2", 0.05) == 50_000


def test_prices_of_traffic_tell_where_and_when_they_are_from() -> None:
    billing = {name for name, cloud in known_clouds().items() if cloud.egress.origins}
    assert billing == {"aws", "gcp", "azure"}
    for name in (*billing, "lambda", "nebius", "runpod"):
        assert known_clouds()[name].egress.source.startswith("https://"), name
        assert re.fullmatch(r"2\d{3}(-\d\d-\d\d)?", known_clouds()[name].egress.as_of), name


def job(trainer: dict[str, object]) -> Job:
    own = {"infra": "ssh", "hosts": ["me@there"], "price_usd_per_hour": 3.0}
    aws = {"infra": "aws/us-east-2", "via": "direct", "accelerators": "H100:8"}
    return Job.model_validate(
        {
            "name": "far",
            "model": {"init": "tiny"},
            "data": {"reasoning_gym": ["spell_backward"]},
            "trainer": {"address": "head.example.org", **trainer},
            "rollout": {"spot": {"any_of": [aws, aws | {"infra": "aws/us-west-2"}, own]}},
            "output": "s3://ours/here",
        }
    )


BOUGHT = {"infra": "aws/us-east-2", "via": "direct", "accelerators": "H100:8", "address": None}


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (BOUGHT, [0.02, 0.02, 0.09]),
        ({"infra": "local"}, [0.0, 0.0, 0.0]),
        ({"infra": "local", "location": "aws/us-east-2"}, [0.02, 0.02, 0.09]),
        ({"infra": "ssh", "hosts": ["me@gpu"], "location": "gcp/us-central1"}, [0.12, 0.12, 0.12]),
    ],
)
def test_plans_and_offers_of_a_job_have_the_same_price(
    trainer: dict[str, object], expected: list[float], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    made = job(trainer)
    assert [egress_usd_per_gb(made, offer) for offer in made.rollout.spot.any_of] == expected
    providers = providers_of(made, RunFolder(tmp_path / "runs" / "far"))
    pools = providers["aws"]._pools.values()
    assert [pool.egress_micro_usd_per_gb / 1e6 for pool in pools] == expected[:2]
    assert providers["ssh"]._egress_micro_usd_per_gb / 1e6 == expected[2]


def test_a_location_is_refused_where_the_head_is_bought() -> None:
    with pytest.raises(ValueError, match="location is for a machine of your own"):
        job(BOUGHT | {"location": "aws/us-east-2"})
    with pytest.raises(ValueError, match="location"):
        job({"infra": "local", "location": "mars/north"})
