"""The wheel holds our packages, all of them and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "rlboost_cli",
    "runtime/rlboost",
    "runtime/rlboost_runtime",
    "providers/rlboost_providers",
    "templates/rlboost_templates",
)


@pytest.mark.integration
def test_the_wheel_holds_the_packages_as_they_are_in_the_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("rlboost-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "rlboost = rlboost_cli.main:run" in archive.read(entry_points).decode()
    code = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in code} == {Path(package).name for package in PACKAGES}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert code == in_tree()


def in_tree() -> set[str]:
    folders = [ROOT / package for package in PACKAGES]
    return {
        path.relative_to(folder.parent).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
