"""What every provider must do, written against `base.Provider` alone; run for each provider that we ship.

A new provider adds one function to `CLOUDS` that yields a `Cloud`: a way to make provider objects anew, as a
restarted coordinator does, and two ways to look at what is really there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlboost_providers.base import CanPreempt, LaunchRequest, MachineState, Offer, Provider
from rlboost_providers.local import LocalProvider
from rlboost_runtime.errors import NotFound
from rlboost_runtime.job import LocalOffer
from rlboost_runtime.process_tags import kill_tagged, tagged

pytestmark = pytest.mark.integration

RUN = "conformance"


@dataclass(frozen=True)
class Cloud:
    """`provider` makes a new object that knows nothing of earlier ones but what the cloud itself keeps."""

    provider: Callable[[], Provider]
    num_processes: Callable[[str], int]
    """Really living processes of a machine, of every machine for ""."""
    instances: int


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


CLOUDS = {"local": local_cloud}


@pytest.fixture(params=sorted(CLOUDS))
def cloud(request, tmp_path):
    with CLOUDS[request.param](tmp_path) as made:
        yield made


def offer_of(provider: Provider) -> Offer:
    return provider.offers()[0]


def request_for(provider: Provider, machine: str = "spot-0") -> LaunchRequest:
    instances = (f"{machine}/0", f"{machine}/1")
    return LaunchRequest(RUN, machine, offer_of(provider), {"machine": machine, "instances": instances})


def state(provider: Provider, machine: str = "spot-0") -> MachineState:
    return next(view.state for view in provider.describe(RUN) if view.machine == machine)


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
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
    assert described.state is MachineState.RUNNING
    assert described.started_at is not None
    assert before <= described.started_at <= time.time()
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
    assert views == [views[0]] * 3
    wait_until(lambda: booted(cloud))
    time.sleep(0.1)
    assert booted(cloud)


def test_an_ended_machine_is_not_launched_again_under_its_id(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    provider.terminate(RUN, "spot-0")
    assert provider.launch(request_for(provider)).state is MachineState.GONE
    assert cloud.num_processes("") == 0


def test_machines_are_found_by_their_run_only(cloud):
    provider = cloud.provider()
    provider.launch(request_for(provider))
    provider.launch(request_for(provider, "spot-1"))
    assert {view.machine for view in cloud.provider().describe(RUN)} == {"spot-0", "spot-1"}
    assert provider.describe("another-run") == []
    provider.terminate("another-run", "spot-0")
    assert state(provider) is MachineState.RUNNING


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
    [ended] = [view for view in provider.describe(RUN) if view.machine == "spot-0"]
    assert ended.state is MachineState.GONE
    assert ended.ended_at is not None
    provider.terminate(RUN, "spot-0")
    assert ended in cloud.provider().describe(RUN), "the end is recorded once"
    assert state(provider, "spot-1") is MachineState.RUNNING


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
    assert state(provider) is MachineState.GONE


def test_a_noticed_machine_lives_through_its_notice_and_not_longer(cloud):
    provider = cloud.provider()
    assert isinstance(provider, CanPreempt)
    provider.launch(request_for(provider))
    wait_until(lambda: booted(cloud))
    began = time.time()
    provider.preempt(RUN, "spot-0", 0.8)
    assert state(provider) is MachineState.RUNNING
    assert booted(cloud)
    del provider  # whoever asked for it may be gone by then
    wait_until(lambda: cloud.num_processes("spot-0") == 0)
    [view] = cloud.provider().describe(RUN)
    assert view.state is MachineState.GONE
    assert view.ended_at is not None
    assert view.ended_at >= began + 0.8


def test_preempting_what_is_not_there_says_so(cloud):
    provider = cloud.provider()
    assert isinstance(provider, CanPreempt)
    with pytest.raises(NotFound):
        provider.preempt(RUN, "spot-0", None)
    provider.launch(request_for(provider))
    with pytest.raises(NotFound):
        provider.preempt("another-run", "spot-0", None)
    provider.terminate(RUN, "spot-0")
    with pytest.raises(NotFound):
        provider.preempt(RUN, "spot-0", 1.0)


def test_nothing_is_left_when_all_are_terminated(cloud):
    provider = cloud.provider()
    for machine in ("spot-0", "spot-1", "spot-2"):
        provider.launch(request_for(provider, machine))
    for view in provider.describe(RUN):
        provider.terminate(RUN, view.machine)
    assert cloud.num_processes("") == 0
    assert {view.state for view in provider.describe(RUN)} == {MachineState.GONE}
