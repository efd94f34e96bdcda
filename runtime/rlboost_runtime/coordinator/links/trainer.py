"""The trainer's side of the coordinator: step requests in, finished groups and the GPU lease out, and single
responses before their group where the trainer wants them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.links.weights import WeightTracker
from rlboost_runtime.coordinator.observers.steps import ReservedMeter, StepWarnings
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Command,
    Event,
    Finished,
    GrantLease,
    LeaseReturned,
    RecallLease,
    StepTrained,
    TrainerLost,
    VersionPublished,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.health.monitor import HealthMonitor
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.protocol.session import accept, refuse
from rlboost_runtime.seams import Clock, Transport

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""The trainer may be busy in a long micro-batch, but its connection has a thread of its own."""

EndRun = Callable[[str, str, str, int], None]
"""Called with state ("done" or "failed"), problem, remedy and exit code."""


class TrainerLink:
    """The one trainer's connection; a newer one replaces it.

    A trainer receives groups and the lease only for the request that it has made on this connection. What
    the core decides before then is for the request of a former process: a restarted trainer that requests the
    same step would take that lease for its own, while the request wakes the reserved engines.
    """

    def __init__(
        self,
        driver: CoreDriver,
        ledger: Ledger,
        clock: Clock,
        weights: WeightTracker,
        reserved: ReservedMeter,
        end_run: EndRun,
        *,
        is_market_ours: bool = False,
    ) -> None:
        """`reserved` must observe the core. `is_market_ours`: see `HealthMonitor`."""
        self._driver = driver
        driver.add_observer(self)
        self._ledger = ledger
        self._clock = clock
        self._weights = weights
        self._reserved = reserved
        self._end_run = end_run
        self._outgoing: deque[wire.Message] = deque()
        self._wake = asyncio.Event()
        self._generation = 0
        self._resumes_lease = self._has_requested = self._wants_responses = False
        self._asked: wire.StepStartedMessage | None = None
        """What was requested last on this connection."""
        self._last_trained = max((record.step for record in ledger.steps()), default=-1)
        self._trained_at: float | None = None
        self.connected = False
        self.warnings = StepWarnings(record.metrics for record in ledger.steps())
        self.health = HealthMonitor(
            ((record.step, record.metrics) for record in ledger.steps()), is_market_ours=is_market_ours
        )

    # --- commands out -------------------------------------------------------------------------------------

    def deliver(self, group: wire.DeliverGroupMessage) -> None:
        """Hand over a finished group; without a trainer it is delivered on the next request."""
        self._send(group)

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Hand over a response that is finished before its group, if the trainer wants that."""
        if isinstance(event, Finished) and event.response < FIRST_REQUEST:
            self._deliver_early((event.response,))

    def _deliver_early(self, responses: Iterable[int]) -> None:
        if not (self.connected and self._has_requested and self._wants_responses):
            return
        for early in map(self._driver.finished_early, responses):
            if early is not None:
                self._send(early)

    def lease(self, command: GrantLease | RecallLease) -> None:
        """Grant the GPU to the trainer, or recall it."""
        match command:
            case GrantLease(step=step):
                self._send(wire.GrantLeaseMessage(step, len(self._asked.prompts) if self._asked else 0))
            case RecallLease(step=step):
                self._send(wire.RecallLeaseMessage(step))

    def _send(self, message: wire.Message) -> None:
        if self.connected and self._has_requested:
            self._outgoing.append(message)
            self._wake.set()

    # --- serving the connection ---------------------------------------------------------------------------

    async def serve(self, transport: Transport) -> None:
        """Serve one connection until it ends or a newer trainer takes its place."""
        run = self._driver.run.name
        hello = await accept(transport, wire.trainer_message_decoder, wire.TrainerHello, run)
        if hello is None:
            return
        self._generation += 1
        generation = self._generation
        self._wake.set()  # the writer of a former connection sees that it is replaced
        self._outgoing = deque([wire.TrainerWelcome(self._driver.core.newest_version)])
        self._wake = asyncio.Event()
        self._wake.set()
        self._resumes_lease, self._has_requested, self._asked = hello.holds_lease, False, None
        self.connected = True
        log_event(log, "trainer.connected", boot_id=hello.boot_id, holds_lease=hello.holds_lease)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(transport, generation))
                tasks.create_task(self._write(transport, generation))
        except* (ConnectionError, TimeoutError) as group:
            log_event(log, "trainer.disconnected", problem=repr(group.exceptions[0]))
        except* (ProtocolError, *wire.UNREADABLE) as group:
            log_event(log, "trainer.protocol_error", problem=str(group.exceptions[0]))
            await refuse(transport, wire.Refused(str(group.exceptions[0])))
        finally:
            if generation == self._generation:
                self.connected = False
                self._driver.apply(TrainerLost(self._driver.now()))

    async def _read(self, transport: Transport, generation: int) -> None:
        while True:
            message = wire.trainer_message_decoder.decode(await transport.receive())
            if generation != self._generation:
                raise ConnectionError("a newer trainer took over")
            await self._handle(message)

    async def _write(self, transport: Transport, generation: int) -> None:
        wake, outgoing = self._wake, self._outgoing
        while True:
            await wake.wait()
            wake.clear()
            if generation != self._generation:
                raise ConnectionError("a newer trainer took over")
            while outgoing:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await transport.send(wire.encode(outgoing.popleft()))

    async def _handle(self, message: object) -> None:
        driver = self._driver
        match message:
            case wire.StepStartedMessage():
                await self._on_step_request(message)
            case wire.VersionPublishedMessage(version=version, num_bytes=num_bytes, publish_s=publish_s):
                self._weights.published(message)
                log_event(log, "version.published", version=version, bytes=num_bytes, seconds=publish_s)
                driver.apply(VersionPublished(driver.now(), version, message.delta_bytes or num_bytes))
            case wire.LeaseReturnedMessage():
                driver.apply(LeaseReturned(driver.now()))
            case wire.StepTrainedMessage():
                self._on_trained(message)
            case wire.EpisodeEnded(step=step, number=number, num_tokens=num_tokens):
                driver.episode_ended(step, number, num_tokens)
            case wire.Checkpointed(step=step):
                driver.step_checkpointed(step)
            case wire.Evaluated(step=step, metrics=metrics):
                if self._ledger.add_metrics(step, metrics):
                    self.health.evaluated(step + 1, metrics)
            case wire.RunFinished(model_path=path):
                log_event(log, "run.trained", model=path)
                self._end_run("done", "", "", 0)
            case wire.RunFailed(problem=problem, remedy=remedy, exit_code=exit_code):
                self._end_run("failed", problem, remedy, exit_code)
            case _:
                raise ProtocolError(
                    f"unexpected {type(message).__name__} from the trainer", "install one version of rlboost"
                )

    async def _on_step_request(self, request: wire.StepStartedMessage) -> None:
        driver = self._driver
        _check(request, driver.core.newest_version)
        keeps_lease, open_from = request.keeps_lease, request.open_from
        self._wants_responses = request.wants_responses
        # What is not part of what is requested: it may differ when that is requested again.
        request = msgspec.structs.replace(request, keeps_lease=False, open_from=None, wants_responses=False)
        resumes, self._resumes_lease = self._resumes_lease, False
        generation = self._generation

        def on_open() -> None:
            if generation == self._generation:
                self._requested(request)

        same = driver.step is not None and driver.step.request == request and driver.is_step_known
        if same and resumes and driver.core.lease in (LeaseState.TRAINER, LeaseState.RECALLING):
            # It never stopped training: hand over what it may have missed, and leave the GPU with it.
            assert driver.step is not None
            self._requested(request)
            for group in driver.core.complete_groups() if not request.are_episodes else ():
                self.deliver(driver.finished_group(driver.step, group))
            self.lease(GrantLease(request.step))
            if driver.core.lease is LeaseState.RECALLING:
                self.lease(RecallLease(request.step))
            self._deliver_early(driver.step.all_responses())
            return
        await driver.open_step(request, keeps_lease=keeps_lease, open_from=open_from, on_open=on_open)
        step = driver.open_step_of(request.step)
        if step is not None and generation == self._generation:  # what was finished before it asked
            self._deliver_early(step.all_responses())

    def _requested(self, request: wire.StepStartedMessage) -> None:
        """The core is about to learn of the trainer's request: groups and leases are for that one from now
        on. A trainer that adds prompts to its last request has all groups of that."""
        former, self._asked = self._asked, request
        is_longer = former is not None and former != request and former.begins(request)
        first = len(former.prompts) if former is not None and is_longer else 0
        self._driver.wanted = range(first, len(request.prompts))
        self._has_requested = True
        step = self._driver.step
        if step is not None and step.request.are_episodes:
            self._send(wire.StepOpened(step.request.step, step.first_response))

    def _on_trained(self, message: wire.StepTrainedMessage) -> None:
        driver, now = self._driver, self._clock.wall()
        step = driver.core.step
        is_forgotten = step is None or step.step < message.step  # a power cut took its start from the log
        current = step if step is not None and step.step == message.step else None  # else another is open
        if message.step <= self._last_trained if current is None else current.trained:
            log_event(log, "trainer.stale_step", step=message.step)
            return
        if current is not None:
            began = now - (driver.now() - current.started_at)
        else:  # where steps overlap, what one takes is the time since the last one was trained
            step_s = message.metrics.get("step_s", message.busy_s)
            began = now - step_s if self._trained_at is None else self._trained_at
        self._last_trained, self._trained_at = message.step, now
        self._ledger.record_step(
            step=message.step,
            started_at=began,
            ended_at=now,
            tokens=message.tokens_trained,
            reward_mean=message.reward_mean,
            metrics=self._measured(message),
        )
        if is_forgotten:
            log_event(log, "step.trained_unknown", step=message.step)
            return
        handover_s = message.metrics.get("handover_s", 0.0)
        driver.apply(StepTrained(driver.now(), message.step, message.wait_s, message.busy_s, handover_s))
        for kind, text in self.warnings.trained(message.step, message.metrics):
            self._ledger.note(self._clock.wall(), kind, text)
        for change in self.health.trained(message.step, message.metrics):
            self._ledger.note(self._clock.wall(), change.kind, change.text)
        if message.checkpointed:
            driver.step_checkpointed(message.step)
        log_event(log, "step.trained", step=message.step, reward=message.reward_mean)

    def _measured(self, message: wire.StepTrainedMessage) -> dict[str, float]:
        """Return the trainer's metrics and what the report needs besides."""
        driver = self._driver
        metrics = dict(message.metrics)
        metrics["train_busy_s"] = message.busy_s
        metrics["weight_bytes"] = float(driver.core.weight_bytes)
        if driver.core.step is None or driver.core.step.step != message.step:
            return metrics  # what is measured here belongs to the step that is rolled out now
        seen = driver.core.observation(driver.now(), message.wait_s, message.busy_s)
        if seen is not None:  # what the next plan of such a job is made from
            metrics |= {"spot_instances_mean": seen.n_prem, "rollout_s": seen.t_remote}
        if driver.step is not None:
            metrics |= self._reserved.measured(driver.step, driver.store.of(message.step), driver.core)
        return metrics


def _check(request: wire.StepStartedMessage, newest_version: int | None) -> None:
    """Raise `ProtocolError` for a step that cannot be rolled out: nothing of it may reach the event log."""
    groups = [prompt.group for prompt in request.prompts]
    problem = None
    if groups != list(range(len(groups))):  # none: a step that is trained on data alone
        problem = f"its groups are not 0, 1, 2, ... but {groups[:5]}"
    elif request.open_from is not None and not request.in_flight_updates:
        problem = f"it keeps steps from {request.open_from} on open, but its version is not to change"
    elif request.group_size < 1 or request.max_response_tokens < 1:
        problem = f"group_size {request.group_size}, max_response_tokens {request.max_response_tokens}"
    elif any(prompt.num_responses < 0 or prompt.max_tokens < 0 for prompt in request.prompts):
        problem = "a prompt asks for fewer than 0 responses or tokens"
    elif any(len(prompt.token_ids) == 0 or len(prompt.token_ids) % 4 for prompt in request.prompts):
        problem = "a prompt has no token ids, or not whole ones"
    elif newest_version is None or request.policy_version > newest_version:
        problem = f"policy version {request.policy_version} is not published (newest: {newest_version})"
    if problem is not None:
        raise ProtocolError(f"step {request.step} cannot be rolled out: {problem}", "correct the trainer")
