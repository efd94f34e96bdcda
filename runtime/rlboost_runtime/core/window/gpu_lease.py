"""The GPU lease: whether the reserved GPUs belong to the reserved engines or to the trainer.

::

    ENGINES --window closes--> CLOSING --all asleep, GrantLease--> TRAINER --RecallLease--> RECALLING
       ^                          |                                   |                         |
       +------ StepStarted -------+------------ StepStarted ----------+-- StepStarted, LeaseReturned

A run begins in TRAINER: the trainer loads its model before it asks for the first step. The lease is granted
only when every live reserved engine has reported that its memory is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlboost_runtime.core.base.state_machine import StateMachine


class LeaseState(StrEnum):
    """Who holds the reserved GPUs."""

    ENGINES = "engines"
    """The reserved engines: the seeding window is open."""
    CLOSING = "closing"
    """The window is closed; engines hand their work over and go to sleep."""
    TRAINER = "trainer"
    """The trainer."""
    RECALLING = "recalling"
    """The trainer was asked to free them and has not answered yet."""


LEGAL = {
    LeaseState.ENGINES: frozenset({LeaseState.CLOSING}),
    LeaseState.CLOSING: frozenset({LeaseState.TRAINER, LeaseState.ENGINES}),
    LeaseState.TRAINER: frozenset({LeaseState.ENGINES, LeaseState.RECALLING}),
    LeaseState.RECALLING: frozenset({LeaseState.ENGINES}),
}


@dataclass(frozen=True, slots=True)
class LeaseInputs:
    """What the lease is decided on, as it is now. Times in seconds of the run."""

    now: float
    num_unfinished: int
    has_serving_spot: bool
    has_reserved: bool
    """Reserved instances are configured, or one has joined."""
    can_recall: bool
    """A reserved instance is connected, so that a recall is of use."""
    t_seed_s: float


class GpuLease:
    """Who holds the reserved GPUs, and since when the window is open or no instance serves."""

    def __init__(self) -> None:
        self._lifecycle = StateMachine("gpu lease", LeaseState.TRAINER, LEGAL, 0.0)
        self.opened_at = 0.0
        self.unserved_since: float | None = None
        """Since when the trainer holds the GPUs while work is left that no spot instance can do."""

    @property
    def state(self) -> LeaseState:
        """Who holds the GPUs."""
        return self._lifecycle.state

    def open(self, why: str, at: float) -> None:
        """The trainer has given the GPUs back: the window opens (again)."""
        if self.state is not LeaseState.ENGINES:
            self._lifecycle.move(LeaseState.ENGINES, why, at)
        self.opened_at = at
        self.unserved_since = None

    def close(self, why: str, at: float) -> None:
        """The window closes."""
        self._lifecycle.move(LeaseState.CLOSING, why, at)

    def grant(self, at: float) -> None:
        """The trainer gets the GPUs."""
        self._lifecycle.move(LeaseState.TRAINER, "all reserved engines asleep", at)
        self.unserved_since = None

    def recall(self, at: float) -> None:
        """The trainer is asked to give them back."""
        self._lifecycle.move(LeaseState.RECALLING, "work is left and no spot instance serves", at)
        self.unserved_since = None

    def reason_to_close(self, inputs: LeaseInputs) -> str | None:
        """Return why the open window should close now, None to keep it open."""
        if self.state is not LeaseState.ENGINES:
            return None
        if inputs.num_unfinished == 0:
            return "all responses are finished"
        if not inputs.has_reserved:
            return "there are no reserved engines"
        if inputs.has_serving_spot and inputs.now >= self.closes_at(inputs.t_seed_s):
            return f"open for {inputs.now - self.opened_at:.3f} s and a spot instance serves"
        return None

    def closes_at(self, t_seed_s: float) -> float:
        """Return when the window has lasted T_seed."""
        return self.opened_at + t_seed_s

    def watch_for_recall(self, inputs: LeaseInputs) -> float | None:
        """Note if an instance serves; return since when none does although work is left, else None."""
        unserved = (
            self.state is LeaseState.TRAINER
            and inputs.num_unfinished > 0
            and not inputs.has_serving_spot
            and inputs.can_recall
        )
        if not unserved:
            self.unserved_since = None
        elif self.unserved_since is None:
            self.unserved_since = inputs.now
        return self.unserved_since
