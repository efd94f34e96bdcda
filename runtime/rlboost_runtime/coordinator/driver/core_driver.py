"""Drives the core: events in, commands carried out, in one order, on one event loop.

Guarantees:

- an event is in the event log before anything that follows from it happens;
- tokens are journalled before they are acknowledged and before the core learns that a response ended;
- a restarted coordinator has the same core, the same tokens and the same assignments as the one that died;
- where the event log calls a response finished that the journal does not hold as it was finished, it is
  generated again: journal and event log agree before anything is handed to the trainer;
- where the event log has lost its end (a power cut, a damaged line), all instances register anew, and no
  number that they may know is given out again.

What was repaired is in `repairs`, in words.

Nothing here waits: effects are handed to the links and the fleet, which own their tasks.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from rlboost_runtime.coordinator.driver.requests import RequestDesk
from rlboost_runtime.coordinator.driver.totals import Observer, Recovered, snapshot_code
from rlboost_runtime.coordinator.storage.columns import renumbered
from rlboost_runtime.coordinator.storage.journal import (
    EventLog,
    EventReader,
    Journal,
    SegmentReader,
    segment_path,
)
from rlboost_runtime.coordinator.storage.snapshot import SnapshotWriter
from rlboost_runtime.coordinator.storage.token_store import StepStores, TokenStore
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    Command,
    CoordinatorRestarted,
    CoreConfig,
    DeliverGroup,
    EndRequest,
    Event,
    EventsLost,
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
    StepTrained,
    TerminateMachine,
    Tick,
    TokensLost,
    VersionPublished,
    Wake,
)
from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.core.state.responses import Response, StepResponses
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol.messages import (
    DeliverGroupMessage,
    DeliverResponseMessage,
    FinishedResponse,
    PromptSpec,
    StepStartedMessage,
    WorkItem,
)
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.seams import Clock, Disk

log = logging.getLogger(__name__)

STEP_HEADER = b"S"
"""First byte of the journal record that opens a step: what was asked for; later in a segment, of one that
extends the step."""
TOKENS = b"T"
"""First byte of a journal record of accepted tokens."""
FORGOTTEN = b"F"
"""First byte of a journal record of responses (u32) whose tokens before it do not count."""


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
    request: StepStartedMessage | None = None
    """The longer one of that request and the present one."""
    is_other: bool = False
    """The segment is of another request for the step: nothing is taken over, not its numbers either."""


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
    _starts: tuple[int, ...] = field(init=False, repr=False)
    """First response of each group, and the one after the last."""

    def __post_init__(self) -> None:
        sizes = (prompt.num_responses or self.request.group_size for prompt in self.request.prompts)
        object.__setattr__(self, "_starts", tuple(accumulate(sizes, initial=self.first_response)))

    def requests(self) -> tuple[ResponseRequest, ...]:
        """Return one request per response, siblings next to each other."""
        return tuple(
            ResponseRequest(response, prompt.group, len(prompt.token_ids) // 4, self._limit_of(prompt))
            for prompt in self.request.prompts
            for response in self.responses_of(prompt.group)
        )

    def limits(self) -> list[int]:
        """Return the most tokens of each response."""
        return [request.max_tokens for request in self.requests()]

    def _limit_of(self, prompt: PromptSpec) -> int:
        return prompt.max_tokens or self.request.max_response_tokens

    def work(self, response: int, assignment: int, kept: bytes, version: int) -> WorkItem:
        """Return an assignment of a response that goes on after the `kept` token ids (i32) under `version`,
        which its engine serves."""
        prompt, offset = self.prompt_of(response), len(kept) // 4
        return WorkItem(
            assignment,
            prompt.token_ids + kept,
            offset,
            self._limit_of(prompt) - offset,
            version,
            prompt.sampling,
        )

    def prompt_of(self, response: int) -> PromptSpec:
        """Return the prompt of a response of this step."""
        return self.request.prompts[bisect_right(self._starts, response) - 1]

    def responses_of(self, group: int) -> range:
        """Return the responses of a group."""
        return range(self._starts[group], self._starts[group + 1])

    def all_responses(self) -> range:
        """Return the responses of the step."""
        return range(self.first_response, self._starts[-1])


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
        self.core, self.totals, *_ = recovered
        self.repairs: list[str] = [recovered.problem] if recovered.problem else []
        """What of event log and journal was lost or damaged when this process began, for people."""
        self.store = StepStores()
        self.journal_problem: str | None = None
        self.journal = Journal(run.journal, disk, self._journal_problem, lambda: self.events.size)
        self.requests = RequestDesk(
            run.requests,
            lambda folder: Journal(folder, disk, self._journal_problem),
            keeps_past=keep_journal,
        )
        self.step: OpenStep | None = None
        """The one that was asked for last; None while it is being opened."""
        self.earlier: dict[int, OpenStep] = {}
        """Those before it that stay open."""
        self.wanted = range(2**31)
        """The newest step's groups that the trainer has asked for and does not have. One that was killed has
        not asked again for all that a step has which was extended."""
        self._outlet = outlet
        self._observers = list(observers)
        self._keep_journal = keep_journal
        self.tokens_migrated = 0
        """Kept tokens that an instance took over from another, since this process began."""
        self._opening = asyncio.Lock()
        self._pending: deque[Event] = deque()
        self._handling = False
        self._fault: OSError | None = None
        self._is_broken = asyncio.Event()
        self._recover(clock, disk, recovered.log)
        self._snapshots = SnapshotWriter(run.snapshot, snapshot_code(), clock, recovered.num_replayed)

    # --- events -------------------------------------------------------------------------------------------

    def add_observer(self, observer: Observer) -> None:
        """Have one more observer, which itself needs this driver, follow from the next event on."""
        self._observers.append(observer)

    def now(self) -> float:
        """Return the run's time; never before the last event."""
        return max(self.clock.now(), self.core.now)

    def apply(self, event: Event) -> None:
        """Log one event, let the core handle it, carry out its commands; also from within a command.

        Raises `OSError` if it cannot be logged, and for every later one: the process has to end, as whoever
        comes next would wait for what was lost.
        """
        if self._fault is not None:
            raise self._fault
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                self._apply(first := self._pending.popleft())
                is_quiet = isinstance(first, StepTrained)
                self._snapshots.after_event((self.core, self.totals), self.events.place, is_quiet=is_quiet)
        finally:
            self._handling = False

    async def broken(self) -> None:
        """Wait until an event could not be logged, and raise why: `apply` may be called in a callback, whose
        errors nobody sees."""
        await self._is_broken.wait()
        assert self._fault is not None
        raise self._fault

    def tick(self) -> None:
        """Apply a `Tick` if the core's next deadline has passed."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.apply(Tick(self.now()))

    def _apply(self, event: Event) -> None:
        try:
            self.events.append(event)
        except OSError as fault:
            self._fault = fault
            self._is_broken.set()
            raise
        commands = self.core.handle(event)
        if isinstance(event, StepTrained):
            self._forget_closed()
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
            case DeliverGroup(step=number, group=group):
                step = self.open_step_of(number)
                is_wanted = step is not self.step or group in self.wanted
                if step is not None and not step.request.are_episodes and is_wanted:
                    self._outlet.deliver(self.finished_group(step, group))
            case EndRequest(response=response, reason=reason):
                if reason is FinishReason.QUARANTINED:
                    self.requests.complete(response, reason)
            case GrantLease() | RecallLease():
                self._outlet.lease(command)
            case LaunchMachine() | TerminateMachine():
                self._outlet.fleet(command)

    def _assign(self, command: Assign) -> None:
        response = command.response
        if response >= FIRST_REQUEST:
            self._assign_request(command)
            return
        step = self._step_of(response)
        if step is None:
            return  # the next step is being opened: it cancels this one's responses
        offset = self.store.assign(command.assignment, response, command.instance)
        complete = self.store.is_complete(response)
        if complete is not None:
            # A finished response is never resumed. The event was lost, or its tokens are not on the disk yet.
            self.store.unassign(command.assignment)
            self.journal.append(b"", lambda: self.apply(Finished(self.now(), response, offset, complete)))
            return
        if self.totals.assigned[response] > 1:
            self.tokens_migrated += offset
        kept, version = self.store.token_ids(response), self.core.instances[command.instance].version
        assert version is not None, "only instances that serve are given work"
        self._outlet.work(command, step.work(response, command.assignment, kept, version))

    def _assign_request(self, command: Assign) -> None:
        version = self.core.instances[command.instance].version
        item = self.requests.assign(command.assignment, command.response, command.instance, version or 0)
        if item is None:
            self.requests.complete(command.response)
            return
        if item.offset:
            self.tokens_migrated += item.offset
        self._outlet.work(command, item)

    def length(self, response: int) -> int:
        """Return how many tokens a response of an open step, or an open request, has."""
        return self.requests.length(response) if response >= FIRST_REQUEST else self.store.length(response)

    # --- steps --------------------------------------------------------------------------------------------

    @property
    def open_steps(self) -> list[OpenStep]:
        """All open steps, the one that was asked for last at the end."""
        return [*self.earlier.values(), *([] if self.step is None else [self.step])]

    def open_step_of(self, step: int) -> OpenStep | None:
        """Return an open step by its number."""
        return next((each for each in self.open_steps if each.request.step == step), None)

    def _step_of(self, response: int) -> OpenStep | None:
        """Return the open step of a response."""
        return next((step for step in self.open_steps if response in step.all_responses()), None)

    def _forget_closed(self) -> None:
        """Drop earlier steps that the core has closed."""
        open_steps = {book.step for book in self.core.open_steps}
        if self.earlier.keys() - open_steps:
            self.earlier = {step: each for step, each in self.earlier.items() if step in open_steps}
            self._keep_stores()

    def _keep_stores(self) -> None:
        self.store.keep({step.request.step for step in self.open_steps})

    async def open_step(
        self,
        request: StepStartedMessage,
        *,
        keeps_lease: bool = False,
        open_from: int | None = None,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the step that the trainer requests. A request for an open step, or for its first prompts,
        only delivers it again; one with more prompts adds them. `open_from`: as in the request, which has
        neither that nor `keeps_lease` here. `on_open` is called right before the core learns of it.

        A step is applied to the core only once its header is on stable storage: whatever a later coordinator
        finds in the event log, it finds the prompts for. A run that is ending opens none, so that its last
        step is still there for a run that resumes from before it.
        """
        async with self._opening:
            if self.core.is_ending:
                log_event(log, "step.refused", step=request.step)
                return
            finished: dict[int, FinishReason] = {}
            step = self.earlier.get(request.step)
            if step is not None and request.begins(step.request):
                request = step.request
            elif self.step is not None and request.begins(self.step.request):
                request = self.step.request
            elif self.step is not None and self.step.request.begins(request):
                await self._extend(self.step, request)
                if self.core.is_ending:
                    return
            else:
                carried = await self._carried(request)
                request = carried.request or request
                self._keep_open(request.step if open_from is None else open_from, request.step)
                step, finished = await self._write_header(request, carried)
                if self.core.is_ending:  # decided meanwhile
                    return
                self.step = step
                log_event(
                    log, "step.opened", step=request.step, policy_version=request.policy_version,
                    carried=len(finished),
                )  # fmt: skip
            step = self.open_step_of(request.step)
            assert step is not None
            requests = step.requests()
            on_open()
            for lost in self._disagreements(step):
                self.apply(lost)
            self.apply(
                StepStarted(
                    self.now(), request.step, request.policy_version, requests, keeps_lease,
                    are_episodes=request.are_episodes, in_flight_updates=request.in_flight_updates,
                    open_from=open_from,
                )
            )  # fmt: skip
            for response, reason in finished.items():
                if self.core.response(response).finish_reason is None:
                    self.apply(Finished(self.now(), response, self.store.length(response), reason))

    def _keep_open(self, first: int, before: int) -> None:
        """Go on with the open steps from `first` on; those after `before` are closed."""
        steps = {step.request.step: step for step in self.open_steps}
        known = {book.step for book in self.core.open_steps if not book.trained}
        self.earlier = {
            number: step for number, step in steps.items() if first <= number < before and number in known
        }
        self.step = None
        self._keep_stores()

    async def _extend(self, step: OpenStep, request: StepStartedMessage) -> None:
        """Add what a longer request for the open step asks for, behind what it has. What comes meanwhile of
        its first prompts is taken in as before."""
        longer = OpenStep(request, step.first_response)
        self.store.of(request.step).extend(longer.limits()[len(step.all_responses()) :])
        self.journal.append(_header(StepHeader(longer.first_response, request)))
        await self.journal.flushed()
        self.step = longer
        log_event(log, "step.extended", step=request.step, prompts=len(request.prompts))

    async def _carried(self, request: StepStartedMessage) -> Carried:
        """Return what the journal holds of the same request: a trainer that was killed before its checkpoint
        requests an earlier step again, and the step that it had requested ahead. Of two that differ in
        further prompts the longer one counts."""
        await self.journal.flushed()
        reader = Journal.read(self.run.journal, request.step)
        records = list(reader)
        headers = [step_header(record) for record in records if record.startswith(STEP_HEADER)]
        if not headers:
            return NOTHING_CARRIED
        first, asked = headers[0], headers[-1].request
        if not asked.begins(request) and not request.begins(asked):
            return NOTHING_CARRIED._replace(is_other=True)
        longer = request if asked.begins(request) else asked
        tokens = [record for record in records if not record.startswith(STEP_HEADER)]
        carried = Carried((first.first_response, *first.carried_from), tokens, longer)
        self._note_damage(reader)
        return carried

    async def _write_header(
        self, request: StepStartedMessage, carried: Carried
    ) -> tuple[OpenStep, dict[int, FinishReason]]:
        """Begin the step's segment, with the tokens that it takes over under new numbers; return the step and
        which responses are complete. From here on, what still comes for the former step is dropped."""
        known = self.core.step
        step = OpenStep(request, self.totals.first_response)
        lost_header = (
            known is not None
            and not known.trained
            and self.totals.open_step == _key(request)
            and not carried.is_other
            and len(known.responses) <= len(step.all_responses())
        )
        if not lost_header:
            step = OpenStep(request, self.totals.next_response)
        self._open_store(step)
        self.journal.open_step(request.step, fresh=True)
        openings = tuple(first for first in carried.openings if first != step.first_response)
        header = StepHeader(step.first_response, request, openings)
        self.journal.append(_header(header))
        moved = [_moved(record, step.first_response - carried.openings[0]) for record in carried.records]
        step, finished = self._restore(step, moved)
        for record in moved:
            self.journal.append(record)
        await self.journal.flushed()
        if lost_header:
            self._restore_assignments()
        return step, finished

    def _open_store(self, step: OpenStep) -> None:
        store = TokenStore()
        self.store.add(step.request.step, store)
        store.open_step(
            step.request.step,
            step.all_responses(),
            step.limits(),
            step.request.stop_token_ids,
            _vocabulary(self.run.weights / f"v{step.request.policy_version:06d}" / "config.json"),
        )

    def episode_ended(self, step: int, number: int, num_tokens: int) -> None:
        """Finish an episode of the open step; of another one it means nothing any more."""
        opened = self.step
        if opened is None or opened.request.step != step or not opened.request.are_episodes:
            return
        response = opened.all_responses()[number]
        if self.core.response(response).finish_reason is None:
            self.apply(Finished(self.now(), response, num_tokens, FinishReason.STOP))

    @property
    def is_step_known(self) -> bool:
        """False where the core has not learned of all responses of the open step, before a restart."""
        if self.step is None or self.core.step is None:
            return False
        return all(response in self.core.step.responses for response in self.step.all_responses())

    def step_checkpointed(self, step: int) -> None:
        """Forget the tokens of a step that is trained and checkpointed, and of all before it."""
        is_being_trained = any(book.step <= step and not book.trained for book in self.core.open_steps)
        if not self._keep_journal and not is_being_trained:
            self.journal.drop_before(step + 1)

    def finished_group(self, step: OpenStep, group: int) -> DeliverGroupMessage:
        """Return a group of an open step all of whose responses are finished."""
        for response in map(self.core.response, step.responses_of(group)):
            if not self._holds(step, response):
                raise RuntimeFault(
                    f"the journal does not hold response {response.response} as it was finished",
                    "the coordinator restarts and has it generated again",
                )
        responses = tuple(map(self._finished_response, step.responses_of(group)))
        return DeliverGroupMessage(step=step.request.step, group=group, responses=responses)

    def _finished_response(self, response: int) -> FinishedResponse:
        return FinishedResponse(
            response=response,
            token_ids=self.store.token_ids(response),
            logprobs=self.store.logprobs(response),
            segments=self.store.segments(response),
            finish_reason=self.core.response(response).finish_reason or FinishReason.STOP,
        )

    def finished_early(self, response: int) -> DeliverResponseMessage | None:
        """Return a response of an open step that is finished before its group; None: it is not such a one."""
        step = self._step_of(response)
        if step is None or step.request.are_episodes:
            return None
        known = self.core.response(response)
        if known.finish_reason in (None, FinishReason.QUARANTINED):
            return None
        siblings = step.responses_of(known.group)
        is_complete = all(self.core.response(each).finish_reason is not None for each in siblings)
        if is_complete or not self._holds(step, known):
            return None
        place = response - siblings.start
        return DeliverResponseMessage(
            step.request.step, known.group, place, self._finished_response(response)
        )

    # --- restart ------------------------------------------------------------------------------------------

    def _recover(self, clock: Clock, disk: Disk, read: EventReader) -> None:
        known, path = self.core.now, self.run.events
        self.is_new = read.good_bytes == 0
        """The run has not begun: its event log is empty."""
        away = 0.0 if self.is_new else max(0.0, clock.wall() - path.stat().st_mtime)
        self.clock = RunClock(clock, known + away)
        if read.problem:
            shutil.copyfile(path, self.run.damaged_events)
        self.events = EventLog(path, disk, read.place)
        self._late: list[Event] = []
        why = self._why_events_are_lost(read)
        if why:
            self.repairs.append(why)
            self._late += self._events_lost(int(clock.wall()))
        if read.num_unchecked:
            log_event(log, "events.unchecked", lines=read.num_unchecked, why="of an earlier version")
        for book in self.core.open_steps:
            self._recover_step(book)
        if not why:
            self._restore_assignments()
        self._late += self.requests.recover(self.core, self.totals.next_request, resumes=not why)

    def _why_events_are_lost(self, read: EventReader) -> str:
        """Return why the event log may have lost its end, "" where it has not."""
        restored = read_json(self.run.restored)
        if restored is not None and not restored["taken"]:
            when = datetime.datetime.fromtimestamp(restored["at"], datetime.UTC)
            copy = f"its copy at {restored['url']}, as of {when:%F %T} UTC"
            return f"the head was lost: the run continues from {copy}"
        if read.problem:
            return f"{read.problem}; the whole file was kept as events.damaged.log"
        segments = sorted(self.run.journal.glob("step-*.seg"))
        newest = segments[-1] if segments else None
        last_mark = 0
        for path in segments[-max(1, len(self.core.open_steps)) :]:
            reader = SegmentReader(path)
            for _ in reader:
                last_mark = max(last_mark, reader.mark)
        if read.good_bytes < last_mark:
            found = f"{self.run.events} has {read.good_bytes} bytes, the journal saw {last_mark}"
            return f"the event log has lost its end: {found}"
        if self.is_new:
            has_begun = newest is not None or self.run.checkpoints.exists() or self.run.metrics.exists()
            return f"{self.run.events} is missing or empty although the run had begun" if has_begun else ""
        if self.totals.boot not in ("", _boot()):
            return "the head was rebooted: a power cut may have taken the last seconds of its event log"
        return ""

    def _events_lost(self, floor: int) -> list[Event]:
        """Return what the core has to know then. `floor`: numbers that grow by less than one a second are
        below it, as it is the time in seconds."""
        next_response = self.totals.next_response
        for path in self.run.journal.glob("step-*.seg"):
            for header in (step_header(each) for each in SegmentReader(path) if each.startswith(STEP_HEADER)):
                step = OpenStep(header.request, header.first_response)
                next_response = max(next_response, step.all_responses().stop)
        events: list[Event] = [
            EventsLost(0.0, floor, max(floor, self.totals.next_epoch), next_response),
        ]
        if versions := [int(path.name[1:]) for path in self.run.weights.glob("v[0-9]*")]:
            events.append(VersionPublished(0.0, max(versions), self.core.weight_bytes))
        return events

    def _recover_step(self, book: StepResponses) -> None:
        """Read the tokens of a step that the core has open."""
        reader = Journal.read(self.run.journal, book.step)
        records = iter(reader)
        header = next(records, None)
        if header is None:  # trained and dropped: the trainer asks for the next one
            self._note_damage(reader)
            return
        opened = step_header(header)
        first_response = next(iter(book.responses), self.totals.first_response)
        if opened.first_response != first_response:  # of an opening whose event was never logged
            return
        step = OpenStep(opened.request, opened.first_response)
        self._open_store(step)
        step, finished = self._restore(step, records)
        self._note_damage(reader)
        if len(book.responses) > len(step.all_responses()):  # what extended it is damaged
            self._keep_stores()
            return
        if book is self.core.step:
            self.step = step
        else:
            self.earlier[book.step] = step
        self.journal.open_step(book.step)
        if not book.trained:
            self._late += self._disagreements(step)
        for response, reason in finished.items():
            known = book.responses.get(response)
            if known is not None and known.finish_reason is None:  # of others the core has lost the request
                event = Finished(0.0, response, self.store.length(response), reason)
                self._late.append(event)

    def _restore(self, step: OpenStep, records: Iterable[bytes]) -> tuple[OpenStep, dict[int, FinishReason]]:
        """Apply journal records to a step and its store; return the step, perhaps extended, and which
        responses are complete, and why."""
        finished: dict[int, FinishReason] = {}
        store = self.store.of(step.request.step)
        for record in records:
            if record.startswith(STEP_HEADER):
                former, header = step, step_header(record)
                step = OpenStep(header.request, former.first_response)
                store.extend(step.limits()[len(former.all_responses()) :])
            elif record.startswith(FORGOTTEN):
                for response in msgspec.msgpack.decode(record[1:], type=list[int]):
                    store.forget(response)
                    finished.pop(response, None)
            else:
                finished.update(store.restore(record[1:]))
        return step, finished

    def _holds(self, step: OpenStep, response: Response) -> bool:
        """Return True if the journal has what the core says of a finished response. The trainer keeps
        episodes."""
        reason = response.finish_reason
        if reason is None or reason is FinishReason.QUARANTINED or step.request.are_episodes:
            return True
        return self.store.holds(response.response, response.num_tokens, reason)

    def _disagreements(self, step: OpenStep) -> list[TokensLost]:
        """Forget what the journal has of a step's responses that the core knows otherwise; return what it has
        to know then."""
        books = [book for book in self.core.open_steps if step.first_response in book.responses]
        known = [
            book.responses[response]
            for book in books
            for response in step.all_responses()
            if response in book.responses  # or the core has not learned of them before a restart
        ]
        lost = [response for response in known if not self._holds(step, response)]
        if not lost:
            return []
        numbers = [response.response for response in lost]
        for number in numbers:
            self.store.forget(number)
        number = step.request.step
        self.journal.append(FORGOTTEN + msgspec.msgpack.encode(numbers), step=number)
        self.repairs.append(
            f"step {number}: {len(lost)} finished responses ({numbers[0]}, ...) are not in"
            f" {segment_path(self.run.journal, number)} as they were finished: they are"
            " generated again"
        )
        return [TokensLost(self.now(), response.response, response.num_tokens) for response in lost]

    def _note_damage(self, reader: SegmentReader) -> None:
        if reader.problem:
            log_event(log, "journal.cut", problem=reader.problem)
        if reader.problem and not reader.is_torn:
            self.repairs.append(reader.problem)

    def _restore_assignments(self) -> None:
        for assignment, response, instance in self.core.assignments():
            if response < FIRST_REQUEST and self._step_of(response) is not None:
                self.store.assign(assignment, response, instance)

    def begin(self, config: CoreConfig, prior: Prior | None = None, num_named: int = 0) -> None:
        """Start the run with `config` and what a former run measured, or go on after a restart with what it
        was started with. `num_named`: as `CoordinatorRestarted.num_named`."""
        if self.is_new:
            self.apply(RunStarted(0.0, config, _boot(), prior))
        else:
            self.apply(CoordinatorRestarted(self.now(), _boot(), num_named))
        self.requests.begin(self.apply, self.now)
        for event in self._late:
            self.apply(replace(event, at=self.now()))
        restored = read_json(self.run.restored)
        if restored is not None and not restored["taken"]:
            write_json(self.run.restored, {**restored, "taken": True}, durably=True)

    async def close(self) -> None:
        """Write both journals to their ends, and make the event log safe: nobody reads it again who could
        mend it. Raises `RuntimeFault` when the disk refuses."""
        await self.journal.close()
        await self.requests.close()
        try:
            self.events.sync()
        except OSError as error:
            raise RuntimeFault(
                f"{self.run.events}: {error.strerror or error}", "make room on its disk, or replace that"
            ) from error

    def _journal_problem(self, problem: str | None) -> None:
        if problem is not None:
            log_event(log, "journal.failed", problem=problem)
        self.journal_problem = problem


def step_header(record: bytes) -> StepHeader:
    """Return what a journal record says that opens or extends a step."""
    return msgspec.msgpack.decode(record[1:], type=StepHeader)


def _header(header: StepHeader) -> bytes:
    return STEP_HEADER + msgspec.msgpack.encode(header)


def _moved(record: bytes, shift: int) -> bytes:
    """Return a record of a step's segment with `shift` added to the numbers of its responses."""
    if record.startswith(FORGOTTEN):
        numbers = msgspec.msgpack.decode(record[1:], type=list[int])
        return FORGOTTEN + msgspec.msgpack.encode([number + shift for number in numbers])
    return TOKENS + renumbered(record[1:], shift)


def _vocabulary(config: Path) -> int:
    """Return how many token ids a version's model has; where it does not say, as many as a frame can hold."""
    known = json.loads(config.read_bytes()) if config.exists() else {}
    return int(known.get("vocab_size") or known.get("text_config", {}).get("vocab_size") or 2**31)


def _boot() -> str:
    """Return what names this boot of the machine; "" where the system has no name for it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _key(request: StepStartedMessage) -> tuple[int, int]:
    return request.step, request.policy_version
