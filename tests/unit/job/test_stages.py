"""Jobs that imitate or compare: sft needs no machine; settings that another loss would ignore are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_runtime.fit.plan import fit_plan
from rlboost_runtime.fit.shape import find_shape
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import JobErrors, load_job

GOOD = "name: good\nmodel: {init: tiny, warmup: null}\n"
GYM = "data: {reasoning_gym: [spell_backward]}\n"


def loaded(folder: Path, text: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(GOOD + text)
    return load_job(path)


def told(folder: Path, text: str) -> str:
    with pytest.raises(JobErrors) as found:
        loaded(folder, text)
    return found.value.problem


def test_sft_has_neither_spot_machines_nor_engines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    job = loaded(tmp_path, "data: {source: rows.jsonl}\nalgorithm: {loss: sft}\n")
    assert (job.rollout.spot.max_instances, job.trainer.local_engines) == (0, 0)
    assert not job.is_scored
    again = Job.model_validate_json(job.canonical_json())
    assert again == job
    evaluated = loaded(tmp_path, GYM + "algorithm: {loss: sft}\nevaluation: {prompts: 4, every_steps: 2}\n")
    assert (evaluated.rollout.spot.max_instances, evaluated.trainer.local_engines) == (0, 1)
    assert evaluated.is_scored


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithm: {loss: sft}\nrollout: {spot: {max_instances: 2}}\n", "max_instances is 2, but loss sft"),
        (
            "algorithm: {loss: sft}\ntrainer: {local_engines: 0}\nevaluation: {prompts: 4, every_steps: 2}\n",
            "no engine generates",
        ),
        (
            "algorithm: {loss: grpo, dpo: {beta: 0.2}}\n",
            "dpo: found, but loss is grpo; write loss: dpo",
        ),
        ("algorithm: {loss: dpo, clip_low: 0.1}\n", "clip_low: found 0.1, but dpo has no probability ratio"),
        ("algorithm: {loss: rejection, rejection: {keep: 0}}\n", "rejection.keep"),
    ],
)
def test_what_would_be_ignored_is_told(tmp_path: Path, text: str, words: str) -> None:
    assert words in told(tmp_path, GYM + text)


def test_dpo_s_reference_folder_is_found_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    job = loaded(tmp_path, GYM + "algorithm: {loss: dpo, dpo: {reference: base}}\n")
    assert job.algorithm.reference == str(tmp_path / "base")


def test_dpo_s_memory_is_that_of_a_pair_and_of_a_reference(tmp_path: Path) -> None:
    job = loaded(
        tmp_path, GYM + "algorithm: {loss: dpo, max_prompt_tokens: 5000, max_response_tokens: 7000}\n"
    )
    shape = find_shape(job.model)
    assert shape is not None
    plan = fit_plan(job, shape)
    assert plan.setup.tokens == 24_000
    assert plan.setup.reference > 0
    other = job.model_copy(update={"algorithm": job.algorithm.model_copy(update={"loss": "rejection"})})
    assert fit_plan(other, shape).setup.tokens == 12_000
    assert fit_plan(other, shape).setup.reference == 0
