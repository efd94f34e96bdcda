"""A core under a hand on the clock (events are said in one line, every invariant is checked after each), and
what tests of small tensors want."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlboost_runtime.core.base.messages import (
    Assign,
    Command,
    CoreConfig,
    Event,
    Finished,
    FinishReason,
    Heartbeat,
    InstanceJoined,
    InstanceReady,
    MachineLaunched,
    Pool,
    Released,
    ReleaseReason,
    ResponseRequest,
    RunStarted,
    Slept,
    StepStarted,
    Tick,
    VersionPublished,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.sim.policies import baseline_rules


class CoreDriver:
    """Drives one core; `now` is the time of the next event."""

    def __init__(self, config: CoreConfig) -> None:
        self.core = Core(baseline_rules())
        self.now = 0.0
        self.commands: list[Command] = []
        self._next_epoch = 1
        self._next_response = 0
        self.send(RunStarted(0.0, config))

    def send(self, event: Event) -> list[Command]:
        commands = self.core.handle(event)
        self.core.check()
        self.commands += commands
        return commands

    def until(
        self, at: float, *, beating: tuple[str, ...] | None = None, stuck: tuple[str, ...] = ()
    ) -> list[Command]:
        """Let time pass, tick by tick; instances beat (all by default), `stuck` ones without progress."""
        heard: list[Command] = []
        while self.now < at:
            self.now = min(at, self.now + 0.5)
            for name, instance in list(self.core.instances.items()):
                if (beating is None or name in beating) and instance.is_connected:
                    progress = 0 if name in stuck else round(self.now * 1000)
                    heard += self.send(Heartbeat(self.now, name, instance.epoch, progress, ()))
            while (due := self.core.next_deadline()) is not None and due <= self.now:
                heard += self.send(Tick(self.now))
        return heard

    def join(
        self,
        name: str,
        pool: Pool = Pool.SPOT,
        *,
        machine: str = "",
        max_running: int = 4,
        kv_tokens: int = 10_000,
    ) -> list[Command]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        machine = machine or f"by-hand-{name}"
        return self.send(InstanceJoined(self.now, name, machine, pool, epoch, max_running, kv_tokens))

    def epoch(self, name: str) -> int:
        return self.core.instances[name].epoch

    def ready(self, name: str, version: int = 0, kv_tokens: int = 0) -> list[Command]:
        return self.send(InstanceReady(self.now, name, self.epoch(name), version, kv_tokens))

    def slept(self, name: str) -> list[Command]:
        return self.send(Slept(self.now, name, self.epoch(name)))

    def publish(self, version: int = 0) -> list[Command]:
        return self.send(VersionPublished(self.now, version))

    def spot(self, *names: str, version: int = 0, **capacity: int) -> None:
        """Have spot instances ready."""
        for name in names:
            self.join(name, **capacity)
            self.ready(name, version)

    def reserved(self, name: str = "head-0", **capacity: int) -> None:
        """Have a reserved instance asleep, as it is before the first step."""
        self.join(name, Pool.RESERVED, machine="head", **capacity)
        self.slept(name)

    def step(
        self,
        step: int = 0,
        version: int = 0,
        *,
        groups: int = 1,
        size: int = 1,
        prompt: int = 10,
        limit: int = 100,
        ahead: bool = False,
    ) -> list[Command]:
        first, self._next_response = self._next_response, self._next_response + groups * size
        requests = tuple(ResponseRequest(first + i, i // size, prompt, limit) for i in range(groups * size))
        return self.send(StepStarted(self.now, step, version, requests, keeps_lease=ahead))

    def finish(self, response: int, num_tokens: int = 7) -> list[Command]:
        return self.send(Finished(self.now, response, num_tokens, FinishReason.STOP))

    def release(
        self, response: int, num_tokens: int = 5, reason: ReleaseReason = ReleaseReason.ABORTED
    ) -> list[Command]:
        held = self.core.response(response)
        assert held.holder is not None
        assert held.assignment is not None
        return self.send(Released(self.now, held.holder, held.assignment, num_tokens, reason))

    def launched(self, machine: str) -> list[Command]:
        return self.send(MachineLaunched(self.now, machine))

    @staticmethod
    def assigned(commands: list[Command]) -> dict[int, str]:
        """Responses given out, and to whom."""
        return {c.response: c.instance for c in commands if isinstance(c, Assign)}

    def where(self) -> dict[int, str]:
        """Who holds which response."""
        return {response: instance for _, response, instance in self.core.assignments()}


@pytest.fixture
def new_run() -> Callable[..., CoreDriver]:
    """Return a factory of runs: `new_run(max_spot_instances=2, lease_s=3.0)`."""

    def make(**config: object) -> CoreDriver:
        defaults: dict[str, object] = {"max_spot_instances": 0, "reserved_instances": 0}
        return CoreDriver(CoreConfig(**{**defaults, **config}))  # type: ignore[arg-type]

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only get in one another's way."""
    import torch  # most tests here do without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
