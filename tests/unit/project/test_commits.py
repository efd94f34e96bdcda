"""The check of commit subjects accepts what CONTRIBUTING asks for and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / ".ci" / "check_commits.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_commits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "subject",
    [
        "Move every module into its room",
        "Pass arrays to the loss",
        "Bring the ledger up to date",
        "Speed up the journal",
        'Revert "Add a cloud"',
        "Add " + "x" * 68,
    ],
)
def test_an_imperative_of_at_most_72_characters_is_accepted(check: ModuleType, subject: str) -> None:
    assert check.fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("Add " + "x" * 69, "73 characters"),
        ("Add a cloud.", "full stop"),
        ("add a cloud", "'add'"),
        ("Added a cloud", "imperative"),
        ("Adds a cloud", "imperative"),
        ("Adding a cloud", "imperative"),
        ("The ledger has prices", "'The'"),
        ("fixup! Add a cloud", "'fixup!'"),
        ("", "''"),
    ],
)
def test_anything_else_is_refused_with_a_reason(check: ModuleType, subject: str, why: str) -> None:
    assert why in check.fault(subject)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def run_check(folder: Path, base: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, base], cwd=folder, capture_output=True, text=True, check=False
    )


def test_commits_after_the_base_are_checked_where_the_clone_has_it(tmp_path: Path) -> None:
    repository, shallow = tmp_path / "repository", tmp_path / "shallow"
    repository.mkdir()
    git(repository, "init", "-q")
    git(repository, "commit", "-q", "--allow-empty", "-m", "an old subject that is exempt.")
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "--allow-empty", "-m", "Add a cloud")
    assert run_check(repository, base).stdout == f"commit subjects: 1 checked since {base}\n"
    git(repository, "commit", "-q", "--allow-empty", "-m", "added a loss")
    found = run_check(repository, base)
    assert found.returncode == 1
    assert "added a loss\n  starts with 'added'" in found.stderr
    git(tmp_path, "clone", "-q", "--depth", "1", repository.as_uri(), str(shallow))
    skipped = run_check(shallow, base)
    assert skipped.returncode == 0
    assert "not checked, this clone does not have commit" in skipped.stdout
