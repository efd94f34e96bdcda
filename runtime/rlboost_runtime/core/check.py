"""Invariants across the core's collections, asserted after every event in tests."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.base.timers import Context, Timer, Timers
from rlboost_runtime.core.dispatch.assignments import Work
from rlboost_runtime.core.state.instances import Instance, InstanceState, Roster
from rlboost_runtime.core.state.machines import Fleet
from rlboost_runtime.core.state.responses import ResponseState
from rlboost_runtime.core.window.gpu_lease import GpuLease, LeaseState


def check_core(roster: Roster, work: Work, fleet: Fleet, lease: GpuLease, context: Context) -> None:
    """Assert everything that must hold between events; the message names the object and its story."""
    _check_work(roster, work)
    for instance in roster.instances.values():
        instance.check()
        _check_deadlines(instance, context.timers)
    _check_lease(roster, lease)
    fleet.check()
    _check_machines(roster, fleet)
    due = context.timers.earliest()
    assert due is None or due >= 0, "a deadline before the run"


def _check_work(roster: Roster, work: Work) -> None:
    held = {a: r for i in roster.instances.values() for a, r in i.assignments.items()}
    assert held == work.current, "instances and current assignments disagree"
    if work.book is None:
        assert not held, "work without a step"
        return
    work.book.check()
    queued = [r.response for r in work.dispatcher.queued()]
    waiting = [r.response for r in work.book.responses.values() if r.state is ResponseState.WAITING]
    assert sorted(queued) == sorted(waiting), f"queued {queued}, waiting {waiting}: one is lost or doubled"
    for response in work.book.responses.values():
        if response.state is ResponseState.RUNNING:
            story = response.life
            assert response.holder in roster.instances, f"held by the dead, {story}"
            assert response.assignment is not None, story
            assert roster.instances[response.holder].assignments.get(response.assignment) is response, story


def _check_deadlines(instance: Instance, timers: Timers) -> None:
    name = instance.instance
    story = instance.life
    assert timers.due(Timer.LEASE, name) is not None, f"lives without a lease, {story}"
    assert instance.is_connected == (timers.due(Timer.GRACE, name) is None), f"grace, {story}"
    assert instance.is_paused == (timers.due(Timer.PAUSE, name) is not None), f"pause, {story}"
    if instance.is_connected:
        hang = timers.due(Timer.HANG, name) is not None
        assert hang == bool(instance.assignments), f"hang deadline, {story}"
        waits = bool(instance.aborting) or instance.life.state is InstanceState.SLEEPING
        assert waits == (timers.due(Timer.ANSWER, name) is not None), f"answer deadline, {story}"


def _check_lease(roster: Roster, lease: GpuLease) -> None:
    if lease.state not in (LeaseState.TRAINER, LeaseState.RECALLING):
        return
    for instance in roster.reserved.values():
        story = instance.life
        assert not instance.is_awake, f"awake while the trainer has the GPU, {story}"


def _check_machines(roster: Roster, fleet: Fleet) -> None:
    for machine in fleet.machines.values():
        lives = {i.instance for i in roster.spot() if i.machine == machine.machine}
        assert set(machine.instances) == lives, f"{machine.machine} has {lives}, not {machine.instances}"
    for instance in roster.instances.values():
        assert instance.pool is Pool.SPOT or instance.instance in roster.reserved
