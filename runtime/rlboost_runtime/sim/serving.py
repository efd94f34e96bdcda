"""A fleet that only serves, in virtual time: requests arrive, the core places them and sizes the fleet.

Requests arrive at random (a Poisson process whose rate may swing), each with lengths of its own, on a spot
market that takes machines away. The core is the one of live runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from rlboost_runtime.core.base.autoscaling import Autoscaling
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    RLBOOST,
    Assign,
    Command,
    FinishReason,
    RequestArrived,
    ResponseRequest,
    RunStarted,
    Tick,
    VersionPublished,
)
from rlboost_runtime.sim.policies import PolicySetup, Switches, policy_setup
from rlboost_runtime.sim.presets import Preset
from rlboost_runtime.sim.responses import ResponseStore
from rlboost_runtime.sim.world import Watch, World
from rlboost_runtime.traces import Trace


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients ask for."""

    requests_per_s: float
    """In the mean."""
    swing: float = 0.0
    """How far the rate goes above and below its mean, as a share of it, as a sine."""
    period_s: float = 3600.0
    mean_tokens: float = 256.0
    """Of a response; lengths are exponential, cut at the limit."""
    prompt_tokens: int = 256

    def rate(self, at: float) -> float:
        """Return the requests per second at a moment."""
        return self.requests_per_s * (1.0 + self.swing * math.sin(2.0 * math.pi * at / self.period_s))


@dataclass(frozen=True, slots=True)
class ServingResult:
    """What was seen; times in seconds."""

    seconds: float
    arrived: int
    finished: int
    tokens: int
    """Of the requests that finished."""
    usd: float
    waits: tuple[float, ...]
    """From a request's arrival to its first engine, sorted."""
    preemptions: int
    launches: int
    mean_spot_machines: float
    wanted: tuple[tuple[float, int], ...]
    """Spot instances wanted, whenever that changed."""

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Everything spent over the tokens served; None where there are none."""
        return 1e6 * self.usd / self.tokens if self.tokens else None

    def wait_s(self, share: float) -> float:
        """Return the wait that `share` of the requests did not exceed."""
        return self.waits[min(len(self.waits) - 1, int(share * len(self.waits)))] if self.waits else 0.0

    def waited_longer(self, seconds: float) -> float:
        """Return the share of requests that waited longer."""
        return 1.0 - bisect_left(self.waits, seconds) / len(self.waits) if self.waits else 0.0


class RequestStore(ResponseStore):
    """The truth about the open requests: how long each becomes and what has been received of it."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(1, max_tokens)
        self._asked: dict[int, tuple[int, int]] = {}

    def add(self, response: int, prompt: int, goal: int) -> None:
        """A request arrives, with lengths in tokens."""
        self._asked[response], self.tokens[response] = (prompt, goal), 0

    def prompt_of(self, response: int) -> int:
        """Return the prompt's tokens."""
        return self._asked[response][0]

    def goal_of(self, response: int) -> int:
        """Return how many tokens the response becomes."""
        return self._asked[response][1]

    def finish(self, response: int) -> tuple[int, FinishReason]:
        """Note that a request is complete, and forget it."""
        goal = self._asked.pop(response)[1]
        del self.tokens[response]
        return goal, FinishReason.STOP


class ServingWorld(World):
    """A world without a trainer."""

    def __init__(
        self,
        preset: Preset,
        trace: Trace,
        setup: PolicySetup,
        traffic: Traffic,
        seed: int,
        *,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(preset, trace, setup, seed, watch=watch)
        self._limit = preset.workload.max_response_tokens
        self._requests = RequestStore(self._limit)
        self.responses = self._requests
        self._serving = preset
        self._setup_of = setup
        self._traffic = traffic
        self._random = Random(seed)  # noqa: S311 (arrivals, no secrets)
        self._arrived_at: dict[int, float] = {}
        self._next_number = FIRST_REQUEST
        self.num_arrived = self.num_finished = self.tokens_served = 0
        self.waits: list[float] = []
        self.wanted: list[tuple[float, int]] = []

    def serve(self, seconds: float) -> ServingResult:
        """Live for so long."""
        self.cloud.begin()
        while self.agenda.next_time() == 0.0:
            self.agenda.step()
        self.send(RunStarted(0.0, self._setup_of.config))
        self._start_reserved()
        self.send(VersionPublished(0.0, 0, round(self._serving.model.weight_bytes)))
        self._plan_arrival()
        while self.agenda.now < seconds:
            when, deadline = self.agenda.next_time(), self.core.next_deadline()
            if deadline is not None and (when is None or deadline <= when):
                self.agenda.now = max(self.agenda.now, deadline)
                self.send(Tick(self.agenda.now))
            else:
                self.agenda.step()
                self._drain()
            self._note_wanted()
        now = self.agenda.now
        spot_usd, spot_s = self.cloud.billed()
        self.recorder.close(now)
        return ServingResult(
            seconds=now,
            arrived=self.num_arrived,
            finished=self.num_finished,
            tokens=self.tokens_served,
            usd=spot_usd + self.egress_usd + self._serving.reserved_usd_per_hour * now / 3600.0,
            waits=tuple(sorted(self.waits)),
            preemptions=len(self.recorder.kills),
            launches=len({interval.machine for interval in self.recorder.intervals}) - 1,
            mean_spot_machines=spot_s / now,
            wanted=tuple(self.wanted),
        )

    def finished(self, response: int) -> None:
        """A request is complete."""
        if self.responses.is_open(response):
            self.num_finished += 1
            self.tokens_served += self._requests.goal_of(response)
            super().finished(response)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Assign) and (at := self._arrived_at.pop(command.response, None)) is not None:
            self.waits.append(self.agenda.now - at)
        super()._execute(command)

    def _note_wanted(self) -> None:
        wanted = self.core.useful_instances
        if not self.wanted or self.wanted[-1][1] != wanted:
            self.wanted.append((self.agenda.now, wanted))

    def _plan_arrival(self) -> None:
        """Plan the next arrival at the highest rate; what exceeds the rate then is dropped (thinning)."""
        most = self._traffic.requests_per_s * (1.0 + self._traffic.swing)
        self.agenda.after(self._random.expovariate(most), lambda: self._arrive(most))

    def _arrive(self, most: float) -> None:
        now, traffic = self.agenda.now, self._traffic
        if self._random.random() * most < traffic.rate(now):
            number, self._next_number = self._next_number, self._next_number + 1
            goal = min(self._limit, max(1, round(self._random.expovariate(1.0 / traffic.mean_tokens))))
            self._requests.add(number, traffic.prompt_tokens, goal)
            self._arrived_at[number] = now
            self.num_arrived += 1
            request = ResponseRequest(number, number, traffic.prompt_tokens, self._limit)
            self.send(RequestArrived(now, request))
        self._plan_arrival()


def simulate_serving(
    preset: Preset,
    trace: Trace,
    rule: Autoscaling,
    traffic: Traffic,
    *,
    seed: int,
    hours: float,
    watch: Callable[..., None] | None = None,
) -> ServingResult:
    """Simulate `hours` of a served model. `watch` sees every event and the core's commands. Raises
    `ValueError` for a model that its machines cannot hold."""
    setup = policy_setup(RLBOOST.name, preset, Switches())
    config = replace(setup.config, autoscaling=rule, max_spot_instances=rule.max_instances)
    world = ServingWorld(preset, trace, replace(setup, config=config), traffic, seed, watch=watch)
    return world.serve(hours * 3600.0)
