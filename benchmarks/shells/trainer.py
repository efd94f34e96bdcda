"""A played trainer on the real session: it requests steps, also ahead of the one that it trains, checks each
group token by token, and may be killed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from benchmarks.shells.engine import STOP, context, extended, next_token
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    DeliverGroupMessage,
    DeliverResponseMessage,
    FinishedResponse,
    GrantLeaseMessage,
    LeaseReturnedMessage,
    Message,
    PromptSpec,
    RecallLeaseMessage,
    RunFinished,
    StepStartedMessage,
    StepTrainedMessage,
    TrainerCommand,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
    trainer_command_decoder,
)
from rlboost_runtime.protocol.session import Conversation, CoordinatorSession
from rlboost_runtime.seams import Clock, Transport

GROUP_SIZE, MAX_TOKENS = 2, 120
TRAIN_S = (0.2, 3.0)


@dataclass
class Trained:
    """What of the training is durable: it survives the trainer."""

    num_steps: int
    """Steps that the run has."""
    num_prompts: int
    next_step: int = 0
    num_groups: int = 0
    num_tokens: int = 0
    reports: list[StepTrainedMessage] = field(default_factory=list)
    """What was written of each step before its checkpoint."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Versions under which the checkpoint's trainer had asked for steps."""
    max_staleness: int = 0
    in_flight_updates: bool = False
    broken: list[str] = field(default_factory=list)
    """Promises that a delivered group broke."""


def prompt_of(step: int, group: int) -> tuple[int, ...]:
    """Return a prompt's token ids: no two are alike."""
    return (step + 1, group + 1, *range(20, 20 + (step * 7 + group * 3) % 11))


class PlayedTrainer:
    """One process of the trainer. A version has the number of the steps that are in it."""

    def __init__(
        self, run: str, boot: str, trained: Trained, metrics: Path, dial: Callable[[], Awaitable[Transport]],
        clock: Clock, random: Random,
    ) -> None:  # fmt: skip
        """`metrics` gets a line per step, by which the supervisor sees progress."""
        self._run, self._boot, self._random = run, boot, random
        self._trained, self._metrics = trained, metrics
        self._step: int = trained.next_step
        """The one that is trained first."""
        self._asked: dict[int, StepStartedMessage] = {}
        """Steps that were asked for and are not trained, oldest first."""
        self._groups: dict[int, dict[int, DeliverGroupMessage]] = {}
        self._reports = trained.reports[-1 - trained.max_staleness :]
        """Those that the coordinator may not have; a new process does not know."""
        self._said_before = 0
        """How many of them were said before the last request."""
        self._holds_lease = False
        self._changed = asyncio.Event()
        talk = Conversation(
            TrainerWelcome, trainer_command_decoder, self._hello, self._welcomed, self._received
        )
        self._session = CoordinatorSession(dial, talk, clock)
        self._ask(self._step)
        while trained.in_flight_updates and self._may_ask_ahead():
            self._ask(max(self._asked) + 1)

    async def run(self) -> None:
        """Train until the run is done. The session goes on until the process is killed."""
        session = asyncio.create_task(self._session.run())
        trained = self._trained
        while self._step < trained.num_steps:
            await self._until(lambda: self._is_complete(self._step) and self._holds_lease)
            busy_s = self._random.uniform(*TRAIN_S)
            await asyncio.sleep(busy_s)
            groups = self._groups.pop(self._step)
            tokens = sum(len(r.token_ids) // 4 for g in groups.values() for r in g.responses)
            trained.num_groups += len(groups)
            trained.num_tokens += tokens
            trained.next_step = self._step + 1  # the checkpoint is durable
            with self._metrics.open("a") as lines:
                lines.write(f'{{"step": {self._step}}}\n')
            report = StepTrainedMessage(self._step, 0.0, busy_s, tokens, 0.5, {"loss": 1.0})
            trained.reports.append(report)
            self._reports.append(report)
            del self._asked[self._step]
            trained.ahead = {step: request.policy_version for step, request in self._asked.items()}
            self._step += 1
            self._session.post(report)
            self._session.post(self._published())
            if not self._asked:
                self._holds_lease = False
                self._ask(self._step)
                self._session.post(self._newest())
            self._ask_ahead()
        await session

    # --- what it asks for ---------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        if step >= self._trained.num_steps:
            return
        prompts = tuple(
            PromptSpec(group, array("i", prompt_of(step, group)).tobytes())
            for group in range(self._trained.num_prompts)
        )
        self._asked[step] = StepStartedMessage(
            step,
            self._trained.ahead.get(step, self._step),
            prompts,
            GROUP_SIZE,
            MAX_TOKENS,
            (STOP,),
            in_flight_updates=self._trained.in_flight_updates,
            open_from=self._step if self._trained.in_flight_updates else None,
            wants_responses=True,
        )
        self._groups.setdefault(step, {})
        self._said_before = len(self._reports)

    def _ask_ahead(self) -> None:
        if self._may_ask_ahead():
            self._ask(max(self._asked) + 1)
            self._session.post(self._newest())

    def _may_ask_ahead(self) -> bool:
        newest, trained = max(self._asked, default=-1), self._trained
        is_time = trained.in_flight_updates or self._is_complete(newest)
        return (
            bool(self._asked)
            and is_time
            and newest + 1 < trained.num_steps
            and newest < self._step + trained.max_staleness
        )

    def _newest(self) -> Message:
        """Return the last request, which keeps the GPUs where an earlier step is to be trained."""
        if not self._asked:
            return RunFinished("/played/model")
        step = max(self._asked)
        keeps = self._holds_lease and step > self._step
        self._holds_lease = keeps
        return msgspec.structs.replace(self._asked[step], keeps_lease=keeps)

    def _hello(self) -> Message:
        return TrainerHello(SCHEMA, self._run, self._boot, self._holds_lease)

    def _welcomed(self, welcome: TrainerWelcome) -> list[Message]:
        return [self._published(), *self._reports, *self._repeated()]

    def _repeated(self) -> list[Message]:
        """Return the requests of the open steps as they were made: a trainer keeps the GPUs that it holds."""
        if not self._asked:
            return [RunFinished("/played/model")]
        since = self._step if self._trained.in_flight_updates else max(self._asked)
        return [
            msgspec.structs.replace(request, keeps_lease=self._holds_lease)
            for step, request in sorted(self._asked.items())
            if step >= since
        ]

    def _published(self) -> Message:
        return VersionPublishedMessage(self._step, f"digest {self._step}", 1000, 0.1)

    # --- what it is given ---------------------------------------------------------------------------------

    def _received(self, command: TrainerCommand) -> None:
        newest = max(self._asked, default=-1)
        if getattr(command, "step", None) == newest:
            del self._reports[: self._said_before]
            self._said_before = 0
        is_early = self._trained.in_flight_updates
        match command:
            case DeliverGroupMessage(step=step, group=group) if step == newest or (
                is_early and step in self._asked
            ):
                self._check(command)
                self._groups[step].setdefault(group, command)
                self._ask_ahead()
            case DeliverResponseMessage(step=step, group=group, response=response) if step in self._asked:
                self._check_response(step, group, response)
            case GrantLeaseMessage(step=step) if step == newest:
                self._holds_lease = True
            case RecallLeaseMessage(step=step) if step == newest and self._holds_lease:
                self._holds_lease = False
                self._session.post(LeaseReturnedMessage())
        self._changed.set()

    def _is_complete(self, step: int) -> bool:
        return len(self._groups.get(step, ())) == self._trained.num_prompts

    def _check(self, group: DeliverGroupMessage) -> None:
        where, broken = f"step {group.step} group {group.group}", self._trained.broken
        known = self._groups[group.step].get(group.group)
        if len(group.responses) != GROUP_SIZE:
            broken.append(f"{where}: {len(group.responses)} responses")
        if known is not None and _tokens(known) != _tokens(group):
            broken.append(f"{where}: delivered twice, differently")
        for response in group.responses:
            self._check_response(group.step, group.group, response)

    def _check_response(self, step: int, group: int, response: FinishedResponse) -> None:
        self._trained.broken += [
            f"step {step} group {group}, response {response.response}: {problem}"
            for problem in self._problems(step, group, response)
        ]

    def _problems(self, step: int, group: int, response: FinishedResponse) -> Iterator[str]:
        """Yield what is wrong with a response: each token follows from its version and all before it."""
        tokens = array("i", response.token_ids).tolist()
        asked = self._asked[step].policy_version
        versions = [segment.policy_version for segment in response.segments]
        newest = self._step if self._trained.in_flight_updates else asked
        if any(not asked <= version <= newest for version in versions):
            yield f"tokens of versions {versions} instead of {asked} to {newest}"
        expected: list[int] = []
        for segment in response.segments:
            state = context(segment.policy_version, (*prompt_of(step, group), *tokens[: len(expected)]))
            for _ in range(segment.num_tokens):
                expected.append(next_token(state))
                state = extended(state, expected[-1])
        if tokens != expected:
            yield _difference(tokens, expected)
        is_stopped = STOP in tokens
        if STOP in tokens[:-1] or not (is_stopped or len(tokens) == MAX_TOKENS):
            yield f"{len(tokens)} tokens, which is not where it ends"
        if response.finish_reason != ("stop" if is_stopped else "length"):
            yield f"ended by {response.finish_reason}"

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _tokens(group: DeliverGroupMessage) -> list[list[int]]:
    return [array("i", response.token_ids).tolist() for response in group.responses]


def _difference(tokens: list[int], expected: list[int]) -> str:
    pairs = zip(tokens, expected, strict=False)
    first = next((place for place, (got, wanted) in enumerate(pairs) if got != wanted), None)
    wrong = "" if first is None else f", a wrong one at {first}"
    return f"{len(tokens)} tokens instead of {len(expected)}{wrong}"
