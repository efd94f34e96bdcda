"""The simulated shells: a short sweep holds, a seed is the same each time, and planted bugs are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from benchmarks.shells.loop import Process, VirtualLoop
from benchmarks.shells.network import SLOW_S, Network
from benchmarks.shells.storage import InlineJournal
from benchmarks.shells.world import live
from rlboost_runtime.agent import weight_children
from rlboost_runtime.coordinator.driver.core_driver import OpenStep
from rlboost_runtime.coordinator.fleet.controller import FleetController
from rlboost_runtime.protocol.messages import WorkItem
from rlboost_runtime.supervisor import supervisor
from rlboost_runtime.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.integration
SWEEP = 20
FIND_WITHIN = 500
"""Seeds within which a planted bug must show."""


def test_seeds_keep_every_promise() -> None:
    lived = [live(seed) for seed in range(SWEEP)]
    assert [each.broken for each in lived] == [[]] * SWEEP
    happened = set().union(*(each.faults for each in lived))
    assert {"coordinator killed", "power cut", "process paused", "connection silent", "disk full"} <= happened
    assert {"supervisor killed", "weight server killed", "puller hangs"} <= happened
    assert all(each.num_tokens > 0 and each.num_events > 0 for each in lived)


def test_a_connection_keeps_the_order_of_its_messages() -> None:
    """Behind a slow message the next ones were due at one moment, and a loop runs such in any order."""
    sent = [bytes([number]) for number in range(200)]

    async def carry() -> list[bytes]:
        network = Network(Random(3), lambda *_: None)
        near, far = await network.connect(Process("one"), Process("other"))
        for message in sent:
            await near.send(message)
        return [await far.receive() for _ in sent]

    loop = VirtualLoop(lambda: 0.0)
    try:
        assert loop.run_until_complete(loop.create_task(carry())) == sent
        assert loop.time() > SLOW_S[0], "a message was slow"
    finally:
        loop.close()


def test_a_seed_is_lived_the_same_again_in_another_process() -> None:
    path = os.pathsep.join(filter(None, sys.path))

    def trace(hash_seed: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.shells", "--seed", "7"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    first = trace("1")
    assert first["trace"] == trace("2")["trace"]
    assert first["messages"] > 100


def first_broken(*faults: str) -> str:
    """Return what the first seed that breaks a promise says; `faults`: those that may happen, else all."""
    kinds = frozenset(faults) or None
    return next(
        lived.broken[0] for lived in (live(seed, faults=kinds) for seed in range(FIND_WITHIN)) if lived.broken
    )


@pytest.mark.soak  # some hundred seeds: a minute and a half
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_an_acknowledgement_before_the_journal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = InlineJournal.append

    def append(
        self: InlineJournal,
        record: bytes,
        on_commit: Callable[[], None] | None = None,
        step: int | None = None,
    ) -> None:
        if on_commit is not None:
            on_commit()
        plain(self, record, step=step)

    monkeypatch.setattr(InlineJournal, "append", append)
    found = first_broken("disk full")  # by the tokens' places, or by an end that nobody remembers
    assert "does not fit" in found or "never finished" in found


def test_a_response_that_continues_without_its_kept_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = OpenStep.work

    def work(self: OpenStep, response: int, assignment: int, kept: bytes, version: int) -> WorkItem:
        item = plain(self, response, assignment, kept, version)
        return msgspec.structs.replace(item, token_ids=self.prompt_of(response).token_ids)

    monkeypatch.setattr(OpenStep, "work", work)
    assert "tokens instead of" in first_broken("machine vanishes")


def test_a_machine_that_is_not_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end_nothing(self: FleetController, timeout_s: float) -> list[str]:
        return []

    monkeypatch.setattr(FleetController, "end_all", end_nothing)
    assert live(0).broken == [], "the supervisor ends what the coordinator left"
    monkeypatch.setattr(Supervisor, "_try_to_end_machines", lambda self: None)
    found = first_broken()  # at the run's end, or in its bill
    assert "still running" in found or "open in the ledger" in found


def test_a_supervisor_that_takes_over_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "adopt", lambda role, run: None)
    assert "a supervisor killed a living" in first_broken("supervisor killed")


@pytest.mark.soak  # each seed waits ten minutes of its own time: ten seconds
@pytest.mark.e2e
def test_a_pull_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_children, "PROGRESS_TIMEOUT_S", 1e6)
    assert "the run did not end" in first_broken("puller hangs")
