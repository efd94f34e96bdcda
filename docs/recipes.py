"""Writes docs/recipes.md from the recipes and what their first lines say."""

from __future__ import annotations

from typing import NamedTuple

from ruamel.yaml import YAML

import rlboost_templates
from rlboost_runtime.job import CloudOffer, Job

INTRODUCTION = """\
Whole jobs of papers and of other frameworks, with hyperparameters as published and machines to rent. Take
the one that is nearest to yours, and change the model, the data or the machines:

```sh
rlboost init job.yaml --template lora-8b      # --list lists them
rlboost doctor job.yaml                       # the role, the bucket and what else is yours to set
rlboost plan job.yaml                         # hours and dollars as of today
```

**None has run on GPUs yet.** Hours and dollars are what `rlboost plan` says: simulated, at shipped prices
({prices}). A tiny twin of each, with its algorithm and a small model, is trained to its end on a CPU by
`tests/e2e/test_recipes.py`, which also compares the plans. At these prices spot machines save time in all of
them and money in few: look at the line on spot, and at the plan for the prices of today. For a first run
take `rlboost init` as it is, or one of the [examples](../examples/README.md), which need no GPU."""
PLAN, SOURCE, FIGURES = "Plan: ", "Source: ", "Figures of spot are "


class Recipe(NamedTuple):
    """A recipe with what its first lines say."""

    name: str
    summary: str
    spot: str
    plan: str
    source: str
    remarks: str
    prices: str
    job: Job

    @classmethod
    def read(cls, name: str) -> Recipe:
        """Return a recipe. Raises `ValueError` where a line is missing."""
        text = rlboost_templates.text(name)
        head = text.partition("\n\n")[0]
        summary, spot, *others = [line.removeprefix("# ") for line in head.splitlines()]
        found = {mark: [line for line in others if line.startswith(mark)] for mark in (PLAN, FIGURES)}
        if not others[1].startswith(SOURCE) or any(len(lines) != 1 for lines in found.values()):
            raise ValueError(
                f"{name}: its first lines are to be what it is, spot, plan, source, ..., figures"
            )
        source, *remarks = " ".join(others[1:-1]).removeprefix(SOURCE).split(". ", 1)
        job = Job.model_validate(YAML(typ="safe").load(text))
        return cls(
            name,
            summary,
            spot,
            found[PLAN][0].removeprefix(PLAN).rstrip("."),
            source,
            "".join(remarks),
            found[FIGURES][0].rpartition("prices of ")[2].rstrip("."),
            job,
        )

    @property
    def machines(self) -> str:
        """What it rents, in words."""
        spot = self.job.rollout.spot
        offers = [offer.accelerators for offer in spot.any_of if isinstance(offer, CloudOffer)]
        reserved = f"{self.job.trainer.accelerators} in {self.job.trainer.infra}, reserved"
        return f"{reserved}; up to {spot.max_instances} spot machines of {' or '.join(dict.fromkeys(offers))}"


def recipes_page() -> str:
    """Return docs/recipes.md."""
    found = [Recipe.read(name) for name in rlboost_templates.recipes()]
    prices = ", ".join(dict.fromkeys(recipe.prices for recipe in found))
    rows = [
        f"| [`{each.name}`](#{each.name}) | {each.job.algorithm.loss} | {each.job.model} | {each.plan} |"
        for each in found
    ]
    parts = [
        "# Recipes",
        "<!-- Written by docs/generate.py from templates/rlboost_templates/recipes/: do not edit. -->",
        INTRODUCTION.replace("{prices}", prices),
        "\n".join(["| recipe | loss | model | plan, simulated |", "|---|---|---|---|", *rows]),
    ]
    for each in found:
        lines = [
            f"- machines: {each.machines}",
            f"- {each.spot[:1].lower()}{each.spot[1:]}",
            f"- source: {each.source.rstrip('.')}",
            *([f"- {each.remarks}"] if each.remarks else []),
            f"- file: [{each.name}.yaml](../templates/rlboost_templates/recipes/{each.name}.yaml)",
        ]
        parts += [f"## {each.name}", each.summary, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
