"""What the simulator's agents report, live agents report too, from what their engines measure."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from rlboost_runtime.agent.bootstrap import Bootstrap
from rlboost_runtime.agent.service import Agent, Seams
from rlboost_runtime.agent.weight_children import Puller
from rlboost_runtime.coordinator.storage.journal import decode_event
from rlboost_runtime.core.base.messages import Event
from rlboost_runtime.engines.base import EngineSettings, EngineSpec, KvCache
from rlboost_runtime.engines.emulated import EmulatedEngine
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    PromptSpec,
    Sampling,
    StepStartedMessage,
    TrainerHello,
    TrainerWelcome,
    VersionPublishedMessage,
)
from rlboost_runtime.seams import SystemClock
from rlboost_runtime.sim import agents, simulate
from rlboost_runtime.weights.child_pipe import PullRequest
from tests.integration.agent.test_agent_service import PULLER, write_version
from tests.integration.coordinator.test_coordinator_shell import Shell, pipe, shell
from tests.unit.sim.test_sim_run import HOURS, churn, small

pytestmark = pytest.mark.integration

OF_AGENTS = tuple(kind for kind in get_args(Event) if vars(agents).get(kind.__name__) is kind)
"""Events that the simulator's agents cause."""
SLOTS = 2
"""Fewer than the agent's hello promises: only what the engine itself reports can show it."""
KV = KvCache(640, 16, 5)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The run's folder, which bears the run's name."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


class SmallEngine(EmulatedEngine):
    """An emulated engine with fewer slots and less cache than it was asked for."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(msgspec.structs.replace(spec, max_running=SLOTS))

    @property
    def kv_cache(self) -> KvCache:
        return KV


def filled(events: Iterable[Event]) -> dict[str, set[str]]:
    """The fields of agents' events that ever say more than their default, or than nothing."""
    found: dict[str, set[str]] = defaultdict(set)
    for event in events:
        for field in dataclasses.fields(event) if isinstance(event, OF_AGENTS) else ():
            if getattr(event, field.name) not in (None, 0, "", (), field.default):
                found[type(event).__name__].add(field.name)
    return found


def live_agent(made: Shell, folder: Path) -> Agent:
    """A real agent, connected in memory, whose engine has less than its settings say."""
    serving: set[asyncio.Task[None]] = set()

    async def dial() -> Any:
        ours, theirs = pipe()
        serving.add(asyncio.create_task(made.agents.serve(ours)))
        return theirs

    script = folder / "puller.py"
    script.write_text(PULLER)
    template = PullRequest("", -1, str(folder / "weights"), "secret", "PEM", 2)
    puller = Puller(template, folder / "puller.log", (sys.executable, "-S", str(script)))
    engine = EngineSettings("emulated", Sampling(), 1024, 8, "float32", 0, tokens_per_s_per_response=50.0)
    bootstrap = Bootstrap(
        "job", "reserved-0", "reserved", ("reserved-0/0",), "https://head", "secret", "PEM", engine
    )
    return Agent(bootstrap, "reserved-0/0", folder, Seams(dial, SmallEngine, puller, SystemClock()))


async def live_run(folder: Path) -> list[Event]:
    """Let a coordinator and an agent work on a step until the engine has reported a queue."""
    agent_folder = folder.parent / "agent"
    agent_folder.mkdir()
    write_version(agent_folder, 1)
    async with shell(folder) as made:
        made.agents.weights_endpoint = {"url": "https://weights"}
        trainer = made.trainers()
        await trainer.say(TrainerHello(SCHEMA, "job", "boot"))
        await trainer.hear(TrainerWelcome)
        await trainer.say(VersionPublishedMessage(1, "digest", 1, 0.0))
        agent = asyncio.create_task(live_agent(made, agent_folder).run(asyncio.Event()))
        prompt = np.arange(3, dtype="<i4").tobytes()
        prompts = tuple(PromptSpec(group, prompt) for group in range(4))
        await trainer.say(StepStartedMessage(0, 1, prompts, 2, 120, ()))
        try:
            async with asyncio.timeout(20):
                while True:
                    await asyncio.sleep(0.2)
                    instances = made.driver.core.instances.values()
                    if any(i.num_queued and i.num_executing == SLOTS for i in instances):
                        break
            (instance,) = instances
            assert (instance.kv_tokens, instance.max_running) == (KV.capacity_tokens, KV.max_running)
            assert instance.num_assigned > SLOTS
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
    return [decode_event(line) for line in made.run.events.read_bytes().splitlines()]


def test_live_agents_fill_what_simulated_agents_fill(tmp_path: Path) -> None:
    simulated: list[Event] = []
    simulate(
        small(),
        churn(),
        "rlboost",
        seed=0,
        hours=HOURS / 2,
        watch=lambda event, _commands: simulated.append(event),
    )
    live = filled(asyncio.run(live_run(tmp_path)))
    expected = filled(simulated)
    assert {"num_queued", "tokens"} <= expected["Heartbeat"]
    assert "kv_tokens" in expected["InstanceJoined"]
    for kind in ("InstanceJoined", "InstanceReady", "Heartbeat", "Slept"):
        assert expected[kind] <= live[kind], f"{kind}: the simulator fills {expected[kind] - live[kind]}"
    assert {"kv_tokens", "kv_block_tokens", "max_running"} <= live["InstanceReady"], "measured by the engine"
