"""Every judgement of a head elsewhere is shown a good machine and a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.doctor import checks, head
from rlboost_cli.doctor import clouds as bought
from rlboost_cli.doctor import clouds as markets
from rlboost_cli.doctor.findings import ACCOUNT, DoctorContext, Finding, Verdict, lines_of
from rlboost_runtime.job import Job
from rlboost_runtime.run.head import HeadPlace

GB = 10**9
PLACE = HeadPlace("me@train-1")
OWN = HeadPlace("me@train-1", python="/opt/python")
GOOD_PYTHON = {
    "is_there": True, "path": "/opt/python", "system": "3.9.2", "python": "3.11.7", "rlboost": "0.3",
    "torch": "2.13.0", "cuda": "12.8", "gpus": 2, "problem": "",
}  # fmt: skip
BARE = {"is_there": False, "path": "/home/me/.rlboost/venv/bin/python", "system": "3.9.2"}
TWO = {"gpus": [{"name": "NVIDIA A10G", "mib": 23028}] * 2, "driver": "570.86", "problem": ""}


def job(**changes: Any) -> Job:
    fields = {
        "name": "demo",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["basic_arithmetic"]},
        "trainer": {"infra": "ssh", "hosts": ["me@train-1"]},
    }
    return Job.model_validate_json(json.dumps({**fields, **changes}))


def on_spot(*infras: str, **more: Any) -> Job:
    offers = [{"infra": infra, "accelerators": "A10G:1"} for infra in infras]
    return job(rollout={"spot": {"any_of": offers}}, **more)


def judged(finding: Finding, verdict: Verdict, *words: str) -> None:
    assert finding.verdict is verdict, finding
    assert (finding.remedy == "") == (verdict is Verdict.OK), "whoever finds something says what to do"
    text = "\n".join(lines_of(finding))
    assert all(word in text for word in words), text


def test_python() -> None:
    judged(head.judge_python(GOOD_PYTHON, PLACE), Verdict.OK, "3.11.7, rlboost 0.3, torch 2.13.0")
    judged(head.judge_python(BARE, PLACE), Verdict.OK, "3.9.2", "`rlboost up`")
    judged(head.judge_python(BARE, OWN), Verdict.FAIL, "no program /opt/python", "trainer.python")
    broken = {**GOOD_PYTHON, "problem": "ImportError('libcudart.so')"}
    judged(head.judge_python(broken, PLACE), Verdict.FAIL, "libcudart", "~/.rlboost/venv")
    judged(head.judge_python(broken, OWN), Verdict.FAIL, "libcudart", "remove trainer.python")
    old = {**GOOD_PYTHON, "python": "3.9.18"}
    judged(head.judge_python(old, OWN), Verdict.FAIL, "/opt/python is 3.9.18", "3.11")


def test_gpus_driver_and_torch() -> None:
    judged(
        head.judge_gpu(TWO, GOOD_PYTHON), Verdict.OK, "2 x NVIDIA A10G (22 GiB), driver 570.86; torch sees"
    )
    judged(head.judge_gpu(TWO, BARE), Verdict.OK, "torch is not installed yet")
    blind = {**GOOD_PYTHON, "gpus": 0}
    judged(head.judge_gpu(TWO, blind), Verdict.FAIL, "(for CUDA 12.8) sees none", "driver there that is new")
    judged(head.judge_gpu(TWO, {**blind, "cuda": ""}), Verdict.FAIL, "for CPUs only", "torch with CUDA")
    judged(head.judge_gpu(TWO, {**GOOD_PYTHON, "gpus": 1}), Verdict.WARN, "sees 1", "CUDA_VISIBLE_DEVICES")
    none = {"gpus": [], "driver": "", "problem": ""}
    judged(head.judge_gpu(none, GOOD_PYTHON), Verdict.WARN, "CPUs")
    mismatch = {**none, "problem": "Failed to initialize NVML: Driver/library version mismatch"}
    judged(head.judge_gpu(mismatch, GOOD_PYTHON), Verdict.FAIL, "version mismatch", "reboot")


def test_disk() -> None:
    good = {"place": "/data", "free_bytes": 20 * GB, "can_write": True}
    judged(next(head.judge_room(good, 15 * GB)), Verdict.OK, "/data of the head")
    judged(next(head.judge_room(good, 25 * GB)), Verdict.FAIL, "18.6 GiB free", "trainer.folder")
    closed = {**good, "can_write": False}
    judged(next(head.judge_room(closed, 0)), Verdict.FAIL, "/data cannot be written", "trainer.folder")


def test_clock() -> None:
    judged(head.judge_clock(-1.2, "train-1"), Verdict.OK)
    judged(head.judge_clock(12.0, "train-1"), Verdict.WARN, "12 s ahead")
    judged(head.judge_clock(-7200.0, "train-1"), Verdict.FAIL, "7,200 s behind", "set-ntp")


def test_ports() -> None:
    judged(head.judge_ports({"was_dialled": True, "problem": ""}, PLACE), Verdict.OK)
    refused = {"was_dialled": False, "problem": "[Errno 111] Connection refused"}
    judged(head.judge_ports(refused, PLACE), Verdict.WARN, "refused", "me@train-1", "trainer.address")
    judged(head.judge_ports(None, PLACE), Verdict.WARN, "jump host")


def test_credentials_of_every_cloud_that_it_is_to_launch_in() -> None:
    found = {"aws": "its role trainer", "gcp": ""}
    (aws,) = head.judge_credentials(found, on_spot("aws/us-east-1", "aws/us-west-2"))
    judged(aws, Verdict.OK, "aws: its role trainer")
    (gcp,) = head.judge_credentials(found, on_spot("gcp/us-central1"))
    judged(gcp, Verdict.FAIL, "gcp: the head has no credentials", "secrets: [GOOGLE_APPLICATION_CREDENTIALS]")
    assert gcp.exit_code == ACCOUNT
    keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    (named,) = head.judge_credentials({"aws": "", "gcp": ""}, on_spot("aws", secrets=keys))
    judged(named, Verdict.OK, "AWS_ACCESS_KEY_ID", "secrets")
    (other,) = head.judge_credentials(found, on_spot("azure"))
    judged(other, Verdict.WARN, "azure: not checked")
    assert list(head.judge_credentials(found, job())) == []


def test_a_laptop_is_not_asked_for_what_only_a_head_needs() -> None:
    here = {check.examine for check in checks.checks_for(job())}
    assert head.head in here
    assert here.isdisjoint({checks.machine.packages, checks.local.cpus, checks.local.memory})
    assert head.head not in {check.examine for check in checks.checks_for(job(trainer={}))}


def test_a_job_is_looked_at_only_where_what_trains_is_installed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert head.not_here not in {check.examine for check in checks.checks_for(job())}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = [check.examine for check in checks.checks_for(job())]
    assert found[-3:] == [head.not_here, head.secrets, head.head]
    judged(next(head.not_here(DoctorContext(tmp_path, job()))), Verdict.WARN, "not checked", "rlboost[train]")


def test_a_head_that_is_yet_to_be_bought_is_asked_of_its_cloud_and_so_are_spot_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    trainer = {"infra": "aws/us-east-2", "accelerators": "A10G:1", "role": "head"}
    found = [each.examine for each in checks.checks_for(job(trainer=trainer, output="s3://bucket/runs"))]
    assert head.head not in found, "there is no machine to look at"
    assert found[-3:] == [bought.offer, bought.identity, markets.offers]


def test_a_secret_that_a_run_would_not_find_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    patient = DoctorContext(tmp_path, job(secrets=["HF_TOKEN", "WANDB_API_KEY"]))
    monkeypatch.setenv("HF_TOKEN", "of-mine")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (missing,) = head.secrets(patient)
    judged(missing, Verdict.FAIL, "WANDB_API_KEY: not set", "export WANDB_API_KEY")
    monkeypatch.setenv("WANDB_API_KEY", "too")
    (there,) = head.secrets(patient)
    judged(there, Verdict.OK, "HF_TOKEN, WANDB_API_KEY: set here")
    assert list(head.secrets(DoctorContext(tmp_path, job()))) == []
