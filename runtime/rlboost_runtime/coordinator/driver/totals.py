"""Folds over the core's events and commands: the observer protocol, and the running totals of a run.

The totals are a pure fold: replaying the event log after a restart gives the same totals.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from rlboost_runtime.coordinator.storage.journal import START, EventReader, encode_command
from rlboost_runtime.coordinator.storage.snapshot import UnfitSnapshot, code_digest, read_snapshot
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Assign,
    Command,
    CoordinatorRestarted,
    Event,
    EventsLost,
    Finished,
    InstanceJoined,
    RequestArrived,
    RequestWithdrawn,
    RunStarted,
    StepStarted,
    StepTrained,
    TokensLost,
)
from rlboost_runtime.core.core import Core


class Observer(Protocol):
    """Follows what the core does. Observers decide nothing and must not wait."""

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Take in one event that `core` has handled, and the commands that followed from it."""


@dataclass(slots=True)
class RunTotals:
    """Counts since the run began. Tokens are response tokens."""

    requested: int = 0
    finished: int = 0
    tokens_finished: int = 0
    in_step: int = 0
    """Responses of the open step."""
    tokens_in_step: int = 0
    """Tokens of the responses that finished in the open step."""
    tokens_redone: int = 0
    """Tokens of finished responses whose step was opened again under another version."""
    assigned: Counter[int] = field(default_factory=Counter)
    """Assignments per response of the open step."""
    holders: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Instance and epoch that each response of the open step was assigned to last."""
    migrated: set[int] = field(default_factory=set)
    rebalanced: set[int] = field(default_factory=set)
    """Responses of the open step that are counted below."""
    responses_migrated: int = 0
    """Responses that went on elsewhere because their instance was lost or about to go."""
    responses_rebalanced: int = 0
    """Responses that went on elsewhere although their instance stayed: it gave them up at the end of a
    window, or for balance."""
    open_step: tuple[int, int] | None = None
    """(step, policy version) of the newest step."""
    earlier: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(policy version, first response) of the steps that stay open beside it."""
    trained_step: int = -1
    first_response: int = 0
    """Number of the open step's first response."""
    next_response: int = 0
    """Number of the next response to be asked for; never reused."""
    next_epoch: int = 1
    """Epoch of the next registration; never reused."""
    next_request: int = FIRST_REQUEST
    """Number of the next request outside a step; never reused."""
    requests_finished: int = 0
    request_tokens: int = 0
    """Tokens of the requests that finished, and of those that were withdrawn before."""
    boot: str = ""
    """The head's boot under which the last coordinator began; empty where it is unknown."""
    num_events: int = 0
    num_commands: int = 0
    _digest: bytes = b""

    @property
    def commands_digest(self) -> str:
        """Digest of all commands so far; replaying the event log through a new core gives the same one."""
        return self._digest.hex()

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Add one event and the commands that followed from it."""
        self.num_events += 1
        self.num_commands += len(commands)
        match event:
            case StepStarted():
                self._step_started(event)
            case RequestArrived(request=request):
                self.next_request = max(self.next_request, request.response + 1)
            case Finished(response=response, num_tokens=num_tokens) if response >= FIRST_REQUEST:
                self.requests_finished += 1
                self.request_tokens += num_tokens
            case RequestWithdrawn(num_tokens=num_tokens):
                self.request_tokens += num_tokens
            case Finished(num_tokens=num_tokens):
                self.finished += 1
                self.tokens_finished += num_tokens
                self.tokens_in_step += num_tokens
            case TokensLost(num_tokens=num_tokens):
                self.finished -= 1
                self.tokens_finished -= num_tokens
                self.tokens_in_step -= num_tokens
            case EventsLost(next_epoch=epoch, next_response=response):
                self.next_epoch = max(self.next_epoch, epoch)
                self.next_response = max(self.next_response, response)
            case RunStarted(boot=boot) | CoordinatorRestarted(boot=boot):
                self.boot = boot
            case StepTrained(step=step):
                self.trained_step = step
            case InstanceJoined(epoch=epoch):
                self.next_epoch = max(self.next_epoch, epoch + 1)
            case _:
                pass
        for command in commands:
            self._digest = hashlib.blake2b(self._digest + encode_command(command), digest_size=16).digest()
            if isinstance(command, Assign):
                self._assign(command, core)

    def _step_started(self, event: StepStarted) -> None:
        step, requests = event.step, event.requests
        first = requests[0].response if requests else self.next_response
        known = self.earlier.get(step)
        if known is not None and known == (event.policy_version, first):
            return  # asked for again
        is_other = bool(requests) and first != self.first_response
        if self.open_step == (step, event.policy_version) and not is_other:
            self.requested += max(0, len(requests) - self.in_step)  # perhaps more of them
            self.in_step = max(self.in_step, len(requests))
        else:
            self._open(event, first)
        if requests:
            self.next_response = max(self.next_response, requests[-1].response + 1)

    def _open(self, event: StepStarted, first: int) -> None:
        step = event.step
        if self.open_step is not None:
            if step <= self.open_step[0]:
                self.tokens_redone += self.tokens_in_step
            self.earlier[self.open_step[0]] = self.open_step[1], self.first_response
        least = step if event.open_from is None else event.open_from
        self.earlier = {each: known for each, known in self.earlier.items() if least <= each < step}
        self.open_step = (step, event.policy_version)
        self.requested += len(event.requests)
        self.in_step = len(event.requests)
        self.first_response = first
        self.tokens_in_step = 0
        since = min((known[1] for known in self.earlier.values()), default=first)
        self.assigned = Counter({each: n for each, n in self.assigned.items() if each >= since})
        self.holders = {each: holder for each, holder in self.holders.items() if each >= since}
        self.migrated = {each for each in self.migrated if each >= since}
        self.rebalanced = {each for each in self.rebalanced if each >= since}

    def _assign(self, command: Assign, core: Core) -> None:
        response, holder = command.response, (command.instance, command.epoch)
        self.assigned[response] += 1
        last = self.holders.get(response)
        self.holders[response] = holder
        if last is None or last == holder:
            return
        former = core.instances.get(last[0])
        stays = (
            former is not None
            and former.epoch == last[1]
            and former.is_alive
            and former.is_connected
            and not former.is_draining
        )
        if stays and response not in self.rebalanced:
            self.rebalanced.add(response)
            self.responses_rebalanced += 1
        elif not stays and response not in self.migrated:
            self.migrated.add(response)
            self.responses_migrated += 1


class Recovered(NamedTuple):
    """What the event log of a run leads to; of a new run: nothing yet."""

    core: Core
    totals: RunTotals
    log: EventReader
    """How far the log could be read."""
    num_replayed: int
    """Events after the snapshot."""
    problem: str = ""
    """Why the snapshot was not used, in words."""


def snapshot_code() -> str:
    """Return what names the code that a snapshot must be of."""
    return code_digest(__file__)


def recover(events: Path, snapshot: Path | None = None) -> Recovered:
    """Replay the event log through a new core, or from the snapshot on, up to its first damaged line."""
    core, totals, start, problem = Core(), RunTotals(), START, ""
    if snapshot is not None:
        try:
            (core, totals), start = read_snapshot(snapshot, snapshot_code(), events)
        except FileNotFoundError:
            pass
        except (UnfitSnapshot, OSError) as error:
            problem = f"{snapshot} is not used, the whole event log is replayed: {error}"
    reader = EventReader(events, start)
    for event in reader:
        totals.observe(event, core.handle(event), core)
    return Recovered(core, totals, reader, reader.place.num_lines - start.num_lines, problem)
