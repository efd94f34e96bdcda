"""The bare install, and each extra alone: every command works, or says which extra it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import rlboost_templates
from rlboost_cli import main
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.folder import RunFolder, write_json

pytestmark = pytest.mark.integration

EXTRAS = ("run", "ssh", "aws", "gcp", "sky", "data", "track", "plot")
COMMANDS = (
    ("init", "new.yaml"),
    ("check", "laptop.yaml"),
    ("check", "aws.yaml"),
    ("schema",),
    ("doctor", "laptop.yaml"),
    ("doctor", "aws.yaml"),
    ("doctor", "gcp.yaml"),
    ("doctor", "own-machines.yaml"),
    ("up", "laptop.yaml", "--yes"),
    ("launch", "laptop.yaml", "--yes"),
    ("launch", "aws.yaml", "--yes"),
    ("launch", "own-machines.yaml", "--yes"),
    ("status",),
    *(("status", run) for run in ("old", "left")),
    *((command, "old") for command in ("logs", "samples", "metrics", "cost", "audit", "launch")),
    *((command, "old", "--json") for command in ("status", "logs", "samples", "metrics", "cost")),
    *((command, "old", "--csv") for command in ("metrics", "cost")),
    ("compare", "old", "left"),
    ("report", "old"),
    ("report", "old", "--md"),
    ("dashboard", "nothing"),
    ("dashboard", "old", "--port", "99999"),
    ("doctor", "old"),
    ("launch", "left", "--yes"),
    ("preempt", "left", "spot-0"),
    ("ssh", "left"),
    ("ssh", "left", "spot-0", "--", "true"),
    ("chaos", "left"),
    ("tasks", "nothing", "--python", "/no/such/python"),
    ("serve", "laptop.yaml", "--yes"),
    ("image", "list", "aws/us-east-1"),
    ("image", "build", "docker", "--only-write"),
    ("generate", "left", "rows.jsonl", "answers.jsonl"),
    ("down", "left", "--yes"),
    ("rm", "old", "--yes"),
    ("gc", "--dry-run"),
    ("gc", "--dry-run", "--cloud", "aws"),
    ("gc", "--dry-run", "--cloud", "gcp"),
    ("acceptance", "aws/us-east-1"),
    ("budget", "aws", "--max-usd", "5", "--email", "me@example.org"),
    ("budget", "gcp", "--max-usd", "5", "--billing-account", "A-1"),
    ("prices",),
    ("prices", "--live"),
    ("simulate", "--preset", "paper-8b", "--window", "0:0.2", "--policy", "on_demand"),
    ("simulate", "--preset", "paper-8b", "--window", "0:0.2", "--policy", "on_demand", "--plot", "pictures"),
    ("traces",),
    ("traces", "show", "generated-p3"),
    ("traces", "fetch", "bamboo-p3", "--from", "https://127.0.0.1:9/none"),
)
PLAN = ("plan", "laptop.yaml")
"""Takes seconds, so it is tried on the bare install only: no extra changes it."""
BLOCKER = """
import sys, traceback
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.partition(".")[0] in ABSENT else find_spec(name, *a)
from typer.testing import CliRunner
from rlboost_cli.main import app
for command in COMMANDS:
    done = CliRunner().invoke(app, list(command))
    print("===", *command, "->", done.exit_code, flush=True)
    print(done.output, flush=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        traceback.print_exception(done.exception, file=sys.stdout)
"""


@cache
def needed(package: str, extra: str = "") -> frozenset[str]:
    """The package with all that it needs, extras left out but for `extra` of the package itself."""
    found, todo = set(), [(package, extra)]
    while todo:
        name, wanted = todo.pop()
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        for line in lines:
            match = re.match(r"([A-Za-z0-9._-]+)(?:\[([\w,-]+)\])?", line)
            assert match is not None
            of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            if of_extra is not None and of_extra[1] != wanted:
                continue
            other = re.sub(r"[-_.]+", "-", match[1]).lower()
            if (other, match[2]) not in found:
                found.add((other, match[2]))
                todo.append((other, match[2] or ""))
    return frozenset(name for name, _ in found)


def absent_with(extra: str) -> set[str]:
    """Top-level modules of packages that `pip install 'rlboost[extra]'` would not bring."""
    here = needed("rlboost", extra)
    brought = {re.sub(r"[-_.]+", "-", name).lower() for name in (*here, "rlboost")}
    every = {
        module: {re.sub(r"[-_.]+", "-", d).lower() for d in packages}
        for module, packages in packages_distributions().items()
    }
    ours = set().union(*(needed("rlboost", e) for e in (*EXTRAS, "train")))
    return {m for m, packages in every.items() if packages & ours and not packages & brought}


def make_runs(folder: Path) -> None:
    """Make `old`, a run that is done, and `left`, whose processes are gone."""
    job = load_job(folder / "laptop.yaml")
    for name in ("old", "left"):
        run = RunFolder(folder / "home" / "runs" / name)
        for made in (run.path, run.files, run.logs, run.processes):
            made.mkdir(parents=True, exist_ok=True)
        run.job_json.write_text(job.model_copy(update={"name": name}).canonical_json())
        Ledger(run.ledger).close()
        write_json(run.status, {"run": name, "state": "training", "step": 1, "reward_mean": 0.5})
        run.metrics.write_text('{"step": 0, "reward_mean": 0.5, "entropy": 1.0}\n')
        (run.logs / "trainer.log").write_text('{"at": 1.0, "level": "info", "event": "began"}\n')
    write_json(RunFolder(folder / "home" / "runs" / "old").outcome, {"state": "done", "exit_code": 0})


def run_all(extra: str, commands: Iterable[tuple[str, ...]], folder: Path) -> str:
    for name in ("laptop", "aws", "gcp", "own-machines"):
        (folder / f"{name}.yaml").write_text(rlboost_templates.text(name))
    make_runs(folder)
    program = BLOCKER.replace("ABSENT", repr(sorted(absent_with(extra)))).replace("COMMANDS", repr(commands))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE"))
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment
        | {"RLBOOST_HOME": str(folder / "home"), "HOME": str(folder), "NO_COLOR": "1"}
        | {"AWS_EC2_METADATA_DISABLED": "true", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_no_command_ends_in_a_traceback(extra: str, tmp_path: Path) -> None:
    said = run_all(extra, COMMANDS, tmp_path)
    assert said.count("===") == len(COMMANDS), said
    assert "unexpected" not in said, said
    assert "Traceback" not in said, said
    assert said.count("launch laptop.yaml --yes -> 2") == 1, said
    assert "pip install 'rlboost[train]'" in said, said


def test_the_bare_install_plans_and_looks_at_runs(tmp_path: Path) -> None:
    words = "schema status logs metrics cost compare down report gc prices simulate traces rm plan"
    commands = [each for each in (PLAN, *COMMANDS) if each[0] in words.split()]
    said = run_all("", commands, tmp_path)
    needs_more = {("prices", "--live"), *(each for each in commands if {"--cloud", "--plot"} & {*each})}
    for each in commands:
        code = 7 if "fetch" in each else 2 if each in needs_more else 0
        assert f"=== {' '.join(each)} -> {code}\n" in said, said


def test_doctor_reports_a_missing_package_and_goes_through_all_checks(tmp_path: Path) -> None:
    said = run_all("", [("doctor", "aws.yaml"), ("doctor", "laptop.yaml")], tmp_path)
    assert "error:" not in said, said
    assert "this needs botocore, which is not installed" in said, said
    aws, laptop = said.split("=== doctor laptop.yaml")
    assert "rlboost-head in aws" in aws, "the identity is judged after the offers"
    assert "machines" in laptop, "those of this machine are tried last"


def test_every_command_is_tried() -> None:
    assert {command for command, *_ in (PLAN, *COMMANDS)} == main.COMMANDS.keys()


def test_what_is_missing_is_an_extras_business() -> None:
    assert {"torch", "boto3", "aiohttp", "paramiko"} <= absent_with("")
    assert not {"typer", "rich", "msgspec", "pydantic"} & absent_with("")
    assert "boto3" not in absent_with("aws")
    assert "torch" in absent_with("run")
