"""`rlboost gc` as a person types it: what no open run owns is found and ended, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.provider import LaunchRequest
from rlboost_providers.base.tags import owner_of
from rlboost_providers.local.provider import LocalProvider
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.processes import kill_tagged, tagged
from rlboost_runtime.run.folder import RunFolder
from tests.fakes.ec2 import IMAGE, REGION, Refusal, fake_ec2

pytestmark = pytest.mark.integration

POOL = AwsPool(REGION, "A10G:1", ("g5.xlarge",), IMAGE, 500_000, 1_006_000)
OFFER = CloudOffer(infra=f"aws/{REGION}", accelerators="A10G:1", via="direct", image=IMAGE)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "runs").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def ec2(monkeypatch):
    with fake_ec2() as fake:
        fake.sign_in(monkeypatch)
        fake.prices = {("g5.xlarge", f"{REGION}a"): 0.30}
        yield fake


def make_run(home, name, *, is_open, offer=OFFER):
    run = RunFolder(home / "runs" / name)
    run.path.mkdir()
    job = Job(
        name=name,
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=[offer])),
    )
    run.job_json.write_text(job.canonical_json())
    if not is_open:
        run.outcome.write_text(json.dumps({"state": "done", "problem": "", "remedy": "", "exit_code": 0}))
    return run


def launch(ec2, owner, run, machine="spot-0"):
    provider = AwsProvider([POOL], owner, client=ec2.client)
    bootstrap = {"machine": machine, "instances": (f"{machine}/0",)}
    provider.launch(LaunchRequest(run, machine, provider.offers()[0], bootstrap))


def gc(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rlboost_cli", "gc", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def alive(ec2):
    marks = [{tag["key"]: tag["value"] for tag in each.get_tags()} for each in ec2.instances()]
    return sorted((mark["rlboost-run"], mark["rlboost-machine"]) for mark in marks)


def test_orphans_are_ended_and_what_open_runs_and_other_people_own_is_not(home, ec2):
    make_run(home, "open", is_open=True)
    make_run(home, "ended", is_open=False)
    for run in ("open", "ended", "forgotten"):
        launch(ec2, owner_of(home), run)
    launch(ec2, "ba9876543210", "theirs")
    shown = gc("--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr
    machines = {each["run"]: each for each in json.loads(shown.stdout)["machines"]}
    assert {run: each["to_end"] for run, each in machines.items()} == {
        "ended": True,
        "forgotten": True,
        "theirs": False,
    }
    assert machines["theirs"]["why"] == "it belongs to another owner, ba9876543210"
    assert len(alive(ec2)) == 4
    done = gc("--yes")
    assert done.returncode == 0, done.stderr
    assert "terminated 2 machines" in done.stderr
    assert alive(ec2) == [("open", "spot-0"), ("theirs", "spot-0")]


def test_a_home_without_any_run_finds_what_its_head_left_where_it_is_told_the_cloud(home, ec2):
    launch(ec2, owner_of(home), "lost", "spot-3")
    shutil.rmtree(home / "runs")
    assert "no orphaned machines" in gc("--yes").stderr
    done = gc("--yes", "--cloud", "aws")
    assert done.returncode == 0, done.stderr
    assert alive(ec2) == []


def test_a_cloud_that_refuses_to_answer_is_told_with_its_exit_code(home, ec2):
    make_run(home, "ended", is_open=False)
    ec2.refusals.append(Refusal("", "RequestExpired", 401, times=1000))
    done = gc("--yes")
    assert done.returncode == 6
    lines = [line for line in done.stderr.splitlines() if "RequestExpired" in line]
    assert len(lines) == len(set(lines)), "each refusal is shown once"
    assert lines[-1].startswith("error: ")
    assert "aws sts get-caller-identity" in done.stderr


def test_what_other_regions_have_is_ended_where_one_is_denied_and_that_is_told(home, ec2):
    make_run(home, "ended", is_open=False)
    launch(ec2, owner_of(home), "ended")
    launch(ec2, owner_of(home), "forgotten")
    ec2.refusals.append(
        Refusal("DescribeInstances", "UnauthorizedOperation", 403, times=1000, region="us-west-2")
    )
    done = gc("--yes")
    assert done.returncode == 6
    assert "error: cannot list the machines in us-west-2" in done.stderr
    assert "terminated 2 machines" in done.stderr
    assert alive(ec2) == []


def test_a_machine_that_cannot_be_ended_is_named_with_what_to_do(home, ec2):
    make_run(home, "ended", is_open=False)
    launch(ec2, owner_of(home), "ended")
    ec2.refusals.append(Refusal("TerminateInstances", "UnauthorizedOperation", 403, times=1000))
    done = gc("--yes")
    assert done.returncode == 7
    assert "machines may still run: spot-0 of ended" in done.stderr
    assert alive(ec2) == [("ended", "spot-0")]


def test_processes_that_an_ended_run_left_on_this_machine_are_ended(home):
    offer = LocalOffer(infra="local")
    run = make_run(home, "here", is_open=False, offer=offer)
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    provider = LocalProvider(run.path, [offer], command=lambda bootstrap, instance: nap)
    try:
        provider.launch(LaunchRequest("here", "spot-0", provider.offers()[0], {"instances": ("spot-0/0",)}))
        done = gc("--yes")
        assert done.returncode == 0, done.stderr
        assert tagged(run.path) == []
    finally:
        kill_tagged(run.path)
