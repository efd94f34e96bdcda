"""What goes into an image: what machines are shipped, the script that installs it, and a Dockerfile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from rlboost_runtime.deploy.shipment import Software, common_part, template
from rlboost_runtime.errors import ConfigError, RuntimeFault

BASE = "ubuntu:24.04"
"""What the container image begins with: torch and vLLM bring their CUDA, the host brings the driver."""
BUILD_S = 5400.0
_BUILDERS = ("docker", "podman", "buildah")


def image_part(folder: Path, engine: str) -> Path:
    """Fill `folder` with what is copied to the machine of which an image is made; return it."""
    common_part(folder, Software(trains=True, vllm=engine == "vllm"))
    (folder / "install.sh").rename(folder / "setup.sh")
    (folder / "install.sh").write_text(template("bake.sh"), encoding="utf-8")
    (folder / "agent.txt").write_text(template("agent.txt"), encoding="utf-8")
    told = {"rlboost": version("rlboost"), "engine": engine, "made_at": round(time.time())}
    (folder / "image.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    return folder


def write_context(folder: Path, engine: str, base: str = BASE) -> Path:
    """Write the build context of the container image into `folder`, which must not exist; return it. Raises
    `ConfigError`."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already; nothing was written", "give another --output")
    image_part(folder, engine)
    folder.chmod(0o755)
    text = template("Dockerfile")
    for name, value in {"@BASE@": base, "@VERSION@": version("rlboost"), "@ENGINE@": engine}.items():
        text = text.replace(name, value)
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    return folder


def builder() -> str | None:
    """Return the program of this machine that builds container images; None: there is none."""
    return next((name for name in _BUILDERS if shutil.which(name)), None)


def build_context(folder: Path, tag: str, program: str, say: Callable[[str], None]) -> None:
    """Build the container image. Raises `RuntimeFault`."""
    say(f"{program} builds {tag}; its output follows")
    command = [program, "build", "--tag", tag, str(folder)]
    try:
        status: object = subprocess.run(command, stdout=sys.stderr, timeout=BUILD_S, check=False).returncode
    except subprocess.TimeoutExpired:
        status = f"not done after {BUILD_S:.0f} s"
    if status != 0:
        raise RuntimeFault(
            f"{program} could not build the image ({status})", f"correct it, then type: {' '.join(command)}"
        )
