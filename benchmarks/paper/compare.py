"""`rlboost` beside `paper` and `oracle` over the same windows, node samples and response lengths."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from benchmarks.paper.found import Case

MODELS = ("8b", "14b", "32b")


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


def comparisons(runs: dict[str, Case]) -> list[Comparison]:
    """Return one comparison per model that has been run."""
    found = []
    for model in MODELS:
        keys = [key.split("/", 2)[2] for key in runs if key.startswith(f"paper-{model}/rlboost/")]
        trios = [
            (ours, papers, oracles)
            for key in keys
            if (ours := runs.get(f"paper-{model}/rlboost/{key}"))
            and (papers := runs.get(f"paper-{model}/paper/{key}"))
            and (oracles := runs.get(f"paper-{model}/oracle/{key}"))
        ]
        if trios:
            found.append(_compare(model, trios))
    return found


def as_markdown(runs: dict[str, Case]) -> list[str]:
    """Return a section of the report."""
    rows = [
        f"| {c.model} | {c.runs} | {c.tokens_per_s:.3f} (worst {c.worst_tokens_per_s:.3f}) |"
        f" {c.tokens_per_usd:.3f} (worst {c.worst_tokens_per_usd:.3f}) | {c.of_oracle:.0%} |"
        f" {c.paper_of_oracle:.0%} |"
        for c in comparisons(runs)
    ]
    if not rows:
        return ["`rlboost` and `paper` have not been run over the same windows."]
    return [
        "## rlboost over paper, same windows, samples and lengths",
        "",
        "| model | windows | tokens/s | tokens per dollar | rlboost / oracle, tokens/s | paper / oracle |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _compare(model: str, trios: list[tuple[Case, Case, Case]]) -> Comparison:
    speed = [ours["tokens_per_s"] / papers["tokens_per_s"] for ours, papers, _ in trios]
    money = [ours["tokens_per_usd"] / papers["tokens_per_usd"] for ours, papers, _ in trios]
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
    )
