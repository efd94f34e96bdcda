"""`rlboost` beside `paper` on markets that nothing was fitted to: same windows, nodes and lengths.

    python -m benchmarks.paper.other_traces --out other_traces.jsonl

Public traces are taken from `$RLBOOST_HOME/traces` (`rlboost traces fetch NAME`); one that is not there is
passed over. Of each market so many 2-hour windows are taken, evenly spread. One line of JSON per run is
appended to `--out`; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.paper.found import Case
from benchmarks.paper.windows import WINDOW_S, simulate_window
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import home
from rlboost_runtime.sim import presets
from rlboost_runtime.traces import Trace, sample_nodes
from rlboost_runtime.traces.catalogue import open_trace

NODE_SHARES = {
    "bamboo-g4dn": 0.5,
    "gcp-a100": 0.1,
    "skypilot-4-us-east-1f": 1.0,
    "skypilot-4-us-west-2c": 1.0,
    "skypilot-16-us-east-2b": 0.5,
    "generated-p3": 0.25,
    "generated-a100": 0.1,
}
"""Share of a market's nodes: so many that about as many are left as a fleet wants."""
WINDOWS_EACH = 3
POLICIES = ("paper", "rlboost")


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    market: str
    window: int
    preset: str
    policy: str

    @property
    def key(self) -> str:
        """Name in the file of results."""
        return f"{self.market}/{self.window}/{self.preset}/{self.policy}"


def runs(markets: list[str]) -> Iterator[Run]:
    """Yield all; windows last, so that a part of them is a smaller report rather than a biased one."""
    for window in range(WINDOWS_EACH):
        for market in markets:
            for preset in presets():
                yield from (Run(market, window, preset, policy) for policy in POLICIES)


def window_of(trace: Trace, number: int) -> Trace:
    """Return one of `WINDOWS_EACH` windows, evenly spread."""
    start = (trace.duration_s - WINDOW_S) * (number + 0.5) / WINDOWS_EACH
    return trace.window(start, start + WINDOW_S)


def as_markdown(found: dict[str, Case]) -> list[str]:
    """Return a section of the report."""
    lines = []
    for market in NODE_SHARES:
        for preset in presets():
            pairs = [
                (ours, papers)
                for window in range(WINDOWS_EACH)
                if (ours := found.get(Run(market, window, preset, "rlboost").key))
                and (papers := found.get(Run(market, window, preset, "paper").key))
            ]
            if pairs:
                lines.append(f"| {market} | {preset[6:]} | {len(pairs)} | {_ratios(pairs)} |")
    if not lines:
        return ["`rlboost` and `paper` have not been run on other traces."]
    return [
        "## rlboost over paper on other traces",
        "",
        f"As many two-hour windows as said, of {WINDOWS_EACH} evenly spread; generated traces with seed 0.",
        "",
        "| trace | model | windows | tokens/s | tokens per dollar | spot machines, paper / rlboost |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def _ratios(pairs: list[tuple[Case, Case]]) -> str:
    cells = []
    for what in ("tokens_per_s", "tokens_per_usd"):
        ratios = [ours[what] / papers[what] for ours, papers in pairs]
        cells.append(f"{mean(ratios):.3f} (worst {min(ratios):.3f})")
    held = [mean(pair[side]["mean_spot_machines"] for pair in pairs) for side in (1, 0)]
    return " | ".join([*cells, f"{held[0]:.1f} / {held[1]:.1f}"])


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    traces: dict[str, Trace] = {}
    for name, share in NODE_SHARES.items():
        try:
            traces[name] = sample_nodes(open_trace(name, home() / "traces"), share, 0)
        except ConfigError as missing:
            print(f"{missing.problem}: passed over", file=sys.stderr)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.loads(line)["key"] for line in lines}
    todo = [run for run in runs(list(traces)) if run.key not in known]
    with options.out.open("a", encoding="utf-8") as out:
        for number, run in enumerate(todo):
            found = simulate_window(run.preset, window_of(traces[run.market], run.window), run.policy)
            print(json.dumps({"key": run.key, **found}), file=out, flush=True)
            print(f"{number + 1}/{len(todo)} {run.key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
