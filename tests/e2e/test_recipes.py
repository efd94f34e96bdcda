"""A tiny twin of each recipe runs here: its algorithm on a small model, generated data, and fewer prompts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import rlboost_templates

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SMALLER = {
    "group_size": 8,
    "prompts_per_step": 4,
    "steps": 3,
    "learning_rate": 1.0e-4,
    "max_prompt_tokens": 128,
    "max_response_tokens": 24,
}
AT_MOST = {"minibatches_per_step": 2, "spare_prompts": 4, "overlong_penalty_tokens": 8}


def twin(recipe: str) -> dict[str, Any]:
    """The sections of the recipe that a tiny job can have, smaller."""
    fields = YAML(typ="safe").load(rlboost_templates.text(recipe))
    algorithm = fields["algorithm"] | SMALLER
    for name, most in AT_MOST.items():
        if name in algorithm:
            algorithm[name] = min(algorithm[name], most)
    if algorithm["loss"] == "ppo":
        algorithm |= {"prompts_per_step": 32, "group_size": 1}
        algorithm["ppo"] |= {"critic": "start", "learning_rate": 1.0e-3}
    if "lora" in algorithm:
        algorithm["lora"] = {"rank": 4, "alpha": 8}
    return {
        "model": {"warmup": {"reward": 0.1, "max_seconds": 30}},  # so that rewards differ, and it learns
        "algorithm": algorithm,
        "evaluation": {"every_steps": 2, "prompts": 2},
        "weights": fields.get("weights", {}),
    }


@pytest.mark.parametrize("recipe", rlboost_templates.recipes())
def test_a_twin_of_the_recipe_runs_to_its_end(cli: Any, recipe: str) -> None:
    sections = twin(recipe)
    cli("launch", cli.job(recipe, **sections), "--yes", timeout_s=240)
    run = cli.run_folder(recipe)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(SMALLER["steps"]))
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers)
    assert (lines[-1]["reference_kl"] != 0) == ("kl" in sections["algorithm"])
    assert any("eval_reward_mean" in line for line in lines)
    assert json.loads(run.job_json.read_text())["algorithm"]["loss"] == sections["algorithm"]["loss"]
    cli.assert_gone(recipe)


def plan_line(plan: dict[str, Any]) -> str:
    """What the third line of a recipe says."""
    forecast = plan["forecast"]
    (alone,) = [each for each in forecast["alternatives"] if each["what"].startswith("on demand only")]
    unpriced = any(offer["price_usd_per_hour"] is None for offer in plan["offers"])
    unknown = " and spot machines of unknown price" if unpriced else ""
    took, spent = forecast["hours"]["mean"], forecast["usd"]["mean"]
    return (
        f"# Plan: {plan['steps']} steps in {took:,.1f} h for ${spent:,.0f}{unknown};"
        f" on demand only {alone['hours']:,.1f} h and ${alone['usd']:,.0f}."
    )


@pytest.mark.parametrize("recipe", rlboost_templates.recipes())
def test_a_recipe_says_what_its_plan_says_of_spot(recipe: str, cli: Any, tmp_path: Path) -> None:
    text = rlboost_templates.text(recipe)
    (tmp_path / "job.yaml").write_text(text)
    plan = json.loads(cli("plan", tmp_path / "job.yaml", "--json").stdout)
    said, planned = text.splitlines()[1:3]
    now = plan_line(plan)
    numbers = re.compile(r"\d[\d,]*(?:\.\d+)?")
    former, found = ([float(n.replace(",", "")) for n in numbers.findall(line)] for line in (planned, now))
    assert numbers.sub("N", planned) == numbers.sub("N", now), now
    assert former == pytest.approx(found, rel=0.05, abs=0.1), now
    pays = {
        True: "# Spot pays here: ",
        False: "# Spot is for speed here, ",
        None: "# Whether spot pays is not known",
    }
    assert said.startswith(pays[plan["forecast"]["spot_pays"]]), said
    percent = re.search(r"(\d+) % (less|dearer)", said)
    assert (percent is None) == (plan["forecast"]["spot_pays"] is None)
    if percent is not None:
        saving = plan["forecast"]["on_demand"]["saving_fraction"]
        told = int(percent[1]) / 100 * (1 if percent[2] == "less" else -1)
        assert saving == pytest.approx(told, abs=0.05), said
