"""Runs whose rollouts have several turns: a class, a function and a program, through kills of every role."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlboost_runtime.audit.run import audit

pytestmark = pytest.mark.e2e

GUESS = Path(__file__).parents[2] / "examples" / "guess"
FUNCTION = """
async def episode(client, row):
    text = row["prompt"]
    for _ in range(2):
        answer = await client.completions.create(model="policy", prompt=text, max_tokens=6)
        text += answer.choices[0].text + " again? "
    return len(set(text)) / 50
"""
PROGRAM = """
import json, sys, openai
row = json.load(sys.stdin)["row"]
client = openai.OpenAI()
answer = client.completions.create(model="policy", prompt=row["prompt"], max_tokens=6)
print(json.dumps({"reward": len(set(answer.choices[0].text)) / 6}))
"""


def job(cli: Any, name: str, environment: Any, **changes: Any) -> Path:
    for file in ("guess.py", "prompts.jsonl"):
        shutil.copy(GUESS / file, cli.home / file)
    (cli.home / "function.py").write_text(FUNCTION)
    (cli.home / "program.py").write_text(PROGRAM)
    algorithm = {"max_prompt_tokens": 32, "max_response_tokens": 64} | changes.pop("algorithm", {})
    path = cli.job(name, environment=environment, reward="guess.py:is_digit", algorithm=algorithm, **changes)
    fields = YAML(typ="safe").load(path)
    fields["data"] = {"source": "prompts.jsonl"}
    with path.open("w") as file:
        YAML().dump(fields, file)
    return path


def lines(cli: Any, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cli.run_folder(name).metrics.read_text().splitlines()]


def num_turns(found: list[dict[str, Any]]) -> int:
    """Turns of a run's steps, as its metrics have them; the rig's job has 6 prompts and groups of 4."""
    return round(sum(line["turns_mean"] for line in found) * 6 * 4)


@pytest.mark.soak
def test_episodes_survive_kills_of_every_role(cli: Any) -> None:
    path = job(cli, "guess", {"python": "guess.py:Guess", "max_turns": 5}, algorithm={"steps": 9})
    cli("launch", path, "--yes", "--detach")
    cli.wait("guess", lambda s: s["step"] >= 1, timeout_s=180)
    for role in ("coordinator", "endpoint", "trainer"):
        before = cli.wait("guess", lambda s: True, timeout_s=10)["step"]
        cli.process("guess", role).kill()
        cli.wait("guess", lambda s, b=before: s["step"] > b, timeout_s=120)
    players = [
        child
        for child in cli.process("guess", "trainer").children(recursive=True)
        if "rlboost_runtime.trainer.episodes.child" in child.cmdline()
    ]
    players[-1].kill()
    cli.processes("guess", "rlboost_runtime.agent")[0].kill()
    assert cli.wait_outcome("guess", timeout_s=300)["exit_code"] == 0
    found = lines(cli, "guess")
    assert [line["step"] for line in found] == list(range(9))
    for line in found:
        assert line["turns_mean"] > 1
        assert line["environment_tokens_mean"] > 0
        assert sum(line[name] for name in line if name.startswith("episodes_left_out")) == 0
        assert line["mismatch_kl"] < 1e-6, "trained after exactly the tokens that it was sampled after"
    audited = audit(cli.run_folder("guess"))
    assert audited.problems == []
    assert audited.turns_trained == num_turns(found)
    assert "1 to 9?" in cli("samples", "guess").stdout
    cli("down", "guess", "--yes")
    assert cli.processes("guess") == []


@pytest.mark.parametrize(
    "environment",
    [{"python": "function.py:episode"}, {"command": ["python", "program.py"]}],
    ids=["function", "program"],
)
def test_functions_and_programs_train(cli: Any, environment: dict[str, Any]) -> None:
    network = {"reward_network": True, "files": ["program.py"]} if "command" in environment else {}
    path = job(cli, "other", environment, algorithm={"steps": 2}, **network)
    assert "environment" in cli("doctor", path).stdout
    cli("launch", path, "--yes")
    found = lines(cli, "other")
    assert len(found) == 2
    assert all(line["reward_mean"] > 0 for line in found)
    assert all(line["turns_mean"] == (1 if network else 2) for line in found)
    audited = json.loads(cli("audit", "other", "--json").stdout)
    assert audited["clean"], audited["problems"]
    assert audited["turns"]["trained"] == num_turns(found)
