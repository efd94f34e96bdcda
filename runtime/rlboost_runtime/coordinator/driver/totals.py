"""Running totals of a run, folded over the core's events and commands.

A pure fold: driving the event log through it again after a restart gives the same totals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlboost_runtime.core.base.messages import (
    Assign,
    Command,
    Event,
    Finished,
    InstanceJoined,
    StepStarted,
    StepTrained,
)


@dataclass(slots=True)
class RunTotals:
    """Counts since the run began. Tokens are response tokens."""

    requested: int = 0
    finished: int = 0
    tokens_finished: int = 0
    tokens_in_step: int = 0
    """Tokens of the responses that finished in the open step."""
    tokens_redone: int = 0
    """Tokens of finished responses whose step was opened again under another version."""
    assigned: Counter[int] = field(default_factory=Counter)
    """Assignments per response of the open step."""
    responses_migrated: int = 0
    """Responses that went on elsewhere at least once."""
    open_step: tuple[int, int] | None = None
    """(step, policy version)."""
    trained_step: int = -1
    first_response: int = 0
    """Number of the open step's first response."""
    next_response: int = 0
    """Number of the next response to be asked for; never reused."""
    next_epoch: int = 1
    """Epoch of the next registration; never reused."""

    def fold(self, event: Event, commands: list[Command]) -> None:
        """Take in one event and the commands that followed from it."""
        match event:
            case StepStarted(step=step, policy_version=version, requests=requests):
                if self.open_step != (step, version):
                    if self.open_step is not None and step <= self.open_step[0]:
                        self.tokens_redone += self.tokens_in_step
                    self.open_step = (step, version)
                    self.requested += len(requests)
                    self.first_response = requests[0].response
                    self.next_response = max(self.next_response, requests[-1].response + 1)
                    self.tokens_in_step = 0
                    self.assigned = Counter()
            case Finished(num_tokens=num_tokens):
                self.finished += 1
                self.tokens_finished += num_tokens
                self.tokens_in_step += num_tokens
            case StepTrained(step=step):
                self.trained_step = step
            case InstanceJoined(epoch=epoch):
                self.next_epoch = max(self.next_epoch, epoch + 1)
            case _:
                pass
        for command in commands:
            if isinstance(command, Assign):
                self.assigned[command.response] += 1
                self.responses_migrated += self.assigned[command.response] == 2
