"""The cache of the lab's image: what an installation of our runtime leaves on a machine, kept as a layer.

Made as somebody makes an image of their own: one machine is booted, `install.sh` is run, what the engines
import is compiled, and the home is kept. On machines that have it, `install.sh` only brings our newest wheel.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from cloudlab.machine import USER_ID, Image, Machine, lower_bridge, raise_bridge, sweep
from rlboost_runtime.deploy.shipment import Software, archive, common_part

_ADDRESS = "10.231.192.1"
_INSTALL_S = 600
_INSTALL = f"""\
set -euo pipefail
export PATH=/usr/local/bin:/usr/bin:/bin
mkdir /tmp/shipment && tar -x -C /tmp/shipment
run() {{
  setpriv --reuid {USER_ID} --regid {USER_ID} --clear-groups env -i HOME=/home/ubuntu PATH=$PATH "$@"
}}
run bash /tmp/shipment/install.sh
run /home/ubuntu/.rlboost/venv/bin/python - <<'END'
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost_runtime.agent import service
from rlboost_runtime.engines.transformers import child, continuous_batch, model_loading

AutoModelForCausalLM.from_config(
    Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
)
END
"""


def make_cache(draft: Path, image: Image) -> None:
    """Fill `draft` with the layer. Raises `RuntimeError` with what the installation said."""
    with tempfile.TemporaryDirectory(prefix="rlboost-lab-") as name:
        folder = Path(name)
        shipment = archive(common_part(folder / "shipment", Software()))
        sweep(folder / "machines")
        raise_bridge()
        machine = Machine("cache", _ADDRESS, "ubuntu", "", image, folder / "machines", "")
        try:
            machine.boot()
            _install(machine, shipment)
            _keep(machine, draft)
        finally:
            machine.destroy()
            lower_bridge()


def _install(machine: Machine, shipment: bytes) -> None:
    done = subprocess.run(
        machine.command("bash", "-c", _INSTALL),
        input=shipment,
        capture_output=True,
        timeout=_INSTALL_S,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise RuntimeError(f"the image's cache cannot be made:\n{said[-4000:]}")


def _keep(machine: Machine, draft: Path) -> None:
    with subprocess.Popen(["tar", "-x", "-C", str(draft)], stdin=subprocess.PIPE) as taken:
        subprocess.run(
            machine.command("tar", "-c", "-C", "/home", "ubuntu/.rlboost"),
            stdout=taken.stdin,
            timeout=_INSTALL_S,
            check=True,
        )
    if taken.returncode:
        raise RuntimeError("the image's cache cannot be kept: see tar's words above")
    os.chown(draft / "ubuntu", USER_ID, USER_ID)
    (draft / "ubuntu").chmod(0o700)
