"""What a machine wrote, fetched before it is ended: its installation's and its agents' logs, by SSH.

Best effort and bounded: a machine that does not answer is ended all the same.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from pathlib import Path

from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

FETCH_S = 15.0
_MOST_BYTES = 262_144  # of each log, from its end
_SCRIPT = (
    "cd ~/.rlboost && for file in install.log install.json agents.log machine/agent-*.log;"
    f' do [ -f $file ] && echo "==> $file" && tail -c {_MOST_BYTES} $file; done'
)


def fetch_logs(cluster: str, folder: Path) -> bool:
    """Write the logs of the cluster's machine to `folder`/machine.log; returns whether it answered.

    Uses the SSH configuration that SkyPilot keeps for each of its clusters.
    """
    configuration = Path.home() / ".sky" / "generated" / "ssh" / cluster
    ssh = shutil.which("ssh")
    if ssh is None or not configuration.exists():
        return False
    options = ("-F", str(configuration), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [ssh, *options, cluster, _SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_S,
            check=False,
        )
        if done.stdout:
            (folder / "machine.log").write_bytes(done.stdout)
            return True
    event(log, "machine.logs_not_fetched", cluster=cluster)
    return False
