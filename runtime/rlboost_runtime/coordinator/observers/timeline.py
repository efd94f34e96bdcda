"""The run's timeline: the core's events as lines that a user understands, kept in the ledger.

Few lines on purpose: a machine that is preempted makes one line when it goes and one when its responses are
elsewhere, whatever the agents, the connection and the cloud report about it one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.core.base.messages import (
    Assign,
    Command,
    CoordinatorRestarted,
    Event,
    Finished,
    Heartbeat,
    InstanceJoined,
    InstanceReady,
    LaunchFailed,
    LossCause,
    MachineGone,
    NoticeReceived,
    Pool,
    RecallLease,
    StepStarted,
    StepTrained,
    TerminateMachine,
    TrainerLost,
    VersionPublished,
    VersionRefused,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.seams import Clock

_MOST_TARGETS = 3
"""Instances named in the line of a migration; the rest are counted."""

Line = tuple[str, str]
"""(kind, text)."""

# a machine that its cloud takes was preempted, however that was learnt; one that we end is released
_HOW_LOST = {
    LossCause.RESET: ("preempted", "{who} was preempted: connection reset"),
    LossCause.MACHINE_GONE: ("preempted", "{who} was preempted"),
    LossCause.SILENT: ("preempted", "{who} was preempted: no heartbeat"),
    LossCause.NOTICED: ("left", "{who} was preempted, as announced"),
    LossCause.HUNG: ("lost", "{who} hung and was evicted"),
    LossCause.REPLACED: ("lost", "{who} restarted"),
    LossCause.STOPPED: ("left", "{who} released: no longer needed"),
}


class Timeline:
    """Turns events into lines: only what a user would want to know; never one line per response."""

    def __init__(self, ledger: Ledger, clock: Clock, core: Core) -> None:
        self._ledger = ledger
        self._clock = clock
        self._migrations = Migrations()
        self._alive: dict[str, Instance] = dict(core.instances)
        self._losses = Counter(core.counters.losses)
        self._served = {(name, i.epoch) for name, i in core.instances.items() if i.has_served}
        self._leaving: set[str] = set()
        """Machines whose end has been reported."""
        self._versions: dict[int, int] = {}
        """The policy version under which each step that is not trained yet was started."""
        for step in core.open_steps:
            self._versions[step.step] = step.policy_version
        self._no_capacity = False
        self._is_over = False

    def end(self) -> None:
        """Add no more lines: the run is being wound up, and what goes from now on goes on purpose."""
        self._is_over = True

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Note what `event` and the commands that followed from it mean to a user, if anything."""
        if isinstance(event, Heartbeat):
            return
        lines: list[Line | None] = [*self._loss_lines(core)]
        lines.append(self._line(event, core))
        lines += [self._command(command, core) for command in commands]
        # last: the commands may give away what an instance held until this event
        lines += [_migrated(migration, core) for migration in self._migrations.update(event, commands)]
        for line in lines:
            if line is not None and not self._is_over:
                self._ledger.note(self._clock.wall(), *line)

    def _line(self, event: Event, core: Core) -> Line | None:
        match event:
            case InstanceJoined(instance=instance):
                return "joined", f"{_short(instance, core)} joined"
            case InstanceReady(instance=instance, epoch=epoch, version=version):
                if (instance, epoch) in self._served:
                    return None
                self._served.add((instance, epoch))
                return "ready", f"{_short(instance, core)} serves policy version {version}"
            case NoticeReceived():
                return self._noticed(event, core)
            case VersionRefused(instance=instance, version=version, problem=problem):
                return "refused", f"{_short(instance, core)} cannot serve policy version {version}: {problem}"
            case LaunchFailed(problem=problem):
                is_known, self._no_capacity = self._no_capacity, True
                return None if is_known else ("no capacity", f"no spot capacity, retrying: {problem}")
            case MachineGone(machine=machine):
                return None if self._is_reported(machine) else ("preempted", f"{machine} was preempted")
            case VersionPublished(version=version) if core.step is None:
                return "published", f"policy version {version} published"
            case StepStarted(step=step, policy_version=version):
                self._versions[step] = version
                return None
            case StepTrained(step=step):
                self._no_capacity = False
                return "step", self._trained(step)
            case TrainerLost():
                return "trainer", "trainer restarting from its last checkpoint"
            case CoordinatorRestarted():
                return "coordinator", "coordinator restarted; its state is recovered"
            case _:
                return None

    def _trained(self, step: int) -> str:
        """Name the version that generated the step: by now the next one may be published, or not yet."""
        version = self._versions.get(step)
        self._versions = {later: v for later, v in self._versions.items() if later > step}
        return f"step {step + 1} trained" + ("" if version is None else f" from policy version {version}")

    def _noticed(self, notice: NoticeReceived, core: Core) -> Line | None:
        held = self._migrations.leave(notice.instance)
        known = core.instances.get(notice.instance)
        if known is not None and self._is_reported(known.machine) and not held:
            return None
        how_long = "a preemption notice" if notice.is_assumed else f"{notice.seconds:.0f} s of notice"
        return "noticed", f"{_short(notice.instance, core)} has {how_long}{_go_on(held)}"

    def _loss_lines(self, core: Core) -> list[Line]:
        """Return a line per instance that was lost by the last event."""
        causes = core.counters.losses - self._losses
        if not causes:
            for name in core.instances.keys() - self._alive.keys():
                self._alive[name] = core.instances[name]
            return []
        self._losses = Counter(core.counters.losses)
        cause = causes.most_common(1)[0][0]
        lost = [i for name, i in self._alive.items() if core.instances.get(name) is not i]
        self._alive = dict(core.instances)
        return [line for instance in lost if (line := self._lost(instance, cause, core)) is not None]

    def _lost(self, instance: Instance, cause: LossCause, core: Core) -> Line | None:
        held = self._migrations.leave(instance.instance)
        is_reported = instance.pool is Pool.SPOT and self._is_reported(instance.machine)
        if is_reported and cause is LossCause.STOPPED:
            return None
        kind, words = _HOW_LOST[cause]
        return kind, words.format(who=_short(instance.instance, core)) + _go_on(held)

    def _command(self, command: Command, core: Core) -> Line | None:
        match command:
            case TerminateMachine(machine=machine, reason=reason):
                return None if self._is_reported(machine) else ("ended", f"{machine} released: {reason}")
            case RecallLease():
                return "recalled", "no spot instances left; rolling out on the reserved GPU"
            case _:
                return None

    def _is_reported(self, machine: str) -> bool:
        """Return True if a machine's end was reported before; from now on it counts as reported."""
        is_known = machine in self._leaving
        self._leaving.add(machine)
        return is_known


def _migrated(migration: Migration, core: Core) -> Line | None:
    count = sum(migration.targets.values())
    if count == 0:  # all finished before they could move
        return None
    named = [f"{_short(name, core)} ({n})" for name, n in list(migration.targets.items())[:_MOST_TARGETS]]
    if more := len(migration.targets) - len(named):
        named.append(f"{more} more")
    if len(migration.targets) == 1:
        named = [_short(next(iter(migration.targets)), core)]
    source = _short(migration.source, core)
    return "migrated", f"{_responses(count)} of {source} migrated to {_and(named)}"


def _go_on(held: int) -> str:
    return "" if held == 0 else f"; moving its {_responses(held)}"


def _responses(count: int) -> str:
    return "1 response" if count == 1 else f"{count:,} responses"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _short(instance: str, core: Core) -> str:
    """Return the machine's name where it has one instance only."""
    config = core.config
    machine, _, index = instance.rpartition("/")
    is_alone = max(config.instances_per_machine, config.reserved_instances) == 1
    return machine if machine and index == "0" and is_alone else instance


@dataclass(frozen=True, slots=True)
class Migration:
    """Responses that left `source`, all of them now elsewhere or finished."""

    source: str
    targets: dict[str, int]
    """Number of responses that continued on each instance."""


@dataclass(slots=True)
class Migrations:
    """Follows responses from an instance that is lost, or was given notice, to the next one.

    It remembers the open step's responses only.
    """

    _held: dict[int, str] = field(default_factory=dict)
    """The instance that had each unfinished response last."""
    _former: dict[int, str] = field(default_factory=dict)
    """The instance that each response waiting for a new one has left."""
    _waiting: dict[str, set[int]] = field(default_factory=dict)
    _targets: dict[str, Counter[str]] = field(default_factory=dict)
    _first_response: int | None = None

    def update(self, event: Event, commands: Sequence[Command]) -> list[Migration]:
        """Take in an event and the commands that followed; return the migrations that this completed."""
        match event:
            case StepStarted(requests=[first, *_]) if first.response != self._first_response:
                self._first_response = first.response
                if event.open_from in (None, event.step):  # no earlier step stays open
                    self._forget()
            case Finished(response=response):
                self._held.pop(response, None)
                self._settle(response)
            case _:
                pass
        for command in commands:
            if isinstance(command, Assign):
                self._held[command.response] = command.instance
                self._settle(command.response, command.instance)
        return self._completed() if self._waiting else []

    def leave(self, instance: str) -> int:
        """Note that the responses of `instance` must go elsewhere; return how many these are.

        A second call for the same instance counts only what it was given since.
        """
        held = {r for r, holder in self._held.items() if holder == instance and r not in self._former}
        for response in held:
            self._former[response] = instance
        if held:
            self._waiting.setdefault(instance, set()).update(held)
            self._targets.setdefault(instance, Counter())
        return len(held)

    def _settle(self, response: int, target: str | None = None) -> None:
        source = self._former.pop(response, None)
        if source is not None:
            self._waiting[source].discard(response)
            if target is not None:
                self._targets[source][target] += 1

    def _completed(self) -> list[Migration]:
        done = [source for source, waiting in self._waiting.items() if not waiting]
        for source in done:
            del self._waiting[source]
        return [Migration(source, dict(self._targets.pop(source).most_common())) for source in done]

    def _forget(self) -> None:
        for memory in (self._held, self._former, self._waiting, self._targets):
            memory.clear()
