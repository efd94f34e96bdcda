"""Drives the core: events in, commands carried out, in one order, on one event loop.

Guarantees:

- an event is in the event log before anything that follows from it happens;
- tokens are journalled before they are acknowledged and before the core learns that a response ended;
- a restarted coordinator has the same core, the same tokens and the same assignments as the one that died.

Nothing here waits: effects are handed to the links and the fleet, which own their tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec

from rlboost_runtime.coordinator.driver.totals import Observer, Recovered
from rlboost_runtime.coordinator.storage.columns import renumbered
from rlboost_runtime.coordinator.storage.journal import EventLog, Journal
from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    Command,
    CoordinatorRestarted,
    CoreConfig,
    DeliverGroup,
    Event,
    Evict,
    Finished,
    FinishReason,
    GrantLease,
    LaunchMachine,
    LoadVersion,
    RecallLease,
    ResponseRequest,
    RunStarted,
    Sleep,
    StepStarted,
    TerminateMachine,
    Tick,
    Wake,
)
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol.messages import (
    DeliverGroupMessage,
    FinishedResponse,
    StepStartedMessage,
    WorkItem,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.seams import Clock, Disk

log = logging.getLogger(__name__)

STEP_HEADER = b"S"
"""First byte of the journal record that opens a step: what was asked for."""
TOKENS = b"T"
"""First byte of a journal record of accepted tokens."""


class StepHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step's segment starts with."""

    first_response: int
    request: StepStartedMessage
    carried_from: tuple[int, ...] = ()
    """First responses of earlier openings, newest first, whose tokens it took over."""


class Carried(NamedTuple):
    """What the segment of a step holds that was opened before, for the same request."""

    openings: tuple[int, ...]
    """First responses of those openings, newest first."""
    records: list[bytes]


NOTHING_CARRIED = Carried((), [])


class Outlet(Protocol):
    """Where commands go: the agents' links, the trainer's link and the fleet."""

    def to_agent(self, command: Abort | LoadVersion | Sleep | Wake | Evict) -> None:
        """Send a command to an agent; without a connection it is dropped, and repaired on reconnection."""

    def work(self, command: Assign, item: WorkItem) -> None:
        """Send work to an agent."""

    def deliver(self, group: DeliverGroupMessage) -> None:
        """Hand a finished group to the trainer, if it is connected."""

    def lease(self, command: GrantLease | RecallLease) -> None:
        """Grant the GPU to the trainer, or recall it."""

    def fleet(self, command: LaunchMachine | TerminateMachine) -> None:
        """Start or end a machine."""


class RunClock:
    """Seconds since the run began; goes on through restarts and never goes back."""

    def __init__(self, clock: Clock, resume_at: float = 0.0) -> None:
        self._clock = clock
        self._origin = clock.now() - resume_at

    def now(self) -> float:
        """Return the run's time."""
        return self._clock.now() - self._origin


@dataclass(frozen=True, slots=True)
class OpenStep:
    """The step being rolled out: what was asked, and which number its first response has. Its groups are
    0, 1, 2, ... (`links.trainer` refuses others)."""

    request: StepStartedMessage
    first_response: int

    def requests(self) -> tuple[ResponseRequest, ...]:
        """Return one request per response, siblings next to each other."""
        size = self.request.group_size
        return tuple(
            ResponseRequest(
                response=self.first_response + i * size + k,
                group=prompt.group,
                prompt_tokens=len(prompt.token_ids) // 4,
                max_tokens=self.request.max_response_tokens,
            )
            for i, prompt in enumerate(self.request.prompts)
            for k in range(size)
        )

    def group_of(self, response: int) -> int:
        """Return the group of a response of this step."""
        return (response - self.first_response) // self.request.group_size

    def prompt_of(self, response: int) -> bytes:
        """Return the token ids (i32) of a response's prompt."""
        return self.request.prompts[self.group_of(response)].token_ids

    def responses_of(self, group: int) -> range:
        """Return the responses of a group."""
        size = self.request.group_size
        start = self.first_response + group * size
        return range(start, start + size)

    def all_responses(self) -> range:
        """Return the responses of the step."""
        return range(self.first_response, self.first_response + self.num_responses)

    @property
    def num_responses(self) -> int:
        """Responses of the whole step."""
        return len(self.request.prompts) * self.request.group_size


class CoreDriver:
    """Core, tokens, journal and event log of one run."""

    def __init__(
        self,
        run: RunFolder,
        recovered: Recovered,
        clock: Clock,
        disk: Disk,
        outlet: Outlet,
        observers: Sequence[Observer] = (),
        *,
        keep_journal: bool,
    ) -> None:
        """`recovered`: from the run's event log. Each event reaches `observers`, in their order, once its
        commands have been carried out; nothing reaches them or `outlet` before `begin`."""
        self.run = run
        self.core, self.totals = recovered
        self.store = TokenStore()
        self.journal_problem: str | None = None
        self.journal = Journal(run.journal, disk, self._journal_problem)
        self.step: OpenStep | None = None
        self._outlet = outlet
        self._observers = tuple(observers)
        self._keep_journal = keep_journal
        self.tokens_migrated = 0
        """Kept tokens that an instance took over from another, since this process began."""
        self._opening = asyncio.Lock()
        self._pending: deque[Event] = deque()
        self._handling = False
        self._recover(clock, disk)

    # --- events -------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the run's time; never before the last event."""
        return max(self.clock.now(), self.core.now)

    def apply(self, event: Event) -> None:
        """Log one event, let the core handle it, carry out its commands; also from within a command."""
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                self._apply(self._pending.popleft())
        finally:
            self._handling = False

    def tick(self) -> None:
        """Apply a `Tick` if the core's next deadline has passed."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.apply(Tick(self.now()))

    def _apply(self, event: Event) -> None:
        self.events.append(event)
        commands = self.core.handle(event)
        self.totals.observe(event, commands, self.core)
        for command in commands:
            self._carry_out(command)
        for observer in self._observers:
            observer.observe(event, commands, self.core)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Assign():
                self._assign(command)
            case Abort() | LoadVersion() | Sleep() | Wake() | Evict():
                self._outlet.to_agent(command)
            case DeliverGroup(group=group):
                if self.step is not None:
                    self._outlet.deliver(self.finished_group(group))
            case GrantLease() | RecallLease():
                self._outlet.lease(command)
            case LaunchMachine() | TerminateMachine():
                self._outlet.fleet(command)

    def _assign(self, command: Assign) -> None:
        if self.step is None:
            return  # the next step is being opened: it cancels this one's responses
        response = command.response
        offset = self.store.assign(command.assignment, response, command.instance)
        complete = self.store.is_complete(response)
        if complete is not None:
            # The event was lost, the tokens were not: a finished response is never resumed.
            self.store.unassign(command.assignment)
            self._pending.append(Finished(self.now(), response, offset, complete))
            return
        if self.totals.assigned[response] > 1:
            self.tokens_migrated += offset
        request = self.step.request
        item = WorkItem(
            assignment=command.assignment,
            token_ids=self.step.prompt_of(response) + self.store.token_ids(response),
            offset=offset,
            max_new_tokens=request.max_response_tokens - offset,
            policy_version=request.policy_version,
        )
        self._outlet.work(command, item)

    # --- steps --------------------------------------------------------------------------------------------

    async def open_step(
        self,
        request: StepStartedMessage,
        *,
        keeps_lease: bool = False,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the step that the trainer requests; a request for the open step only delivers it again.
        `on_open` is called right before the core learns of it.

        A step is applied to the core only once its header is on stable storage: whatever a later coordinator
        finds in the event log, it finds the prompts for. A run that is ending opens none, so that its last
        step is still there for a run that resumes from before it.
        """
        async with self._opening:
            if self.core.is_ending:
                log_event(log, "step.refused", step=request.step)
                return
            finished: dict[int, FinishReason] = {}
            if self.step is None or self.step.request != request:
                carried = await self._carried(request)
                step, finished = await self._write_header(request, carried)
                if self.core.is_ending:  # decided meanwhile
                    return
                self.step = step
                log_event(
                    log, "step.opened", step=request.step, policy_version=request.policy_version,
                    carried=len(finished),
                )  # fmt: skip
            requests = self.step.requests()
            on_open()
            self.apply(StepStarted(self.now(), request.step, request.policy_version, requests, keeps_lease))
            for response, reason in finished.items():
                if self.core.response(response).finish_reason is None:
                    self.apply(Finished(self.now(), response, self.store.length(response), reason))

    async def _carried(self, request: StepStartedMessage) -> Carried:
        """Return what the journal holds of the same request: a trainer that was killed before its checkpoint
        requests an earlier step again, and the step that it had requested ahead."""
        if self.step is None or self.core.step is None:
            return NOTHING_CARRIED
        await self.journal.flushed()
        records = Journal.read(self.run.journal, request.step)
        first = next(iter(records), None)
        if first is None:
            return NOTHING_CARRIED
        header = msgspec.msgpack.decode(first[1:], type=StepHeader)
        if header.request != request:
            return NOTHING_CARRIED
        return Carried((header.first_response, *header.carried_from), [record[1:] for record in records])

    async def _write_header(
        self, request: StepStartedMessage, carried: Carried
    ) -> tuple[OpenStep, dict[int, FinishReason]]:
        """Begin the step's segment, with the tokens that it takes over under new numbers; return the step and
        which responses are complete. From here on, what still comes for the former step is dropped."""
        known = self.core.step
        lost_header = known is not None and not known.trained and self.totals.open_step == _key(request)
        step = OpenStep(request, self.totals.first_response if lost_header else self.totals.next_response)
        self.step = None
        self._open_store(step)
        self.journal.open_step(request.step, fresh=True)
        header = StepHeader(step.first_response, request, carried.openings)
        self.journal.append(STEP_HEADER + msgspec.msgpack.encode(header))
        finished: dict[int, FinishReason] = {}
        for record in carried.records:
            moved = renumbered(record, step.first_response - carried.openings[0])
            finished.update(self.store.restore(moved))
            self.journal.append(TOKENS + moved)
        await self.journal.flushed()
        if lost_header:
            self._restore_assignments()
        return step, finished

    def _open_store(self, step: OpenStep) -> None:
        first = step.first_response
        self.store.open_step(
            step.request.step,
            range(first, first + step.num_responses),
            step.request.max_response_tokens,
            step.request.stop_token_ids,
        )

    def step_checkpointed(self, step: int) -> None:
        """Forget the tokens of a step that is trained and checkpointed, and of all before it."""
        known = self.core.step
        is_being_trained = known is not None and known.step <= step and not known.trained
        if not self._keep_journal and not is_being_trained:
            self.journal.drop_before(step + 1)

    def finished_group(self, group: int) -> DeliverGroupMessage:
        """Return a group all of whose responses are finished."""
        assert self.step is not None
        return DeliverGroupMessage(
            step=self.step.request.step,
            group=group,
            responses=tuple(
                FinishedResponse(
                    response=response,
                    token_ids=self.store.token_ids(response),
                    logprobs=self.store.logprobs(response),
                    segments=self.store.segments(response),
                    finish_reason=self.core.response(response).finish_reason or FinishReason.STOP,
                )
                for response in self.step.responses_of(group)
            ),
        )

    # --- restart ------------------------------------------------------------------------------------------

    def _recover(self, clock: Clock, disk: Disk) -> None:
        known = self.core.now
        self._is_new = not self.run.events.exists() or self.run.events.stat().st_size == 0
        away = 0.0 if self._is_new else max(0.0, clock.wall() - self.run.events.stat().st_mtime)
        self.clock = RunClock(clock, known + away)
        self.events = EventLog(self.run.events, disk)
        self._late: list[Finished] = []
        if self.core.step is not None:
            self._recover_step(self.core.step.step)

    def _recover_step(self, step: int) -> None:
        records = Journal.read(self.run.journal, step)
        header = next(iter(records), None)
        if header is None:  # trained and dropped: the trainer asks for the next one
            return
        opened = msgspec.msgpack.decode(header[1:], type=StepHeader)
        if opened.first_response != self.totals.first_response:  # of an opening whose event was never logged
            return
        self.step = OpenStep(opened.request, opened.first_response)
        self._open_store(self.step)
        finished: dict[int, FinishReason] = {}
        for record in records:
            finished.update(self.store.restore(record[1:]))
        self._restore_assignments()
        self.journal.open_step(step)
        for response, reason in finished.items():
            if self.core.response(response).finish_reason is None:
                event = Finished(0.0, response, self.store.length(response), reason)
                self._late.append(event)

    def _restore_assignments(self) -> None:
        for assignment, response, instance in self.core.assignments():
            self.store.assign(assignment, response, instance)

    def begin(self, config: CoreConfig) -> None:
        """Start the run with `config`, or go on after a restart with what it was started with."""
        if self._is_new:
            self.apply(RunStarted(0.0, config))
            return
        self.apply(CoordinatorRestarted(self.now()))
        for event in self._late:
            self.apply(replace(event, at=self.now()))

    def _journal_problem(self, problem: str | None) -> None:
        if problem is not None:
            log_event(log, "journal.failed", problem=problem)
        self.journal_problem = problem


def _key(request: StepStartedMessage) -> tuple[int, int]:
    return request.step, request.policy_version
