"""In-flight updates: a step's responses go on under versions that are published while it is rolled out."""

from __future__ import annotations

import pytest

from rlboost_runtime.core.base.messages import (
    Abort,
    Disconnected,
    LoadVersion,
    Reconnected,
    ResponseRequest,
    StepStarted,
    VersionFetched,
    VersionRefused,
)


@pytest.fixture
def run(new_run):
    """Two instances under version 0 and a step of six responses that takes newer versions."""
    run = new_run()
    run.publish(0)
    run.spot("a", "b", max_running=3)
    open_step(run)
    return run


def open_step(run, *, in_flight: bool = True) -> None:
    requests = tuple(ResponseRequest(number, number, 10, 100) for number in range(6))
    run.send(StepStarted(run.now, 0, 0, requests, keeps_lease=True, in_flight_updates=in_flight))


def fetched(run, name: str, version: int = 1):
    return run.send(VersionFetched(run.now, name, run.epoch(name), version))


def held_by(run, name: str) -> list[int]:
    return run.core.responses_on(name)


def test_a_version_is_loaded_in_the_middle_of_the_step(run) -> None:
    commands = run.publish(1)
    assert [c for c in commands if isinstance(c, LoadVersion)] == [
        LoadVersion("a", run.epoch("a"), 1), LoadVersion("b", run.epoch("b"), 1),
    ]  # fmt: skip
    assert not any(isinstance(c, Abort) for c in commands), "what runs goes on while the version travels"


def test_without_in_flight_updates_the_step_keeps_its_version(new_run) -> None:
    run = new_run()
    run.publish(0)
    run.spot("a")
    open_step(run, in_flight=False)
    assert run.publish(1) == []
    assert fetched(run, "a") == []
    assert not run.core.instances["a"].is_swapping


def test_work_is_given_out_under_the_old_version_until_the_new_one_is_here(run) -> None:
    run.publish(1)
    run.finish(held_by(run, "a")[0])
    run.finish(held_by(run, "a")[0])
    assert len(held_by(run, "a")) == 1
    assert run.core.instances["a"].can_serve(0, 1)
    run.release(held_by(run, "b")[0])
    assert len(held_by(run, "a")) + len(held_by(run, "b")) == 4, "it is assigned again at once"


def test_an_instance_that_has_the_version_hands_over_and_gets_nothing_until_it_serves_it(run) -> None:
    run.publish(1)
    mine = list(held_by(run, "a"))
    commands = fetched(run, "a")
    assert [c.instance for c in commands if isinstance(c, Abort)] == ["a"] * len(mine)
    for response in mine:
        given = run.assigned(run.release(response, 9))
        assert "a" not in given.values()
    assert run.assigned(run.ready("a", 1)), "it takes what waits"
    assert all(run.core.response(r).num_tokens == 9 for r in held_by(run, "a") if r in mine)
    assert run.core.counters.redispatches >= len(mine)


def test_each_instance_swaps_when_its_own_pull_is_done(run) -> None:
    run.publish(1)
    mine = list(held_by(run, "a"))
    fetched(run, "a")
    for response in mine:
        run.release(response)
    run.ready("a", 1)
    assert run.core.instances["b"].version == 0
    assert held_by(run, "b"), "it generates on under its older version"
    assert run.core.instances["b"].can_serve(0, 1)


def test_a_version_that_is_overtaken_is_not_waited_for(run) -> None:
    run.publish(1)
    fetched(run, "a")
    assert run.core.instances["a"].is_swapping
    commands = run.publish(2)
    assert LoadVersion("a", run.epoch("a"), 2) in commands
    assert not run.core.instances["a"].is_swapping, "it may work under what it has until 2 is here"
    assert fetched(run, "a", 1) == []


def test_a_refused_version_is_loaded_again_and_the_work_is_with_others(run) -> None:
    run.publish(1)
    fetched(run, "a")
    for response in list(held_by(run, "a")):
        run.release(response)
    run.send(VersionRefused(run.now, "a", run.epoch("a"), 1, "digest"))
    assert not run.core.instances["a"].is_swapping
    assert held_by(run, "b")
    assert any(isinstance(c, LoadVersion) and c.instance == "a" for c in run.until(3.0))


def test_a_swap_survives_a_lost_connection(run) -> None:
    run.publish(1)
    fetched(run, "a")
    held = tuple(run.core.instances["a"].assignments)
    run.send(Disconnected(run.now, "a", run.epoch("a")))
    commands = run.send(Reconnected(run.now, "a", run.epoch("a"), held))
    assert {c.assignment for c in commands if isinstance(c, Abort)} == set(held)
    for response in list(held_by(run, "a")):
        run.release(response)
    run.ready("a", 1)
    assert run.core.instances["a"].version == 1


def test_an_instance_that_joins_loads_the_newest_and_takes_part(run) -> None:
    run.publish(1)
    commands = run.join("c", max_running=3)
    assert LoadVersion("c", run.epoch("c"), 1) in commands
    run.ready("c", 1)
    assert run.core.instances["c"].can_serve(0, 1)
    assert not run.core.instances["c"].can_serve(0, 0)


def test_the_next_step_needs_its_own_version(run) -> None:
    run.publish(1)
    for response in range(6):
        run.finish(response)
    requests = (ResponseRequest(6, 0, 10, 100),)
    run.send(StepStarted(run.now, 1, 1, requests, keeps_lease=True, in_flight_updates=True))
    assert not run.where(), "both serve version 0, which is older than the step's"
    assert run.assigned(run.ready("b", 1)) == {6: "b"}
