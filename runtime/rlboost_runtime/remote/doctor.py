"""The part of `rlboost doctor` that runs on a head elsewhere: sent over the connection, it only looks.

Standard library only, Python 3.8 and later, Linux. It reads one line of JSON from standard input and answers
in lines of JSON, one per thing looked at: {"what": ..., ...}; {"what": "end"} comes last. Of credentials it
says where some are, never what they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Dict, List  # noqa: UP035 the host's Python may be 3.8

Json = Dict[str, Any]  # noqa: UP006

RUN_S = 60.0
"""Longest wait for a program: torch takes seconds to import from a cold disk."""
DIALLED_S = 10.0
MEASURED_BYTES = 512 << 20
"""Four seconds of the slowest disk that clouds give."""
METADATA_S = 1.0
"""A metadata service is on the machine's own link."""
METADATA = "http://169.254.169.254"
TORCH = """\
import json, platform
said = {"python": platform.python_version(), "rlboost": "", "torch": "", "gpus": 0, "cuda": "", "problem": ""}
try:
    from importlib.metadata import version
    said["rlboost"] = version("rlboost")
    import torch
    said["torch"] = torch.__version__
    said["cuda"] = torch.version.cuda or ""
    said["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except Exception as problem:
    said["problem"] = repr(problem)
print(json.dumps(said))
"""


def main() -> None:
    """Look at everything."""
    request = json.loads(sys.stdin.buffer.readline())
    root = Path(os.path.expanduser(request["folder"]))
    python = request["python"]
    python = os.path.expanduser(python) if python else str(root / "venv" / "bin" / "python")
    tell("clock", at=time.time())
    tell("python", **python_facts(python))
    tell("gpu", **gpu_facts())
    tell("disk", **disk_facts(root))
    if request.get("measure"):
        tell("throughput", **throughput(root))
    if request["listen"]:
        listen()
    tell("credentials", found=credentials(request["clouds"]))
    tell("end")


def tell(what: str, **facts: object) -> None:
    """Say one thing."""
    sys.stdout.write(json.dumps(dict(facts, what=what)) + "\n")
    sys.stdout.flush()


def said_by(command: List[str], code: str = "") -> str:  # noqa: UP006
    """Return what a program prints; raises `OSError` and `subprocess.SubprocessError`."""
    done = subprocess.run(command, input=code.encode(), capture_output=True, timeout=RUN_S, check=True)
    return done.stdout.decode(errors="replace").strip()


def python_facts(python: str) -> Json:
    """Return what the runtime's Python has, and whether it sees the GPUs."""
    facts: Json = {"path": python, "system": ".".join(map(str, sys.version_info[:3])), "is_there": False}
    if not os.access(python, os.X_OK):
        return facts
    facts["is_there"] = True
    try:
        facts.update(json.loads(said_by([python, "-"], TORCH).splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as problem:
        facts["problem"] = str(problem)
    return facts


def gpu_facts() -> Json:
    """Return the GPUs that the driver knows, as nvidia-smi lists them."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "driver": "", "problem": ""}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        rows = [row.split(", ") for row in said_by(query).splitlines()]
        gpus = [{"name": name, "mib": int(mib)} for name, mib, _ in rows]
        return {"gpus": gpus, "driver": rows[0][2] if rows else "", "problem": ""}
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        words = getattr(problem, "stdout", None) or b""
        return {"gpus": [], "driver": "", "problem": words.decode(errors="replace").strip() or str(problem)}


def disk_facts(root: Path) -> Json:
    """Return the room where everything is kept, and whether a file can be made there."""
    place = next(folder for folder in [root, *root.parents] if folder.exists())
    return {
        "place": str(place),
        "free_bytes": shutil.disk_usage(str(place)).free,
        "can_write": os.access(str(place), os.W_OK | os.X_OK),
    }


def throughput(root: Path) -> Json:
    """Return how fast the disk takes a file of `MEASURED_BYTES` with its fsync, in MiB/s; it is removed."""
    place = next(folder for folder in [root, *root.parents] if folder.exists())
    path, block = place / f".rlboost-measured-{os.getpid()}", os.urandom(1 << 20)
    try:
        began = time.monotonic()
        with path.open("wb") as file:
            for _ in range(MEASURED_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return {"write_mib_per_s": (MEASURED_BYTES >> 20) / (time.monotonic() - began), "problem": ""}
    except OSError as problem:
        return {"write_mib_per_s": 0.0, "problem": str(problem)}
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def listen() -> None:
    """Open a port, say which, and say whether somebody dialled it."""
    try:
        listener = socket.socket()
        listener.bind(("", 0))
        listener.listen(1)
    except OSError as problem:
        tell("ports", port=0, was_dialled=False, problem=str(problem))
        return
    tell("listening", port=listener.getsockname()[1])
    listener.settimeout(DIALLED_S)
    try:
        listener.accept()[0].close()
        was_dialled = True
    except OSError:  # in time
        was_dialled = False
    finally:
        listener.close()
    tell("ports", was_dialled=was_dialled, problem="")


# --- credentials -------------------------------------------------------------------------------------------


def credentials(clouds: Json) -> Json:
    """Return where credentials of each cloud are found, by cloud; empty where there are none. `clouds`: where
    to look (`CredentialPlaces` of `rlboost_providers.base.traits`)."""
    return {cloud: credentials_of(places) for cloud, places in clouds.items()}


def credentials_of(places: Json) -> str:
    """Return where one cloud's credentials are found: a file, or else the machine's own identity."""
    variable = places["file_variable"]
    named = [os.environ.get(variable, "")] if variable else []
    for name in [*named, *places["files"]]:
        if name and Path(os.path.expanduser(name)).exists():
            return str(name)
    identity = identity_of(places["identity"])
    return f"its {places['identity']['label']} {identity}" if identity else ""


def identity_of(ask: Json) -> str:
    """Return the identity that the cloud gave the machine; empty where it is none of that cloud's."""
    headers = dict(ask["headers"])
    if ask["session_path"]:
        token = asked(ask["session_path"], ask["session_headers"], method="PUT")
        if not token:
            return ""
        headers[ask["session_token_header"]] = token
    return asked(ask["path"], headers)


def asked(path: str, headers: Json, method: str = "GET") -> str:
    """Return the first line of what the metadata service says; nothing where there is none."""
    request = urllib.request.Request(METADATA + path, headers=headers, method=method)  # noqa: S310 http
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=METADATA_S) as answer:
            lines = answer.read(10_000).decode(errors="replace").splitlines()
    except (OSError, ValueError, urllib.error.URLError):
        return ""
    return lines[0] if lines else ""


if __name__ == "__main__":
    main()
