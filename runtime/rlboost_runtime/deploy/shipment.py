"""What is copied to a machine: one folder, complete before anybody copies it.

::

    rlboost-X.Y.Z-py3-none-any.whl   our wheel
    machine.txt                      pinned versions of everything that it needs
    vllm-gpu.txt, vllm-cpu.txt       where it is to have vLLM, too: versions for a venv of its own
    install.sh                       puts all that into place; phases timed in install.json
    wheels.py                        fetches packages from the head, for install.sh
    agents.sh                        runs the machine's agents, then gives the machine up
    local_nvme.sh                    mounts the machine's local NVMe, where it has one
    bootstrap.json                   mode 600: what the agents need to dial in

The folder's mode is 700; nothing in it is a credential of the user's.

What a job needs on its head beside the pinned versions that every machine is given (`machine.txt`).

Our own wheel, made from the packages that run here: what is deployed is what the user has.

Needs no build tool and no source tree: it works from an editable checkout as from an installed wheel. The
same packages give the same bytes, so that the file's digest says whether a machine is up to date.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import CloudOffer, Job, SshOffer
from rlboost_runtime.run.folder import write_atomically

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
        program = resources.files("rlboost_runtime.remote").joinpath("wheels.py")
        (draft / "wheels.py").write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
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
    """Return the common part as a tar file, the same bytes for the same files; machines fetch it."""
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
    for name in ("agents.sh", "local_nvme.sh"):
        (folder / name).write_text(template(name), encoding="utf-8")
    write_atomically(folder / "bootstrap.json", msgspec.json.encode(bootstrap))
    return folder


def template(name: str, folder: str = "deploy") -> str:
    """Return a file of `templates/rlboost_templates`."""
    return resources.files("rlboost_templates").joinpath(folder, name).read_text(encoding="utf-8")


def requirements_of(job: Job) -> list[str]:
    """Return lines for pip: the job's own, and those of our extras for its clouds and its tracking. Raises
    `RuntimeFault` where we are not installed and so do not know our extras."""
    extras = set(_extras_of(job))
    try:
        known = [Requirement(each) for each in requires("rlboost") or []]
    except PackageNotFoundError as missing:
        raise RuntimeFault(
            "rlboost is not installed here, it only lies in the path", "pip install -e ."
        ) from missing
    ours = {
        str(each).partition(";")[0].strip()
        for each in known
        if each.name != "rlboost" and each.marker is not None
        if any(each.marker.evaluate({"extra": extra}) for extra in extras)
    }
    return [*sorted(ours), *job.requirements]


def _extras_of(job: Job) -> Iterator[str]:
    for offer in job.rollout.spot.any_of:
        if isinstance(offer, SshOffer):
            yield "ssh"
        elif isinstance(offer, CloudOffer):
            yield offer.cloud if offer.via == "direct" else "sky"
    if job.trainer.bought_nodes:
        yield (job.trainer.node_offer or job.trainer).cloud
    if job.tracking.tensorboard or job.tracking.wandb is not None:
        yield "track"


PACKAGES = ("rlboost", "rlboost_cli", "rlboost_providers", "rlboost_runtime", "rlboost_templates")
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
