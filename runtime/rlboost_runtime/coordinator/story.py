"""What happened, in words a user understands: told from the core's events, kept in the ledger."""

from __future__ import annotations

from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.messages import (
    Command,
    Disconnected,
    Event,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LaunchFailed,
    MachineGone,
    NoticeReceived,
    RecallLease,
    RunEnding,
    StepTrained,
    VersionRefused,
)
from rlboost_runtime.seams import Clock


class Story:
    """Turns events into lines. Only what a person would want to know; never one line per response."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._served: set[tuple[str, int]] = set()
        self._no_capacity = False
        self._is_over = False

    def tell(self, event: Event, commands: list[Command], core: Core) -> None:
        """Note what `event` means, if it means anything to a person."""
        self._is_over = self._is_over or isinstance(event, RunEnding)
        line = None if self._is_over else self._line(event, core)
        if line is not None:
            self._ledger.note(self._clock.wall(), *line)
        if any(isinstance(command, RecallLease) for command in commands):
            self._ledger.note(
                self._clock.wall(), "recalled", "no spot instance is left: the trainer lends its GPU again"
            )

    def _line(self, event: Event, core: Core) -> tuple[str, str] | None:
        match event:
            case InstanceJoined(instance=instance):
                return "joined", f"{instance} dialled in"
            case InstanceReady(instance=instance, epoch=epoch, version=version):
                if (instance, epoch) in self._served:
                    return None
                self._served.add((instance, epoch))
                return "ready", f"{instance} serves policy version {version}"
            case NoticeReceived(instance=instance, seconds=seconds):
                return "noticed", f"{instance} has {seconds:.0f} s of notice: draining"
            case Disconnected(instance=instance):
                known = core.instances.get(instance)
                held = 0 if known is None else known.num_assigned
                return "lost", f"{instance} is gone without a word; its {held} responses go on elsewhere"
            case InstanceLeft(instance=instance, cause=cause):
                return "left", f"{instance} left ({cause}), nothing lost"
            case VersionRefused(instance=instance, version=version, problem=problem):
                return "refused", f"{instance} could not serve policy version {version}: {problem}"
            case LaunchFailed(problem=problem):
                told, self._no_capacity = self._no_capacity, True
                return None if told else ("no capacity", f"no new spot machine for now: {problem}")
            case MachineGone(machine=machine):
                return "preempted", f"{machine} was taken away"
            case StepTrained(step=step):
                self._no_capacity = False
                return "step", f"step {step + 1} trained, window {core.seeding.t_seed_s:.1f} s"
            case _:
                return None
