"""The part of `rlboost doctor` that runs on a head elsewhere: sent over the connection, it only looks.

Standard library only, Python 3.8 and later, Linux. It reads one line of JSON from standard input and answers
in lines of JSON, one per thing looked at: {"what": ..., ...}; {"what": "end"} comes last. Of credentials it
says where some are, never what they are.
"""

from __future__ import annotations

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
    if request["listen"]:
        listen()
    tell("credentials", found=credentials())
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


def credentials() -> Json:
    """Return where credentials of a cloud are found, by cloud."""
    home = Path(os.path.expanduser("~"))
    google = [os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")]
    google.append(str(home / ".config" / "gcloud" / "application_default_credentials.json"))
    found: Json = {"aws": "", "gcp": ""}
    if (home / ".aws" / "credentials").exists():
        found["aws"] = "~/.aws/credentials"
    elif role := role_on_aws():
        found["aws"] = "its role " + role
    if names := [name for name in google if name and Path(name).exists()]:
        found["gcp"] = names[0]
    elif account := account_on_gcp():
        found["gcp"] = "its service account " + account
    return found


def role_on_aws() -> str:
    """Return the machine's role, where it is one of EC2 that has one."""
    token = asked("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if not token:
        return ""
    return asked("/latest/meta-data/iam/security-credentials/", {"X-aws-ec2-metadata-token": token})


def account_on_gcp() -> str:
    """Return the machine's service account, where it is one of Compute Engine that has one."""
    path = "/computeMetadata/v1/instance/service-accounts/default/email"
    return asked(path, {"Metadata-Flavor": "Google"})


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
