"""The GPUs that were paid for are used: builds fit the driver; a machine without GPUs ends and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rlboost_runtime.agent.bootstrap import Bootstrap, write_bootstrap
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.deploy.bootstrap import make_bootstrap
from rlboost_runtime.deploy.shipment import Software, common_part, template
from rlboost_runtime.engines.base import EngineSettings
from rlboost_runtime.errors import GpuMissing
from rlboost_runtime.fit.gpus import Driver, ask_driver, require_gpus
from rlboost_runtime.job import Job
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.trainer.__main__ import look_for_gpus

UV = """#!/bin/bash
echo "$@" >> "$RECORD"
[ "$1" = venv ] || exit 0
mkdir -p "${@: -1}/bin"
printf '#!/bin/bash\\n' > "${@: -1}/bin/python"
chmod +x "${@: -1}/bin/python"
"""


def fake_driver(folder: Path, version: str | None, num: int = 8) -> str:
    """Return a PATH on which nvidia-smi answers as one with that driver does; None: there is none."""
    folder.mkdir(exist_ok=True)
    if version is not None:
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nfor i in $(seq {num}); do echo {version}; done\n")
        tool.chmod(0o755)
    return f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"


def install(tmp_path: Path, software: Software, driver: str | None) -> tuple[int, list[str], str]:
    """Run install.sh with a recording uv; return its exit status, the installs and what it said."""
    root, record = tmp_path / "root", tmp_path / "record"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "uv").write_text(UV)
    (root / "bin" / "uv").chmod(0o755)
    shipped = common_part(tmp_path / "shipped", software)
    environment = {
        "PATH": fake_driver(tmp_path / "tools", driver), "RLBOOST_ROOT": str(root), "RECORD": str(record),
        "HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(shipped / "install.sh")], env=environment, capture_output=True, text=True, timeout=60
    )
    calls = record.read_text().splitlines() if record.exists() else []
    return done.returncode, [call for call in calls if call.startswith("pip install")], done.stderr


@pytest.mark.parametrize(
    ("driver", "backend"), [(None, ""), ("570.172.08", " --torch-backend auto"), ("580.95.05", "")]
)
def test_torch_is_built_for_a_cuda_that_the_driver_runs(
    driver: str | None, backend: str, tmp_path: Path
) -> None:
    status, installs, said = install(tmp_path, Software(trains=True), driver)
    assert status == 0, said
    assert installs[0].endswith(f"machine.txt{backend}")


@pytest.mark.parametrize(
    ("driver", "wanted"), [(None, "vllm-cpu.txt"), ("580.95.05", "vllm-gpu.txt --torch-backend auto")]
)
def test_vllm_is_the_build_for_the_machine(driver: str | None, wanted: str, tmp_path: Path) -> None:
    status, installs, said = install(tmp_path, Software.for_engine("vllm", None), driver)
    assert status == 0, said
    assert wanted in installs[1]


def test_a_driver_too_old_for_vllm_ends_the_installation_before_anything_is_fetched(tmp_path: Path) -> None:
    status, installs, said = install(tmp_path, Software.for_engine("vllm", None), "570.172.08")
    assert (status, installs) == (78, [])
    assert "driver 570 is too old for vLLM" in said
    assert "use an image with driver 580 or newer" in said


@pytest.mark.parametrize(
    ("driver", "seen", "cuda", "problem", "remedy"),
    [
        (Driver(), 0, "13.0", "nvidia-smi finds no driver", "use an image that has one"),
        (
            Driver(8, "570.172.08"),
            0,
            "13.0",
            "built for CUDA 13.0, which needs driver 580",
            "with driver 580",
        ),
        (Driver(8, "580.95.05"), 0, "", "a build for CPUs", "install one for CUDA"),
        (
            Driver(8, "580.95.05"),
            4,
            "13.0",
            "8 GPUs were rented, but 4 can be used",
            "CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_it_is_said_why_gpus_are_missing(
    driver: Driver, seen: int, cuda: str, problem: str, remedy: str
) -> None:
    with pytest.raises(GpuMissing) as raised:
        require_gpus(8, seen, driver, cuda)
    assert problem in raised.value.problem
    assert remedy in raised.value.remedy
    assert raised.value.exit_code == 8
    require_gpus(8, 8, Driver(8, "580.95.05"), "13.0")


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "none", None))
    assert ask_driver() == Driver()
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "some", "580.95.05", num=2))
    assert ask_driver() == Driver(2, "580.95.05")


def job(**changes: object) -> Job:
    fields = {"name": "demo", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["basic_arithmetic"]}}
    return Job.model_validate_json(json.dumps(fields | changes))


def bought(**changes: object) -> Job:
    """As it is on its head."""
    spot = {"any_of": [{"infra": "aws/us-east-1", "via": "direct", "accelerators": "H100:8"}]}
    return job(trainer={"accelerators": "H100:8", **changes}, rollout={"spot": spot})


def test_a_trainer_without_its_gpus_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "old", "570.172.08"))
    with pytest.raises(GpuMissing, match="8 GPUs were rented, but 0 can be used"):
        look_for_gpus(bought())
    look_for_gpus(bought(allow_cpu=True))
    look_for_gpus(job())


def test_engines_are_told_what_was_paid_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "told")
    run.path.mkdir()
    create_secrets(run)
    write_json(run.endpoint, {"url": "https://127.0.0.1:4711"})

    def promised(wanted: Job, pool: Pool) -> int:
        return make_bootstrap(wanted, run, "spot-3", pool, ("spot-3/0",)).engine.promised_gpus

    assert [promised(bought(), pool) for pool in (Pool.SPOT, Pool.RESERVED)] == [1, 1]
    assert [promised(bought(allow_cpu=True), pool) for pool in (Pool.SPOT, Pool.RESERVED)] == [0, 0]
    assert [promised(job(), pool) for pool in (Pool.SPOT, Pool.RESERVED)] == [0, 0]


def test_an_agent_without_its_gpus_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    settings = EngineSettings("transformers", Sampling(), 64, 4, "float32", 0, promised_gpus=2)
    told = Bootstrap("demo", "spot-3", "spot", ("spot-3/0",), "https://127.0.0.1:9", "token", "", settings)
    file = tmp_path / "bootstrap.json"
    write_bootstrap(file, told)
    environment = {
        **os.environ,
        "PATH": fake_driver(tmp_path / "none", None),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "rlboost_runtime.agent", str(file), "spot-3/0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78, done.stderr
    assert "2 GPUs were rented, but 0 can be used: nvidia-smi finds no driver" in done.stderr
    assert msgspec.json.decode(file.read_bytes(), type=Bootstrap) == told


def test_the_script_asks_for_the_driver_before_it_installs() -> None:
    script = template("install.sh")
    assert script.index("--query-gpu=driver_version") < script.index("pip install -q --python")
