"""Sets the simulated figures beside the published ones.

    python -m benchmarks.paper.report --predictions FILE --windows FILE

Prints a table: published, simulated, error, and whether the calibration had seen the figure; then the mean
and the worst error of the predicted ones, and how many runs each mean rests on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.paper.published import FIGURES, Figure

Case = dict[str, float]


@dataclass(frozen=True, slots=True)
class Found:
    """A simulated figure."""

    value: float
    spread: float = 0.0
    """Standard deviation over runs; 0 for a single one."""
    runs: int = 1


def ratio(cases: dict[str, Case], of: str, to: str, what: str = "tokens_per_s") -> Found | None:
    """Return one case's figure over another's."""
    if of not in cases or to not in cases:
        return None
    return Found(cases[of][what] / cases[to][what])


def over_windows(runs: dict[str, Case], model: str, what: str) -> Found | None:
    """Return the mean over windows and samples of the paper's policy over the co-located baseline."""
    base = runs.get(f"paper-{model}/on_demand/0/0")
    values = [run[what] for key, run in runs.items() if key.startswith(f"paper-{model}/paper/")]
    if base is None or not values:
        return None
    ratios = [value / base[what] for value in values]
    return Found(mean(ratios), stdev(ratios) if len(ratios) > 1 else 0.0, len(ratios))


def simulated(cases: dict[str, Case], runs: dict[str, Case]) -> dict[str, Found | None]:
    """Return every figure that has been simulated, by its published name."""
    found: dict[str, Found | None] = {
        "8b base tokens/s": _plain(cases, "8b n=0"),
        "14b n=1 throughput": ratio(cases, "14b n=1", "14b n=0"),
        "14b n=6 throughput": ratio(cases, "14b n=6", "14b n=0"),
        "14b 5K n=3 throughput": ratio(cases, "14b 5K n=3", "14b 5K n=0"),
        "14b 14K n=6 throughput": ratio(cases, "14b n=6", "14b n=0"),
        "14b 5K n=3 tokens per dollar": ratio(cases, "14b 5K n=3", "14b 5K n=0", "tokens_per_usd"),
        "14b 14K n=6 tokens per dollar": ratio(cases, "14b n=6", "14b n=0", "tokens_per_usd"),
    }
    for machines in (1, 2, 3, 4):
        found[f"8b n={machines} tokens/s"] = _plain(cases, f"8b n={machines}")
    for model in ("8b", "14b", "32b"):
        found[f"{model} trace throughput"] = over_windows(runs, model, "tokens_per_s")
        found[f"{model} trace tokens per dollar"] = over_windows(runs, model, "tokens_per_usd")
    return found


def table(found: dict[str, Found | None]) -> list[str]:
    """Return the table's lines and what follows from them."""
    lines = ["| figure | role | published | simulated | error | runs |", "|---|---|---|---|---|---|"]
    errors: list[float] = []
    for each in FIGURES:
        value = found.get(each.name)
        lines.append(_row(each, value))
        if value is not None and each.role == "predicted":
            errors.append(abs(value.value / each.value - 1.0))
    if errors:
        lines.append(
            f"\nPredicted: mean absolute error {mean(errors):.1%}, worst {max(errors):.1%},"
            f" {len(errors)} figures."
        )
    return lines


def ablations(cases: dict[str, Case]) -> list[str]:
    """Return lines about the ablations that have been run."""
    lines = []
    for after in (100, 200):
        kept = cases.get(f"kill at {after} s, migrated")
        redone = cases.get(f"kill at {after} s, recomputed")
        if kept and redone:
            overhead = redone["killed_s"] - redone["quiet_s"]
            removed = 1.0 - (kept["killed_s"] - kept["quiet_s"]) / overhead
            published = {100: 0.33, 200: 0.76}[after]
            lines.append(
                f"kill at {after} s: migration removes {removed:.0%} of the overhead ({published:.0%})"
            )
    whole = cases.get("churn")
    if whole and "churn, no seeding" in cases:
        loss = cases["churn, no seeding"]["tokens_per_s"] / whole["tokens_per_s"] - 1.0
        lines.append(f"no seeding under churn: {loss:+.0%} (-19%)")
    if whole and "churn, no memory" in cases:
        gain = whole["tokens_per_s"] / cases["churn, no memory"]["tokens_per_s"] - 1.0
        lines.append(f"memory under churn: {gain:+.0%} (+6%)")
    groups = ratio(cases, "14b n=6 whole groups", "14b n=0")
    if groups is not None:
        lines.append(f"14B, six machines, micro-batches of whole groups as in live runs: {groups.value:.2f}x")
    return lines


def _plain(cases: dict[str, Case], name: str) -> Found | None:
    return Found(cases[name]["tokens_per_s"]) if name in cases else None


def _row(each: Figure, found: Found | None) -> str:
    shown = f"{each.value:,.0f}" if each.value > 100 else f"{each.value:.2f}"
    if found is None:
        return f"| {each.name} | {each.role} | {shown} | not run | | |"
    value = f"{found.value:,.0f}" if each.value > 100 else f"{found.value:.2f}"
    spread = f" ± {found.spread:.2f}" if found.spread else ""
    error = found.value / each.value - 1.0
    return f"| {each.name} | {each.role} | {shown} | {value}{spread} | {error:+.1%} | {found.runs} |"


def _read(path: Path | None, key: str) -> dict[str, Case]:
    if path is None or not path.exists():
        return {}
    return {line[key]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def main(arguments: list[str]) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--windows", type=Path)
    options = parser.parse_args(arguments)
    cases, runs = _read(options.predictions, "case"), _read(options.windows, "key")
    print("\n".join([*table(simulated(cases, runs)), "", *ablations(cases)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
