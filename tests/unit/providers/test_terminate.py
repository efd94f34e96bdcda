"""Ending every machine of a run: side by side, patiently, and with words where something is left."""

from __future__ import annotations

import threading
import time

import pytest

from rlboost_providers.base import terminate as terminate_module
from rlboost_providers.base.multi import MultiProvider
from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_providers.base.terminate import terminate_all
from rlboost_runtime.errors import CredentialsRejected, NotYet, ProviderError, RuntimeFault


class Cloud:
    """Machines by name; `failures` are raised by the next looks."""

    def __init__(self, *machines: str) -> None:
        self.alive = set(machines)
        self.failures: list[Exception] = []
        self.stays: set[str] = set()
        self.together: threading.Barrier | None = None

    def describe(self, run: str) -> list[MachineView]:
        if self.failures:
            raise self.failures.pop()
        return [MachineView(name, MachineStatus.RUNNING, 0.0, None) for name in sorted(self.alive)]

    def terminate(self, run: str, machine: str) -> None:
        if self.together is not None:
            self.together.wait(5)
        if machine not in self.stays:
            self.alive.discard(machine)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(terminate_module, "_AGAIN_S", 0.01)


def test_all_are_ended_side_by_side_and_the_last_look_shows_none():
    cloud = Cloud("spot-0", "spot-1", "spot-2")
    cloud.together = threading.Barrier(3)
    ended = terminate_all(cloud, "run")
    assert sorted(ended.machines) == ["spot-0", "spot-1", "spot-2"]
    assert ended.views == ()


def test_a_cloud_that_is_still_starting_is_asked_again():
    cloud = Cloud("spot-0")
    cloud.failures = [NotYet("starting", "wait"), ProviderError("unreachable", "wait")]
    said: list[str] = []
    assert terminate_all(cloud, "run", say=said.append).machines == ("spot-0",)
    assert said == ["waiting for the cloud: unreachable", "waiting for the cloud: starting"]


def test_a_cloud_that_rejects_us_is_not_asked_for_minutes():
    cloud = Cloud("spot-0")
    cloud.failures = [CredentialsRejected("expired", "sign in")]
    began = time.monotonic()
    with pytest.raises(CredentialsRejected):
        terminate_all(cloud, "run", timeout_s=5)
    assert time.monotonic() - began < 2


def test_what_one_cloud_has_is_ended_before_it_is_said_that_another_rejects_us():
    answering, silent = Cloud("spot-0", "spot-1"), Cloud()
    silent.failures = [CredentialsRejected("expired", "sign in")] * 9
    with pytest.raises(ProviderError, match="left in gcp is unknown: expired") as told:
        terminate_all(MultiProvider({"gcp": silent, "aws": answering}), "run", timeout_s=5)
    assert told.value.exit_code == CredentialsRejected.exit_code
    assert answering.alive == set()


def test_what_is_left_at_the_end_is_named():
    cloud = Cloud("spot-0", "spot-1")
    cloud.stays = {"spot-1"}
    with pytest.raises(RuntimeFault, match="machines of run are left: spot-1"):
        terminate_all(cloud, "run", timeout_s=0.2)


def test_even_without_time_everything_is_asked_for_once():
    cloud = Cloud("spot-0")
    assert terminate_all(cloud, "run", timeout_s=-1).machines == ("spot-0",)
