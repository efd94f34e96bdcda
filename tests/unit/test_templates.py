"""Templates: each is good YAML in the words of the job file's contract; a draft says that it is one, and
nothing else is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

import rlboost_templates
from rlboost_cli.main import app
from rlboost_runtime.job import Job
from rlboost_runtime.job_file import JobErrors, load_job

DRAFTS = [name for name in rlboost_templates.names() if rlboost_templates.is_draft(name)]
RUNNABLE = [name for name in rlboost_templates.names() if name not in DRAFTS]
LATER: dict[str, set[str]] = {
    "": {"after"},
    "algorithm": {"lora"},
    "trainer": {"accelerators"},
    "rollout": {"tensor_parallel"},
    "rollout.engine_args": {"gpu_memory_utilization"},
    "rollout.spot.any_of": {"accelerators", "via", "hosts", "max_price_usd_per_hour", "egress_usd_per_gb"},
    "weights": {"peers", "bucket"},
    "after": {"done", "failed", "idle_minutes"},
}
"""Fields of the contract (the job file as designed) that this version has no model for."""


def rlboost(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def fields(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield (section, field) of every key in a job file; entries of a list share their section."""
    if isinstance(value, list):
        for each in value:
            yield from fields(each, at)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield at, key
            yield from fields(inner, f"{at}.{key}" if at else key)


def known_fields() -> set[tuple[str, str]]:
    schema = Job.model_json_schema()

    def walk(node: Any, at: str) -> Iterator[tuple[str, str]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for option in [
            *node.get("anyOf", []),
            *node.get("oneOf", []),
            *([node["items"]] if "items" in node else []),
        ]:
            yield from walk(option, at)
        for key, inner in node.get("properties", {}).items():
            yield at, key
            yield from walk(inner, f"{at}.{key}" if at else key)

    later = {(section, field) for section, names in LATER.items() for field in names}
    return set(walk(schema, "")) | later


def test_there_is_a_template_for_each_kind_of_place() -> None:
    assert rlboost_templates.names() == ["laptop", "own-machines", "aws", "gcp", "multi-cloud"]
    assert RUNNABLE == ["laptop", "own-machines"]


@pytest.mark.parametrize("name", rlboost_templates.names())
def test_a_template_has_comments_and_only_fields_of_the_contract(name: str) -> None:
    text = rlboost_templates.text(name)
    assert all(len(line) <= 110 for line in text.splitlines())
    assert text.count("#") > 20
    unknown = set(fields(YAML(typ="safe").load(text))) - known_fields()
    assert not {(section, key) for section, key in unknown if section != "data.config"}


def test_a_field_outside_the_contract_would_be_found() -> None:
    text = rlboost_templates.text("aws").replace("  nodes: 1", "  node: 1")
    assert set(fields(YAML(typ="safe").load(text))) - known_fields() == {("trainer", "node")}


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_template_that_is_no_draft_is_a_valid_job(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(rlboost_templates.text(name))
    job = load_job(path)
    assert job.rollout.spot.max_instances > 0
    assert job.budget.max_usd is not None


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_says_so_and_check_finds_only_what_is_not_in_this_version(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = rlboost_templates.text(name)
    path.write_text(text)
    head = text[: text.index("\nname:")]
    assert "DRAFT" in head
    assert "rlboost check FILE" in head
    assert "not in this version yet" in head
    with pytest.raises(JobErrors) as found:
        load_job(path)
    assert [line for line in found.value.lines if "not in this version yet" not in line] == []
    assert any("rollout.tensor_parallel" in line for line in found.value.lines)


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
    assert "is there already" in done.stderr
    assert "--force" in done.stderr
    assert path.read_text() == "mine"
    rlboost("init", str(path), "--force")
    assert path.read_text() == rlboost_templates.text("laptop")
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yaml"]


def test_init_of_a_draft_does_not_pretend(tmp_path: Path) -> None:
    done = rlboost("init", str(tmp_path), "--template", "gcp")
    path = tmp_path / "job.yaml"
    assert path.read_text() == rlboost_templates.text("gcp")
    assert "a draft: this version cannot run it" in done.stderr
    assert f"rlboost check {path}" in done.stderr
    assert "not in this version yet" in rlboost("check", str(path), code=2).stderr


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
    assert [line.split()[0] for line in lines[1:]] == rlboost_templates.names()
    assert "DRAFT" in next(line for line in lines if line.startswith("aws"))
    assert list(tmp_path.iterdir()) == []
