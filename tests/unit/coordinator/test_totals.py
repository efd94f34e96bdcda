"""What the run's totals count."""

from __future__ import annotations

from typing import Any

from rlboost_runtime.coordinator.driver.totals import RunTotals
from rlboost_runtime.core.base.messages import InstanceLeft, LossCause, NoticeReceived


def counted(run: Any) -> RunTotals:
    """Return totals that observe `run` from now on."""
    totals, handle = RunTotals(), run.core.handle

    def observed(event: Any) -> Any:
        commands = handle(event)
        totals.observe(event, commands, run.core)
        return commands

    run.core.handle = observed
    return totals


def test_a_response_migrates_once_however_many_machines_it_loses(new_run: Any) -> None:
    run = new_run()
    totals = counted(run)
    run.publish()
    run.spot("a")
    run.step(groups=1, size=2)
    assert set(run.where().values()) == {"a"}
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.RESET))
    run.spot("b")
    assert set(run.where().values()) == {"b"}
    assert (totals.responses_migrated, totals.responses_rebalanced) == (2, 0)
    run.spot("c")
    run.send(NoticeReceived(run.now, "b", run.epoch("b"), 30.0))
    run.release(0, 5)
    run.release(1, 5)
    assert set(run.where().values()) == {"c"}
    assert (totals.responses_migrated, totals.responses_rebalanced) == (2, 0)


def test_a_response_that_moves_from_a_machine_that_stays_has_not_migrated(new_run: Any) -> None:
    run = new_run()
    totals = counted(run)
    run.publish()
    run.spot("a", max_running=1)
    run.step(groups=1, size=1)
    run.release(0, 5)
    assert run.where()[0] == "a"
    assert (totals.responses_migrated, totals.responses_rebalanced) == (0, 0), "it went on where it was"
    totals.holders[0] = ("b", 7)
    run.spot("b")
    totals.holders[0] = ("b", run.epoch("b"))
    run.release(0, 9)
    assert run.where()[0] == "a"
    assert (totals.responses_migrated, totals.responses_rebalanced) == (0, 1)
