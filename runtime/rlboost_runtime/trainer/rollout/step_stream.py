"""A trainer's conversation with the coordinator: request a step, take its groups as they finish, hold
the GPU lease. `loop.py` shows its use; `RolloutClient` is the simpler way in for other trainers.

Guarantees, while the coordinator may restart at any moment:

- training code stays synchronous: the connection lives in a thread of its own, started by `with` and ended by
  it;
- every group of the requested step is returned exactly once, in the order of first arrival: as the message
  that it came as, or as what `on_group` makes of it the moment it arrives;
- after a reconnect, what the coordinator may not know yet is sent again, in order: the newest
  `VersionPublishedMessage`, the last `StepTrainedMessage` and `Checkpointed`, `Evaluated`, the current
  `StepStartedMessage`, and how the run ended; all of these are idempotent there;
- `lease`: from `GrantLeaseMessage` until `request_step` or until a recall is answered. A recall is answered
  by whichever blocking call the trainer is in, or by `answer_recall`: `on_recall` first (in the training
  thread), then `LeaseReturnedMessage`. A lost connection alone does not end the lease: the next hello claims
  it.

Waits are timed (`Waits`), those for groups separately with and without the lease: the first is what the
trainer loses for want of responses (t_train^wait of the paper's Algorithm 1).
"""

from __future__ import annotations

import operator
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Generic, Self, TypeVar, cast

import msgspec

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import transport
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    Checkpointed,
    DeliverGroupMessage,
    DeliverResponseMessage,
    EpisodeEnded,
    Evaluated,
    GrantLeaseMessage,
    LeaseReturnedMessage,
    Message,
    PromptSpec,
    RecallLeaseMessage,
    Refused,
    RunFailed,
    RunFinished,
    StepOpened,
    StepStartedMessage,
    StepTrainedMessage,
    TrainerCommand,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    trainer_command_decoder,
)
from rlboost_runtime.protocol.session import DIAL_TIMEOUT_S, Conversation
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.seams import Transport
from rlboost_runtime.trainer.rollout.coordinator_link import CoordinatorLink

Group = TypeVar("Group")
Made = TypeVar("Made")


@dataclass(slots=True)
class Waits:
    """Seconds that the trainer waited since the last `request_step`."""

    with_lease_s: float = 0.0
    """For groups, while it held the GPU."""
    without_lease_s: float = 0.0
    """For groups, while others had the GPU."""
    for_lease_s: float = 0.0
    """For the GPU, with groups at hand."""

    def __add__(self, other: Waits) -> Waits:
        return Waits(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Waits) -> Waits:
        return Waits(*map(operator.sub, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class _Arrived(Generic[Group]):
    """One group that has not been returned."""

    step: int
    num_responses: int
    group: Group


class StepStream(Generic[Group]):
    """See the module. Public methods belong to one training thread, unless they name another."""

    def __init__(
        self,
        run: str,
        token: str,
        certificate_pem: str,
        url: Callable[[], str | None],
        *,
        connect: Callable[..., Awaitable[Transport]] = transport.connect,
    ) -> None:
        """`url` is asked before each dial for the coordinator's URL; None: not known yet."""
        self.waits = Waits()
        self._run = run
        self._boot_id = secrets.token_hex(8)
        self._on_group: Callable[[DeliverGroupMessage], Any] | None = None
        self._on_response: Callable[[DeliverResponseMessage], None] | None = None
        self._on_recall: Callable[[], None] | None = None

        self._changed = threading.Condition()  # guards everything below
        self._groups: deque[_Arrived[Group]] = deque()
        self._seen: set[tuple[int, int]] = set()
        """Steps and groups that have arrived."""
        self._num_returned: Counter[int] = Counter()
        """Groups that were returned, by step."""
        self._lease = False
        self._recalled = False
        self._known_version: int | None = None
        self._published: VersionPublishedMessage | None = None
        self._trained: list[StepTrainedMessage] = []
        """Reports that the coordinator may not have, in their order."""
        self._said_before = 0
        """How many of them were said before the request that is current."""
        self._checkpointed: Checkpointed | None = None
        self._evaluated: Evaluated | None = None
        self._request: StepStartedMessage | None = None
        self._earlier: dict[int, StepStartedMessage] = {}
        """Steps that stay open beside the requested one, oldest first."""
        self._next_request: StepStartedMessage | None = None  # its version is being published
        self._final: RunFinished | RunFailed | None = None
        self._on_opened: Callable[[int], None] = lambda first_response: None
        self._episodes: dict[int, EpisodeEnded] = {}  # of the requested step, that are over
        self._failure: BaseException | None = None

        async def dial() -> Transport:
            known = url()
            if known is None:
                raise ConnectionError("the coordinator's address is not known yet")
            return await connect(known, token, certificate_pem, timeout_s=DIAL_TIMEOUT_S)

        conversation = Conversation(
            TrainerWelcome, trainer_command_decoder, self._hello, self._on_welcome, self._on_command
        )
        self._link = CoordinatorLink(self._changed, dial, conversation)

    @classmethod
    def for_run(cls, run: RunFolder) -> StepStream[DeliverGroupMessage]:
        """Return the stream of a run on this machine: URL, token and certificate from its folder."""

        def url() -> str | None:
            endpoint = read_json(run.endpoint)
            return None if endpoint is None else f"{endpoint['url']}/v1/trainer"

        return StepStream(run.name, security.read_token(run), run.certificate.read_text(), url)

    def on_recall(self, free: Callable[[], None]) -> None:
        """Have `free` called on a recall, on the training thread; it returns once the GPU is free."""
        self._on_recall = free

    def on_group(self, start: Callable[[DeliverGroupMessage], Made]) -> StepStream[Made]:
        """Have `start` called once per group as soon as it arrives, and `next_groups` return what it returns.

        Call this before the first `request_step` and use the stream that is returned. `start` is called on
        the stream's own thread and must be quick.
        """
        self._on_group = start
        return cast("StepStream[Made]", self)

    def on_response(self, take: Callable[[DeliverResponseMessage], None]) -> None:
        """Have `take` called with each response that is finished before its group, as soon as it arrives; it
        comes again with its group. Call this before the first `request_step`. `take` is called on
        the stream's own thread and must be quick."""
        self._on_response = take

    def on_opened(self, play: Callable[[int], None]) -> None:
        """Have `play` called with the number of the first response once a step of episodes is open, and again
        after a reconnect; on the stream's own thread, so it must be quick."""
        self._on_opened = play

    def __enter__(self) -> Self:
        self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._link.close()

    # --- what the training thread sends --------------------------------------------------------------------

    def request_step(
        self,
        step: int,
        policy_version: int,
        prompts: Sequence[PromptSpec],
        *,
        group_size: int,
        max_response_tokens: int,
        stop_token_ids: Sequence[int] = (),
        keep_lease: bool = False,
        once_published: bool = False,
        are_episodes: bool = False,
        in_flight_updates: bool = False,
        open_from: int | None = None,
    ) -> None:
        """Request a step's groups and return the lease: the GPU must be free when this is called.

        With `keep_lease` the lease stays ours, if it is ours, and the GPU need not be free: an earlier step
        is trained meanwhile, all of whose groups have arrived. A recall stays to be answered.

        With `once_published` the version may still be on its way into the store: the request takes effect
        when `publish` announces it.

        With `are_episodes` the caller plays them, once `on_opened` is called: it reports each one by
        `episode_ended` and each group by `group_ended`.

        With `in_flight_updates` its responses go on under versions that are published meanwhile. With
        `open_from` the steps from there on that were requested before stay open: their groups still come.
        """
        request = StepStartedMessage(
            step, policy_version, tuple(prompts), group_size, max_response_tokens, tuple(stop_token_ids),
            keep_lease, are_episodes, in_flight_updates, open_from, self._on_response is not None,
        )  # fmt: skip
        with self._changed:
            self.waits = Waits()
            if once_published and not self._has_published(policy_version):
                self._next_request = request
            else:
                self._open(request)

    def request_more(self, prompts: Sequence[PromptSpec]) -> None:
        """Request further groups of the requested step, all of whose groups have been returned. The lease
        stays where it is; a recall stays to be answered."""
        with self._changed:
            assert self._request is not None, "a step is open"
            assert self._is_returned(self._request), "all its groups are there"
            self._request = msgspec.structs.replace(
                self._request, prompts=(*self._request.prompts, *prompts), keeps_lease=self._lease
            )
            self._link.post(self._request)

    def _open(self, request: StepStartedMessage) -> None:
        """Start another step. The caller holds the lock."""
        self._next_request = None
        kept = self._earlier | ({} if self._request is None else {self._request.step: self._request})
        first = request.step if request.open_from is None else request.open_from
        self._earlier = {step: each for step, each in kept.items() if first <= step < request.step}
        self._lease = request.keeps_lease and self._lease
        self._recalled = self._recalled and self._lease
        self._request = msgspec.structs.replace(request, keeps_lease=self._lease)
        self._said_before = len(self._trained)
        self._groups = deque(each for each in self._groups if each.step in self._earlier)
        self._seen = {each for each in self._seen if each[0] in self._earlier}
        self._num_returned = Counter({step: self._num_returned[step] for step in self._earlier})
        self._episodes.clear()
        self._link.post(self._request)

    def _has_published(self, version: int) -> bool:
        return self._published is not None and self._published.version >= version

    def publish(self, published: VersionPublishedMessage) -> None:
        """Announce a version that lies complete in the store. From any thread."""
        with self._changed:
            self._published = published
            if self._known_version is None or self._known_version < published.version:
                self._link.post(published)
            waiting = self._next_request
            if waiting is not None and self._has_published(waiting.policy_version):
                self._open(waiting)

    def trained(self, trained: StepTrainedMessage) -> None:
        """Report a step as trained; see `StepTrainedMessage.checkpointed`."""
        with self._changed:
            self._trained.append(trained)
            if self._request is not None and self._request.step <= trained.step:
                self._request = None
            self._earlier.pop(trained.step, None)
            self._link.post(trained)

    def checkpointed(self, step: int) -> None:
        """Report a trained step's checkpoint as durable, if `trained` could not yet. From any thread."""
        with self._changed:
            self._checkpointed = Checkpointed(step)
            self._link.post(self._checkpointed)

    def episode_ended(self, ended: EpisodeEnded) -> None:
        """Report an episode as over. From any thread."""
        with self._changed:
            if self._request is not None and self._request.step == ended.step:
                self._episodes[ended.number] = ended
                self._link.post(ended)

    def group_ended(self, group: DeliverGroupMessage) -> None:
        """Have `next_groups` return a group of episodes that are over. From any thread but the training
        one."""
        self._on_group_done(group)

    def fail(self, problem: BaseException) -> None:
        """Have whatever call the training thread waits in raise `problem`. From any thread."""
        with self._changed:
            self._failure = problem
            self._changed.notify_all()

    def evaluated(self, evaluated: Evaluated) -> None:
        """Report what the final weights' evaluation found."""
        with self._changed:
            self._evaluated = evaluated
            self._link.post(evaluated)

    def finished(self, model_path: str, *, timeout_s: float = 60.0) -> bool:
        """Report that all steps are trained; return True if that was sent within `timeout_s`."""
        return self._end(RunFinished(model_path), timeout_s)

    def failed(self, problem: str, remedy: str, exit_code: int = 1, *, timeout_s: float = 10.0) -> bool:
        """Report why the run cannot continue; return True if that was sent within `timeout_s`."""
        return self._end(RunFailed(problem, remedy, exit_code), timeout_s)

    def _end(self, final: RunFinished | RunFailed, timeout_s: float) -> bool:
        with self._changed:
            self._final = final
            self._link.post(final)
            return self._link.drain(timeout_s)

    # --- what the training thread waits for ----------------------------------------------------------------

    @property
    def holds_lease(self) -> bool:
        """True while the GPU is ours, also once it is recalled."""
        with self._changed:
            return self._lease

    def next_groups(
        self,
        min_responses: int = 1,
        step: int | None = None,
        or_once: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """Return everything that arrived, once that is at least `min_responses` of `step`, or the rest of it;
        None: the one that was requested last. Or once there is something else to do with the GPU, which is
        ours: `or_once` is asked whenever something arrives.

        Else returns [] only when all groups of that step have been returned. Answers recalls meanwhile.
        Raises what ended the stream.
        """

        def enough() -> bool:
            request = self._request if step is None else self._requested(step)
            if request is None:
                return True
            arrived = [each for each in self._groups if each.step == request.step]
            if sum(each.num_responses for each in arrived) >= min_responses:
                return True
            if self._num_returned[request.step] + len(arrived) >= len(request.prompts):
                return True
            return self._lease and or_once()

        self._wait(enough, for_lease=False)
        with self._changed:
            groups = [each.group for each in self._groups]
            self._num_returned.update(each.step for each in self._groups)
            self._groups.clear()
        return groups

    def hold_lease(self) -> None:
        """Return once the GPU is ours and not recalled. Raises what ended the stream."""
        self._wait(lambda: self._lease, for_lease=True)

    def answer_recall(self) -> None:
        """Free the GPU if it was recalled; call between micro-batches. Never waits for the coordinator."""
        with self._changed:
            recalled = self._lease and self._recalled
        if not recalled:
            return
        if self._on_recall is not None:
            self._on_recall()
        with self._changed:
            if not (self._lease and self._recalled):
                return
            self._lease = self._recalled = False
            self._link.post(LeaseReturnedMessage())

    def _wait(self, done: Callable[[], bool], *, for_lease: bool) -> None:
        """Wait for `done` (called under the lock), answering recalls first."""
        while True:
            self.answer_recall()
            with self._changed:
                self._link.raise_problem()
                if self._failure is not None:
                    raise self._failure
                if self._lease and self._recalled:
                    continue
                if done():
                    return
                started, lease = time.monotonic(), self._lease
                self._changed.wait()
                self._count(time.monotonic() - started, lease, for_lease)

    def _count(self, waited_s: float, lease: bool, for_lease: bool) -> None:
        if for_lease:
            self.waits.for_lease_s += waited_s
        elif lease:
            self.waits.with_lease_s += waited_s
        else:
            self.waits.without_lease_s += waited_s

    def _num_groups(self) -> int:
        return 0 if self._request is None else len(self._request.prompts)

    def _requested(self, step: int) -> StepStartedMessage | None:
        is_newest = self._request is not None and self._request.step == step
        return self._request if is_newest else self._earlier.get(step)

    def _is_returned(self, request: StepStartedMessage) -> bool:
        return self._num_returned[request.step] == len(request.prompts)

    # --- what the coordinator sends; on the link's thread ---------------------------------------------------

    def _hello(self) -> TrainerHello:
        return TrainerHello(SCHEMA, self._run, self._boot_id, holds_lease=self.holds_lease)

    def _on_welcome(self, welcome: TrainerWelcome) -> list[Message]:
        known = self._known_version = welcome.published_version
        is_news = self._published is not None and (known is None or known < self._published.version)
        published = self._published if is_news else None
        requests = [*self._earlier.values(), *([] if self._request is None else [self._request])]
        if len(requests) > 1 or not self._lease:  # it was granted, or a recall was answered, since
            requests = [msgspec.structs.replace(each, keeps_lease=self._lease) for each in requests]
        said = (published, *self._trained, self._checkpointed, self._evaluated, *requests)
        all_said = (*said, *self._episodes.values(), self._final)
        return [message for message in all_said if message is not None]

    def _on_command(self, command: TrainerCommand) -> None:
        match command:
            case DeliverGroupMessage():
                self._on_group_done(command)
            case DeliverResponseMessage():
                self._on_early(command)
            case StepOpened(step=step, first_response=first_response):
                with self._changed:
                    is_current = self._is_current(step)
                if is_current:
                    self._on_opened(first_response)
            case GrantLeaseMessage(step=step, num_groups=num_groups):
                with self._changed:
                    if self._is_current(step) and num_groups in (0, self._num_groups()):
                        self._lease, self._recalled = True, False
                        self._changed.notify_all()
            case RecallLeaseMessage(step=step):
                with self._changed:
                    if self._is_current(step) and self._lease:
                        self._recalled = True
                        self._changed.notify_all()
            case Refused(problem=problem):
                raise ProtocolError(f"the coordinator refused us: {problem}", "see the coordinator's log")
            case TrainerWelcome():
                raise ProtocolError("the coordinator welcomed us twice", "see the coordinator's log")

    def _on_group_done(self, group: DeliverGroupMessage) -> None:
        with self._changed:
            self._is_current(group.step)  # then the coordinator has what was said before it was asked for
            request = self._requested(group.step)
            if request is None or (group.step, group.group) in self._seen:
                return
            if not 0 <= group.group < len(request.prompts):
                raise ProtocolError(
                    f"step {group.step} has no group {group.group}", "see the coordinator's log"
                )
            self._seen.add((group.step, group.group))
        made = group if self._on_group is None else self._on_group(group)
        with self._changed:
            if self._requested(group.step) is not None:  # `request_step` may have come meanwhile
                self._groups.append(_Arrived(group.step, len(group.responses), cast("Group", made)))
                self._changed.notify_all()

    def _on_early(self, early: DeliverResponseMessage) -> None:
        with self._changed:
            is_late = (early.step, early.group) in self._seen
            if self._on_response is None or is_late or self._requested(early.step) is None:
                return
        self._on_response(early)
        with self._changed:
            self._changed.notify_all()

    def _is_current(self, step: int) -> bool:
        """Return True for the requested step; the coordinator then has all that was sent before it. Of a step
        that was requested ahead that is not the report of the one before, which was trained later."""
        if self._request is None or self._request.step != step:
            return False
        del self._trained[: self._said_before]
        self._said_before = 0
        return True
