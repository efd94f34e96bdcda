"""Invariants across the core's collections, asserted after every event in tests."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.base.timers import Context, Timer, Timers
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.lease_controller import GpuLease, LeaseState
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.machines import MachineTable
from rlboost_runtime.core.state.responses import ResponseState


def check_core(
    instance_table: InstanceTable, work: Assignments, fleet: MachineTable, lease: GpuLease, context: Context
) -> None:
    """Assert everything that must hold between events; the message names the object and its history."""
    _check_work(instance_table, work)
    for instance in instance_table.instances.values():
        instance.check()
        _check_deadlines(instance, context.timers)
    _check_lease(instance_table, lease)
    fleet.check()
    _check_machines(instance_table, fleet)
    due = context.timers.earliest()
    assert due is None or due >= 0, "a deadline before the run"


def _check_work(instance_table: InstanceTable, work: Assignments) -> None:
    held = {a: r for i in instance_table.instances.values() for a, r in i.assignments.items()}
    assert held == work.current, "instances and current assignments disagree"
    responses = list(work.requests.responses.values())
    work.requests.check()
    for book in work.steps:
        book.check()
        responses += book.responses.values()
    queued = [r.response for r in work.dispatcher.queued()]
    waiting = [r.response for r in responses if r.state is ResponseState.WAITING]
    assert sorted(queued) == sorted(waiting), f"queued {queued}, waiting {waiting}: one is lost or doubled"
    for response in responses:
        if response.state is ResponseState.RUNNING:
            lifecycle = response.lifecycle
            assert response.holder in instance_table.instances, f"held by a lost instance, {lifecycle}"
            assert response.assignment is not None, lifecycle
            assert (
                instance_table.instances[response.holder].assignments.get(response.assignment) is response
            ), lifecycle


def _check_deadlines(instance: Instance, timers: Timers) -> None:
    name = instance.instance
    lifecycle = instance.lifecycle
    assert timers.due(Timer.LEASE, name) is not None, f"lives without a lease, {lifecycle}"
    assert instance.is_connected == (timers.due(Timer.GRACE, name) is None), f"grace, {lifecycle}"
    assert instance.is_paused == (timers.due(Timer.PAUSE, name) is not None), f"pause, {lifecycle}"
    if instance.is_connected:
        hang = timers.due(Timer.HANG, name) is not None
        assert hang == bool(instance.assignments), f"hang deadline, {lifecycle}"
        waits = bool(instance.aborting) or instance.state is InstanceState.SLEEPING
        assert waits == (timers.due(Timer.ANSWER, name) is not None), f"answer deadline, {lifecycle}"


def _check_lease(instance_table: InstanceTable, lease: GpuLease) -> None:
    if lease.state not in (LeaseState.TRAINER, LeaseState.RECALLING):
        return
    for instance in instance_table.reserved.values():
        lifecycle = instance.lifecycle
        assert not instance.is_awake, f"awake while the trainer has the GPU, {lifecycle}"


def _check_machines(instance_table: InstanceTable, fleet: MachineTable) -> None:
    for machine in fleet.machines.values():
        lives = {i.instance for i in instance_table.spot() if i.machine == machine.machine}
        assert set(machine.instances) == lives, f"{machine.machine} has {lives}, not {machine.instances}"
    for instance in instance_table.instances.values():
        assert instance.pool is Pool.SPOT or instance.instance in instance_table.reserved
