"""Who has the reserved GPUs, moment by moment: carries out what `lease` decides, by orders to the reserved
engines.

Guarantees: the trainer is granted the GPUs only after every live reserved engine has said that its memory is
free; an engine has one order at a time (a Wake waits for the answer to a Sleep, a Sleep for the release of
all work); an engine that is lost is waited for no longer.
"""

from __future__ import annotations

from rlboost_runtime.core.context import Context
from rlboost_runtime.core.crew import Crew
from rlboost_runtime.core.instances import Instance, InstanceState, Roster
from rlboost_runtime.core.lease import GpuLease, LeaseState, Outlook
from rlboost_runtime.core.messages import GrantLease, RecallLease
from rlboost_runtime.core.seeding import Seeding
from rlboost_runtime.core.timers import Timer
from rlboost_runtime.core.work import Work


class Handover:
    """Brings reserved engines, trainer and deadlines in line with the lease."""

    def __init__(self, context: Context, roster: Roster, work: Work, crew: Crew, seeding: Seeding) -> None:
        self.lease = GpuLease()
        self._context = context
        self._roster = roster
        self._work = work
        self._crew = crew
        self._seeding = seeding

    def settle(self, has_able_spot: bool) -> None:
        """Close the window, order engines, grant or recall, as the moment asks for."""
        lease, now = self.lease, self._context.now
        outlook = self._outlook(has_able_spot)
        reason = lease.reason_to_close(outlook)
        if reason is not None:
            lease.close(reason, now)
        for instance in self._roster.reserved.values():
            self._order(instance)
        asleep = all(i.life.state is InstanceState.ASLEEP for i in self._roster.reserved.values())
        if lease.state is LeaseState.CLOSING and asleep:
            lease.grant(now)
            self._context.emit(GrantLease(self._step()))
        self._watch_window(outlook)
        self._watch_recall(outlook)

    def _outlook(self, has_able_spot: bool) -> Outlook:
        reserved = self._roster.reserved
        return Outlook(
            now=self._context.now,
            num_unfinished=self._work.num_unfinished,
            has_able_spot=has_able_spot,
            has_reserved=self._context.config.reserved_instances > 0 or bool(reserved),
            can_recall=any(i.is_connected for i in reserved.values()),
            t_seed_s=self._seeding.t_seed_s,
        )

    def _order(self, instance: Instance) -> None:
        if not instance.is_connected:
            return
        if self.lease.state is LeaseState.ENGINES:
            if instance.life.state is InstanceState.ASLEEP and not self._context.is_ending:
                self._crew.wake(instance)
        elif instance.assignments:
            self._work.abort_all(instance)
        elif instance.is_awake:
            self._crew.sleep(instance)

    def _watch_window(self, outlook: Outlook) -> None:
        closes_at = self.lease.closes_at(outlook.t_seed_s)
        if self.lease.state is LeaseState.ENGINES and closes_at > outlook.now:
            self._context.timers.set(Timer.WINDOW, "", closes_at)
        else:
            self._context.timers.cancel(Timer.WINDOW, "")

    def _watch_recall(self, outlook: Outlook) -> None:
        since = self.lease.watch_for_recall(outlook)
        if since is None:
            self._context.timers.cancel(Timer.RECALL, "")
            return
        due = since + self._context.config.recall_after_s
        if outlook.now < due:
            self._context.timers.set(Timer.RECALL, "", due)
            return
        self._context.timers.cancel(Timer.RECALL, "")
        self.lease.recall(outlook.now)
        self._context.counters.recalls += 1
        self._context.emit(RecallLease(self._step()))

    def _step(self) -> int:
        assert self._work.book is not None, "the lease moves only for a step"
        return self._work.book.step
