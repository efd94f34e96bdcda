"""What every provider must do, written against `base.provider.Provider` alone; run for each provider that we
ship.

A new provider adds one function to `CLOUDS` that yields a `Cloud`: a way to make provider objects anew, as a
restarted coordinator does, and two ways to look at what is really there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base import tags
from rlboost_providers.base.provider import (
    Ability,
    CanPreempt,
    CanSweep,
    LaunchRequest,
    MachineStatus,
    Offer,
    Provider,
)
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_providers.local.provider import LocalProvider
from rlboost_providers.skypilot import provider as skypilot_provider
from rlboost_providers.skypilot.provider import SkyPilotProvider
from rlboost_providers.skypilot.session import SkyPilotSweeper
from rlboost_providers.ssh.provider import SshProvider
from rlboost_runtime.errors import ConfigError, NotFound, ProviderError
from rlboost_runtime.job import CloudOffer, LocalOffer, SshOffer
from rlboost_runtime.processes import kill_tagged, tagged
from rlboost_runtime.remote.ssh_host import TAG
from tests.fakes.ec2 import IMAGE, REGION, fake_ec2
from tests.fakes.gce import fake_gce
from tests.fakes.hypervisor import AGENT
from tests.fakes.skypilot import FakeSkyPilot
from tests.fakes.sshd import make_home, sshd_on

pytestmark = pytest.mark.integration

RUN = "conformance"


@dataclass(frozen=True)
class Cloud:
    """`provider` makes a new object that knows nothing of earlier ones but what the cloud itself keeps."""

    provider: Callable[[], Provider]
    num_processes: Callable[[str], int]
    """Really living processes of a machine, of every machine for ""."""
    instances: int
    announces: bool = True
    """It can give a notice before it takes a machine on purpose."""
    notice_s: float = 0.8
    """Long enough that a look at the machine fits in."""
    sweeper: Callable[[], CanSweep] | None = None
    """Who finds machines of any run, where that is not the provider itself."""
    answers_all: bool = True
    """A second launcher of a machine hears how it stands once the first has; else that it is starting."""


@contextmanager
def local_cloud(tmp_path: Path) -> Iterator[Cloud]:
    run = tmp_path / RUN
    run.mkdir()
    nap = "import time; time.sleep(600)"
    fork = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {nap!r}], start_new_session=True)"
    )
    code = f"{fork}; {nap}"  # like an agent: its engine lives in a session of its own

    def provider() -> LocalProvider:
        offers = [LocalOffer(infra="local", price_usd_per_hour=0.5)]
        return LocalProvider(run, offers, command=lambda bootstrap, instance: [sys.executable, "-c", code])

    def num_processes(machine: str) -> int:
        return len(tagged(run, machine=machine or None))

    try:
        yield Cloud(provider, num_processes, 2)
    finally:
        kill_tagged(run)


OWNER = f"{os.getpid():012x}"  # tests in two processes at once must not end each other's machines


@contextmanager
def aws_cloud(tmp_path: Path) -> Iterator[Cloud]:
    pool = AwsPool(REGION, "A10G:1", ("g5.xlarge", "g5.2xlarge"), IMAGE, 500_000, 1_006_000)
    with fake_ec2(tmp_path / "machines") as fake, pytest.MonkeyPatch.context() as patch:
        fake.sign_in(patch)
        fake.prices = {("g5.xlarge", f"{REGION}a"): 0.44, ("g5.2xlarge", f"{REGION}b"): 0.43}
        assert fake.hypervisor is not None
        yield Cloud(
            lambda: AwsProvider([pool], OWNER, client=fake.client),
            fake.hypervisor.num_agents,
            2,
            announces=False,
        )


@contextmanager
def gcp_cloud(tmp_path: Path) -> Iterator[Cloud]:
    pool = GcpPool("us-central1", "L4:1", "g2-standard-4", 300_000, "test")
    with fake_gce(tmp_path / "machines") as fake:
        assert fake.hypervisor is not None

        def provider() -> GcpProvider:
            return GcpProvider([pool], OWNER, clients=lambda: fake.clients)

        yield Cloud(provider, fake.hypervisor.num_agents, 2, announces=False)


@contextmanager
def ssh_cloud(tmp_path: Path) -> Iterator[Cloud]:
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(python=sys.executable))
    agent.chmod(0o755)
    home = make_home(tmp_path / "home")
    made: list[SshProvider] = []
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        servers = [stack.enter_context(sshd_on(tmp_path / f"sshd-{n}", home)) for n in range(3)]
        pools = [
            SshOffer(
                infra="ssh",
                hosts=[server.host],
                price_usd_per_hour=0.5,
                python=str(agent),
                folder=str(tmp_path / f"disk-{n}"),
            )
            for n, server in enumerate(servers)  # each server stands for a host with a disk of its own
        ]

        def provider() -> SshProvider:
            made.append(SshProvider(pools, OWNER))
            return made[-1]

        def num_processes(machine: str) -> int:
            wanted = f"{OWNER}/{RUN}/{machine}"
            tags = [tag_of(process) for process in psutil.process_iter()]
            return sum(tag == wanted if machine else tag.startswith(wanted) for tag in tags)

        try:
            yield Cloud(provider, num_processes, 2, notice_s=5.0)
        finally:
            for process in psutil.process_iter():
                if tag_of(process).startswith(f"{OWNER}/{RUN}/"):
                    process.kill()
            for each in made:
                each.close()


@contextmanager
def skypilot_cloud(tmp_path: Path) -> Iterator[Cloud]:
    """SkyPilot from memory; the real one is in tests/cloud. What is up counts as if it had processes
    here."""
    fake = FakeSkyPilot(says_up=False)
    run, home = tmp_path / RUN, tmp_path / "home"
    run.mkdir()
    home.mkdir()
    home.joinpath("owner").write_text(OWNER)

    def provider() -> SkyPilotProvider:
        return SkyPilotProvider(run, [CloudOffer(infra="aws", accelerators="A10G:1")], skypilot=fake)

    def num_processes(machine: str) -> int:
        up = [row["labels"][tags.MACHINE] for row in fake.clusters.values() if row["status"] == "UP"]
        return sum(2 * 2 for name in up if machine in ("", name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLBOOST_HOME", str(home))
        patch.setattr(skypilot_provider, "_answers", lambda address, port: True)
        yield Cloud(
            provider,
            num_processes,
            2,
            announces=False,
            sweeper=lambda: SkyPilotSweeper(tmp_path / "sweep", skypilot=fake),
            answers_all=False,
        )
    fake.join()


def tag_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(TAG, "")
    except psutil.Error:
        return ""


CLOUDS = {
    "aws": aws_cloud,
    "gcp": gcp_cloud,
    "local": local_cloud,
    "skypilot": skypilot_cloud,
    "ssh": ssh_cloud,
}


@pytest.fixture(params=sorted(CLOUDS))
def cloud(request, tmp_path):
    with CLOUDS[request.param](tmp_path) as made:
        yield made


def offer_of(provider: Provider) -> Offer:
    return provider.offers()[0]


def request_for(provider: Provider, machine: str = "spot-0") -> LaunchRequest:
    instances = (f"{machine}/0", f"{machine}/1")
    return LaunchRequest(RUN, machine, offer_of(provider), {"machine": machine, "instances": instances})


def state(provider: Provider, machine: str = "spot-0") -> MachineStatus:
    return next(view.state for view in provider.describe(RUN) if view.machine == machine)


def wait_until(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def booted(cloud: Cloud, machine: str = "spot-0") -> bool:
    return cloud.num_processes(machine) == 2 * cloud.instances  # each with its child


def test_offers_are_priced_and_cheapest_first(cloud):
    offers = cloud.provider().offers()
    prices = [offer.price_micro_usd_per_hour for offer in offers]
    assert offers
    assert prices == sorted(prices)
    assert all(offer.spot and offer.source for offer in offers)


def test_a_launched_machine_runs_and_is_described_with_its_start(cloud):
    provider = cloud.provider()
    before = time.time()
    launched = provider.launch(request_for(provider))
    [described] = provider.describe(RUN)
    assert described == launched
    assert described.state is MachineStatus.RUNNING
    assert described.started_at is not None
    assert before - 1 <= described.started_at <= time.time()  # clouds tell whole seconds
    assert described.ended_at is None
    wait_until(lambda: booted(cloud))


def test_the_same_id_twice_is_the_same_machine(cloud):
    provider = cloud.provider()
    first = provider.launch(request_for(provider))
    wait_until(lambda: booted(cloud))
    assert provider.launch(request_for(provider)) == first
    restarted = cloud.provider()
    assert restarted.launch(request_for(restarted)) == first
    assert booted(cloud)
    assert len(provider.describe(RUN)) == 1


def test_the_same_id_from_two_launchers_at_once_is_one_machine(cloud):
    views = []

    def launch() -> None:
        provider = cloud.provider()
        views.append(provider.launch(request_for(provider)))

    threads = [threading.Thread(target=launch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if cloud.answers_all:
        assert views == [views[0]] * 3
    assert {view.machine for view in views} == {"spot-0"}
    assert len(cloud.provider().describe(RUN)) == 1
    wait_until(lambda: booted(cloud))
    time.sleep(0.1)
    assert booted(cloud)


def test_an_ended_machine_is_not_launched_again_under_its_id(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    provider.terminate(RUN, "spot-0")
    wait_until(lambda: state(provider) is MachineStatus.GONE)
    assert provider.launch(request_for(provider)).state is MachineStatus.GONE
    assert cloud.num_processes("") == 0


def test_machines_are_found_by_their_run_only(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    provider.launch(request_for(provider, "spot-1"))
    assert {view.machine for view in cloud.provider().describe(RUN)} == {"spot-0", "spot-1"}
    assert provider.describe("another-run") == []
    provider.terminate("another-run", "spot-0")
    assert state(provider) is MachineStatus.RUNNING


def test_a_machine_survives_its_launcher(cloud):
    provider = cloud.provider()
    launched = provider.launch(request_for(provider))
    del provider
    assert cloud.provider().describe(RUN) == [launched]


def test_terminating_ends_it_once_and_for_all(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    provider.launch(request_for(provider, "spot-1"))
    wait_until(lambda: booted(cloud))
    cloud.provider().terminate(RUN, "spot-0")
    assert cloud.num_processes("spot-0") == 0
    wait_until(lambda: state(provider) is MachineStatus.GONE)
    [ended] = [view for view in provider.describe(RUN) if view.machine == "spot-0"]
    assert ended.state is MachineStatus.GONE
    assert ended.ended_at is not None
    provider.terminate(RUN, "spot-0")
    assert ended in cloud.provider().describe(RUN), "the end is recorded once"
    assert state(provider, "spot-1") is MachineStatus.RUNNING


def test_terminating_what_never_was_succeeds(cloud):
    cloud.provider().terminate(RUN, "spot-77")
    assert cloud.provider().describe(RUN) == []


def test_a_preempted_machine_is_gone_at_once(cloud):
    provider = cloud.provider()
    assert isinstance(provider, CanPreempt)
    provider.launch(request_for(provider))
    wait_until(lambda: booted(cloud))
    provider.preempt(RUN, "spot-0", None)
    assert cloud.num_processes("spot-0") == 0
    wait_until(lambda: state(provider) is MachineStatus.GONE)


def test_a_noticed_machine_lives_through_its_notice_and_not_longer(cloud):
    provider = cloud.provider()
    assert isinstance(provider, CanPreempt)
    provider.launch(request_for(provider))
    wait_until(lambda: booted(cloud))
    if not cloud.announces:
        with pytest.raises(ProviderError, match="cannot announce a preemption"):
            provider.preempt(RUN, "spot-0", cloud.notice_s)
        assert state(provider) is MachineStatus.RUNNING
        return
    began = time.time()
    provider.preempt(RUN, "spot-0", cloud.notice_s)
    assert state(provider) is MachineStatus.RUNNING
    assert booted(cloud)
    del provider  # whoever asked for it may be gone by then
    wait_until(lambda: cloud.num_processes("spot-0") == 0)
    [view] = cloud.provider().describe(RUN)
    assert view.state is MachineStatus.GONE
    assert view.ended_at is not None
    assert view.ended_at >= began + cloud.notice_s


def test_preempting_what_is_not_there_says_so(cloud):
    provider = cloud.provider()
    assert isinstance(provider, CanPreempt)
    with pytest.raises(NotFound):
        provider.preempt(RUN, "spot-0", None)
    provider.launch(request_for(provider))
    with pytest.raises(NotFound):
        provider.preempt("another-run", "spot-0", None)
    provider.terminate(RUN, "spot-0")
    wait_until(lambda: state(provider) is MachineStatus.GONE)
    with pytest.raises(NotFound):
        provider.preempt(RUN, "spot-0", None)


def test_nothing_is_left_when_all_are_terminated(cloud):
    provider = cloud.provider()
    for machine in ("spot-0", "spot-1", "spot-2"):
        provider.launch(request_for(provider, machine))
    for view in provider.describe(RUN):
        provider.terminate(RUN, view.machine)
    assert cloud.num_processes("") == 0
    wait_until(lambda: {view.state for view in provider.describe(RUN)} == {MachineStatus.GONE})


def test_watching_says_what_describing_does_at_the_clouds_own_pace(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    assert provider.watch(RUN) == provider.describe(RUN)
    again = provider.watch(RUN)
    assert again is None or again == provider.describe(RUN)


def test_a_place_that_is_not_of_the_job_is_the_job_files_fault(cloud):
    provider = cloud.provider()
    elsewhere = replace(offer_of(provider), zone="nowhere-1")
    with pytest.raises(ConfigError, match="nowhere-1"):
        provider.launch(replace(request_for(provider), offer=elsewhere))
    assert provider.describe(RUN) == []


def test_machines_of_any_run_are_found_by_their_tags_and_only_living_ones(cloud):
    provider = cloud.provider()
    assert Ability.FINDS_BY_TAG in provider.abilities or Ability.TIME_TO_LIVE in provider.abilities
    if cloud.sweeper is None and not isinstance(provider, CanSweep):
        assert isinstance(provider, LocalProvider), "`gc` asks each ended run for what is left of it"
        return
    provider.launch(request_for(provider))
    provider.launch(request_for(provider, "spot-1"))
    provider.terminate(RUN, "spot-1")
    wait_until(lambda: state(provider, "spot-1") is MachineStatus.GONE)
    stranger = cloud.provider() if cloud.sweeper is None else cloud.sweeper()
    assert isinstance(stranger, CanSweep)
    [found] = stranger.sweep()
    assert (found.run, found.machine, found.owner) == (RUN, "spot-0", OWNER)
    for _ in range(2):
        stranger.end(found)
    assert cloud.num_processes("") == 0
    wait_until(lambda: stranger.sweep() == [])
