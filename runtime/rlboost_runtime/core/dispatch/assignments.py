"""The assignments of responses, of the open steps and requested on their own, to instances.

Guarantees: an assignment number names one attempt and is never reused; a response has at most one current
assignment; whatever an instance loses goes back to the queue with the tokens it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    DeliverGroup,
    EndRequest,
    FinishReason,
    ResponseRequest,
    StepStarted,
)
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.balance import Balancer
from rlboost_runtime.core.dispatch.dispatcher import Dispatcher
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.rates import GenerationRate, Lengths
from rlboost_runtime.core.state.requests import OpenRequests
from rlboost_runtime.core.state.responses import OpenSteps, Response, ResponseState, StepResponses

FAILURES_PER_INSTANCE = 3
"""A response is quarantined after `quarantine_after` distinct instances, or after this many failures per
such instance in all: with fewer instances alive than that it would otherwise fail for ever and hold up the
run."""

BALANCE_S = 1.0
"""Least pause between two moves of running responses: the first must show in heartbeats before the second."""
YIELD_S = 2.0
"""Least pause between two looks at whether running responses should give way."""
YIELD_LOOK = 128
"""Running responses that are looked at per pause; with more of them the pauses are longer."""
YIELD_MARGIN = 2
"""A response gives way to one whose group lacks this many fewer. With 1 to 4 the gain is 1.2 to 3.6 %, and
with 2 the greatest (simulated)."""
SMALL_FLEET = 16
"""Eligible instances that share one move per pause; the pauses of a larger fleet are shorter."""


class Assignments:
    """The open steps and the open requests, their queue, and the current assignments."""

    def __init__(
        self,
        context: Context,
        instance_table: InstanceTable,
        eligible: Mapping[str, Instance],
        lengths: Lengths,
        dispatcher: Dispatcher,
        balancer: Balancer,
    ) -> None:
        self._context = context
        self._instance_table = instance_table
        self.dispatcher = dispatcher
        self.balancer = balancer
        self.lengths = lengths
        """Lengths of finished responses."""
        self.pace = GenerationRate()
        self.steps = OpenSteps()
        self.requests = OpenRequests()
        self.current: dict[int, Response] = {}
        """Current assignments."""
        self._next_assignment = 0
        self._eligible = eligible
        self._balance_at = 0.0

    # --- steps --------------------------------------------------------------------------------------------

    def open(self, event: StepStarted) -> None:
        """Open a step. Those that do not stay open beside it are closed: what is unfinished is cancelled."""
        steps, former = self.steps, self.steps.newest
        least = event.step if event.open_from is None else event.open_from
        kept: dict[int, StepResponses] = {}
        for book in steps:
            if least <= book.step < event.step and not book.trained:
                kept[book.step] = book
            else:
                self._close(book)
        if former is not None:
            self.pace.close_step()
        steps.earlier, steps.newest = kept, StepResponses(event)
        self.dispatcher.open_step(steps, former if former is None or former.step not in kept else None)
        self.balancer.close_step()
        for response in (
            *(r for book in steps for r in book.responses.values()),
            *self.requests.responses.values(),
        ):
            if response.state is ResponseState.WAITING:
                self.dispatcher.enqueue(response)

    def _close(self, book: StepResponses) -> None:
        self._cancel(book)
        self.lengths.learn(book.finished_tokens())

    def trained_earlier(self, step: int) -> None:
        """An earlier one of the open steps is trained: nothing is asked of it any more."""
        book = self.steps.earlier.pop(step, None)
        if book is not None:
            self._close(book)
            self.dispatcher.learn(book)

    def add(self, book: StepResponses, event: StepStarted) -> None:
        """Add what a longer request of an open step asks for besides."""
        for response in book.add(event):
            if response.state is ResponseState.WAITING:
                self.dispatcher.enqueue(response)

    def deliver_again(self, book: StepResponses) -> None:
        """Hand every complete group of a step over once more, in order of completion."""
        for group in book.complete_groups:
            self._context.emit(DeliverGroup(book.step, group))

    def response(self, number: int) -> Response | None:
        """Return a response of an open step, or an open request."""
        if number >= FIRST_REQUEST:
            return self.requests.responses.get(number)
        book = self.steps.holding(number)
        return None if book is None else book.responses[number]

    # --- requests of their own ----------------------------------------------------------------------------

    def request(self, request: ResponseRequest) -> bool:
        """Queue a request; return False if it is known."""
        response = self.requests.open(request, self._context.now)
        if response is not None:
            self.dispatcher.enqueue(response)
        return response is not None

    def withdraw(self, response: Response) -> None:
        """Forget a request, and have whoever generates it stop."""
        self._stop(response)
        self.requests.end(response, self._context.now, response.num_tokens, None)
        self.dispatcher.ended_request(response)

    def abort_requests(self, instance: Instance) -> None:
        """Ask an instance that is to load another version to release its requests; they go on under it."""
        for assignment, response in list(instance.assignments.items()):
            if response.response >= FIRST_REQUEST and assignment not in instance.aborting:
                self.abort(instance, assignment)

    def _book_of(self, response: Response) -> StepResponses | OpenRequests:
        return self.requests if response.response >= FIRST_REQUEST else self._step_of(response)

    def _step_of(self, response: Response) -> StepResponses:
        book = self.steps.holding(response.response)
        assert book is not None, f"response {response.response} is of no open step"
        return book

    # --- giving and taking --------------------------------------------------------------------------------

    def assign_waiting(self) -> None:
        """Give waiting responses to eligible instances as far as they fit."""
        if self.dispatcher.has_waiting():
            self.dispatcher.place(self._assign)

    def balance(self) -> None:
        """Take responses away from a crowded instance for an idle one, if none waits and that helps."""
        has_work = self.steps.num_unfinished or self.requests.responses
        if not self._context.config.policy.balances or not has_work:
            return
        if self.dispatcher.has_waiting():
            self._yield_to_nearer_groups()
            return
        now = self._context.now
        if now < self._balance_at:
            self._context.timers.set(Timer.BALANCE, "", self._balance_at)
            return
        rebalance = self.balancer.rebalance(now)
        if rebalance is None:
            return
        self._balance_at = now + BALANCE_S * min(1.0, SMALL_FLEET / max(1, len(self._eligible)))
        for assignment in rebalance.assignments:
            rebalance.source.assignments[assignment].meant_for = rebalance.target.instance
            self.abort(rebalance.source, assignment)
        self.touch(rebalance.source)

    def _yield_to_nearer_groups(self) -> None:
        """Take away running responses of groups that lack much where some of groups that lack little wait."""
        now = self._context.now
        if not self._context.config.policy.yields or self.steps.newest is None:
            return
        if now < self._balance_at:
            self._context.timers.set(Timer.BALANCE, "", self._balance_at)
            return
        instances = list(self._eligible.values())
        if any(instance.aborting for instance in instances):
            return
        running = sorted(
            (-self.dispatcher.lacks(r), r.num_tokens, assignment, instance.instance)
            for instance in instances
            for assignment, r in instance.assignments.items()
            if not r.has_yielded and r.response < FIRST_REQUEST  # a turn is over soon, its prefix is long
        )
        waiting: list[int] = []
        if running and -running[0][0] - self.dispatcher.least_lacking() >= YIELD_MARGIN:
            waiting = sorted(self.dispatcher.lacks(response) for response in self.dispatcher.queued())
        for lacks, (minus_lacks, _, assignment, name) in zip(waiting, running, strict=False):
            if -minus_lacks - lacks < YIELD_MARGIN:
                break
            self.current[assignment].has_yielded = True
            self.abort(self._eligible[name], assignment)
            self.touch_name(name)
        self._balance_at = now + YIELD_S * max(1.0, len(running) / YIELD_LOOK)
        self._context.timers.set(Timer.BALANCE, "", self._balance_at)

    def touch(self, instance: Instance) -> None:
        """Note that the load or eligibility of an instance may have changed."""
        self.touch_name(instance.instance)

    def touch_name(self, name: str) -> None:
        """The same for the name of an instance that may be gone."""
        self.dispatcher.touch(name)
        self.balancer.touch(name)

    def finish(self, response: Response, num_tokens: int, reason: FinishReason) -> None:
        """End a response, wherever it is, and free its slot."""
        self._detach(response)
        if response.response >= FIRST_REQUEST:
            self.requests.end(response, self._context.now, num_tokens, reason)
            self.dispatcher.ended_request(response)
            self.dispatcher.request_lengths.add(num_tokens)
            episode = response.request.episode
            book = None if episode is None else self.steps.holding(episode)
            if book is not None and episode is not None:
                book.add_turn(episode, num_tokens)
            self._context.emit(EndRequest(response.response, reason))
            return
        if reason is FinishReason.QUARANTINED:
            self._context.counters.quarantined.append(response.response)
        book = self._step_of(response)
        is_complete = book.finish(response, num_tokens, reason, self._context.now)
        self.dispatcher.finished(response)
        if is_complete:
            self._context.emit(DeliverGroup(book.step, response.group))

    def take_back(self, response: Response, why: str) -> None:
        """Put a running response back into the queue."""
        self._detach(response)
        self._book_of(response).wait(response, why, self._context.now)
        self.dispatcher.enqueue(response)

    def take_back_all(self, instance: Instance, why: str) -> None:
        """Put everything that a lost instance holds back into the queue."""
        keeps_tokens = self._context.config.policy.keeps_tokens
        for response in list(instance.assignments.values()):
            if not keeps_tokens:
                response.drop_tokens_beyond(0)
            self.take_back(response, why)

    def begin_again(self, response: Response) -> None:
        """Queue a finished response anew: its tokens were lost."""
        self._step_of(response).begin_again(response, self._context.now)
        self.dispatcher.enqueue(response)

    def skip_to(self, assignment: int) -> None:
        """Give out no assignment below this number any more."""
        self._next_assignment = max(self._next_assignment, assignment)

    def fail_on(self, instance: Instance, response: Response) -> None:
        """Take back a response that made the instance fail; quarantine it if it did so too often."""
        response.failed_on[instance.instance] = None
        response.num_failures += 1
        limit = self._context.config.quarantine_after
        if len(response.failed_on) >= limit or response.num_failures >= FAILURES_PER_INSTANCE * limit:
            self.finish(response, response.num_tokens, FinishReason.QUARANTINED)
        else:
            self.take_back(response, f"failed on {instance.instance}")

    def abort(self, instance: Instance, assignment: int) -> None:
        """Ask the instance to release an assignment, once, or again after a reconnect."""
        instance.aborting[assignment] = None
        if not instance.is_connected:
            return
        self._context.emit(Abort(instance.instance, instance.epoch, assignment))
        if self._context.timers.due(Timer.ANSWER, instance.instance) is None:
            self.expect_answer(instance)

    def abort_all(self, instance: Instance) -> None:
        """Ask the instance to release every assignment that it has not been asked to release yet."""
        for assignment in [a for a in instance.assignments if a not in instance.aborting]:
            self.abort(instance, assignment)

    def expect_answer(self, instance: Instance) -> None:
        """Set the deadline after which an instance that does not answer counts as hung."""
        due = self._context.now + self._context.config.hang_after_s
        self._context.timers.set(Timer.ANSWER, instance.instance, due)

    def expect_progress(self, instance: Instance) -> None:
        """Set the deadline after which an engine with work that makes no progress counts as hung."""
        if instance.assignments:
            due = self._context.now + self._context.config.hang_after_s
            self._context.timers.set(Timer.HANG, instance.instance, due)

    # --- helpers ------------------------------------------------------------------------------------------

    def _assign(self, response: Response, instance: Instance, kv_estimate: int) -> None:
        context, assignment = self._context, self._next_assignment
        self._next_assignment += 1
        if response.num_assignments:
            context.counters.redispatches += 1
        if response.num_tokens and response.last_holder != instance.instance:
            context.counters.migrations += 1
            context.counters.tokens_migrated += response.num_tokens
        was_idle = not instance.assignments
        instance.hold(assignment, response, kv_estimate)
        self.touch(instance)
        self.current[assignment] = response
        self._book_of(response).run(response, assignment, instance.instance, context.now)
        if was_idle:
            self.expect_progress(instance)
            instance.measured_at = None
        kept, response.keep_tokens, response.meant_for = response.keep_tokens, None, None
        context.emit(Assign(instance.instance, instance.epoch, assignment, response.response, kept))

    def _detach(self, response: Response) -> None:
        """Unbook a response's assignment, if it has one; its own state is the caller's to change."""
        if response.assignment is None or response.holder is None:
            return
        instance = self._instance_table.instances[response.holder]
        del self.current[response.assignment]
        instance.let_go(response.assignment)
        self.touch(instance)
        if not instance.assignments:
            self._context.timers.cancel(Timer.HANG, instance.instance)
        if not instance.aborting:
            self._context.timers.cancel(Timer.ANSWER, instance.instance)

    def _cancel(self, book: StepResponses) -> None:
        for response in book.responses.values():
            if response.state is ResponseState.FINISHED:
                continue
            self._context.counters.cancelled += 1
            self._stop(response)
            book.cancel(response, self._context.now)

    def _stop(self, response: Response) -> None:
        """Have the instance that runs a response stop, and wait for no answer."""
        if response.assignment is not None and response.holder is not None:
            holder = self._instance_table.instances[response.holder]
            if holder.is_connected and response.assignment not in holder.aborting:
                self._context.emit(Abort(holder.instance, holder.epoch, response.assignment))
            self._detach(response)
