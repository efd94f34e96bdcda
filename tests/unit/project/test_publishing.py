"""Workflows, image and site name targets, folders and pages that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_and_jobs_that_exist(path: Path) -> None:
    jobs = read(path)["jobs"]
    for job in jobs.values():
        assert set(job.get("needs", ())) <= set(jobs)
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        for step in job.get("steps", ()):
            made = re.search(r"\bmake ([a-z0-9 -]+)$", step.get("run", ""))
            assert set(made[1].split() if made else ()) <= TARGETS


def test_together_the_workflows_run_what_ci_runs() -> None:
    rules = re.split(r"^(?=\S)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (ci,) = (rule for rule in rules if rule.startswith("ci:"))
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    made = {target for line in re.findall(r"\bmake ([a-z0-9 -]+)$", text, re.M) for target in line.split()}
    assert set(re.findall(r"\$\(MAKE\) ([a-z0-9-]+)", ci)) <= made


def test_the_image_is_made_of_what_the_wheel_is_made_of() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        for source in line.split()
    }
    let_through = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = {package.partition("/")[0] for package in build["targets"]["wheel"]["packages"]}
    assert copied == let_through == packages | {"pyproject.toml", "README.md", "LICENSE"}
