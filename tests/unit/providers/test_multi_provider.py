"""Several clouds as one, and what a job's offers become; no cloud is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlboost_providers.aws.machines import pools_of as aws_pools
from rlboost_providers.base.multi import MultiProvider
from rlboost_providers.base.prices import expected_usd_per_hour
from rlboost_providers.base.provider import (
    Ability,
    LaunchRequest,
    MachineStatus,
    MachineView,
    Offer,
    PartlyListed,
    PollTimer,
)
from rlboost_providers.base.startup import startup_script
from rlboost_providers.base.tags import machine_name, owner_of
from rlboost_providers.gcp.machines import pools_of as gcp_pools
from rlboost_providers.registry import cheapest_offer, prices_of, provider_for, require_ends
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    ProviderError,
    Retry,
    RLBoostError,
    Throttled,
)
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, ReasoningGym, Rollout, Spot, SshOffer, TinyModel
from rlboost_runtime.run.folder import RunFolder


class Cloud:
    """Machines in a dictionary; `problem` is raised by everything while it is set."""

    abilities = frozenset({Ability.FINDS_BY_TAG})

    def __init__(self, name: str, price: int) -> None:
        self.name, self.price = name, price
        self.views: dict[str, MachineView] = {}
        self.problem: RLBoostError | None = None
        self.is_due = True
        self.ended: list[str] = []

    def _say(self) -> None:
        if self.problem is not None:
            raise self.problem

    def offers(self) -> list[Offer]:
        self._say()
        return [Offer(self.name, "zone", "L4:1", self.price, True, "test")]

    def launch(self, request: LaunchRequest) -> MachineView:
        self._say()
        view = MachineView(request.machine, MachineStatus.RUNNING, 1.0, None)
        self.views[request.machine] = view
        return view

    def describe(self, run: str) -> list[MachineView]:
        self._say()
        return list(self.views.values())

    def watch(self, run: str) -> list[MachineView] | None:
        return self.describe(run) if self.is_due else None

    def terminate(self, run: str, machine: str) -> None:
        self._say()
        self.ended.append(machine)


@pytest.fixture
def clouds() -> tuple[Cloud, Cloud, MultiProvider]:
    dear, cheap = Cloud("aws", 200), Cloud("gcp", 100)
    return dear, cheap, MultiProvider({"aws": dear, "gcp": cheap})


def launch(multi: MultiProvider, number: int, machine: str) -> None:
    multi.launch(LaunchRequest("r", machine, multi.offers()[number], {}))


class ShowingCloud(Cloud):
    """One that keeps consoles."""

    def console(self, run: str, machine: str) -> str:
        return f"{machine} at {self.name}"


def test_a_console_is_read_where_the_machine_is_and_empty_where_none_is_kept() -> None:
    multi = MultiProvider(
        {"aws": ShowingCloud("aws", 200), "ssh": Cloud("ssh", 100), "gcp": ShowingCloud("gcp", 300)}
    )
    for number, machine in enumerate(("spot-0", "spot-1", "spot-2")):
        launch(multi, number, machine)
    told = [multi.console("r", f"spot-{number}") for number in range(4)]
    assert told == ["", "spot-1 at aws", "spot-2 at gcp", ""]


def test_the_cheapest_of_all_clouds_comes_first_and_a_silent_one_is_left_out(clouds) -> None:
    dear, cheap, multi = clouds
    assert [offer.provider for offer in multi.offers()] == ["gcp", "aws"]
    cheap.problem = Throttled("slow down", "wait")
    assert [offer.provider for offer in multi.offers()] == ["aws"]
    dear.problem = ProviderError("down", "wait")
    with pytest.raises(ProviderError):
        multi.offers()


def test_machines_of_a_cloud_that_does_not_answer_stay_as_last_seen(clouds) -> None:
    dear, cheap, multi = clouds
    launch(multi, 0, "spot-0")
    launch(multi, 1, "spot-1")
    assert len(multi.describe("r")) == 2
    cheap.problem = ProviderError("down", "wait")
    dear.views.clear()
    assert [view.machine for view in multi.describe("r")] == ["spot-0"]
    assert [view.machine for view in multi.watch("r") or []] == ["spot-0"]


def test_nothing_is_known_while_a_cloud_has_never_been_seen(clouds) -> None:
    dear, _, multi = clouds
    launch(multi, 0, "spot-0")
    dear.problem = ProviderError("down", "wait")
    with pytest.raises(ProviderError):
        multi.describe("r")
    dear.problem, dear.is_due = None, False
    assert multi.watch("r") is None


REFUSALS = [CredentialsRejected("signed out", "sign in"), ConfigError("no project", "name one")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_a_cloud_that_was_never_seen_hides_nothing_of_the_others(clouds, refusal) -> None:
    dear, cheap, multi = clouds
    launch(multi, 1, "spot-0")
    cheap.problem = refusal
    assert [offer.provider for offer in multi.offers()] == ["aws"]
    dear.views["spot-0"] = MachineView("spot-0", MachineStatus.GONE, 1.0, 2.0)
    for ask in (multi.watch, multi.describe):
        with pytest.raises(PartlyListed, match=r"in gcp is unknown: (signed out|no project)") as told:
            ask("r")
        assert told.value.views == (dear.views["spot-0"],)
        assert told.value.silent == {"gcp"}
        assert (told.value.exit_code, told.value.retry) == (refusal.exit_code, Retry.NEVER)


def test_a_cloud_whose_settings_are_wrong_keeps_no_other_from_being_asked_to_end_a_machine(clouds) -> None:
    dear, cheap, multi = clouds
    dear.problem = ConfigError("no region", "name one")
    with pytest.raises(ConfigError):
        multi.terminate("r", "spot-9")
    assert cheap.ended == ["spot-9"]


def test_watching_is_silent_while_no_cloud_is_due(clouds) -> None:
    dear, cheap, multi = clouds
    multi.describe("r")
    dear.is_due = cheap.is_due = False
    assert multi.watch("r") is None
    dear.is_due = True
    assert multi.watch("r") == []


def test_a_machine_is_ended_where_it_is_and_everywhere_where_that_is_not_known(clouds) -> None:
    dear, cheap, multi = clouds
    launch(multi, 1, "spot-0")
    multi.terminate("r", "spot-0")
    assert (dear.ended, cheap.ended) == (["spot-0"], [])
    multi.terminate("r", "spot-9")
    assert (dear.ended, cheap.ended) == (["spot-0", "spot-9"], ["spot-9"])


def test_a_cloud_that_could_keep_a_forgotten_machine_for_ever_is_refused() -> None:
    cloud = Cloud("aws", 1)
    cloud.abilities = frozenset({Ability.REAL_BID})
    with pytest.raises(ConfigError, match="allow_unlisted"):
        require_ends("aws", cloud, allowed=False)
    require_ends("aws", cloud, allowed=True)


def offer(**more: object) -> CloudOffer:
    return CloudOffer.model_validate(
        {"infra": "aws/us-east-2", "accelerators": "H100:8", "via": "direct", "image": "ami-1", **more}
    )


def test_an_offer_becomes_machine_types_and_a_bid(tmp_path: Path) -> None:
    [pool] = aws_pools([offer(max_price_usd_per_hour=14.0)], head="gcp/us-central1")
    assert pool.instance_types == ("p5.48xlarge",)
    assert pool.max_price_micro_usd_per_hour == 14_000_000
    assert pool.on_demand_micro_usd_per_hour == 55_040_000
    assert pool.egress_micro_usd_per_gb == 120_000
    with pytest.raises(ConfigError, match="write instance_type"):
        aws_pools([offer(accelerators="X9:3")])
    [bare] = aws_pools([offer(image=None)])
    assert bare.image.startswith("resolve:ssm:")
    assert "/v1/runtime" in bare.install
    with_image = aws_pools([offer()])[0].install
    assert "/v1/runtime" in with_image, "the head's version goes over that of an image of RLBoost's"
    done = subprocess.run(
        ["bash", "-c", with_image], cwd=tmp_path, capture_output=True, timeout=10, check=True
    )
    assert (done.stdout, list(tmp_path.iterdir())) == (b"", []), "another image has everything"
    [on_demand] = aws_pools([offer()], spot=False)
    assert not on_demand.spot
    [named] = aws_pools([offer(accelerators="X9:3", instance_type="x9.mega")])
    assert named.instance_types == ("x9.mega",)


@pytest.mark.parametrize("zone", ["us-west-2b", "us-west-2-lax-1a"])
def test_a_zone_that_an_entry_names_is_the_pools(zone: str) -> None:
    [pool] = aws_pools([offer(infra=f"aws/us-west-2/{zone}")])
    assert (pool.region, pool.zone) == ("us-west-2", zone)
    assert aws_pools([offer()])[0].zone is None


def test_google_is_bought_from_at_a_known_price_only() -> None:
    google = {"infra": "gcp/us-east4", "accelerators": "H100"}
    [pool] = gcp_pools([offer(**google)])
    assert (pool.machine_type, pool.price_micro_usd_per_hour) == ("a3-highgpu-1g", 2_505_600)
    assert gcp_pools([offer(**google, max_price_usd_per_hour=2.0)]) == []
    with pytest.raises(ConfigError, match="max_price_usd_per_hour"):
        gcp_pools([offer(**{**google, "infra": "gcp/europe-west4"})])
    [unknown] = gcp_pools([offer(**{**google, "infra": "gcp/europe-west4"}, max_price_usd_per_hour=3.0)])
    assert unknown.price_micro_usd_per_hour == 3_000_000
    assert "job file" in unknown.price_source


def test_plans_count_with_the_shipped_price_or_the_maximum() -> None:
    assert expected_usd_per_hour(offer()) == pytest.approx(11.5616)
    assert expected_usd_per_hour(offer(max_price_usd_per_hour=9.0)) == 9.0
    assert expected_usd_per_hour(offer(accelerators="X9:3", max_price_usd_per_hour=9.0)) == 9.0
    assert expected_usd_per_hour(offer(accelerators="X9:3")) is None
    without_a_spot_market = offer(infra="lambda", accelerators="H100:8", via="skypilot")
    assert expected_usd_per_hour(without_a_spot_market) == 31.92


def test_what_nobody_knows_the_price_of_is_not_the_cheapest() -> None:
    unknown = CloudOffer(infra="lambda", accelerators="X9:3")
    assert cheapest_offer(job(unknown, offer())) == offer()
    assert prices_of(job(unknown, offer())).spot_usd_per_hour == pytest.approx(11.5616)
    assert cheapest_offer(job(unknown)) == unknown
    assert prices_of(job(unknown)).spot_usd_per_hour == 0


def job(*offers: LocalOffer | SshOffer | CloudOffer) -> Job:
    return Job(
        name="r",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=list(offers))),
    )


def test_pools_know_what_disk_and_address_cost_beside_the_price():
    (aws,) = aws_pools([offer(disk_gb=730)])
    assert aws.storage_micro_usd_per_hour == 80_000 + 5000
    (fast,) = aws_pools([offer(disk_gb=730, disk_mib_per_s=1000)])  # 875 MiB/s and 1,000 IOPS more
    assert fast.storage_micro_usd_per_hour == aws.storage_micro_usd_per_hour + round(40e6 / 730)
    (gcp,) = gcp_pools([offer(infra="gcp/us-central1", disk_gb=730)])
    assert gcp.storage_micro_usd_per_hour == 100_000 + 2500
    (head,) = gcp_pools([offer(infra="gcp/us-central1", disk_gb=730)], spot=False)
    assert head.storage_micro_usd_per_hour == 100_000 + 5000


def test_a_jobs_offers_become_one_provider_without_loading_an_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    for name in ("boto3", "google.cloud.compute_v1", "paramiko"):
        monkeypatch.setitem(sys.modules, name, None)
    run = RunFolder(tmp_path / "runs" / "r")
    local = LocalOffer(infra="local")
    assert type(provider_for(job(local), run)).__name__ == "LocalProvider"
    google = offer(infra="gcp/us-east4", accelerators="H100")
    many = provider_for(job(local, SshOffer(infra="ssh", hosts=["a"]), offer(), google), run)
    assert isinstance(many, MultiProvider)
    assert sorted(many._providers) == ["aws", "gcp", "local", "ssh"]


def test_an_owner_is_made_once_and_mended(tmp_path: Path) -> None:
    first = owner_of(tmp_path / "home")
    assert owner_of(tmp_path / "home") == first
    (tmp_path / "home" / "owner").write_text("not an owner")
    assert len(owner_of(tmp_path / "home")) == 12
    assert owner_of(tmp_path / "home") == owner_of(tmp_path / "home")


def test_names_are_short_plain_and_never_shared() -> None:
    names = [machine_name("r" * length, f"spot-{n}", "0123456789ab") for length in (1, 60) for n in (1, 11)]
    assert len(set(names)) == 4
    assert all(len(name) <= 63 and name[0].isalpha() for name in names)


def test_a_pace_lets_through_once_in_a_while() -> None:
    now = [0.0]
    pace = PollTimer(5.0, lambda: now[0])
    assert [pace.is_due(), pace.is_due()] == [True, False]
    now[0] = 5.0
    assert pace.is_due()


def test_a_script_that_its_cloud_would_not_take_is_refused_before_anything_is_bought() -> None:
    bootstrap = {"machine": "m", "instances": ["m/0"]}
    assert "@" not in startup_script(bootstrap).replace("$@", "")
    with pytest.raises(ConfigError, match="this cloud takes 100"):
        startup_script(bootstrap, longest=100)
    with pytest.raises(ConfigError, match="END_OF_INSTALL"):
        startup_script(bootstrap, install="cat <<X\nEND_OF_INSTALL\n")
