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

from rlboost_runtime.deploy.shipment import common_part, template, worker_shipment
from rlboost_runtime.deploy.wheel import PACKAGES, build_wheel


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
    common = common_part(tmp_path / "common")
    assert common_part(tmp_path / "common") == common, "made once"
    folder = worker_shipment(tmp_path / "spot-0", common, {"token": "secret", "instances": ["spot-0/0"]})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "bootstrap.json").stat().st_mode) == 0o600
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in common.iterdir()),
        "agents.sh",
        "bootstrap.json",
    }
    assert [p for p in folder.iterdir() if b"secret" in p.read_bytes()] == [folder / "bootstrap.json"]


def test_machines_that_are_launched_at_once_share_one_complete_part(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: common_part(tmp_path / "common"), range(4)))
    assert made == [tmp_path / "common"] * 4
    assert len(list((tmp_path / "common").iterdir())) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "common"], "no drafts are left"


@pytest.mark.parametrize("name", ["install.sh", "agents.sh"])
def test_the_scripts_are_bash(name, tmp_path):
    script = tmp_path / name
    script.write_text(template(name))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


def test_every_version_that_machines_get_is_pinned():
    lines = [line for line in template("machine.txt").splitlines() if line and not line.startswith("#")]
    assert len(lines) > 50
    assert all(line.count("==") == 1 for line in lines)
    assert any(line.startswith("torch==") for line in lines)


def test_machines_get_a_version_of_everything_that_we_need_and_one_that_we_take():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for each in (*project["dependencies"], *extras["run"], *extras["train"])]
    lines = [line for line in template("machine.txt").splitlines() if line and not line.startswith("#")]
    pinned = {
        canonicalize_name(name): version for name, _, version in (each.partition("==") for each in lines)
    }
    lacking = [
        str(each)
        for each in wanted
        if each.name != "rlboost"
        and not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0.dev0"))
    ]
    assert lacking == [], "make lock-machines"
