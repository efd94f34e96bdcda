"""Runs with a constant number of spot machines, as in the paper's figure 11 and the artifact's curve."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlboost_runtime.sim import Preset, SimResult, Switches, simulate
from rlboost_runtime.traces import Trace, TraceEvent

LONG_S = 1e6
"""Length of the constant trace: more than any run here takes."""
FIRST_WINDOWS_S = {1: 400.0, 2: 250.0, 3: 180.0, 4: 120.0, 5: 90.0, 6: 70.0}
"""Where the window begins, by number of machines, so that few steps are spent on the way to where it
settles."""
STEPS = 9
UNSETTLED_STEPS = 4
"""Left out at the beginning: the window is still on its way, and the first step waits for machines to
boot."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Means over the settled steps."""

    tokens_per_s: float
    usd_per_s: float
    t_seed_s: float
    wait_s: float
    n_prem: float

    @property
    def tokens_per_usd(self) -> float:
        """Tokens per dollar."""
        return self.tokens_per_s / self.usd_per_s


def constant_trace(machines: int) -> Trace:
    """Return a market that always has so many nodes and never takes one."""
    events = tuple(TraceEvent(0.0, f"node{i}", "add") for i in range(machines))
    return Trace(f"constant-{machines}", "constant number of machines", events, LONG_S)


def run_static(
    preset: Preset,
    machines: int,
    policy: str,
    *,
    steps: int = STEPS,
    seed: int = 0,
    switches: Switches | None = None,
) -> SimResult:
    """Run a policy on a constant fleet; the fleet's size is given, not learned."""
    first = FIRST_WINDOWS_S.get(machines, 50.0)
    fixed = replace(preset, max_spot_instances=machines, seeding_initial_s=first)
    return simulate(
        fixed,
        constant_trace(machines),
        policy,
        seed=seed,
        hours=LONG_S / 3600.0,
        max_steps=steps,
        switches=switches,
    )


def settled(result: SimResult) -> Settled:
    """Return the means over all steps but the first ones."""
    rows = result.rows[UNSETTLED_STEPS:]
    seconds = sum(row.seconds for row in rows)
    return Settled(
        tokens_per_s=sum(row.tokens for row in rows) / seconds,
        usd_per_s=sum(row.usd for row in rows) / seconds,
        t_seed_s=sum(row.t_seed_s for row in rows) / len(rows),
        wait_s=sum(row.wait_s for row in rows) / len(rows),
        n_prem=sum(row.useful_instances for row in rows) / len(rows),
    )
