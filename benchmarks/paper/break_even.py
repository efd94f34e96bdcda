"""The discount from which spot machines give more tokens per dollar than none.

By the paper's own figures, in the simulated windows of its trace, and on constant fleets. A fleet breaks
even where it is as much dearer as it is faster::

    1 + machines x GPUs x (1 - discount) x price of a reserved GPU / price of the reserved nodes = speed-up
"""

from __future__ import annotations

from statistics import mean

from benchmarks.paper.found import Case, Check
from rlboost_runtime.sim import presets

PUBLISHED = 0.30
"""The paper's figure 16: about this is enough to gain both speed and cost."""
OWN_FIGURES = (("fig. 11, six machines", 6.0, 1.37 * 1.64), ("fig. 10", 5.1, 1.97))
"""Machines and speed-up of 14B as published."""
FLEETS = (
    ("14b, six machines", "paper-14b", 6, "14b n=6", "14b n=0"),
    ("14b of at most 5K, three machines", "paper-14b", 3, "14b 5K n=3", "14b 5K n=0"),
    ("8b, four machines", "paper-8b", 4, "8b n=4", "8b n=0"),
    ("32b, three machines", "paper-32b", 3, "32b n=3", "32b n=0"),
)
"""Constant ones: what, preset, machines, case, and the one without any."""


def discount(preset: str, machines: float, speedup: float) -> float:
    """Return the discount at which so many machines with that speed-up break even; negative: always."""
    known = presets()[preset]
    each = known.spot[0].gpus / known.reserved.gpus * known.reserved.usd_per_hour
    return 1.0 - (speedup - 1.0) * known.reserved_usd_per_hour / (machines * each)


def checks(cases: dict[str, Case], runs: dict[str, Case]) -> list[Check]:
    """Return what has been run, the paper's own figures first."""
    found = [
        Check(
            f"break-even discount by the paper's own speed-up, {what}",
            PUBLISHED,
            discount("paper-14b", n, speedup),
        )
        for what, n, speedup in OWN_FIGURES
    ]
    for preset in presets():
        base = runs.get(f"{preset}/on_demand/0/0")
        windows = [run for key, run in runs.items() if key.startswith(f"{preset}/paper/")]
        if base and windows:
            machines = mean(run["mean_spot_machines"] for run in windows)
            speedup = mean(run["tokens_per_s"] for run in windows) / base["tokens_per_s"]
            what = f"break-even discount, {preset[6:]}, all windows, {machines:.1f} machines"
            found.append(Check(what, PUBLISHED, discount(preset, machines, speedup)))
    for what, preset, machines, case, without in FLEETS:
        if case in cases and without in cases:
            speedup = cases[case]["tokens_per_s"] / cases[without]["tokens_per_s"]
            found.append(
                Check(f"break-even discount, {what}", PUBLISHED, discount(preset, machines, speedup))
            )
    return found
