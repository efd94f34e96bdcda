"""What is copied to a machine: one folder, complete before anybody copies it.

::

    rlboost-X.Y.Z-py3-none-any.whl   our wheel
    machine.txt                      pinned versions of everything that it needs
    install.sh                       puts both into a venv; phases timed in install.json
    agents.sh                        runs the machine's agents, then gives the machine up
    bootstrap.json                   mode 600: what the agents need to dial in

The folder's mode is 700; nothing in it is a credential of the user's.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import msgspec

from rlboost_runtime.deploy.wheel import build_wheel
from rlboost_runtime.run_folder import write_atomically

_TEMPLATES = ("machine.txt", "install.sh")


def common_part(folder: Path) -> Path:
    """Fill `folder` with what is the same for all machines of a run, once; return it."""
    if folder.exists():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        build_wheel(draft)
        for name in _TEMPLATES:
            (draft / name).write_text(template(name), encoding="utf-8")
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else somebody was faster, with the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def archive(common: Path) -> bytes:
    """Return the common part as a tar file, the same bytes for the same files: machines that dial out
    fetch it from the head."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(common.iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()


def worker_shipment(folder: Path, common: Path, bootstrap: Mapping[str, object]) -> Path:
    """Fill `folder` for one spot machine; return it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in common.iterdir():
        shutil.copyfile(path, folder / path.name)
    (folder / "agents.sh").write_text(template("agents.sh"), encoding="utf-8")
    write_atomically(folder / "bootstrap.json", msgspec.json.encode(bootstrap))
    return folder


def template(name: str) -> str:
    """Return a file of `templates/rlboost_templates/deploy`."""
    return resources.files("rlboost_templates").joinpath(f"deploy/{name}").read_text(encoding="utf-8")
