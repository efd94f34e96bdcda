"""Our own wheel, made from the packages that run here: what is deployed is what the user has.

Needs no build tool and no source tree: it works from an editable checkout as from an installed wheel. The
same packages give the same bytes, so that the file's digest says whether a machine is up to date.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from rlboost_runtime.errors import RuntimeFault

PACKAGES = ("rlboost_cli", "rlboost_providers", "rlboost_runtime", "rlboost_templates")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
_LEFT_OUT = ("__pycache__",)


def build_wheel(folder: Path) -> Path:
    """Write the wheel into `folder` and return its path. Raises `RuntimeFault` where we are not installed."""
    try:
        us = distribution("rlboost")
        metadata = us.read_text("METADATA")
    except PackageNotFoundError:
        metadata = None
    if metadata is None:
        raise RuntimeFault("rlboost is not installed here, it only lies in the path", "pip install -e .")
    entry_points = us.read_text("entry_points.txt") or ""
    info = f"rlboost-{us.version}.dist-info"
    files = dict(_sources())
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: rlboost\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = entry_points.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    path = folder / f"rlboost-{us.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return path


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise RuntimeFault(f"package {package} is missing", "install rlboost again")
        root = Path(next(iter(found.submodule_search_locations)))
        for path in sorted(root.rglob("*")):
            if path.is_file() and not any(part in _LEFT_OUT for part in path.parts):
                yield f"{package}/{path.relative_to(root).as_posix()}", path.read_bytes()


def _record(files: dict[str, bytes], record: str) -> bytes:
    lines = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    return ("\n".join([*lines, f"{record},,"]) + "\n").encode()
