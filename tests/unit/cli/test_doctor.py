"""Every judgement of the doctor is shown a good patient and a bad one."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.doctor import checks, local, machine
from rlboost_cli.doctor import clouds as bought
from rlboost_cli.doctor import job as of_job
from rlboost_cli.doctor.findings import (
    Diagnosis,
    DoctorContext,
    Finding,
    Verdict,
    fail,
    failed,
    lines_of,
    ok,
    warn,
)
from rlboost_cli.main import app
from rlboost_providers.skypilot import session
from rlboost_runtime.errors import CredentialsRejected, ProviderError, QuotaExceeded
from rlboost_runtime.fit.plan import BESIDE_BYTES, fit_plan_here
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.trainer.data.reading import Example
from rlboost_runtime.trainer.rewards.outcome import Reward, RewardFailure
from tests.fakes.skypilot import FakeSkyPilot

GIB = 2**30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("RLBOOST_HOME", str(path))
    return path


def job(**changes: Any) -> Job:
    fields = {"name": "demo", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["basic_arithmetic"]}}
    return Job.model_validate_json(json.dumps({**fields, **changes}))


def judged(finding: Finding, verdict: Verdict, *words: str) -> None:
    assert finding.verdict is verdict, finding
    assert (finding.remedy == "") == (verdict is Verdict.OK), "whoever finds something says what to do"
    text = "\n".join(lines_of(finding))
    assert all(word in text for word in words), text


def only(findings: Any) -> Finding:
    (finding,) = findings
    return finding


# --- the machine -------------------------------------------------------------------------------------------


def test_python() -> None:
    judged(machine.judge_python((3, 11, 0)), Verdict.OK, "3.11.0")
    judged(machine.judge_python((3, 10, 12)), Verdict.FAIL, "3.10.12", "Python 3.11")


def test_the_packages_wanted_are_those_of_training() -> None:
    wanted = machine.wanted_packages(
        [
            "msgspec>=0.19",
            'rlboost[run]; extra == "train"',
            "torch==2.13.0 ; extra == 'train'",
            'transformers<5.20,>=5.19; extra == "train"',
            'uvicorn[standard]>=0.34; extra == "run"',
            'mypy>=1.14; extra == "dev"',
            'numpy; extra == "run"',
        ]
    )
    assert wanted == {
        "msgspec": ">=0.19",
        "torch": "==2.13.0",
        "transformers": "<5.20,>=5.19",
        "uvicorn": ">=0.34",
        "numpy": "",
    }


def test_packages() -> None:
    wanted = {"torch": "==2.13.0", "transformers": ">=5.19,<5.20", "numpy": ">=2", "pip": ""}
    good: dict[str, str | None] = {
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "numpy": "2.1",
        "pip": "1",
    }
    assert [f.verdict for f in machine.judge_packages(wanted, good)] == [Verdict.OK] * 3
    bad = {**good, "torch": "2.12.1", "transformers": None, "numpy": "1.26"}
    torch, transformers, rest = machine.judge_packages(wanted, bad)
    judged(torch, Verdict.FAIL, "torch 2.12.1 is installed, wanted ==2.13.0", "pip install")
    judged(transformers, Verdict.FAIL, "transformers is not installed")
    judged(rest, Verdict.FAIL, "numpy 1.26 is installed, wanted >=2")
    assert "pip " not in rest.found


def test_the_pins_are_read_from_this_distribution() -> None:
    from importlib import metadata

    wanted = machine.wanted_packages(metadata.requires("rlboost") or [])
    assert wanted["torch"] == "==2.13.0"
    assert "pytest" not in wanted


def test_a_home_that_can_be_written_is_left_as_it_was(home: Path) -> None:
    judged(only(machine.home(DoctorContext(home))), Verdict.OK, str(home))
    assert list(home.iterdir()) == []


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    judged(only(machine.home(DoctorContext(tmp_path / "file" / "home"))), Verdict.FAIL, "RLBOOST_HOME")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    judged(only(machine.home(DoctorContext(tmp_path / "closed"))), Verdict.FAIL, "Permission denied")


def test_clock(home: Path, tmp_path: Path) -> None:
    judged(machine.judge_clock(1000.0, 1030.0, "a"), Verdict.OK)
    judged(machine.judge_clock(1000.0, 8200.0, "some/file"), Verdict.FAIL, "7,200 s before", "some/file")
    path = tmp_path / "job.yaml"
    path.write_text("x")
    run = prepare_run(path, job()).run
    judged(only(machine.clock(DoctorContext(home))), Verdict.OK)
    future = run.job_json.stat().st_mtime + 5000
    os.utime(run.job_json, (future, future))
    judged(only(machine.clock(DoctorContext(home))), Verdict.FAIL, "job.json")


def test_open_files(home: Path) -> None:
    unlimited = resource.RLIM_INFINITY
    judged(machine.judge_open_files(1024, 4096, 4), Verdict.OK, "1,024")
    judged(machine.judge_open_files(unlimited, unlimited, 4000), Verdict.OK)
    judged(machine.judge_open_files(256, 4096, 4), Verdict.FAIL, "ulimit -n 320")
    judged(machine.judge_open_files(256, 300, 4), Verdict.FAIL, "limits.conf")
    machines = {"max_instances": 10_000, "any_of": [{"infra": "local", "accelerators": "cpu:9999"}]}
    many = DoctorContext(home, job(rollout={"spot": machines}))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] != unlimited:
        judged(only(machine.open_files(many)), Verdict.FAIL)


def test_loopback(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(only(machine.loopback(DoctorContext(home))), Verdict.OK, "127.0.0.1")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    judged(only(machine.loopback(DoctorContext(home))), Verdict.FAIL, "Cannot assign", "ip link set lo up")
    judged(local.judge_free_port(local._free_port()), Verdict.FAIL, "no free port")


# --- the local place ---------------------------------------------------------------------------------------


def test_cpus(home: Path) -> None:
    judged(local.judge_cpus(2, 5), Verdict.OK, "2 for 5 threads")
    judged(local.judge_cpus(1, 5), Verdict.WARN, "max_instances")
    many = job(rollout={"spot": {"max_instances": 10_000}})
    judged(only(local.cpus(DoctorContext(home, many))), Verdict.WARN, "10002 threads")


def test_memory() -> None:
    trainer, engine = 2 * GIB, GIB
    judged(local.judge_memory(16 * GIB, 8 * GIB, trainer, engine, 4), Verdict.OK, "about 6.0 GiB wanted")
    judged(local.judge_memory(16 * GIB, 5 * GIB, trainer, engine, 4), Verdict.WARN, "5.0 GiB of 16.0 GiB")
    judged(local.judge_memory(4 * GIB, 4 * GIB, trainer, engine, 4), Verdict.FAIL, "there is 4.0", "smaller")


def test_memory_of_a_gpu() -> None:
    large = job(model="Qwen/Qwen3-8B")
    judged(local.judge_gpu_memory(large, 180 * GIB, "gpu"), Verdict.OK, "computed for the trainer, per GPU")
    judged(local.judge_gpu_memory(large, 80 * GIB, "gpu"), Verdict.FAIL, "model: ", "GB per GPU")


def test_disk(home: Path) -> None:
    plan = fit_plan_here(job(rollout={"spot": {"max_instances": 3}}))
    assert plan is not None
    num = plan.setup.shape.parameters
    assert plan.checkpoint == 12 * num
    assert plan.disk == 3 * 12 * num + 4 * num + 4 * 3 * 4 * num + BESIDE_BYTES
    judged(local.judge_disk(plan.disk, plan.disk, "/x"), Verdict.OK)
    judged(local.judge_disk(plan.disk - 1, plan.disk, "/x"), Verdict.FAIL, "/x", "keep_checkpoints")


def test_a_port_that_an_open_run_owns_may_not_be_taken(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("x")
    patient = DoctorContext(home, job(), path)
    judged(only(local.ports(patient)), Verdict.OK, "available")
    run = prepare_run(path, job()).run
    judged(only(local.ports(patient)), Verdict.OK, "the ports of run demo are free")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run.endpoint.write_text(json.dumps({"url": f"https://127.0.0.1:{port}"}))
        judged(only(local.ports(patient)), Verdict.FAIL, f"{port} (coordinator)", "rlboost down demo")
    judged(only(local.ports(patient)), Verdict.OK)
    run.outcome.write_text("{}")
    judged(only(local.ports(patient)), Verdict.OK, "available")


# --- the job -----------------------------------------------------------------------------------------------


def test_prompt_lengths() -> None:
    fits = job(algorithm={"max_prompt_tokens": 10, "prompts_per_step": 3})
    judged(of_job.judge_lengths([3, 10, 7], 3, fits), Verdict.OK, "of 3 to 10 tokens (limit 10)")
    judged(of_job.judge_lengths([3, 11, 7, 0], 4, fits), Verdict.WARN, "50.0% are too long or empty")
    judged(of_job.judge_lengths([11, 20], 2, fits), Verdict.FAIL, "shortest: 11", "longest: 20")
    judged(of_job.judge_lengths([3, 4], 2, fits), Verdict.WARN, "a step takes 3")
    judged(of_job.judge_lengths([], 0, fits), Verdict.FAIL)


def test_rewards() -> None:
    answered, silent, made = Example("q", "a", {}), Example("q", None, {}), job(secrets=["JUDGE_KEY"])
    judged(
        of_job.judge_reward(Reward(1.0), answered, made), Verdict.OK, "1 for the first prompt's own answer"
    )
    judged(
        of_job.judge_reward(Reward(0.0), answered, made), Verdict.WARN, "0 for the first prompt's own answer"
    )
    judged(of_job.judge_reward(Reward(0.0), silent, made), Verdict.OK, "an empty response")
    broken = Reward(0.0, RewardFailure.RAISED, "KeyError: 'x'")
    judged(of_job.judge_reward(broken, answered, made), Verdict.FAIL, "raised", "KeyError: 'x'")
    remedy = of_job.judge_reward(broken, answered, made).remedy
    assert "neither a network nor the job's secrets unless the job has reward_network: true" in remedy
    free = made.model_copy(update={"reward_network": True})
    assert "reward_network" not in of_job.judge_reward(broken, answered, free).remedy


# --- the whole ---------------------------------------------------------------------------------------------


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(list(findings))


def test_the_exit_code_says_whose_fault_it_is() -> None:
    account = failed("quota", QuotaExceeded("0 H100s allowed", "ask for more"))
    login = failed("login", CredentialsRejected("expired", "log in"))
    cloud = failed("cloud", ProviderError("unreachable", "later"))
    mistake = fail("disk", "full", "free some")
    fine, so_so = ok("python", "3.12"), warn("cpus", "few", "fewer engines")
    assert diagnosis(fine, so_so).exit_code == 0
    assert diagnosis(fine, account, login).exit_code == 6
    assert diagnosis(mistake, account).exit_code == 2
    assert diagnosis(cloud).exit_code == 2
    assert diagnosis(fine, so_so, mistake).count(Verdict.WARN) == 1


def test_a_place_adds_its_checks_by_the_first_word_of_infra(monkeypatch: pytest.MonkeyPatch) -> None:
    here = list(checks.checks_for(job()))
    assert here == [*checks.MACHINE, *checks.job_checks(), *checks.TOOLS, *checks.PLACES["local"]]
    assert list(checks.checks_for(None)) == list(checks.MACHINE)
    elsewhere = checks.Check(lambda patient: iter([ok("cloud", "there")]))
    monkeypatch.setattr(checks, "PLACES", {"local": (elsewhere,)})
    assert list(checks.checks_for(job()))[-1] is elsewhere


@pytest.mark.parametrize("second", ["aws", "head"])
def test_a_problem_that_several_checks_find_is_explained_once(
    monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    error = CredentialsRejected("no credentials", "sign in")
    each = [checks.Check(lambda patient, name=name: iter([failed(name, error)])) for name in ("head", second)]
    monkeypatch.setattr(checks, "checks_for", lambda job: each)
    head, again = checks.examine(DoctorContext(Path("/nowhere")))
    judged(head, Verdict.FAIL, "no credentials", "sign in")
    assert (again.check, again.found, again.remedy) == (second, "see head above", "")
    assert again.verdict is Verdict.FAIL
    assert again.exit_code == head.exit_code == 6


def test_without_a_job_the_machine_is_looked_at(home: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["job"] is None
    assert found["ready"] is True
    names = [finding["check"] for finding in found["findings"]]
    assert names[:4] == ["python", "torch", "transformers", "packages"]
    assert set(names[4:]) == {"home", "clock", "open files", "loopback"}


def test_a_failure_is_shown_with_its_remedy_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "file" / "home"))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "fail  home" in done.stdout
    assert "set RLBOOST_HOME" in done.stdout
    assert "1 failed, 0 warnings" in done.stderr


def test_a_job_with_mistakes_is_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: demo\nmodel: {init: tiny}\ndata: {source: gone.jsonl}\n")
    done = CliRunner().invoke(app, ["doctor", str(path)])
    assert done.exit_code == 2
    assert f"{path}:3: data.source" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"infra": "aws"}, "it stops after its run, and its disk costs money until you type a command"),
        ({"infra": "aws", "role": "rlboost-head"}, "the head will be rlboost-head in aws"),
        ({"infra": "gcp"}, "the head will be SkyPilot's own service account in gcp"),
    ],
)
def test_a_head_of_skypilot_is_told_whom_its_cloud_takes_it_for(trainer: dict[str, str], says: str) -> None:
    fields = {
        "name": "far",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "trainer": {"accelerators": "H100:8", "via": "skypilot", **trainer},
        "output": "s3://bucket/runs",
    }
    assert says in bought.judge_identity(Job.model_validate_json(json.dumps(fields))).found


def test_a_head_of_skypilot_is_not_said_to_be_had_with_credentials_that_nobody_tried(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSkyPilot()
    monkeypatch.setattr(session.Session, "sky", lambda self: fake)
    trainer = {"infra": "aws", "accelerators": "A10G:1", "via": "skypilot"}
    found = only(bought.offer(DoctorContext(home, job(trainer=trainer, output="s3://bucket/runs"))))
    judged(
        found, Verdict.OK, "$1.0060 per hour (SkyPilot catalogue)", "`sky check` shows whether it may launch"
    )


@pytest.mark.parametrize(
    ("trainer", "more", "verdict"),
    [
        ({"role": "rlboost-head"}, {}, "ok"),
        ({}, {"secrets": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]}, "ok"),
        ({}, {}, "warn"),
        ({"role": "rlboost-head", "infra": "gcp/us-central1"}, {}, "warn"),  # its role is Google's
        ({"via": "skypilot", "infra": "aws"}, {}, "warn"),
        ({"via": "skypilot", "infra": "aws", "role": "rlboost-head"}, {}, "ok"),
        ({"via": "skypilot", "infra": "gcp"}, {}, "warn"),  # its fleet is in AWS
    ],
)
def test_a_bought_head_that_is_nobody_to_the_clouds_of_its_fleet_is_told(
    trainer: dict[str, str], more: dict[str, object], verdict: str
) -> None:
    head = {"infra": "aws/us-east-1", "accelerators": "H100:8", **trainer}
    spot = {"infra": "aws/us-east-1", "accelerators": "H100:8", "via": "direct"}
    fields = {
        "name": "far",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["spell_backward"]},
        "trainer": head,
        "rollout": {"spot": {"any_of": [spot]}},
        "output": "s3://bucket/runs",
        **more,
    }
    found = bought.judge_identity(Job.model_validate_json(json.dumps(fields)))
    assert found.verdict == verdict, found


def test_findings_are_broken_between_words_at_the_terminals_width() -> None:
    finding = Finding(
        "memory", Verdict.WARN, "15.2 GiB free, about 2.2 GiB wanted: trainer 0.6 GiB + " * 2, "free some"
    )
    lines = list(lines_of(finding, 79))
    assert max(map(len, lines)) <= 79
    assert [line[:19].split() for line in lines] == [["warn", "memory"], *[[]] * (len(lines) - 1)]
    assert next(iter(lines_of(finding))).endswith("0.6 GiB + "), "whole where nobody looks at it"
