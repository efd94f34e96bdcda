"""The lab's machine image and package mirror, made once and kept: some minutes and about 1.5 GB.

The image has what a cloud's has once SkyPilot's own runtime is on it (uv, Ray, SkyPilot's dependencies): the
machines of the lab reach no network. Packages of ours are never in it: those are deployed for real, from the
mirror. Only package registries are asked, by pip and uv as set up on the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from cloudlab.machine import USER_ID, Image

SKYPILOT = "0.14.1"
_BAKE = Path(__file__).with_name("bake.sh")
_TIMEOUT_S = 900
_PYTHON = {
    "name": "cpython",
    "arch": {"family": "x86_64", "variant": None},
    "os": "linux",
    "libc": "gnu",
    "major": 3,
    "minor": 11,
    "patch": 2,
    "prerelease": "",
    "url": "file:///var/wheels/cpython.tar.gz",
    "sha256": None,
    "variant": None,
    "build": "20260101",
}
_UV = """\
no-index = true
find-links = ["/var/wheels"]
python-downloads-json-url = "/var/wheels/python.json"
"""


def build_image(cache: Path, lock: Path) -> Image:
    """Return the image with the packages of `lock` on its mirror; takes minutes where `cache` lacks it."""
    home, wheels = cache / f"home-{_digest(_BAKE)}", cache / f"wheels-{_digest(lock)}"
    if not home.exists():
        _make(home, lambda draft: _bake(draft))
    if not wheels.exists():
        _make(wheels, lambda draft: _mirror(draft, lock, home / "ubuntu" / ".python"))
    return Image(home, wheels)


def _make(target: Path, fill) -> None:
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    fill(draft)
    draft.rename(target)


def _bake(draft: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    _run(["unshare", "--mount", "bash", str(_BAKE), str(draft), str(uv), SKYPILOT, str(USER_ID)])


def _mirror(draft: Path, lock: Path, python: Path) -> None:
    """Fill the mirror: wheels, and a Python for uv to fetch where the system has none."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    _run([*build, "--wheel-dir", str(draft), "--requirement", str(lock)])
    with tarfile.open(draft / "cpython.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(python, "python", filter=_movable)
    (draft / "python.json").write_text(json.dumps({"cpython-3.11.2-linux-x86_64-gnu": _PYTHON}))
    (draft / "uv.toml").write_text(_UV)


def _movable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what points outside, and what Python makes again."""
    return None if entry.linkname.startswith("/") or "__pycache__" in entry.name else entry


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env={**os.environ, "VIRTUAL_ENV": ""},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:4])}... failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
