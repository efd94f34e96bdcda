"""The JSON Schema of job files judges their shape as `check` does."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import rlboost_templates
from rlboost_cli.main import app
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import describe_fields
from rlboost_runtime.job.file.tree import parse

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
FILES = {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in sorted(EXAMPLES.rglob("*.yaml"))}
FILES |= {name: rlboost_templates.text(name) for name in rlboost_templates.names()}
FILES |= {name: rlboost_templates.text(name) for name in rlboost_templates.recipes()}
WRONG: list[Any] = ["no such value", -1, 10**15, 2.5, 0, True, None, [], {}, ["x"], {"no_such_field": 1}]
EVERYTHING = """
name: all
model: {init: tiny, warmup: {reward: 0.5}}
data:
- {source: prompts.jsonl, weight: 2}
- {dataset: openai/gsm8k}
- {reasoning_gym: [spell_backward], reward: {http: "https://host/score", concurrency: 2}}
secrets: [HOOK]
notify: [{webhook: "${HOOK}", on: [done]}, {command: [echo, hello]}]
environment: {verifiers: {taskset: gsm8k-v1, packages: [gsm8k-v1]}, max_turns: 4}
reward: [{name: mine, python: "rewards.py:score", weight: 2}, {name: judge, http: "https://host/score"}]
endpoint: {scaling: {max_wait_s: 5}, max_requests: 8}
dashboard: {port: 7443}
weights: {transfer: lora, peers: true}
after: {done: down, idle_minutes: 5}
algorithm: {kl: {}, entropy_bonus: {}, lora: {}, adam_betas: [0.9, 0.99]}
trainer: {infra: aws/us-east-2, accelerators: "H100:8"}
output: s3://bucket/x
rollout:
  spot:
    any_of:
    - {infra: local, price_usd_per_hour: 1, market: {seed: 1}}
    - {infra: ssh, hosts: [me@machine]}
    - {infra: gcp/us-central1, accelerators: "H100:8", max_price_usd_per_hour: 3}
evaluation: {prompts: 2}
tracking: {wandb: {project: p}}
budget: {max_usd: 5}
"""


EPISODES = """
name: episodes
model: {init: tiny}
data: {source: prompts.jsonl}
reward_network: true
environment: {openenv: {url: "http://10.0.0.7:8000"}, max_turns: 4}
algorithm: {loss: ppo, ppo: {}}
"""
WHOLE = {"everything": EVERYTHING, "episodes": EPISODES}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    done = CliRunner().invoke(app, ["schema"])
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@pytest.mark.parametrize("name", FILES)
def test_every_template_and_example_is_accepted(name: str, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(parse(FILES[name]).data)] == []


def has_shape(data: Any) -> bool:
    """True if `check` finds nothing but what fields ask of one another."""
    try:
        Job.model_validate_json(json.dumps(data))
    except ValidationError as errors:
        return all(error["type"] == "value_error" for error in errors.errors())
    return True


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(data: Any) -> Iterator[tuple[str, Any]]:
    """Files with one change: a value replaced, a field removed, or an unknown field added."""
    for path in places(data):
        for value in [*WRONG, ...]:
            other = copy.deepcopy(data)
            owner = other
            for key in path[:-1]:
                owner = owner[key]
            if value is ...:
                del owner[path[-1]]
            else:
                owner[path[-1]] = value
            yield f"{path}: {value}", other
            if isinstance(owner, dict) and value is ...:
                owner["no_such_field"] = 1
                yield f"{path} renamed", other


@pytest.mark.parametrize("name", ["quickstart", "multi-cloud", *WHOLE])
def test_it_refuses_the_shapes_that_check_refuses_and_no_other(name: str, validator: Any) -> None:
    data = parse({**FILES, **WHOLE}[name]).data
    assert has_shape(data)
    assert validator.is_valid(data)
    verdicts = [(what, has_shape(other), validator.is_valid(other)) for what, other in changed(data)]
    assert [each for each in verdicts if each[1] != each[2]] == []
    refused = sum(not shape for _, shape, _ in verdicts)
    assert refused > len(verdicts) / 2 > 80


def test_every_documented_field_is_in_it_with_its_words(schema: dict[str, Any]) -> None:
    sections = schema["$defs"]
    words = {
        (name, field.get("description") or sections[field["$ref"].rpartition("/")[2]]["description"])
        for model in [schema, *sections.values()]
        for name, field in model["properties"].items()
    }
    for field in describe_fields():
        name = field.path.rpartition(".")[2]
        told = [said for known, said in words if known == name]
        assert any(said in " ".join(field.doc.split()) for said in told), field.path
    assert "title" not in json.dumps(schema["$defs"])
