"""Templates: each is a valid job that uses all the GPUs it pays for, with a comment on what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rlboost_templates
from rlboost_cli.main import app
from rlboost_runtime.fit.plan import misfits
from rlboost_runtime.fit.shape import find_shape
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import hints, load_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def rlboost(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def test_there_is_a_template_for_each_kind_of_place() -> None:
    assert rlboost_templates.names() == [
        *("laptop", "own-machines", "quickstart", "serve"),
        *("aws", "gcp", "multi-cloud"),
    ]


@pytest.mark.parametrize("name", rlboost_templates.names())
def test_a_template_is_a_valid_job_with_comments(name: str, tmp_path: Path) -> None:
    text = rlboost_templates.text(name)
    assert all(len(line) <= 115 for line in text.splitlines())
    assert text.count("#") > (5 if name == "quickstart" else 20)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    job = load_job(path)
    assert job.rollout.spot.max_instances > 0
    assert (job.budget.max_usd is None) == (name == "quickstart"), "only a demonstration has no budget"
    assert [hint for hint in hints(job) if not hint.startswith("model:")] == []


def test_there_are_the_promised_recipes() -> None:
    found = {load_recipe(name).algorithm.loss for name in rlboost_templates.recipes()}
    assert found == {"dapo", "dr_grpo", "gspo", "reinforce_pp", "ppo"}
    papers = [
        name for name in rlboost_templates.recipes() if "RLBoost paper" in rlboost_templates.summary(name)
    ]
    assert [load_recipe(name).model for name in papers] == [f"Qwen/Qwen3-{size}B" for size in (14, 32, 8)]


def load_recipe(name: str) -> Job:
    return load_job(EXAMPLES / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("name", rlboost_templates.recipes())
def test_a_recipe_is_a_valid_job_that_fits_its_machines_and_names_its_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # shapes of models are known without a cache
    text = rlboost_templates.text(name)
    assert all(len(line) <= 115 for line in text.splitlines())
    head = text.partition("\nname: ")[0]
    assert "\n# Source: " in head
    assert all(line.startswith("#") for line in head.splitlines() if line)
    job = load_recipe(name)
    assert job.name == name
    shape = find_shape(job.model)
    assert shape is not None
    assert misfits(job, shape) == []
    assert [hint for hint in hints(job) if not hint.startswith("model:")] == []
    rlboost("init", str(tmp_path), "--template", name)
    assert (tmp_path / "job.yaml").read_text() == text


def test_an_unknown_template_is_a_key_error() -> None:
    for name in ("nope", "../rlboost_templates/laptop"):
        with pytest.raises(KeyError):
            rlboost_templates.text(name)


def test_a_place_may_be_called_as_infra_calls_it() -> None:
    assert rlboost_templates.text("local") == rlboost_templates.text("laptop")
    assert rlboost_templates.text("ssh") == rlboost_templates.text("own-machines")


def test_init_writes_the_laptop_job_and_says_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rlboost("init")
    assert done.stdout == ""
    assert "wrote job.yaml" in done.stderr
    assert "rlboost launch job.yaml" in done.stderr
    assert Path("job.yaml").read_text() == rlboost_templates.text("laptop")
    rlboost("check", "job.yaml")


def test_init_never_overwrites_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    done = rlboost("init", str(path), code=2)
    assert "already exists" in done.stderr
    assert "--force" in done.stderr
    assert path.read_text() == "mine"
    rlboost("init", str(path), "--force")
    assert path.read_text() == rlboost_templates.text("laptop")
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yaml"]


def test_init_of_a_cloud_job_says_what_to_edit_and_what_to_type(tmp_path: Path) -> None:
    done = rlboost("init", str(tmp_path), "--template", "gcp")
    path = tmp_path / "job.yaml"
    assert path.read_text() == rlboost_templates.text("gcp")
    assert "role, output, budget" in done.stderr
    assert f"rlboost doctor {path}" in done.stderr
    rlboost("check", str(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x.yaml", "--template", "gpc"), "did you mean gcp?"),
        (("x.yaml", "--template", "moon"), "there are laptop, own-machines"),
        (("no/such/folder/x.yaml",), "No such file or directory"),
    ],
)
def test_init_explains_what_it_cannot_do(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in rlboost("init", *arguments, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_init_lists_templates_on_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = rlboost("init", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == rlboost_templates.names() + rlboost_templates.recipes()
    assert "on AWS" in next(line for line in lines if line.startswith("aws"))
    assert list(tmp_path.iterdir()) == []
