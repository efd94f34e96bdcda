"""What is copied to a machine: one folder, complete before anybody copies it.

::

    rlboost-X.Y.Z-py3-none-any.whl   our wheel
    machine.txt                      pinned versions of everything that it needs
    vllm-gpu.txt, vllm-cpu.txt       where it is to have vLLM, too: versions for a venv of its own
    install.sh                       puts all that into place; phases timed in install.json
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
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from rlboost_runtime.deploy.wheel import build_wheel
from rlboost_runtime.job import Job
from rlboost_runtime.run_folder import write_atomically

_ENGINE_LISTS = ("vllm-gpu.txt", "vllm-cpu.txt")


@dataclass(frozen=True, slots=True)
class Software:
    """What a machine is to have beside rlboost itself."""

    trains: bool = True
    """torch and what our own trainer and engine need."""
    vllm: bool = False
    """vLLM, in a venv of its own."""

    @classmethod
    def for_head(cls, job: Job) -> Software:
        """Return what the machine needs that trains `job`."""
        has_engines = job.trainer.local_engines > 0
        spot = cls.for_engine(job.rollout.engine, job.rollout.engine_args.python)
        return cls(trains=True, vllm=spot.vllm and has_engines)

    @classmethod
    def for_engine(cls, kind: str, python: str | None) -> Software:
        """Return what a spot machine needs: with vLLM no torch beside it, and no vLLM where the job names a
        `python` that has it."""
        is_vllm = kind == "vllm"
        return cls(trains=not is_vllm, vllm=is_vllm and python is None)


def common_part(folder: Path, software: Software) -> Path:
    """Fill `folder` with what is the same for all machines of a kind in a run, once; return it."""
    if folder.exists():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        build_wheel(draft)
        (draft / "install.sh").write_text(template("install.sh"), encoding="utf-8")
        versions = template("machine.txt" if software.trains else "agent.txt")
        (draft / "machine.txt").write_text(versions, encoding="utf-8")
        for name in _ENGINE_LISTS if software.vllm else ():
            (draft / name).write_text(template(name, "engines"), encoding="utf-8")
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


def template(name: str, folder: str = "deploy") -> str:
    """Return a file of `templates/rlboost_templates`."""
    return resources.files("rlboost_templates").joinpath(folder, name).read_text(encoding="utf-8")
