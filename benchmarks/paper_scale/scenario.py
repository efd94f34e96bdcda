"""What is emulated, for the processes of the run: a file that the job carries, and what follows from it.

Tokens are made up so that every mistake shows. A response is named by the assignment that began it. Its
first token is that name, token k a function of name and k, and its length a function of group and name; so
any engine can go on where another stopped, and the trainer can check each token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec

from rlboost_runtime.processes import RUN_TAG
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.sim.engine_model import EngineSpeed, engine_speed
from rlboost_runtime.sim.presets import Preset, Workload, presets

FILE = "paper_scale.json"
STEPS = "paper_scale_steps.jsonl"
"""What the emulated trainer notes of each step, in the run's folder."""
_MULTIPLIER, _VOCABULARY = 48_271, 150_001
PROBE = (1, 2, 3)
"""Tokens of the probe that proves a version."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's parameters."""

    preset_name: str
    seed: int
    prompts: int
    """Prompts of a step; the paper's are 128."""
    max_response_tokens: int
    """The paper's are 14,336."""
    restore_s: float = 0.0
    """What a trainer that is started again needs to have model and optimizer back."""

    @classmethod
    def of_run(cls) -> Scenario:
        """Return the scenario of the run that started this process."""
        path = RunFolder(Path(os.environ[RUN_TAG])).files / FILE
        return msgspec.json.decode(path.read_bytes(), type=cls)

    @property
    def preset(self) -> Preset:
        """The simulator's preset with this workload."""
        preset = presets()[self.preset_name]
        workload = Workload(prompts=self.prompts, max_response_tokens=self.max_response_tokens)
        return replace(preset, workload=workload)

    def speed(self, *, reserved: bool) -> EngineSpeed:
        """Return the roofline of one engine."""
        preset, assumed = self.preset, self.preset.assumptions
        shape = preset.reserved if reserved else preset.spot[0]
        share = assumed.reserved_memory_share if reserved else assumed.spot_memory_share
        return engine_speed(preset.model, shape, share, preset.calibration, assumed)

    def prompt(self, step: int, group: int) -> list[int]:
        """Return a prompt: step and group, then padding to a drawn length."""
        mean = self.preset.workload.prompt_tokens
        drawn = Random(f"prompt/{self.seed}/{step}/{group}").uniform(0.5, 1.5)
        return [step, group, *[0] * (max(2, round(mean * drawn)) - 2)]

    def length(self, prompt: Sequence[int], name: int) -> int:
        """Return the length of a response, drawn from the distribution of `sim.responses`."""
        assumed = self.preset.assumptions
        group = Random(f"group/{self.seed}/{prompt[0]}/{prompt[1]}").gauss(0.0, 1.0)
        own = Random(f"own/{self.seed}/{prompt[0]}/{name}").gauss(0.0, 1.0)
        share = assumed.length_group_share
        spread = math.sqrt(share) * group + math.sqrt(1.0 - share) * own
        length = math.exp(math.log(assumed.length_median) + assumed.length_sigma * spread)
        return max(1, min(self.max_response_tokens, round(length)))


def tokens_of(name: int, start: int, end: int) -> list[int]:
    """Return tokens [start, end) of a response."""
    tokens = [(name * _MULTIPLIER + k) % _VOCABULARY for k in range(start, end)]
    if start == 0 and tokens:
        tokens[0] = name
    return tokens


class Checks:
    """Finds what is wrong with delivered responses: one token lost, doubled or another's shows."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._names: set[int] = set()

    def problem(self, prompt: Sequence[int], ids: list[int], num_logprobs: int) -> str | None:
        """Return what is wrong with one response; None: nothing."""
        if not ids:
            return "it is empty"
        if ids[0] in self._names:
            return f"{ids[0]} was delivered before"
        self._names.add(ids[0])
        length = self._scenario.length(prompt, ids[0])
        if len(ids) != length or num_logprobs != length:
            return f"{len(ids)} tokens and {num_logprobs} logprobs instead of {length}"
        return None if ids == tokens_of(ids[0], 0, length) else "its tokens are not those of one response"
