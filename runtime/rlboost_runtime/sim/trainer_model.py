"""The trainer as seconds: it asks for steps, trains on finished groups in micro-batches while it has the
GPUs, and publishes.

With `Workload.max_staleness` it asks for a step as soon as all groups of the newest one are there, so many
steps ahead of the one that it trains, and keeps the GPUs. With `Workload.in_flight_updates` it does not wait
for them: so many steps are open besides the one that it trains.

A response costs some forward passes (`Assumptions.forward_passes`). A micro-batch takes whole
groups, at least `micro_batch_responses` of them and whatever else is ready, up to `MAX_SHARE` of the step,
so that a recall is answered soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlboost_runtime.core.base.messages import (
    Event,
    LeaseReturned,
    StepStarted,
    StepTrained,
    VersionPublished,
)
from rlboost_runtime.sim.clock import Agenda
from rlboost_runtime.sim.presets import Preset
from rlboost_runtime.sim.responses import ResponseStore, StepLengths, draw_lengths
from rlboost_runtime.sim.result import Activity

MAX_SHARE = 1 / 16
"""Largest micro-batch, as a share of the step's responses."""
LOOK_AGAIN_S = 0.5
"""With synchronised weights: pause between two checks that every instance has them."""


class TrainerHost(Protocol):
    """What the trainer needs of the world."""

    agenda: Agenda
    responses: ResponseStore

    def send(self, event: Event) -> None:
        """Send the core an event."""

    def trainer_activity(self, what: Activity) -> None:
        """The reserved node does something else now."""

    def step_began(self, *, gives_back: bool) -> None:
        """The trainer begins with a step; `gives_back`: others may have its GPUs meanwhile."""

    def step_ended(self, step: int, wait_s: float, train_s: float, tokens: Sequence[int]) -> None:
        """A step is trained and published, with responses of so many tokens."""

    def all_loaded(self) -> bool:
        """Return True if every spot instance serves the newest version that it was ordered to load."""


def train_s(preset: Preset, lengths: list[tuple[int, int]]) -> float:
    """Return the seconds of training (prompt, response) lengths in one micro-batch."""
    shape, calibration = preset.reserved, preset.calibration
    rate = preset.reserved_nodes * shape.gpus * shape.gpu.flops * calibration.train_mfu
    work = sum(preset.model.forward_flops(prompt + tokens) for prompt, tokens in lengths)
    return preset.assumptions.forward_passes * work / rate + calibration.micro_batch_s


@dataclass
class _Step:
    """A step that was asked for and is not trained yet."""

    number: int
    first_response: int
    lengths: StepLengths
    num_missing: int
    """Responses that have not arrived."""
    num_left: int
    """Responses that are not trained."""
    ready: deque[tuple[int, int]] = field(default_factory=deque)
    """Prompt and response tokens of those that may be trained now."""


class SimTrainer:
    """One trainer."""

    def __init__(
        self, host: TrainerHost, preset: Preset, seed: int, *, waits_for_weights: bool, weight_bytes: int
    ) -> None:
        self._steps: deque[_Step] = deque()
        """The one that is trained first; without in-flight updates all but the last have arrived."""
        self._next_step = 0
        self._version = 0
        self._weight_bytes = weight_bytes
        self._host = host
        self._preset = preset
        self._seed = seed
        self._waits_for_weights = waits_for_weights
        self._has_lease = False
        self._is_busy = False
        self._is_recalled = False
        self._idle_since: float | None = None
        self._wait_s = 0.0
        self._train_s = 0.0

    def begin(self) -> None:
        """Publish version 0 and ask for the first step."""
        self._host.send(VersionPublished(self._host.agenda.now, 0, self._weight_bytes))
        self._open()

    def group_finished(self, step: int, group: int) -> None:
        """A group is finished."""
        if self._preset.assumptions.trains_whole_groups:
            asked = next(each for each in self._steps if each.number == step)
            self._arrived(asked, self._host.responses.members_of(asked.first_response, group))

    def response_finished(self, response: int) -> None:
        """A response is finished."""
        if not self._preset.assumptions.trains_whole_groups:
            asked = next(each for each in reversed(self._steps) if each.first_response <= response)
            self._arrived(asked, (response,))

    def _arrived(self, step: _Step, responses: Sequence[int]) -> None:
        step.ready.extend(self._host.responses.lengths_of(response) for response in responses)
        step.num_missing -= len(responses)
        self._try()
        if self._may_ask_ahead():
            self._host.agenda.after(0.0, self._ask_ahead)

    @property
    def _asks_early(self) -> bool:
        workload = self._preset.workload
        return workload.in_flight_updates and workload.turns is None

    def _may_ask_ahead(self) -> bool:
        steps = self._steps
        is_time = bool(steps) and (self._asks_early or not steps[-1].num_missing)
        return is_time and len(steps) <= self._preset.workload.max_staleness

    def _ask_ahead(self) -> None:
        if self._may_ask_ahead():
            self._open()

    def granted(self) -> None:
        """The GPUs are the trainer's."""
        self._has_lease = True
        self._host.trainer_activity("wait")
        self._idle_since = self._host.agenda.now
        self._try()

    def recalled(self) -> None:
        """The GPUs are wanted back."""
        self._is_recalled = True
        if not self._is_busy:
            self._give_back()

    def _open(self) -> None:
        """Ask for the next step, to be trained now or after those that were asked for before."""
        preset, now, number = self._preset, self._host.agenda.now, self._next_step
        self._next_step += 1
        is_ahead = bool(self._steps)
        lengths = draw_lengths(preset.workload, preset.assumptions, self._seed, number)
        num_kept = len(self._steps) if self._asks_early else 0
        requests = self._host.responses.open_step(lengths, num_kept)
        num = preset.workload.responses
        self._steps.append(_Step(number, requests[0].response, lengths, num, num))
        if not is_ahead:
            self._has_lease = self._is_recalled = False
            self._begin_step(gives_back=True)
        self._host.send(
            StepStarted(
                now,
                number,
                self._version,
                requests,
                keeps_lease=is_ahead and (self._has_lease or not self._asks_early),
                are_episodes=preset.workload.turns is not None,
                in_flight_updates=preset.workload.in_flight_updates,
                open_from=self._steps[0].number if self._asks_early else None,
            )
        )
        if self._asks_early and self._may_ask_ahead():
            self._host.agenda.after(0.0, self._ask_ahead)

    def _begin_step(self, *, gives_back: bool) -> None:
        self._wait_s = self._train_s = 0.0
        self._host.step_began(gives_back=gives_back)

    def _try(self) -> None:
        if not self._has_lease or self._is_busy or not self._steps or not self._steps[0].num_left:
            return
        enough, step = self._preset.assumptions.micro_batch_responses, self._steps[0]
        if len(step.ready) < min(enough, step.num_left):
            return
        most = max(enough, int(MAX_SHARE * self._preset.workload.responses))
        batch = [step.ready.popleft() for _ in range(min(most, len(step.ready)))]
        step.num_left -= len(batch)
        seconds = train_s(self._preset, batch)
        self._stop_waiting()
        self._is_busy = True
        self._train_s += seconds
        self._host.trainer_activity("train")
        self._host.agenda.after(seconds, self._trained)

    def _trained(self) -> None:
        self._is_busy = False
        if not self._steps[0].num_left:
            self._optimize()
            return
        self._idle_since = self._host.agenda.now
        if self._is_recalled:
            self._give_back()
            return
        self._host.trainer_activity("wait")
        self._try()

    def _give_back(self) -> None:
        self._stop_waiting()
        self._has_lease = self._is_recalled = False
        self._host.trainer_activity("hand-over")
        self._host.send(LeaseReturned(self._host.agenda.now))

    def _stop_waiting(self) -> None:
        if self._idle_since is not None:
            self._wait_s += self._host.agenda.now - self._idle_since
            self._idle_since = None

    def _optimize(self) -> None:
        self._is_busy = True
        self._host.trainer_activity("optimizer")
        self._host.agenda.after(self._preset.assumptions.optimizer_s, self._gather)

    def _gather(self) -> None:
        self._host.trainer_activity("publish")
        self._host.agenda.after(self._preset.assumptions.gather_s, self._publish)

    def _publish(self) -> None:
        now, assumptions, step = self._host.agenda.now, self._preset.assumptions, self._steps.popleft()
        self._is_busy = False
        busy_s = self._train_s + assumptions.optimizer_s + assumptions.gather_s
        self._version += 1
        self._host.send(VersionPublished(now, self._version, self._weight_bytes))
        self._host.send(StepTrained(now, step.number, self._wait_s, busy_s))
        self._host.step_ended(step.number, self._wait_s, self._train_s, step.lengths.tokens)
        if self._steps:
            self._go_on()
        elif self._waits_for_weights:
            self._host.agenda.after(0.0, self._open_when_loaded)
        else:
            self._open()

    def _go_on(self) -> None:
        """Train the next step, which was asked for before; the GPUs are kept, unless they are wanted back."""
        self._begin_step(gives_back=False)
        self._ask_ahead()
        if self._is_recalled:
            self._give_back()
            return
        self._host.trainer_activity("wait")
        self._idle_since = self._host.agenda.now
        self._try()

    def _open_when_loaded(self) -> None:
        if self._host.all_loaded():
            self._open()
        else:
            self._host.agenda.after(LOOK_AGAIN_S, self._open_when_loaded)
