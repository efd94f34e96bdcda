"""Mistakes in a job file and its data: one line each, with the place and what to write; nothing is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

MISTAKES = {
    "unknown key": (
        ("algorithm:", "algoritm: {steps: 3}\nalgorithm:"),
        "{job}:6: algoritm: unknown field; did you mean algorithm?",
    ),
    "unknown key in a section": (
        ("group_size: 4", "group_sizes: 4"),
        "{job}:7: algorithm.group_sizes: unknown field; did you mean group_size?",
    ),
    "wrong type": (
        ("steps: 2", "steps: '2'"),
        "{job}:9: algorithm.steps: found '2' (text); write 2",
    ),
    "group_size 1": (
        ("group_size: 4", "group_size: 1"),
        "{job}:7: algorithm.group_size: is 1, but dapo compares the responses to a prompt; write at least 2",
    ),
    "missing data file": (
        ("prompts.jsonl", "promts.jsonl"),
        "{job}:3: data.source: found 'promts.jsonl', which does not exist; did you mean prompts.jsonl?",
    ),
    "missing reward file": (
        ("rewards.py:fine", "nowhere.py:fine"),
        "{job}:4: reward: found 'nowhere.py', which does not exist; write a Python file",
    ),
    "missing reward function": (
        ("rewards.py:fine", "rewards.py:find"),
        "{job}:4: reward: found rewards.py:find, but rewards.py has no function find; did you mean fine?",
    ),
}


@pytest.mark.parametrize(("change", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_place_finding_and_remedy(
    rlboost: Any, change: tuple[str, str], told: str
) -> None:
    job = rlboost.job()
    assert change[0] in job.read_text()
    job.write_text(job.read_text().replace(*change))
    said = rlboost("launch", job, "--yes")
    assert said.err.splitlines() == [told.format(job=job)]
    assert (said.code, said.out) == (2, "")
    assert not rlboost.home.exists()


def test_all_mistakes_are_told_at_once_and_in_the_order_of_their_lines(rlboost: Any) -> None:
    job = rlboost.job()
    text = job.read_text()
    for change, _ in MISTAKES.values():
        text = text.replace(*change)
    job.write_text(text)
    said = rlboost("check", job)
    lines = [int(line.split(":")[1]) for line in said.err.splitlines()]
    assert len(lines) == 5  # of seven: three fields are wrong twice, or were given another name
    assert lines == sorted(lines)
    assert said.code == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "found prompts.jsonl, which is empty; write a JSON-lines or .parquet file"),
        ("\n\n  \n", "found prompts.jsonl without a single prompt; write one JSON object per line"),
        ('{"prompt": ""}\n', "found prompts.jsonl:1: no text in field prompt (fields: prompt); set"),
    ],
    ids=["empty", "blank lines", "empty prompt"],
)
def test_an_empty_data_set_is_told_before_anything_starts(rlboost: Any, content: str, told: str) -> None:
    job = rlboost.job()
    (rlboost.folder / "prompts.jsonl").write_text(content)
    said = rlboost("up", job)
    (line,) = said.err.splitlines()
    assert line.startswith(f"{job}:3: data.source: {told}")
    assert said.code == 2
    assert not rlboost.home.exists()


def test_a_missing_job_file_is_told_with_where_to_get_one(rlboost: Any) -> None:
    said = rlboost("launch", "nowhere.yaml", "--yes")
    assert said.err.startswith("error: nowhere.yaml: no such job file\n\nhint: write one")
    assert "rlboost init" in said.err
    assert said.code == 2


def test_a_prompt_over_the_limit_is_left_out_and_counted(tmp_path: Path) -> None:
    from rlboost_runtime.coordinator.observers.steps import StepWarnings
    from rlboost_runtime.job import PromptFile
    from rlboost_runtime.trainer.data.prompts import PromptSource
    from rlboost_runtime.trainer.data.reading import read_examples

    rows = [{"prompt": "short"}, {"prompt": "x" * 500}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_examples(PromptFile(source="p.jsonl"), tmp_path)
    source = PromptSource(
        examples,
        lambda each: (each.text, list(each.text.encode())),
        prompts_per_step=4,
        max_prompt_tokens=64,
        seed=0,
    )
    assert {prompt.text for prompt in source.batch(0)} == {"short"}
    told = StepWarnings([]).trained(0, {"prompts_skipped": float(source.num_skipped)})
    assert told == [("data", "1 prompt is longer than algorithm.max_prompt_tokens and left out")]
