"""Frames from all agents into the token store and the journal, several at a time.

What a frame costs is mostly the number of numpy calls and of journal records, not its tokens. So frames that
arrive soon after a batch of several (`SHARE`) are merged and accepted as one, with one journal record. One
that comes later, or while so few come that each is alone, is accepted at once, as somebody may wait for its
first token. Each sender gets its own
acknowledgement once that record is on stable storage; only then does the core learn what ended.

Guarantees: frames of one sender are accepted in their order; a frame that contradicts itself costs its sender
the connection and touches no other sender's tokens; `settle` leaves nothing gathered.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rlboost_runtime.coordinator.driver.core_driver import TOKENS, CoreDriver
from rlboost_runtime.coordinator.driver.requests import OwnTokens
from rlboost_runtime.coordinator.storage.columns import merge_frames
from rlboost_runtime.coordinator.storage.token_store import AcceptedOfSteps, EndedAssignment
from rlboost_runtime.core.base.messages import Event, Finished, FinishReason, Released, ReleaseReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol.messages import Frame

GATHER_S = 0.02
"""Longest time between two batches while frames come: less than half of the agents' flush interval."""

SHARE = 0.1
"""The pause after a batch of several makes its cost this share of the time."""

NO_OWN_TOKENS = OwnTokens()

MAX_MERGED = 64
"""Most frames accepted as one: a few milliseconds of the event loop's time."""

MAX_QUEUED = 256
"""Frames of one sender that wait before its connection is left unread, which bounds memory."""


class Sender(Protocol):
    """One agent's connection."""

    @property
    def instance(self) -> str:
        """The sending instance."""

    def ack(self, seq: int) -> None:
        """Acknowledge all frames up to `seq`: they are journalled."""

    def fail(self, problem: ProtocolError) -> None:
        """Close the connection: the peer sent something that makes no sense."""


Arrived = tuple[Sender, Frame]


class TokenObserver(Protocol):
    """Follows accepted tokens. Observers decide nothing and must not wait."""

    def observe_tokens(self, batch: Sequence[Arrived], accepted: AcceptedOfSteps, at: float) -> None:
        """Take in which frames were accepted at `at`, in the run's time, and what they changed."""


class Ingest:
    """Takes frames; counts tokens over the life of this process."""

    def __init__(self, driver: CoreDriver, observers: Sequence[TokenObserver] = ()) -> None:
        """Each batch reaches `observers`, in their order, before it is journalled."""
        self._driver = driver
        self._observers = tuple(observers)
        self._arrived: dict[Sender, deque[Frame]] = {}  # the one that waits longest first
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        """Until when frames gather, by the loop's clock."""
        self.tokens_accepted = 0
        self.tokens_dropped = 0
        """Late: their assignment was no longer current, or they left a gap."""
        self.tokens_duplicate = 0

    def take(self, sender: Sender, frame: Frame) -> None:
        """Queue one frame to be accepted within `GATHER_S`."""
        self._arrived.setdefault(sender, deque()).append(frame)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._due_at, loop.time()), self._accept_some)

    def is_behind(self, sender: Sender) -> bool:
        """Return True if so much of a sender's waits that no more should be read from it for now."""
        return len(self._arrived.get(sender, ())) >= MAX_QUEUED

    def settle(self) -> None:
        """Accept everything that has arrived, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._arrived:
            self._accept_batch()

    def _accept_some(self) -> None:
        """Accept one batch; leave the next one to another turn of the loop, so that other tasks can run."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        num_frames = self._accept_batch()
        now = loop.time()
        self._due_at = now + min(GATHER_S, (now - began) / SHARE) if num_frames > 1 else now
        self._timer = loop.call_later(0, self._accept_some) if self._arrived else None

    def _accept_batch(self) -> int:
        """Accept the first frame of each sender; return how many that were."""
        batch = [arrived for arrived in self._take_batch() if self._is_own(*arrived)]
        if batch:
            self._accept_merged(batch)
        return len(batch)

    def _is_own(self, sender: Sender, frame: Frame) -> bool:
        """Fail a sender that answers for another: no honest agent knows another's assignments."""
        try:
            requests = self._driver.requests
            is_foreign = self._driver.store.is_foreign(frame, sender.instance)
            if is_foreign or requests.holds_foreign(frame, sender.instance):
                raise ProtocolError("a frame holds another instance's assignment", "deploy the agent again")
        except ProtocolError as problem:
            sender.fail(problem)
            return False
        return True

    def _take_batch(self) -> list[Arrived]:
        """Take the first frame of each sender, all under the policy version of the very first one."""
        version = next(iter(self._arrived.values()))[0].policy_version
        batch: list[Arrived] = []
        for sender, frames in self._arrived.items():
            if frames[0].policy_version == version:
                batch.append((sender, frames.popleft()))
                if len(batch) == MAX_MERGED:
                    break
        for sender, _ in batch:
            frames = self._arrived.pop(sender)
            if frames:
                self._arrived[sender] = frames  # behind those who still wait for their first
        return batch

    def _accept_merged(self, batch: list[Arrived]) -> None:
        merged = merge_frames([frame for _, frame in batch]) if len(batch) > 1 else None
        if merged is not None:
            try:
                self._accept(batch, merged)
            except ProtocolError:
                pass  # one frame is to blame: the next lines find out which
            else:
                return
        for sender, frame in batch:
            try:
                self._accept([(sender, frame)], frame)
            except ProtocolError as problem:
                sender.fail(problem)

    def _accept(self, batch: Sequence[Arrived], frame: Frame) -> None:
        """Accept the merged `frame` of a batch. Raises `ProtocolError`, and changes nothing then."""
        requests = self._driver.requests
        frame, own = requests.split(frame)
        accepted = self._driver.store.accept(frame)
        self._journal(batch, accepted, NO_OWN_TOKENS if own is None else requests.accept(own))

    def _journal(self, batch: Sequence[Arrived], accepted: AcceptedOfSteps, own: OwnTokens) -> None:
        self.tokens_accepted += accepted.num_accepted + own.num_accepted
        self.tokens_dropped += accepted.num_dropped
        self.tokens_duplicate += accepted.num_duplicate
        at = self._driver.now()
        for observer in self._observers:
            observer.observe_tokens(batch, accepted, at)
        events = self._events(batch, accepted) + own.events
        requests = self._driver.requests

        def committed() -> None:
            for make in events:
                self._driver.apply(make(self._driver.now()))
            for sender, frame in batch:
                sender.ack(frame.seq)

        # Both journals in this order for every frame, so that acknowledgements stay in the frames' order.
        done = partial(requests.journal, own, committed) if requests.is_used else committed
        journal = self._driver.journal
        *first, (step, last) = accepted.records or ((None, b""),)
        for earlier, record in first:
            journal.append(TOKENS + record, step=earlier)
        journal.append(TOKENS + last if last else b"", done, step)

    def _events(self, batch: Sequence[Arrived], accepted: AcceptedOfSteps) -> list[Callable[[float], Event]]:
        """Return makers, by time, of the events that follow once the tokens are journalled."""
        store = self._driver.store
        made: list[Callable[[float], Event]] = []
        for response in accepted.full:
            reason = store.is_complete(response) or FinishReason.LENGTH
            made.append(partial(_finished, response, store.length(response), reason))
        if accepted.endings:
            ended_by = {e.assignment: sender for sender, frame in batch for e in frame.endings}
            for ending in accepted.endings:
                if ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    reason = FinishReason(ending.reason)
                    made.append(partial(_finished, ending.response, ending.num_tokens, reason))
                else:
                    made.append(partial(_released, ended_by[ending.assignment].instance, ending))
        return made


def _finished(response: int, num_tokens: int, reason: FinishReason, at: float) -> Event:
    return Finished(at, response, num_tokens, reason)


def _released(instance: str, ending: EndedAssignment, at: float) -> Event:
    return Released(at, instance, ending.assignment, ending.num_tokens, ReleaseReason(ending.reason))


THRESHOLDS = (50_000, 20, 100)
"""Allocations before a young collection, young ones before a middle one, middle ones before a full one.

Reference counting frees nearly everything in the coordinator; the collector only has to find rare cycles. By
default it walks all long-lived objects every few thousand frames, which takes 5 to 8 % of the coordinator's
time under the load of `benchmarks/ingest`."""


def relax() -> None:
    """Make garbage collection rare; call once the process has imported what it needs."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
