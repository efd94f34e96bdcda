"""The trainer as seconds: it asks for steps, trains on finished groups in micro-batches while it has the
GPUs, and publishes.

With `Workload.max_staleness` it asks for a step as soon as all groups of the newest one are there, so many
steps ahead of the one that it trains, and keeps the GPUs where it has them. With
`Workload.in_flight_updates` it does not wait for them: so many steps are open besides the one that it trains.

A response costs some forward passes (`Assumptions.forward_passes`). A micro-batch takes whole
groups, at least `micro_batch_responses` of them and whatever else is ready, up to `MAX_SHARE` of the step,
so that a recall is answered soon. A trainer that has the GPUs and waits for groups takes the passes that need
none meanwhile (`early_passes`), for as many responses at a time; not with in-flight updates, where it hardly
waits.

A trainer that restarts has nothing of the steps that it had not published. It asks for them again, the oldest
first, and receives their groups again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlboost_runtime.core.base.messages import (
    Event,
    LeaseReturned,
    ResponseRequest,
    StepStarted,
    StepTrained,
    TrainerLost,
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

    def is_step_open(self, step: int) -> bool:
        """Return True if the core has that step open."""

    def step_asked(self, responses: Sequence[int]) -> None:
        """A step has been asked for. If it was asked for before, some of its responses may be finished."""

    def all_loaded(self) -> bool:
        """Return True if every spot instance serves the newest version that it was ordered to load."""


def train_s(preset: Preset, lengths: Iterable[tuple[int, int]]) -> float:
    """Return the seconds of training (prompt, response) lengths in one micro-batch."""
    return passes_s(preset, [(*each, preset.assumptions.forward_passes) for each in lengths])


def passes_s(preset: Preset, passes: Iterable[tuple[int, int, float]]) -> float:
    """Return the seconds of a micro-batch of (prompt tokens, response tokens, forward passes)."""
    shape, calibration = preset.reserved, preset.calibration
    rate = preset.reserved_nodes * shape.gpus * shape.gpu.flops * calibration.train_mfu
    work = sum(times * preset.model.forward_flops(prompt + tokens) for prompt, tokens, times in passes)
    return work / rate + calibration.micro_batch_s


@dataclass
class _Step:
    """A step that was asked for and is not trained yet."""

    number: int
    version: int
    """The newest one when it was asked for."""
    requests: tuple[ResponseRequest, ...]
    lengths: StepLengths
    num_missing: int = field(init=False)
    """Responses that have not arrived."""
    num_left: int = field(init=False)
    """Responses that are not trained."""
    ready: deque[tuple[int, int, float]] = field(init=False)
    """Prompt tokens, response tokens and forward passes of those that may be trained now."""
    early: dict[int, None] = field(init=False)
    """Those that are finished before their groups, in that order, and have had no pass."""
    had_early: set[int] = field(init=False)
    """Those that have had the passes that need no group."""
    carried: list[int] | None = None
    """Tokens of each response when the core closed the step that a former process had asked for."""

    def __post_init__(self) -> None:
        self.forget()

    @property
    def first_response(self) -> int:
        """Number of its first response."""
        return self.requests[0].response

    @property
    def responses(self) -> range:
        """Numbers of its responses."""
        return range(self.first_response, self.first_response + len(self.requests))

    def forget(self) -> None:
        """Go back to when it was asked for."""
        self.num_missing = self.num_left = len(self.requests)
        self.ready = deque()
        self.early, self.had_early = {}, set()


class SimTrainer:
    """One trainer."""

    def __init__(
        self,
        host: TrainerHost,
        preset: Preset,
        seed: int,
        *,
        waits_for_weights: bool,
        works_early: bool,
        weight_bytes: int,
    ) -> None:
        """`works_early`: it takes what passes it can of responses whose groups are not complete."""
        assumptions = preset.assumptions
        waits = assumptions.trains_whole_groups and not preset.workload.in_flight_updates
        self._early_passes = assumptions.early_passes if works_early and waits else 0.0
        self._steps: deque[_Step] = deque()
        """The one that is trained first; without in-flight updates all but the last have arrived."""
        self._former: deque[_Step] = deque()
        """Steps that a former process had asked for and this one has not."""
        self._life = 0
        """Counts its processes."""
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

    def restart(self, back_after_s: float) -> None:
        """Its process ends; after so many seconds another one has the state of the last step published.
        Nothing happens before the first step. Not for episodes, whose environments would end with it."""
        assert self._preset.workload.turns is None, "a trainer with episodes cannot be restarted"
        if not self._next_step:
            return
        self._life += 1
        self._stop_waiting()
        for step in reversed(self._steps):
            step.forget()
            self._former.appendleft(step)
        self._steps.clear()
        self._is_busy = self._has_lease = self._is_recalled = False
        self._host.trainer_activity("restart")
        self._host.send(TrainerLost(self._host.agenda.now))
        self._later(back_after_s, self._open)

    def group_finished(self, step: int, group: int) -> None:
        """A group is finished."""
        if self._preset.assumptions.trains_whole_groups:
            asked = next((each for each in self._steps if each.number == step), None)
            if asked is not None:  # else it is delivered again once this process asks for it
                self._arrived(asked, self._host.responses.members_of(asked.first_response, group))

    def response_finished(self, response: int) -> None:
        """A response is finished."""
        asked = next((each for each in self._steps if response in each.responses), None)
        if asked is None:
            return
        if not self._preset.assumptions.trains_whole_groups:
            self._arrived(asked, (response,))
        elif self._early_passes and response not in asked.had_early:
            asked.early[response] = None
            self._later(0.0, self._try)  # its group may be complete at this very moment

    def _arrived(self, step: _Step, responses: Sequence[int]) -> None:
        for response in responses:
            step.early.pop(response, None)
            left = self._preset.assumptions.forward_passes
            left -= self._early_passes if response in step.had_early else 0.0
            step.ready.append((*self._host.responses.lengths_of(response), left))
        step.num_missing -= len(responses)
        self._try()
        if self._may_ask_ahead():
            self._later(0.0, self._ask_ahead)

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
        if not self._steps:
            return  # no process is there
        self._has_lease = True
        self._host.trainer_activity("wait")
        self._idle_since = self._host.agenda.now
        self._try()

    def recalled(self) -> None:
        """The GPUs are wanted back."""
        if not self._has_lease:
            return
        self._is_recalled = True
        if not self._is_busy:
            self._give_back()

    def _open(self) -> None:
        """Ask for the next step, to be trained now or after those that were asked for before."""
        preset = self._preset
        is_ahead, is_again = bool(self._steps), bool(self._former)
        step = self._former_step() if is_again else self._new_step()
        self._steps.append(step)
        if not is_ahead:
            self._has_lease = self._is_recalled = False
            self._begin_step(gives_back=True, is_again=is_again)
        self._host.send(
            StepStarted(
                self._host.agenda.now,
                step.number,
                step.version,
                step.requests,
                keeps_lease=is_ahead and self._has_lease,
                are_episodes=preset.workload.turns is not None,
                in_flight_updates=preset.workload.in_flight_updates,
                open_from=self._steps[0].number if self._asks_early else None,
            )
        )
        self._host.step_asked(step.responses)
        if is_again and not preset.assumptions.trains_whole_groups:
            self._arrived(step, [each for each in step.responses if self._host.responses.is_finished(each)])
        if self._asks_early and self._may_ask_ahead():
            self._later(0.0, self._ask_ahead)

    def _new_step(self) -> _Step:
        preset, number = self._preset, self._next_step
        self._next_step += 1
        lengths = draw_lengths(preset.workload, preset.assumptions, self._seed, number)
        num_kept = len(self._steps) if self._asks_early else 0
        return _Step(number, self._version, self._host.responses.open_step(lengths, num_kept), lengths)

    def _former_step(self) -> _Step:
        """Return the next step that a former process had asked for. One that the core has closed gets new
        numbers and keeps its tokens, as the journal does."""
        store, step = self._host.responses, self._former[0]
        if not self._host.is_step_open(step.number):
            for each in self._former:  # the core closes those too
                each.carried = each.carried or store.tokens_of(each.responses) or list(each.lengths.tokens)
            step.requests, step.carried = store.open_step(step.lengths, carried=step.carried), None
        return self._former.popleft()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a time if the process still lives then."""
        life = self._life
        self._host.agenda.after(seconds, lambda: action() if life == self._life else None)

    def _begin_step(self, *, gives_back: bool, is_again: bool = False) -> None:
        self._wait_s = self._train_s = 0.0
        if is_again:  # its time goes on
            self._host.trainer_activity("hand-over")
        else:
            self._host.step_began(gives_back=gives_back)

    def _try(self) -> None:
        if not self._has_lease or self._is_busy or not self._steps or not self._steps[0].num_left:
            return
        enough, step = self._preset.assumptions.micro_batch_responses, self._steps[0]
        most = max(enough, int(MAX_SHARE * self._preset.workload.responses))
        if len(step.ready) >= min(enough, step.num_left):
            batch = [step.ready.popleft() for _ in range(min(most, len(step.ready)))]
            step.num_left -= len(batch)
            self._busy(batch)
        elif len(step.early) >= enough:
            taken = list(step.early)[:most]
            for response in taken:
                del step.early[response]
            step.had_early.update(taken)
            lengths_of = self._host.responses.lengths_of
            self._busy([(*lengths_of(each), self._early_passes) for each in taken])

    def _busy(self, passes: list[tuple[int, int, float]]) -> None:
        """Take so many forward passes of each response."""
        seconds = passes_s(self._preset, passes)
        self._stop_waiting()
        self._is_busy = True
        self._train_s += seconds
        self._host.trainer_activity("train")
        self._later(seconds, self._trained)

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
        self._later(self._preset.assumptions.optimizer_s, self._gather)

    def _gather(self) -> None:
        self._host.trainer_activity("publish")
        self._later(self._preset.assumptions.gather_s, self._publish)

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
            self._later(0.0, self._open_when_loaded)
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
            self._later(LOOK_AGAIN_S, self._open_when_loaded)
