"""The trainer of the run, as `trainer.script`: it takes the simulator's seconds and checks every token.

It requests steps, trains whole groups while it holds the lease, takes the passes that need no group while it
waits for groups, answers recalls between micro-batches, and publishes small weights, all through
`RolloutClient`. Of each step it notes a line in the run's folder: when it began, how long it took, the
lengths that responses had, and what was wrong with them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from benchmarks.paper_scale.scenario import PROBE, STEPS, Checks, Scenario
from rlboost_runtime.engines.emulated import emulated_response
from rlboost_runtime.protocol.messages import (
    DeliverGroupMessage,
    DeliverResponseMessage,
    Sampling,
    StepTrainedMessage,
)
from rlboost_runtime.sim.trainer_model import MAX_SHARE, passes_s
from rlboost_runtime.trainer.artifacts.publisher import VersionContent
from rlboost_runtime.trainer.rollout.client import RolloutClient, prompt_specs
from rlboost_runtime.weights.manifest import Probe

WEIGHTS = 262_144
"""Parameters of the model that is published: 1 MB."""


@dataclass(slots=True)
class Lived:
    """What is known of the open step."""

    lengths: dict[int, list[list[int]]] = field(default_factory=dict)
    """(prompt, response) tokens of each response, by group."""
    problems: list[str] = field(default_factory=list)
    migrated: int = 0
    train_s: float = 0.0
    had: set[tuple[int, int]] = field(default_factory=set)
    """Group and place of the responses that have had the passes which need no group."""


class ModelledTrainer:
    """One trainer."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._scenario = Scenario.of_run()
        self._preset = self._scenario.preset
        self._checks = Checks(self._scenario)
        self._notes = client.run.path / STEPS
        self._early: dict[tuple[int, int], int] = {}
        """Tokens by group and place of the open step's responses whose groups are not complete. Filled by the
        stream's thread, item by item."""
        client.stream.on_response(self._finished_early)

    def train(self) -> None:
        """Train until the run is ended; a trainer that is started again goes on from the last version."""
        if self._notes.exists():
            time.sleep(self._scenario.restore_s)
        self._notes.touch()
        done = self._notes.read_text().count("\n")
        self._publish(done)
        for step in count(done):
            self._step(step)

    def _publish(self, step: int) -> None:
        ids, logprobs = emulated_response(list(PROBE), 4, Sampling())
        weights = torch.full((WEIGHTS,), float(step))
        content = VersionContent(
            lambda: [("weights", weights)],
            lambda: {"config.json": b"{}", "generation_config.json": b"{}"},
            lambda: Probe(PROBE, tuple(ids), tuple(logprobs), 0.01),
        )
        self._client.begin_publication(content, step)
        self._client.publisher.ready()

    def _step(self, step: int) -> None:
        workload, stream = self._preset.workload, self._client.stream
        prompts = [self._scenario.prompt(step, group) for group in range(workload.prompts)]
        began, began_wall = time.monotonic(), time.time()
        self._client.request_step(
            step, self._client.version, prompt_specs(prompts), group_size=workload.group_size,
            max_response_tokens=workload.max_response_tokens, stop_token_ids=frozenset(),
        )  # fmt: skip
        lived = Lived()
        self._train(prompts, lived)
        assumed = self._preset.assumptions
        time.sleep(assumed.optimizer_s + assumed.gather_s)
        self._publish(step + 1)
        waits, tokens = stream.waits, sum(n for group in lived.lengths.values() for _, n in group)
        step_s = time.monotonic() - began
        busy_s = lived.train_s + assumed.optimizer_s + assumed.gather_s
        line = {
            "step": float(step), "policy_version": float(self._client.version - 1), "reward_mean": 0.0,
            "tokens_trained": float(tokens), "train_s": busy_s, "train_wait_s": waits.with_lease_s,
            "rollout_wait_s": waits.without_lease_s + waits.for_lease_s, "step_s": step_s,
        }  # fmt: skip
        self._note(
            step=step, began=began, began_wall=began_wall, seconds=step_s, tokens=tokens,
            wait_s=waits.with_lease_s, train_s=lived.train_s, migrated=lived.migrated,
            problems=lived.problems, lengths=[lived.lengths[group] for group in range(len(prompts))],
        )  # fmt: skip
        self._client.report(StepTrainedMessage(step, waits.with_lease_s, busy_s, tokens, 0.0, line))

    def _finished_early(self, early: DeliverResponseMessage) -> None:
        self._early[early.group, early.place] = len(early.response.token_ids) // 4

    def _train(self, prompts: list[list[int]], lived: Lived) -> None:
        """Take micro-batches of the simulator's size, each for the simulator's seconds."""
        stream, workload = self._client.stream, self._preset.workload
        enough = self._preset.assumptions.micro_batch_responses
        most = max(enough, int(MAX_SHARE * workload.responses))
        left = workload.responses
        ready: deque[tuple[int, int, bool]] = deque()
        while left:
            if (wanted := min(enough, left) - len(ready)) > 0:
                groups = stream.next_groups(wanted, or_once=lambda: len(self._early) >= enough)
                self._take(groups, prompts, ready, lived)
                if not groups:
                    self._work_early(prompts, most, lived)
                continue
            stream.hold_lease()
            self._take(stream.next_groups(0), prompts, ready, lived)
            batch = [ready.popleft() for _ in range(min(most, len(ready)))]
            left -= len(batch)
            assumed = self._preset.assumptions
            whole, early = assumed.forward_passes, assumed.early_passes
            self._pass([(prompt, tokens, whole - had * early) for prompt, tokens, had in batch], lived)
            if left:
                stream.answer_recall()
        self._early.clear()

    def _work_early(self, prompts: list[list[int]], most: int, lived: Lived) -> None:
        """Take the passes that need no group for up to `most` responses."""
        self._client.stream.hold_lease()
        places = list(self._early)[:most]
        lengths = {place: self._early.pop(place) for place in places}
        lived.had.update(places)
        passes = self._preset.assumptions.early_passes
        self._pass([(len(prompts[group]), tokens, passes) for (group, _), tokens in lengths.items()], lived)
        self._client.stream.answer_recall()

    def _pass(self, passes: list[tuple[int, int, float]], lived: Lived) -> None:
        """Take as long as the simulator says for (prompt tokens, response tokens, forward passes)."""
        seconds = passes_s(self._preset, passes)
        time.sleep(seconds)
        lived.train_s += seconds

    def _take(
        self,
        groups: list[DeliverGroupMessage],
        prompts: list[list[int]],
        ready: deque[tuple[int, int, bool]],
        lived: Lived,
    ) -> None:
        for group in groups:
            prompt = prompts[group.group]
            lengths = []
            for response in group.responses:
                ids = np.frombuffer(response.token_ids, "<i4").tolist()
                lengths.append([len(prompt), len(ids)])
                lived.migrated += len({segment.instance for segment in response.segments}) > 1
                if problem := self._checks.problem(prompt, ids, len(response.logprobs) // 4):
                    lived.problems.append(f"group {group.group}, response {response.response}: {problem}")
            lived.lengths[group.group] = lengths
            for place, (prompt_tokens, tokens) in enumerate(lengths):
                self._early.pop((group.group, place), None)
                ready.append((prompt_tokens, tokens, (group.group, place) in lived.had))

    def _note(self, **values: Any) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    """Train the run that started this process."""
    with RolloutClient.of_run() as client:
        ModelledTrainer(client).train()


if __name__ == "__main__":
    main()
