"""The open steps: their responses, each waiting, running or over, their groups, and the queue of those that
wait.

Guarantees: a response ends once; a group is complete exactly when all its responses are finished; the counts
agree with the states (`StepResponses.check`).

The queue is ordered by the tokens that responses keep: the most first, as the published code has it, or the
fewest first (`SchedulingPolicy.least_first`); before that, if the trainer takes whole groups, by the
unfinished responses of the group (`nearest_group_first`). An entry that no longer waits is dropped when it
comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlboost_runtime.core.base.messages import FinishReason, ResponseRequest, StepStarted
from rlboost_runtime.core.base.state_machine import StateMachine


class ResponseState(StrEnum):
    """Where a response is in its life."""

    WAITING = "waiting"
    """No instance generates it: not begun, or to be continued from its kept tokens."""
    RUNNING = "running"
    """An instance holds an assignment for it."""
    EPISODE = "episode"
    """An environment drives it: its turns are requests of their own, and nothing of it is generated while it
    waits for the environment."""
    FINISHED = "finished"
    """Complete, or quarantined; never resumed, begun again only where the journal lost its tokens."""
    CANCELLED = "cancelled"
    """Unfinished when the trainer asked for another step, or withdrawn."""


LEGAL = {
    ResponseState.WAITING: frozenset(
        {ResponseState.RUNNING, ResponseState.FINISHED, ResponseState.CANCELLED}
    ),
    ResponseState.RUNNING: frozenset(
        {ResponseState.WAITING, ResponseState.FINISHED, ResponseState.CANCELLED}
    ),
    ResponseState.EPISODE: frozenset({ResponseState.FINISHED, ResponseState.CANCELLED}),
    ResponseState.FINISHED: frozenset({ResponseState.WAITING}),  # only where its tokens were lost
    ResponseState.CANCELLED: frozenset[ResponseState](),
}


@dataclass(slots=True, eq=False)
class Response:
    """One continuation of an open step. Token counts are estimates while it runs, exact once released or
    over."""

    request: ResponseRequest
    order: int
    """Place in the step's request."""
    lifecycle: StateMachine[ResponseState]
    num_tokens: int = 0
    """Tokens so far, prompt not counted."""
    assignment: int | None = None
    holder: str | None = None
    """The instance that runs it."""
    last_holder: str | None = None
    counted_for: int | None = None
    """The assignment under which the last heartbeat counted its tokens."""
    kv_estimate: int = 0
    """KV tokens booked for it on its holder."""
    failed_on: dict[str, None] = field(default_factory=dict)
    """Distinct instances that it made fail, in order."""
    num_failures: int = 0
    num_assignments: int = 0
    finish_reason: FinishReason | None = None
    keep_tokens: int | None = None
    """The next assignment continues after so many tokens only; None: after all there are."""
    has_yielded: bool = False
    """It gave its place to one of a nearer group: once at most, as each time costs a prefill."""
    meant_for: str | None = None
    """The instance that it was taken away for: a preference of the next assignment only."""

    def begin(self, assignment: int, holder: str, at: float) -> None:
        """Run it on an instance."""
        self.lifecycle.move(ResponseState.RUNNING, f"assignment {assignment} on {holder}", at)
        self.assignment, self.holder = assignment, holder
        self.num_assignments += 1

    def let_go(self) -> None:
        """Forget the instance that ran it."""
        self.last_holder = self.holder
        self.assignment = self.holder = None
        self.kv_estimate = 0

    def check(self) -> None:
        """Assert that it has an assignment exactly while it runs, and a reason once it is finished."""
        running, timeline = self.state is ResponseState.RUNNING, self.lifecycle
        assert running == (self.assignment is not None) == (self.holder is not None), timeline
        assert (self.state is ResponseState.FINISHED) == (self.finish_reason is not None), timeline

    def drop_tokens_beyond(self, kept: int) -> None:
        """Have the next assignment generate again what is beyond `kept` tokens."""
        self.num_tokens = min(self.num_tokens, kept)
        self.keep_tokens = kept if self.keep_tokens is None else min(self.keep_tokens, kept)

    @property
    def kv_limit(self) -> int:
        """KV tokens that it takes at most."""
        return self.request.prompt_tokens + self.request.max_tokens

    @property
    def response(self) -> int:
        """Its number, unique in the run."""
        return self.request.response

    @property
    def group(self) -> int:
        """Its group."""
        return self.request.group

    @property
    def state(self) -> ResponseState:
        """Where it is in its life."""
        return self.lifecycle.state


class StepResponses:
    """The responses of one step."""

    def __init__(self, event: StepStarted) -> None:
        self.step = event.step
        self.policy_version = event.policy_version
        self.started_at = event.at
        self.are_episodes = event.are_episodes
        self.in_flight_updates = event.in_flight_updates
        self.rank = 0 if event.open_from is None else event.step
        """Of steps that are open at once, the lower one goes first."""
        self.responses: dict[int, Response] = {}
        self.complete_groups: list[int] = []
        """In order of completion."""
        self.num_finished = 0
        self.num_running = 0
        self.last_finished_at: float | None = None
        self.is_ahead = event.keeps_lease
        """A step before it is trained, or waited for, by the trainer."""
        self.was_reopened = False
        self.trained = False
        self._unfinished_of: dict[int, int] = {}
        self._members: dict[int, list[Response]] = {}
        self.add(event)

    def add(self, event: StepStarted) -> list[Response]:
        """Add the responses of the event that are new here; return them."""
        begin = ResponseState.EPISODE if event.are_episodes else ResponseState.WAITING
        found = [
            new_response(request, order, event.at, begin)
            for order, request in enumerate(event.requests)
            if request.response not in self.responses
        ]
        for response in found:
            self.responses[response.response] = response
            self._members.setdefault(response.group, []).append(response)
            self._unfinished_of[response.group] = self._unfinished_of.get(response.group, 0) + 1
            self.trained = False
        return found

    @property
    def num_unfinished(self) -> int:
        """Responses still to be finished."""
        return len(self.responses) - self.num_finished

    def members_of(self, group: int) -> Sequence[Response]:
        """Return a group's responses, in the order of the request."""
        return self._members[group]

    def unfinished_of(self, group: int) -> int:
        """Return how many responses of a group are to be finished."""
        return self._unfinished_of[group]

    def is_for(self, event: StepStarted) -> bool:
        """Return True if this is that step under that version, with the same responses or more of them."""
        is_same = (self.step, self.policy_version) == (event.step, event.policy_version)
        return is_same and (not event.requests or event.requests[0].response in self.responses)

    def takes(self, version: int | None) -> bool:
        """Return True if its responses may be generated under `version`."""
        if version is None or not self.in_flight_updates:
            return version == self.policy_version
        return version >= self.policy_version

    def run(self, response: Response, assignment: int, holder: str, at: float) -> None:
        """Give a waiting response to an instance."""
        response.begin(assignment, holder, at)
        self.num_running += 1

    def wait(self, response: Response, why: str, at: float) -> None:
        """Take a running response back."""
        response.lifecycle.move(ResponseState.WAITING, why, at)
        self._let_go(response)

    def finish(self, response: Response, num_tokens: int, reason: FinishReason, at: float) -> bool:
        """End a response; return True if that completed its group."""
        was_running = response.state is ResponseState.RUNNING
        response.lifecycle.move(ResponseState.FINISHED, reason, at)
        if was_running:
            self._let_go(response)
        response.num_tokens, response.finish_reason = num_tokens, reason
        self.num_finished += 1
        self.last_finished_at = at
        self._unfinished_of[response.group] -= 1
        if self._unfinished_of[response.group]:
            return False
        self.complete_groups.append(response.group)
        return True

    def add_turn(self, episode: int, num_tokens: int) -> None:
        """A turn of an episode is over."""
        response = self.responses.get(episode)
        if response is not None and response.state is ResponseState.EPISODE:
            response.num_tokens += num_tokens

    def begin_again(self, response: Response, at: float) -> None:
        """Take back that a response is finished: none of its tokens are left."""
        response.lifecycle.move(ResponseState.WAITING, "its tokens were lost", at)
        response.num_tokens, response.finish_reason, response.keep_tokens = 0, None, None
        self.num_finished -= 1
        self.was_reopened, self.trained = True, False
        self._unfinished_of[response.group] += 1
        if response.group in self.complete_groups:
            self.complete_groups.remove(response.group)

    def cancel(self, response: Response, at: float) -> None:
        """Drop an unfinished response."""
        was_running = response.state is ResponseState.RUNNING
        response.lifecycle.move(ResponseState.CANCELLED, "another step was asked for", at)
        if was_running:
            self._let_go(response)

    def finished_tokens(self) -> list[int]:
        """Return the lengths of the finished responses."""
        return [r.num_tokens for r in self.responses.values() if r.state is ResponseState.FINISHED]

    def mean_finished_tokens(self) -> float | None:
        """Return the mean length of the finished responses, None where none is."""
        if not self.num_finished:
            return None
        lengths = (r.num_tokens for r in self.responses.values() if r.state is ResponseState.FINISHED)
        return sum(lengths) / self.num_finished

    def check(self) -> None:
        """Assert that counts, groups and states agree."""
        states = [r.state for r in self.responses.values()]
        assert self.num_finished == states.count(ResponseState.FINISHED), "finished responses miscounted"
        assert self.num_running == states.count(ResponseState.RUNNING), "running responses miscounted"
        assert ResponseState.CANCELLED not in states, "a cancelled response is in the open step"
        unfinished = dict.fromkeys(self._unfinished_of, 0)
        for response in self.responses.values():
            response.check()
            unfinished[response.group] += response.state is not ResponseState.FINISHED
        assert unfinished == self._unfinished_of, "groups miscounted"
        complete = sorted(group for group, count in unfinished.items() if count == 0)
        assert complete == sorted(self.complete_groups), (
            f"complete groups {complete} != {self.complete_groups}"
        )

    def _let_go(self, response: Response) -> None:
        response.let_go()
        self.num_running -= 1


class OpenSteps:
    """The step that was asked for last, and those before it that stay open."""

    def __init__(self) -> None:
        self.newest: StepResponses | None = None
        self.earlier: dict[int, StepResponses] = {}
        """By number, oldest first."""

    def __iter__(self) -> Iterator[StepResponses]:
        """Iterate over all, oldest first."""
        yield from self.earlier.values()
        if self.newest is not None:
            yield self.newest

    def get(self, step: int) -> StepResponses | None:
        """Return an open step."""
        return next((each for each in self if each.step == step), None)

    def holding(self, response: int) -> StepResponses | None:
        """Return the step of a response."""
        if self.newest is not None and response in self.newest.responses:
            return self.newest
        return next((each for each in self.earlier.values() if response in each.responses), None)

    @property
    def first(self) -> StepResponses | None:
        """The oldest one: the trainer trains it, or waits for it."""
        return next(iter(self.earlier.values())) if self.earlier else self.newest

    @property
    def first_unfinished(self) -> StepResponses | None:
        """The oldest one that has work left."""
        if self.earlier:
            return next((each for each in self if each.num_unfinished), None)
        newest = self.newest
        return newest if newest is not None and newest.num_unfinished else None

    @property
    def num_unfinished(self) -> int:
        """Responses of all that are still to be finished."""
        earlier = sum(each.num_unfinished for each in self.earlier.values()) if self.earlier else 0
        return earlier + (0 if self.newest is None else self.newest.num_unfinished)


def new_response(
    request: ResponseRequest, order: int, at: float, state: ResponseState = ResponseState.WAITING
) -> Response:
    """Return a response that waits; `order`: its place among those that are requested together."""
    life = StateMachine(f"response {request.response}", state, LEGAL, at)
    return Response(request, order, life)


class WaitingQueue:
    """Waiting responses by what their groups lack, if that counts, by the tokens that they keep, then in the
    order of the step's request."""

    def __init__(self, *, least_first: bool = False) -> None:
        self._sign = 1 if least_first else -1
        self._heap: list[tuple[int, int, int, int, Response]] = []

    def add(self, response: Response, num_unfinished: int = 0) -> None:
        """Queue a waiting response, or again under another `num_unfinished` of its group."""
        rank = num_unfinished, self._sign * response.num_tokens, response.order
        heapq.heappush(self._heap, (*rank, response.num_assignments, response))

    def peek(self) -> Response | None:
        """Return the first that waits."""
        while self._heap and not is_current(*self._heap[0][3:]):
            heapq.heappop(self._heap)  # it ended, or was given out, while it was here
        return self._heap[0][4] if self._heap else None

    def pop(self) -> Response:
        """Take out the one that `peek` returned."""
        return heapq.heappop(self._heap)[4]

    def all(self) -> list[Response]:
        """Return all that wait, in no order. Looks at everything: for checks and whole-step decisions."""
        return list({id(e[4]): e[4] for e in self._heap if is_current(*e[3:])}.values())

    def clear(self) -> None:
        """Forget everything."""
        self._heap.clear()


def is_current(num_assignments: int, response: Response) -> bool:
    """True if the response has waited ever since it was queued with so many assignments behind it."""
    return response.num_assignments == num_assignments and response.state is ResponseState.WAITING
