"""The lab's machine image and package mirror, made once and kept: a minute or two, and about 2.5 GB.

The image has what a cloud's has once SkyPilot's own runtime is on it (uv, Ray, SkyPilot's dependencies): the
machines of the lab reach no network. Over it lies a cache, as an image of a user's own may have one: our
runtime's installation. Machines without it are deployed from nothing, from the mirror. Only package
registries are asked, by pip and uv as set up on the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cloudlab.cache import make_cache
from cloudlab.machine import USER_ID, Image

SKYPILOT = "0.14.1"
_BAKE = Path(__file__).with_name("bake.sh")
_TIMEOUT_S = 900
_PYTHON = Path("/usr")
"""Where the machines' Python 3.11 comes from: they see the libraries that the host's own needs."""
_UV = """\
no-index = true
find-links = ["/var/wheels"]
python-downloads-json-url = "/var/wheels/python.json"
"""


def cache_folder() -> Path:
    """Return where what takes minutes to make is kept."""
    return Path(os.environ.get("RLBOOST_CLOUDLAB_CACHE", "~/.cache/rlboost-cloudlab")).expanduser()


def build_image(cache: Path, lock: Path) -> Image:
    """Return the image with the packages of `lock` on its mirror; takes minutes where `cache` lacks it.

    One lab at a time. Raises `RuntimeError` with what failed.
    """
    if not (_PYTHON / "bin/python3.11").exists():
        raise RuntimeError(
            "the lab's machines are given the system's Python 3.11, and there is none: make cloudlab"
        )
    home, wheels = cache / f"home-{_digest(_BAKE)}", cache / f"wheels-{_digest(lock)}"
    installed = cache / f"installed-{_digest(_BAKE, lock)}"
    with ThreadPoolExecutor(2) as pool:
        baked = pool.submit(_make, home, _bake)
        mirrored = pool.submit(_make, wheels, lambda draft: _mirror(draft, lock))
        baked.result()
        mirrored.result()
    _complete(wheels)
    image = Image(home, wheels)
    _make(installed, lambda draft: make_cache(draft, image))
    return replace(image, cache=installed)


def _make(target: Path, fill: Callable[[Path], None]) -> None:
    if target.exists():
        return
    began = time.monotonic()
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    fill(draft)
    draft.rename(target)
    print(f"{target.name}: made in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _bake(draft: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    _run(["unshare", "--mount", "bash", str(_BAKE), str(draft), str(uv), SKYPILOT, str(USER_ID)])


def _mirror(draft: Path, lock: Path) -> None:
    """Fill the mirror: wheels, and a Python for uv to fetch where the system has none."""
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(draft), "--requirement", str(lock)])
    with tarfile.open(draft / "cpython.tar.gz", "w:gz", compresslevel=1) as archive:
        for part in ("bin/python3.11", "lib/python3.11"):
            archive.add(_PYTHON / part, f"python/{part}", filter=_movable)
    version = _run(
        [str(_PYTHON / "bin/python3.11"), "-c", "import platform; print(platform.python_version())"]
    )
    (draft / "python.json").write_text(json.dumps(_downloads(version.strip())))
    (draft / "uv.toml").write_text(_UV)


def _complete(wheels: Path) -> None:
    """Add what the lock lacks and a head that launches machines needs: the SDK of the lab's cloud."""
    if not any(wheels.glob("boto3-*.whl")):
        _run([sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(wheels), "boto3>=1.40"])


def _downloads(version: str) -> dict[str, object]:
    """Return the list of Pythons that uv may fetch."""
    major, minor, patch = version.split(".")
    python = {
        "name": "cpython", "arch": {"family": "x86_64", "variant": None}, "os": "linux", "libc": "gnu",
        "major": int(major), "minor": int(minor), "patch": int(patch), "prerelease": "",
        "url": "file:///var/wheels/cpython.tar.gz", "sha256": None, "variant": None, "build": "20260101",
    }  # fmt: skip
    return {f"cpython-{version}-linux-x86_64-gnu": python}


def _movable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what points outside, and what Python makes again."""
    return None if entry.linkname.startswith("/") or "__pycache__" in entry.name else entry


def _run(command: list[str]) -> str:
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
    return done.stdout


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
