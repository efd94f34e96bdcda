"""Sets the simulated figures beside the published ones, and `rlboost` beside `paper`.

    python -m benchmarks.paper.report --found FOLDER --out FOLDER

reads `predictions.jsonl`, `windows.jsonl`, `other_traces.jsonl`, `ours.jsonl`, `fleet_size.jsonl`,
`after_change.jsonl`, `scale.jsonl`, `window_cost.jsonl` and `quickstart.json`, as far as they are there.

Writes `report.md`, `report.json` and the pictures: for each figure what is published, what was simulated, the
error, and whether the calibration had seen it; the mean and the worst error of the predicted ones; how many
runs each mean rests on. What has not been run is said to be missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.paper import (
    break_even,
    compare,
    other_traces,
    ours,
    pictures,
)
from benchmarks.paper.found import Case, Check, Found
from benchmarks.paper.published import FIGURES, Figure
from benchmarks.scheduler import after_change, fleet_size, quickstart, scale, window_cost

NO_SEEDING = -0.19
"""Published change in throughput without seeding, under churn."""


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
        lines.append("")
        lines.append(
            f"Predicted: mean absolute error {mean(errors):.1%}, worst {max(errors):.1%},"
            f" {len(errors)} figures."
        )
    return lines


def ablations(cases: dict[str, Case]) -> list[Check]:
    """Return the ablations that have been run, and beside them what they would be in another set-up."""
    found = []
    endings = (
        ("", ""),
        (", back in 15 s", ", machines back in 15 s"),
        (", none back", ", and no machine came back"),
    )
    for suffix, told in endings:
        for after, published in ((100, 0.33), (200, 0.76)):
            kill = cases.get(f"kill at {after} s{suffix}")
            if kill:
                overhead = kill["recomputed_s"] - kill["quiet_s"]
                removed = 1.0 - (kill["migrated_s"] - kill["quiet_s"]) / overhead if overhead > 0 else 0.0
                what = f"share of a kill's overhead that migration removes, {after} s{told}"
                found.append(Check(what, published, removed))
    for whole, told in (("churn", ""), ("churn, away for longer", ", away 2.5 times as long")):
        loss = ratio(cases, f"{whole}, no seeding", whole)
        if loss is not None:
            found.append(Check(f"no seeding, under churn{told}", NO_SEEDING, loss.value - 1.0))
    found += unseeded(cases)
    gain = ratio(cases, "churn", "churn, no memory")
    if gain is not None:
        found.append(Check("memory, under churn", 0.06, gain.value - 1.0))
    return found


def unseeded(cases: dict[str, Case]) -> list[Check]:
    """Return what settled steps without a window lose, and in which share of the time one machine alone
    would explain the published loss."""
    one, six = (ratio(cases, f"14b n={n}, no seeding", f"14b n={n}") for n in (1, 6))
    if one is None or six is None:
        return []
    with_one, with_six = (cases[f"14b n={n}"]["tokens_per_s"] for n in (1, 6))
    left = 1.0 + NO_SEEDING
    lost = (six.value - left) * with_six / ((six.value - left) * with_six - (one.value - left) * with_one)
    return [
        Check("no seeding, one machine, settled", None, one.value - 1.0),
        Check("no seeding, six machines, settled (the paper: negligible)", 0.0, six.value - 1.0),
        Check("share of time with one machine at which settled steps lose 19%", None, lost),
    ]


def _line(check: Check) -> str:
    published = "" if check.published is None else f"{check.published:+.0%}"
    return f"| {check.what} | {published} | {check.simulated:+.0%} |"


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


def _read(path: Path, key: str) -> dict[str, Case]:
    if not path.exists():
        return {}
    return {line[key]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def _read_whole(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def as_markdown(cases: dict[str, Case], runs: dict[str, Case]) -> list[str]:
    """Return the whole report."""
    lines = [
        "# Simulated against published",
        "",
        "Everything here but the quickstart is simulated: the real scheduling core under a virtual clock."
        " Nothing ran on a GPU. The trainer takes whole groups, as in live runs.",
        "Written by `make bench-paper`; the parameters are in `calibration.json`.",
        "",
        *table(simulated(cases, runs)),
        "",
        "## Ablations and trends",
        "",
        "| what | published | simulated |",
        "|---|---|---|",
        *(_line(check) for check in [*ablations(cases), *break_even.checks(cases, runs)]),
    ]
    responses = ratio(cases, "14b n=6 single responses", "14b n=0")
    if responses is not None:
        lines.append(
            f"| 14B, six machines, micro-batches of single responses | 2.25 | {responses.value:.2f}x |"
        )
    lines += ["", *compare.as_markdown(runs)]
    lines += experiments(cases)
    return lines


def experiments(cases: dict[str, Case]) -> list[str]:
    """Return what the experiments say about the 32B set-up, which is not published."""
    lines = []
    for share, name in (("60%", "32b TP 2"), ("80%", "32b TP 2, 80% memory")):
        two = ratio(cases, f"{name}, n=6", f"{name}, n=0")
        if two is not None:
            lines.append(
                f"With engines and machines of two GPUs and {share} of their memory, 32B with six machines"
                f" would be {two.value:.2f}x (1.51x at 5.7 in the paper's mean)."
            )
    return ["", "## 32B", "", *lines] if lines else []


def as_json(cases: dict[str, Case], runs: dict[str, Case]) -> dict[str, object]:
    """Return the report's figures."""
    found = simulated(cases, runs)
    return {
        "is_simulated": True,
        "figures": [
            {
                "name": each.name,
                "role": each.role,
                "published": each.value,
                "source": each.source,
                "simulated": None if value is None else value.value,
                "standard_deviation": None if value is None else value.spread,
                "runs": 0 if value is None else value.runs,
                "error": None if value is None else value.value / each.value - 1.0,
            }
            for each in FIGURES
            for value in (found.get(each.name),)
        ],
        "ablations": [asdict(check) for check in ablations(cases)],
        "break_even_discounts": [asdict(check) for check in break_even.checks(cases, runs)],
        "rlboost_over_paper": [asdict(each) for each in compare.comparisons(runs)],
    }


def write_report(found: Path, out: Path) -> list[str]:
    """Write the report and its pictures into a folder; return its lines."""
    cases, runs = _read(found / "predictions.jsonl", "case"), _read(found / "windows.jsonl", "key")
    sizes = _read(found / "scale.jsonl", "machines")
    out.mkdir(parents=True, exist_ok=True)
    lines = as_markdown(cases, runs)
    lines += ["", *other_traces.as_markdown(_read(found / "other_traces.jsonl", "key"))]
    lines += ["", *ours.as_markdown(_read(found / "ours.jsonl", "case"))]
    lines += ["", *fleet_size.as_markdown(_read(found / "fleet_size.jsonl", "setting"))]
    lines += ["", *after_change.as_markdown(_read(found / "after_change.jsonl", "change"))]
    lines += ["", *quickstart.as_markdown(_read_whole(found / "quickstart.json"))]
    lines += ["", *scale.as_markdown(list(sizes.values()))]
    lines += ["", *window_cost.as_markdown(list(_read(found / "window_cost.jsonl", "policy").values()))]
    drawn = pictures.draw(simulated(cases, runs), runs, list(sizes.values()), out)
    lines += ["", *(f"![{path.stem}]({path.name})" for path in drawn)]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "report.json").write_text(json.dumps(as_json(cases, runs), indent=2) + "\n", encoding="utf-8")
    return lines


def main(arguments: list[str]) -> int:
    """Write the report and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    print("\n".join(write_report(options.found, options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
