"""A played trainer on the real session: it requests steps and checks each group, and may be killed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.shells.engine import STOP, whole_response
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    DeliverGroupMessage,
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
    last: StepTrainedMessage | None = None
    """What the newest checkpoint says of its step."""
    broken: list[str] = field(default_factory=list)
    """Promises that a delivered group broke."""


def prompt_of(step: int, group: int) -> tuple[int, ...]:
    """Return a prompt's token ids: no two are alike."""
    return (step + 1, group + 1, *range(20, 20 + (step * 7 + group * 3) % 11))


def request_of(step: int, num_prompts: int) -> StepStartedMessage:
    """Return what is requested of a step; its version has its number."""
    prompts = tuple(
        PromptSpec(group, array("i", prompt_of(step, group)).tobytes()) for group in range(num_prompts)
    )
    return StepStartedMessage(step, step, prompts, GROUP_SIZE, MAX_TOKENS, (STOP,))


class PlayedTrainer:
    """One process of the trainer."""

    def __init__(
        self, run: str, boot: str, trained: Trained, metrics: Path, dial: Callable[[], Awaitable[Transport]],
        clock: Clock, random: Random,
    ) -> None:  # fmt: skip
        """`metrics` gets a line per step, by which the supervisor sees progress."""
        self._run, self._boot, self._random = run, boot, random
        self._trained, self._metrics = trained, metrics
        self._step: int = trained.next_step
        self._groups: dict[int, DeliverGroupMessage] = {}
        self._holds_lease = False
        self._changed = asyncio.Event()
        talk = Conversation(
            TrainerWelcome, trainer_command_decoder, self._hello, self._welcomed, self._received
        )
        self._session = CoordinatorSession(dial, talk, clock)

    async def run(self) -> None:
        """Train until the run is done. The session goes on until the process is killed."""
        session = asyncio.create_task(self._session.run())
        trained = self._trained
        while self._step < trained.num_steps:
            await self._until(lambda: len(self._groups) == trained.num_prompts and self._holds_lease)
            busy_s = self._random.uniform(*TRAIN_S)
            await asyncio.sleep(busy_s)
            tokens = sum(len(r.token_ids) // 4 for g in self._groups.values() for r in g.responses)
            trained.num_groups += len(self._groups)
            trained.num_tokens += tokens
            trained.next_step = self._step + 1  # the checkpoint is durable
            with self._metrics.open("a") as lines:
                lines.write(f'{{"step": {self._step}}}\n')
            trained.last = StepTrainedMessage(self._step, 0.0, busy_s, tokens, 0.5, {"loss": 1.0})
            self._step += 1
            self._groups, self._holds_lease = {}, False
            self._session.post(trained.last)
            self._session.post(self._published())
            self._session.post(self._request())
        await session

    def _hello(self) -> Message:
        return TrainerHello(SCHEMA, self._run, self._boot, self._holds_lease)

    def _welcomed(self, welcome: TrainerWelcome) -> list[Message]:
        last = self._trained.last
        return [self._published(), *([] if last is None else [last]), self._request()]

    def _published(self) -> Message:
        return VersionPublishedMessage(self._step, f"digest {self._step}", 1000, 0.1)

    def _request(self) -> Message:
        if self._step >= self._trained.num_steps:
            return RunFinished("/played/model")
        return request_of(self._step, self._trained.num_prompts)

    def _received(self, command: TrainerCommand) -> None:
        match command:
            case DeliverGroupMessage(step=step, group=group) if step == self._step:
                self._check(command)
                self._groups.setdefault(group, command)
            case GrantLeaseMessage(step=step) if step == self._step:
                self._holds_lease = True
            case RecallLeaseMessage(step=step) if step == self._step and self._holds_lease:
                self._holds_lease = False
                self._session.post(LeaseReturnedMessage())
        self._changed.set()

    def _check(self, group: DeliverGroupMessage) -> None:
        where, broken = f"step {group.step} group {group.group}", self._trained.broken
        expected = whole_response(group.step, prompt_of(group.step, group.group), MAX_TOKENS)
        reason = "stop" if expected[-1] == STOP else "length"
        known = self._groups.get(group.group)
        if len(group.responses) != GROUP_SIZE:
            broken.append(f"{where}: {len(group.responses)} responses")
        if known is not None and _tokens(known) != _tokens(group):
            broken.append(f"{where}: delivered twice, differently")
        for response, tokens in zip(group.responses, _tokens(group), strict=True):
            if tokens != expected:
                broken.append(f"{where}, response {response.response}: {_difference(tokens, expected)}")
            if response.finish_reason != reason:
                broken.append(f"{where}, response {response.response}: ended by {response.finish_reason}")

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
