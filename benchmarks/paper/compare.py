"""`rlboost` beside `paper`, `oracle` and the baselines over the same windows, node samples and response
lengths."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from benchmarks.paper.found import Case
from benchmarks.paper.windows import WINDOW_S, WITHOUT

MODELS = ("8b", "14b", "32b")
BASELINES = ("recompute", "polyrl")
GROUP_PARTS = ("nearest_group_first", "yields", "fill_limit")
PARTS = ("prediction", "evening", "fair_fill", "least_first", *GROUP_PARTS)
"""Of `rlboost`; the gate shows only where hand-overs are dear (`ours`)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios over all windows that all three have been run on."""

    model: str
    runs: int
    tokens_per_s: float
    """`rlboost` over `paper`, mean of the ratios."""
    tokens_per_usd: float
    worst_tokens_per_s: float
    worst_tokens_per_usd: float
    of_oracle: float
    """Tokens per second of `rlboost` over those of `oracle`."""
    paper_of_oracle: float
    samples: int
    """Seeds of the node sampler among the runs."""
    handover_share: float
    """Of the time, the reserved node's in hand-overs, under `rlboost`."""
    prefill_share: float
    """Of the spot machines' time, in prefills of what had been begun elsewhere, under `rlboost`."""


def comparisons(runs: dict[str, Case]) -> list[Comparison]:
    """Return one comparison per model that has been run."""
    found = []
    for model in MODELS:
        keys = [key.split("/", 2)[2] for key in runs if key.startswith(f"paper-{model}/rlboost/")]
        trios = {
            key: (ours, papers, oracles)
            for key in keys
            if (ours := runs.get(f"paper-{model}/rlboost/{key}"))
            and (papers := runs.get(f"paper-{model}/paper/{key}"))
            and (oracles := runs.get(f"paper-{model}/oracle/{key}"))
        }
        if trios:
            found.append(_compare(model, list(trios), list(trios.values())))
    return found


def as_markdown(runs: dict[str, Case]) -> list[str]:
    """Return a section of the report."""
    rows = [
        f"| {c.model} | {c.runs} ({c.samples}) | {c.tokens_per_s:.3f} (worst {c.worst_tokens_per_s:.3f}) |"
        f" {c.tokens_per_usd:.3f} (worst {c.worst_tokens_per_usd:.3f}) | {c.of_oracle:.0%} |"
        f" {c.paper_of_oracle:.0%} | {c.handover_share:.1%} | {c.prefill_share:.1%} |"
        for c in comparisons(runs)
    ]
    if not rows:
        return ["`rlboost` and `paper` have not been run over the same windows."]
    return [
        "## rlboost over paper, same windows, samples and lengths",
        "",
        "The last two columns are `rlboost`'s: the reserved node in hand-overs, and spot machines in prefills"
        " of what had been begun elsewhere.",
        "",
        "| model | runs (samples of the nodes) | tokens/s | tokens per dollar | rlboost / oracle, tokens/s"
        " | paper / oracle | hand-overs | repeated prefills |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        *baselines(runs),
        *parts(runs),
    ]


def parts(runs: dict[str, Case]) -> list[str]:
    """Return what each part of `rlboost` brings, over the windows that have been run without it."""
    rows = []
    for part in PARTS:
        cells = []
        for model in MODELS:
            prefix = f"paper-{model}/rlboost{WITHOUT}{part}/"
            pairs = [
                (run["tokens_per_s"], whole["tokens_per_s"])
                for key, run in runs.items()
                if key.startswith(prefix)
                and (whole := runs.get(f"paper-{model}/rlboost/{key.removeprefix(prefix)}"))
            ]
            gain = mean(without / whole for without, whole in pairs) - 1.0 if pairs else None
            cells.append("" if gain is None else f"{gain:+.1%} ({len(pairs)})")
        if any(cells):
            rows.append(f"| without {part} | {' | '.join(cells)} |")
    if not rows:
        return []
    head = f"| tokens/s over rlboost's, same windows (runs) | {' | '.join(MODELS)} |"
    return ["", head, "|---" * (len(MODELS) + 1) + "|", *rows]


def baselines(runs: dict[str, Case]) -> list[str]:
    """Return how the other policies stand beside `paper`, over the runs that both have."""
    rows = []
    for model in MODELS:
        for policy in BASELINES:
            prefix = f"paper-{model}/{policy}/"
            pairs = [
                (run, papers)
                for key, run in runs.items()
                if key.startswith(prefix) and (papers := runs.get(key.replace(f"/{policy}/", "/paper/")))
            ]
            if pairs:
                speed = mean(run["tokens_per_s"] / papers["tokens_per_s"] for run, papers in pairs)
                money = mean(run["tokens_per_usd"] / papers["tokens_per_usd"] for run, papers in pairs)
                rows.append(f"| {model} | {policy} | {len(pairs)} | {speed:.3f} | {money:.3f} |")
    if not rows:
        return []
    head = "| model | policy over paper | runs | tokens/s | tokens per dollar |"
    return ["", head, "|---|---|---|---|---|", *rows]


def _compare(model: str, keys: list[str], trios: list[tuple[Case, Case, Case]]) -> Comparison:
    speed = [ours["tokens_per_s"] / papers["tokens_per_s"] for ours, papers, _ in trios]
    money = [ours["tokens_per_usd"] / papers["tokens_per_usd"] for ours, papers, _ in trios]
    overheads = [ours["overheads_s"] for ours, _, _ in trios]
    machines = mean(ours["mean_spot_machines"] for ours, _, _ in trios)
    prefills = mean(each["repeated prefill"] for each in overheads)
    return Comparison(
        model=model,
        runs=len(trios),
        tokens_per_s=mean(speed),
        tokens_per_usd=mean(money),
        worst_tokens_per_s=min(speed),
        worst_tokens_per_usd=min(money),
        of_oracle=mean(ours["tokens_per_s"] / oracles["tokens_per_s"] for ours, _, oracles in trios),
        paper_of_oracle=mean(
            papers["tokens_per_s"] / oracles["tokens_per_s"] for _, papers, oracles in trios
        ),
        samples=len({key.split("/")[1] for key in keys}),
        handover_share=mean(each["hand-over"] for each in overheads) / WINDOW_S,
        prefill_share=prefills / (machines * WINDOW_S) if machines else 0.0,
    )
