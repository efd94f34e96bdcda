"""The doctor asks a job's clouds and hosts what they would sell, and repeats what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.doctor import clouds as markets
from rlboost_cli.doctor.checks import checks_for
from rlboost_cli.doctor.findings import ACCOUNT, DoctorContext, Verdict
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, ReasoningGym, Rollout, Spot, SshOffer, TinyModel
from tests.fakes.ec2 import IMAGE, REGION, FakeEc2, fake_ec2
from tests.fakes.sshd import Sshd, make_home, sshd_on

pytestmark = pytest.mark.integration

AWS = CloudOffer(infra=f"aws/{REGION}", accelerators="A10G:1", via="direct", image=IMAGE)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_home(tmp_path / "home")
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "rlboost"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("SSH_AUTH_SOCK", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def server(tmp_path: Path, home: Path) -> Iterator[Sshd]:
    with sshd_on(tmp_path / "sshd", home) as made:
        yield made


@pytest.fixture
def ec2(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEc2]:
    with fake_ec2() as fake:
        fake.sign_in(monkeypatch)
        fake.prices = {("g5.xlarge", f"{REGION}a"): 0.30}
        yield fake


def patient(*offers: LocalOffer | SshOffer | CloudOffer) -> DoctorContext:
    job = Job(
        name="asked",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=list(offers))),
    )
    return DoctorContext(Path("/nowhere"), job)


def test_a_host_that_can_be_used_is_told_with_its_price(server: Sshd) -> None:
    offer = SshOffer(infra="ssh", hosts=[server.host], price_usd_per_hour=1.5)
    (found,) = markets.offers(patient(LocalOffer(infra="local"), offer))
    assert found.verdict is Verdict.OK
    assert f"1 offer, the cheapest as it is in {server.host} at $1.50 per hour (job file)" in found.found


def test_a_host_that_is_not_there_is_named() -> None:
    (found,) = markets.offers(patient(SshOffer(infra="ssh", hosts=["nobody@127.0.0.1:1"])))
    assert found.verdict is Verdict.FAIL
    assert "nobody@127.0.0.1:1 cannot be reached" in found.found


def test_a_cloud_without_credentials_fails_with_the_accounts_exit_code(
    ec2: FakeEc2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (found,) = markets.offers(patient(AWS, AWS.model_copy(update={"accelerators": "H100:8"})))
    assert (found.verdict, found.exit_code) == (Verdict.FAIL, ACCOUNT)
    assert "no usable AWS credentials" in found.found
    assert "aws configure" in found.remedy


def test_a_cloud_says_what_it_would_sell_and_nothing_is_launched(
    ec2: FakeEc2,
) -> None:
    (found,) = markets.offers(patient(AWS))
    assert found.verdict is Verdict.OK, found
    assert "the cheapest g5" in found.found
    assert ec2.instances() == []


def test_an_entry_that_is_refused_is_told_though_a_run_would_do_with_the_others(ec2: FakeEc2) -> None:
    unknown = AWS.model_copy(update={"accelerators": "X9000:8"})
    good, bad = markets.offers(patient(AWS, unknown))
    assert (good.verdict, bad.verdict) == (Verdict.OK, Verdict.FAIL)
    assert "X9000" in bad.found


def test_prices_above_the_jobs_bound_leave_nothing_and_are_a_warning(
    ec2: FakeEc2,
) -> None:
    (found,) = markets.offers(patient(AWS.model_copy(update={"max_price_usd_per_hour": 0.0001})))
    assert found.verdict is Verdict.WARN
    assert "max_price_usd_per_hour" in found.remedy


def test_a_job_of_this_machine_alone_asks_nobody() -> None:
    asked: Any = patient(LocalOffer(infra="local")).job
    assert markets.offers not in {check.examine for check in checks_for(asked)}
    elsewhere: Any = patient(AWS).job
    assert markets.offers in {check.examine for check in checks_for(elsewhere)}
