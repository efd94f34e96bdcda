"""What a person asked to be simulated, checked before anything long begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlboost_cli.simulation.job import preset_of_job
from rlboost_cli.simulation.runs import SimulatedMarket, SimulationRequest
from rlboost_cli.simulation.trace_views import cut
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import home
from rlboost_runtime.sim import POLICIES, Preset, presets
from rlboost_runtime.traces import PROFILES, Trace, sample_nodes
from rlboost_runtime.traces.catalogue import open_trace

MAX_SEEDS = 1000
"""More than anybody waits for."""


@dataclass(frozen=True, slots=True)
class SimulationArguments:
    """The command line of `rlboost simulate`."""

    job: Path | None
    preset: str | None
    trace: str
    window: str | None
    sample: float
    seed: int | None
    seeds: int | None
    policies: tuple[str, ...]

    def checked(self) -> SimulationRequest:
        """Return what is to be simulated. Raises `ConfigError`."""
        preset, notes = self._preset()
        seeds, policies = self._seeds(), self._policies()
        if not 0 < self.sample <= 1:
            raise ConfigError(f"--sample {self.sample:g} is no share of nodes", "write a share such as 0.5")
        whole = {seed: self._trace(seed) for seed in (seeds if self.trace in PROFILES else seeds[:1])}
        markets = tuple(
            SimulatedMarket(seed, sample_nodes(whole.get(seed, whole[seeds[0]]), self.sample, seed))
            for seed in seeds
        )
        return SimulationRequest(
            preset=preset,
            whole=whole[seeds[0]],
            start_h=_start_h(self.window),
            sample=self.sample,
            markets=markets,
            policies=policies,
            notes=notes,
        )

    def _preset(self) -> tuple[Preset, tuple[str, ...]]:
        known = presets()
        names = ", ".join(known)
        if (self.job is None) == (self.preset is None):
            given = "neither a job file nor --preset" if self.job is None else "both a job file and --preset"
            raise ConfigError(f"{given} was given", f"give a job file, or one of --preset {names}")
        if self.job is not None:
            return preset_of_job(self.job)
        if self.preset not in known:
            raise ConfigError(f"no preset is called `{self.preset}`", f"choose one of {names}")
        return known[self.preset], ()

    def _seeds(self) -> tuple[int, ...]:
        if self.seed is not None and self.seeds is not None:
            raise ConfigError("both --seed and --seeds were given", "leave one of them out")
        if self.seeds is None:
            return (self.seed or 0,)
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"--seeds {self.seeds} cannot be used", f"give 1 to {MAX_SEEDS}")
        return tuple(range(self.seeds))

    def _policies(self) -> tuple[str, ...]:
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown:
            raise ConfigError(f"no policy is called `{unknown[0]}`", f"choose of {', '.join(POLICIES)}")
        return tuple(dict.fromkeys(self.policies)) or tuple(POLICIES)

    def _trace(self, seed: int) -> Trace:
        trace = open_trace(self.trace, home() / "traces", seed=seed)
        return trace if self.window is None else cut(trace, self.window)


def _start_h(window: str | None) -> float:
    return float(window.partition(":")[0] or 0) if window else 0.0
