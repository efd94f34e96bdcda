"""Clusters of SkyPilot as machines: what is promised when launches fail and machines vanish."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_providers.base.provider import CanPreempt, LaunchRequest, MachineStatus
from rlboost_providers.base.tags import head_of
from rlboost_providers.skypilot import offers as offers_module
from rlboost_providers.skypilot import provider as module
from rlboost_providers.skypilot import session
from rlboost_providers.skypilot.provider import HeadTerms, SkyPilotProvider
from rlboost_providers.skypilot.session import SkyPilotSweeper
from rlboost_runtime.errors import ConfigError, NoCapacity, NotFound, NotYet, ProviderError, QuotaExceeded
from rlboost_runtime.job import CloudOffer
from tests.fakes.skypilot import FakeSkyPilot

RUN = "sky"


@pytest.fixture
def sky() -> Iterator[FakeSkyPilot]:
    fake = FakeSkyPilot()
    yield fake
    if fake.hold is not None:
        fake.hold.set()
    fake.join()


@pytest.fixture
def make(
    sky: FakeSkyPilot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SkyPilotProvider]:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(module, "DOUBT_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_answers", lambda address, port: True)
    run = tmp_path / RUN
    run.mkdir()

    def provider(**entry: Any) -> SkyPilotProvider:
        offer = CloudOffer(**{"infra": "aws", "accelerators": "A10G:1", **entry})
        return SkyPilotProvider(run, [offer], skypilot=sky)

    return provider


def request_for(provider: SkyPilotProvider, machine: str = "spot-0") -> LaunchRequest:
    bootstrap = {"machine": machine, "token": "secret-token", "instances": [f"{machine}/0"]}
    return LaunchRequest(RUN, machine, provider.offers()[0], bootstrap)


def state(provider: SkyPilotProvider, machine: str = "spot-0") -> MachineStatus:
    return next(view.state for view in provider.describe(RUN) if view.machine == machine)


def wait_for(provider: SkyPilotProvider, wanted: MachineStatus, machine: str = "spot-0") -> None:
    deadline = time.monotonic() + 10
    while state(provider, machine) is not wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_offers_are_zones_and_a_price_limit_leaves_dearer_ones_out(make):
    assert [offer.zone for offer in make().offers()] == [
        "aws/us-west-2/us-west-2a",
        "aws/us-east-1/us-east-1a",
    ]
    (cheap,) = make(max_price_usd_per_hour=0.4).offers()
    assert cheap.price_micro_usd_per_hour == 350_000
    assert cheap.egress_micro_usd_per_gb == 0, "no cloud bills what leaves a head of one's own"
    assert make(egress_usd_per_gb=0.0).offers()[0].egress_micro_usd_per_gb == 0


def test_an_entry_that_is_refused_hides_no_offer_of_the_others_and_is_asked_again_soon(monkeypatch):
    refused = ["gcp"]

    def ask(infra: str, **_: Any) -> list[dict[str, Any]]:
        if infra in refused:
            raise ConfigError(f"{infra} is not set up", "set it up")
        place = {"cloud": infra, "region": "r", "zone": "", "instance_type": "a", "spot": True}
        return [{**place, "usd_per_hour": 1.0}]

    entries = [CloudOffer(infra=infra, accelerators="A10G:1") for infra in ("gcp", "aws")]
    catalogue = offers_module.Catalogue(entries, ask)
    assert [offer.zone for offer in catalogue.offers()] == ["aws/r"]
    refused.clear()
    assert [offer.zone for offer in catalogue.offers()] == ["aws/r"]
    monkeypatch.setattr(offers_module, "AGAIN_S", 0.0)
    refused.append("gcp")
    again = offers_module.Catalogue(entries, ask)
    assert len(again.offers()) == 1
    refused.clear()
    assert len(again.offers()) == 2
    refused += ["gcp", "aws"]
    with pytest.raises(ConfigError, match="gcp is not set up"):
        offers_module.Catalogue(entries, ask).offers()


def test_machines_on_demand_are_offered_where_they_are_wanted_and_asked_for_as_such(make, tmp_path, sky):
    offers = [CloudOffer(infra="aws", accelerators="A10G:1")]
    provider = SkyPilotProvider(tmp_path / RUN, offers, on_demand=True, skypilot=sky)
    assert [offer.spot for offer in provider.offers()] == [True, True, False, False]
    dearest = provider.offers()[-1]
    assert dearest.price_micro_usd_per_hour == 1_006_000
    provider.launch(LaunchRequest(RUN, "spot-0", dearest, {"instances": ["spot-0/0"]}))
    (task,) = (tmp_path / RUN).rglob("task.yaml")
    assert '"use_spot": false' in task.read_text()


def test_where_a_cloud_sells_no_spot_machines_the_pool_gets_those_on_demand(tmp_path, sky):
    entries = [CloudOffer(infra=infra, accelerators="A10G:1") for infra in ("aws/us-west-2", "lambda")]
    spot, other = SkyPilotProvider(tmp_path / RUN, entries, skypilot=sky).offers()
    assert (spot.spot, other.spot, other.zone) == (True, False, "lambda/us-west-2")
    assert spot.is_of_pool
    assert other.is_of_pool
    both = SkyPilotProvider(tmp_path / RUN, entries, on_demand=True, skypilot=sky).offers()
    kinds = {(each.zone.split("/")[0], each.spot, each.is_of_pool) for each in both}
    assert kinds == {("aws", True, True), ("aws", False, False), ("lambda", False, True)}
    assert len(both) == 3


@pytest.mark.parametrize(
    ("role", "given"), [("head-role", ("head-role", True)), (None, ("rlboost-worker", False))]
)
def test_a_head_is_a_machine_on_demand_of_its_own_that_no_fleet_meets(make, tmp_path, sky, role, given):
    fleet = make()
    offer = CloudOffer(infra="aws", accelerators="A10G:1", disk_gb=500)
    heads = SkyPilotProvider(tmp_path / RUN, [offer], head=HeadTerms(role, (7410, 7411)), skypilot=sky)
    assert {each.spot for each in heads.offers()} == {False}
    script = "#!/bin/bash\n# a private key\n"
    asked = LaunchRequest(head_of(RUN), "head-1", heads.offers()[0], {}, script)
    heads.launch(asked)
    assert heads.launch(asked).machine == "head-1"
    assert len(sky.launched) == 1
    assert sky.roles == [given]
    (task,) = (tmp_path / RUN).rglob("task.yaml")
    assert "a private key" not in task.read_text(), "SkyPilot keeps tasks, and shows them"
    assert task.with_name("start.sh").read_text() == script
    assert task.with_name("start.sh").stat().st_mode & 0o77 == 0
    for line in (
        '"use_spot": false',
        '"ports": [7410, 7411]',
        '"rlboost-run": "sky_head"',
        '"disk_size": 500',
    ):
        assert line in task.read_text()
    deadline = time.monotonic() + 10
    while (view := heads.describe(head_of(RUN))[0]).state is not MachineStatus.RUNNING:
        assert time.monotonic() < deadline
    assert (view.public_address, view.private_address) == ("203.0.113.9", "127.0.0.1")
    assert fleet.describe(RUN) == []
    assert heads.describe(RUN) == []
    fleet.terminate(RUN, "head-1")
    assert len(sky.clusters) == 1
    (found,) = SkyPilotSweeper(tmp_path, skypilot=sky).sweep()
    assert (found.run, found.machine) == (head_of(RUN), "head-1")
    heads.terminate(head_of(RUN), "head-1")
    assert sky.clusters == {}


def test_a_launch_returns_once_the_cloud_gave_the_machine_and_its_setup_goes_on(make, sky):
    sky.hold = threading.Event()
    provider = make()
    launched = provider.launch(request_for(provider))
    assert launched.state is MachineStatus.STARTING
    assert launched.started_at is not None, "money runs while it is set up"
    assert launched.price_micro_usd_per_hour == 350_000
    sky.hold.set()
    wait_for(provider, MachineStatus.RUNNING)


def test_the_task_carries_the_jobs_wishes_and_tags_and_no_secret(make, tmp_path):
    provider = make(image="ami-1", disk_gb=300, disk_tier="high")
    provider.launch(request_for(provider))
    (task,) = (tmp_path / RUN).rglob("task.yaml")
    text = task.read_text()
    assert '"image_id": "ami-1"' in text
    assert '"disk_size": 300' in text
    assert '"disk_tier": "high"' in text
    assert '"rlboost-machine": "spot-0"' in text
    assert "secret-token" not in text
    (bootstrap,) = (tmp_path / RUN).rglob("bootstrap.json")
    told = json.loads(bootstrap.read_bytes())
    assert told["token"] == "secret-token"
    assert told["cloud"] == "aws", "whose notices its agents listen to"
    assert bootstrap.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("(InsufficientInstanceCapacity) We currently do not have sufficient capacity", NoCapacity),
        ("(MaxSpotInstanceCountExceeded) Max spot instance count exceeded", QuotaExceeded),
        ("(InvalidPermission.Duplicate) the specified rule already exists", ProviderError),
    ],
)
def test_a_refused_launch_says_why_and_leaves_nothing(make, sky, text, kind):
    sky.refuse["us-west-2a"] = ("ResourcesUnavailableError", text)
    provider = make()
    with pytest.raises(kind) as told:
        provider.launch(request_for(provider))
    assert type(told.value) is kind
    assert sky.clusters == {}
    (view,) = provider.describe(RUN)
    assert view.state is MachineStatus.GONE
    assert view.started_at is None, "its cloud gave nothing that could be billed"


def test_a_machine_whose_setup_fails_is_ended_and_says_why(make, sky):
    sky.setup_fails = True
    sky.hold = threading.Event()
    provider = make()
    provider.launch(request_for(provider))
    sky.hold.set()
    wait_for(provider, MachineStatus.GONE)
    assert sky.clusters == {}
    (view,) = provider.describe(RUN)
    assert "install.sh failed" in view.detail
    assert view.started_at is not None, "its cloud gave it, and bills it"


def test_the_same_id_twice_is_one_cluster_also_after_a_restart(make, sky):
    provider = make()
    provider.launch(request_for(provider))
    wait_for(provider, MachineStatus.RUNNING)
    restarted = make()
    restarted.launch(request_for(restarted))
    assert len(sky.launched) == 1
    assert restarted.describe(RUN) == provider.describe(RUN)


def test_a_restart_during_the_setup_finds_the_machine(make, sky, monkeypatch):
    sky.hold = threading.Event()
    monkeypatch.setattr(SkyPilotProvider, "_launched", lambda *_: None)  # it died meanwhile
    launcher = make()
    launcher.launch(request_for(launcher))
    launcher._records.end_launch("spot-0")  # as its death does
    restarted = make()
    assert restarted.describe(RUN)[0].state is MachineStatus.STARTING
    sky.hold.set()
    sky.join()
    wait_for(restarted, MachineStatus.RUNNING)


def test_a_look_from_another_process_leaves_a_launch_under_way_alone(make, sky):
    sky.hold = threading.Event()
    launcher, other = make(), make()
    launcher.launch(request_for(launcher))
    row = sky.clusters.pop(sky.launched[0])  # as SkyPilot lists it before the cluster is known
    assert state(other) is MachineStatus.STARTING
    assert [view.state for view in other.watch(RUN)] == [MachineStatus.STARTING]
    sky.clusters[sky.launched[0]] = row
    sky.hold.set()
    wait_for(launcher, MachineStatus.RUNNING)
    assert state(other) is MachineStatus.RUNNING


def test_a_launch_whose_process_ended_before_skypilot_had_heard_of_it_is_taken_back(make, sky, monkeypatch):
    sky.hold = threading.Event()
    monkeypatch.setattr(SkyPilotProvider, "_launched", lambda *_: None)
    launcher = make()
    launcher.launch(request_for(launcher))
    sky.clusters.clear()
    launcher._records.end_launch("spot-0")  # as its death does
    assert state(make()) is MachineStatus.GONE


def test_a_silent_machine_is_gone_only_when_its_cloud_says_so(make, sky, monkeypatch):
    provider = make()
    provider.launch(request_for(provider))
    wait_for(provider, MachineStatus.RUNNING)
    provider.watch(RUN)
    looked = sky.forced
    provider.watch(RUN)
    assert sky.forced == looked, "while it answers nobody is asked"
    monkeypatch.setattr(module, "_answers", lambda address, port: False)
    for _ in range(3):
        (view,) = provider.watch(RUN)
    assert sky.forced > looked
    assert view.state is MachineStatus.RUNNING
    silent_at = time.time()
    sky.reclaim(next(iter(sky.clusters)))
    (view,) = provider.watch(RUN)
    assert view.state is MachineStatus.GONE
    assert view.ended_at <= silent_at, "it is billed until it fell silent"


def test_a_network_that_was_away_for_a_moment_costs_no_machine(make, sky, monkeypatch):
    provider = make()
    provider.launch(request_for(provider))
    wait_for(provider, MachineStatus.RUNNING)
    monkeypatch.setattr(module, "_answers", lambda address, port: False)
    (row,) = sky.clusters.values()
    row["status"] = "INIT"  # SkyPilot cannot reach it either; its cloud says that it is there
    for _ in range(5):
        provider.watch(RUN)
    assert len(sky.clusters) == 1
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    (view,) = provider.watch(RUN)
    assert view.state is MachineStatus.GONE
    assert sky.clusters == {}


def test_what_stays_silent_is_asked_for_now_and_then_not_at_every_look(make, sky, monkeypatch):
    monkeypatch.setattr(module, "DOUBT_EVERY_S", 600.0)
    provider = make()
    provider.launch(request_for(provider))
    wait_for(provider, MachineStatus.RUNNING)
    provider.watch(RUN)
    monkeypatch.setattr(module, "_answers", lambda address, port: False)
    looked = sky.forced
    for _ in range(6):
        provider.watch(RUN)
    assert sky.forced == looked + 1


def test_skypilot_that_takes_long_to_start_is_waited_for_in_the_background(make, sky, monkeypatch):
    monkeypatch.setattr(session, "START_ANSWER_S", 0.05)
    go_on = threading.Event()
    monkeypatch.setattr(sky, "_start", lambda hear: go_on.wait(10), raising=False)
    provider = make()
    for _ in range(2):
        with pytest.raises(NotYet):
            provider.offers()
    go_on.set()
    sky.join()
    monkeypatch.setattr(session, "START_ANSWER_S", 10.0)
    assert len(provider.offers()) == 2


def test_a_silent_api_server_makes_no_machine_gone(make, sky):
    provider = make()
    provider.launch(request_for(provider))
    wait_for(provider, MachineStatus.RUNNING)
    sky.is_down = True
    with pytest.raises(ProviderError):
        provider.describe(RUN)
    sky.is_down = False
    assert state(provider) is MachineStatus.RUNNING


def test_terminating_ends_the_cluster_also_while_it_is_set_up_and_again(make, sky):
    sky.hold = threading.Event()
    provider = make()
    provider.launch(request_for(provider))
    provider.terminate(RUN, "spot-0")
    assert sky.clusters == {}
    sky.hold.set()
    sky.join()
    assert state(provider) is MachineStatus.GONE
    provider.terminate(RUN, "spot-0")
    provider.terminate(RUN, "never-was")
    assert provider.launch(request_for(provider)).state is MachineStatus.GONE
    assert len(sky.launched) == 1


def test_another_run_is_another_world(make, sky):
    provider = make()
    provider.launch(request_for(provider))
    assert provider.describe("other") == []
    assert provider.watch("other") is None
    provider.terminate("other", "spot-0")
    assert len(sky.clusters) == 1
    with pytest.raises(ConfigError):
        provider.launch(LaunchRequest("other", "spot-1", provider.offers()[0], {"instances": ["spot-1/0"]}))


def test_a_sweep_finds_machines_of_runs_that_are_forgotten(make, sky, tmp_path):
    provider = make()
    provider.launch(request_for(provider))
    sweeper = SkyPilotSweeper(tmp_path / "sweep", skypilot=sky)
    (owned,) = sweeper.sweep()
    assert (owned.run, owned.machine, owned.zone) == (RUN, "spot-0", "aws/us-west-2/us-west-2a")
    sweeper.end(owned)
    sweeper.end(owned)
    assert sweeper.sweep() == []


def test_a_machine_can_be_taken_on_purpose_but_not_announced(make):
    provider = make()
    assert isinstance(provider, CanPreempt)
    provider.launch(request_for(provider))
    with pytest.raises(ProviderError, match="cannot announce a preemption"):
        provider.preempt(RUN, "spot-0", 5.0)
    provider.preempt(RUN, "spot-0", None)
    assert state(provider) is MachineStatus.GONE
    with pytest.raises(NotFound):
        provider.preempt(RUN, "spot-0", None)


def test_files_that_cannot_be_written_launch_nothing_and_end_the_machine(make, sky, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_task", fail)
    provider = make()
    with pytest.raises(OSError, match="No space left"):
        provider.launch(request_for(provider))
    assert sky.launched == []
    assert state(provider) is MachineStatus.GONE


def test_a_boot_log_that_cannot_be_written_keeps_no_machine_from_being_up_or_refused(make, sky, tmp_path):
    provider = make()
    (tmp_path / RUN / "logs").mkdir(parents=True, exist_ok=True)
    (tmp_path / RUN / "logs" / "machines").write_text("a file is in the way")
    assert provider.launch(request_for(provider)).machine == "spot-0"
    wait_for(provider, MachineStatus.RUNNING)
    sky.refuse = {"us-west-2a": ("ResourcesUnavailableError", "no capacity")}
    with pytest.raises(NoCapacity):
        provider.launch(request_for(provider, "spot-1"))


def test_a_machine_that_comes_after_another_process_gave_it_up_is_ended(make, sky):
    sky.hold = threading.Event()
    launcher, other = make(), make()
    launcher.launch(request_for(launcher))
    other.terminate(RUN, "spot-0")
    assert state(other) is MachineStatus.GONE
    sky.clusters[sky.launched[0]] = {
        "name": sky.launched[0],
        "status": "INIT",
        "internal": "",
        "address": "",
        "port": 1,
    }
    sky.hold.set()
    deadline = time.monotonic() + 10
    while sky.clusters:
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.01)
