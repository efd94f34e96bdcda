"""The part that ends a bought head: it runs there as root from the first boot on, whatever becomes of the
rest.

Standard library only, Python 3.8 and later, Linux; sent in the machine's start-up script, with its settings
as JSON in the file that is its only argument: `cloud`, `folder` (of our runtime there), `idle_s`, `done` and
`failed`: what is to become of the machine after a run that ended so, "down" or "stay"; `ends_itself`:
whether shutting down ends it there, or leaves a machine that costs on and cannot be reached; `max_s`: its
longest life, or null; and `deletion`: how it deletes itself where a machine that shut down stays
(`rlboost_providers.base.traits.SelfDeletion`).

Guarantee: once no run has gone on there for `idle_s`, and nobody has asked the machine anything, it shuts
down, unless its run ended in a way after which it is to stay; at once, where the run's supervisor says that
all of the run is safe elsewhere. Neither needs the laptop, nor our runtime, nor an end of the run: a crash
and an installation that was given up count as idle. A supervisor that still lives is asked to end first: it
ends the run's other machines. After `max_s` the same happens whatever goes on there; the time counts from the
machine's first boot, by the file `began` beside the settings.

On a machine that SkyPilot bought, SkyPilot's own code ends it, as far as the machine's role or the run's
secrets have the right to. SkyPilot's autodown there is the second line: it follows once this part no longer
says, every `AWAKE_S`, that the machine is in use.

Where a machine cannot end itself it stays up; only its runs are ended, and with them their other machines.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional  # noqa: UP035 the host's Python may be 3.8

Json = Dict[str, Any]  # noqa: UP006

LOOK_S = 2.0
"""Pause between two looks."""
SAFE_S = 30.0
"""How long it waits, once all of the run is safe elsewhere: a laptop that is on ends it then by itself."""
SUPERVISOR_S = 300.0
"""Longest end of a supervisor: it ends the run's machines."""
OFF_S = 120.0
"""So long may a shutdown take before the power is cut."""
AWAKE_S = 300.0
"""Pause between two words to SkyPilot's autodown, which has more patience than that."""
SKYPILOT_S = 90.0
"""Longest answer of SkyPilot's code: it imports for seconds, and then asks its cloud."""
STAY_AWAKE = "from sky.skylet import autostop_lib; autostop_lib.set_last_active_time_to_now()"
END_CLUSTER = """
import os
from sky import provision
from sky.utils import cluster_utils, yaml_utils
cluster = yaml_utils.read_yaml(os.path.expanduser(cluster_utils.SKY_CLUSTER_YAML_REMOTE_PATH))
name = cluster_utils.get_provider_name(cluster)
provision.terminate_instances(name, cluster["cluster_name"], cluster["provider"])
"""


class Facts(NamedTuple):
    """What is seen of the run on the machine; of several, of the one that keeps it most."""

    is_supervised: bool = False
    trains: bool = False
    """Whether it is a run that was launched: one that is only up is idle."""
    ended: Optional[str] = None  # noqa: UP045
    """How it ended; None: it has not."""
    is_safe: bool = False
    """Whether its supervisor has put everything of it where the job's `output` says."""


def reason_to_end(settings: Json, facts: Facts, quiet_s: float, age_s: float) -> str:
    """Return why the machine, or its runs where it cannot end itself, must end now; else empty. Pure."""
    if not settings["ends_itself"] and not facts.is_supervised:
        return ""  # nothing is left to be ended from there
    if settings["max_s"] is not None and age_s >= settings["max_s"]:
        return f"it is {age_s:.0f} s old, and may live {settings['max_s']:.0f} s"
    if is_busy(facts):
        return ""
    if facts.ended is not None:
        if settings["done" if facts.ended == "done" else "failed"] == "stay":
            return ""
        if facts.is_safe and quiet_s >= min(SAFE_S, settings["idle_s"]):
            return f"its run has ended: {facts.ended}; all of it is at the job's output"
    if quiet_s >= settings["idle_s"]:
        return f"no run and no command for {quiet_s:.0f} s"
    return ""


def is_busy(facts: Facts) -> bool:
    """Whether a run goes on, or is just being wound up."""
    return facts.is_supervised and (facts.trains or facts.ended is not None)


def main() -> None:
    """Look until the machine is to end, then end it."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder, account = Path(settings["folder"]), Path(sys.argv[1]).with_name("skypilot-account")
    began = mtime_of(Path(sys.argv[1]).with_name("began")) or time.time()
    quiet_since, asked = time.monotonic(), None
    awake_until = 0.0
    while True:
        if settings["cloud"] == "skypilot" and time.monotonic() >= awake_until:
            ask_skypilot(account, STAY_AWAKE, {})
            awake_until = time.monotonic() + AWAKE_S
        facts, now_asked = facts_of(folder), mtime_of(folder / "asked")
        if is_busy(facts) or now_asked != asked:
            quiet_since, asked = time.monotonic(), now_asked
        why = reason_to_end(settings, facts, time.monotonic() - quiet_since, time.time() - began)
        if why:
            print(f"ending {'this machine' if settings['ends_itself'] else 'its runs'}: {why}", flush=True)
            end_runs(folder)
            if settings["ends_itself"]:
                if settings["cloud"] == "skypilot" and ask_skypilot(
                    account, END_CLUSTER, environment(folder)
                ):
                    time.sleep(OFF_S)  # it is on its way
                end_machine(settings)
        time.sleep(LOOK_S)


# --- looking ------------------------------------------------------------------------------------------------


def facts_of(folder: Path) -> Facts:
    """Return the facts of the run that goes on, else of the one that ended last."""
    runs = sorted(folder.glob("heads/*/runs/*/job.json"), key=mtime_of)
    found = [facts_of_run(job.parent) for job in runs]
    busy = [facts for facts in found if is_busy(facts)]
    return (busy or found or [Facts()])[-1]


def facts_of_run(run: Path) -> Facts:
    """Return what is seen of one run."""
    outcome = read(run / "outcome.json")
    return Facts(
        is_supervised=supervisor_of(run) is not None,
        trains=bool(read(run / "wanted.json").get("train")),
        ended=str(outcome.get("state", "stopped")) if (run / "outcome.json").exists() else None,
        is_safe=(run / "safe.json").exists(),
    )


def supervisor_of(run: Path) -> Optional[int]:  # noqa: UP045
    """Return the process id of the run's supervisor; None where none lives."""
    pid = read(run / "processes" / "supervisor.json").get("pid")
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    return pid if b"RLBOOST_RUN=" + os.fsencode(str(run)) in environment.split(b"\0") else None


def read(path: Path) -> Json:
    """Return the JSON object in `path`; an empty one where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def mtime_of(path: Path) -> float:
    """Return when a file was changed; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# --- ending -------------------------------------------------------------------------------------------------


def end_runs(folder: Path) -> None:
    """Ask supervisors to end, and wait for it: nothing of their runs is left then in any cloud."""
    deadline = time.monotonic() + SUPERVISOR_S
    for job in folder.glob("heads/*/runs/*/job.json"):
        pid = supervisor_of(job.parent)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
    while time.monotonic() < deadline:
        if not any(supervisor_of(job.parent) for job in folder.glob("heads/*/runs/*/job.json")):
            return
        time.sleep(0.5)


def end_machine(settings: Json) -> None:
    """Shut down, which ends the machine for good; delete it first where its cloud would keep it."""
    if settings.get("deletion"):
        delete_itself(settings["deletion"])
    subprocess.run(["shutdown", "-h", "now"], check=False)  # noqa: S607 wherever this system has it
    time.sleep(OFF_S)
    subprocess.run(["poweroff", "-f"], check=False)  # noqa: S607


def ask_skypilot(account: Path, code: str, more: Dict[str, str]) -> bool:  # noqa: UP006
    """Run `code` with the Python of SkyPilot's runtime, as the account that it lies in, which is named in the
    file `account`; return whether it succeeded. `more` is added to its environment."""
    try:
        whose = pwd.getpwnam(account.read_text().strip())
        home = Path(whose.pw_dir)
        python = (home / ".sky" / "python_path").read_text().strip()
        done = subprocess.run(
            ["runuser", "-u", whose.pw_name, "--", python, "-c", code],  # noqa: S607
            env={**os.environ, **more, "HOME": whose.pw_dir, "USER": whose.pw_name},
            cwd=home,
            stdin=subprocess.DEVNULL,
            timeout=SKYPILOT_S,
            check=False,
        )
    except (OSError, KeyError, subprocess.TimeoutExpired) as problem:
        print(f"SkyPilot's runtime cannot be asked: {problem}", flush=True)
        return False
    return done.returncode == 0


def environment(folder: Path) -> Dict[str, str]:  # noqa: UP006
    """Return what the runs there were given as `env` and `secrets`: keys of a cloud may be among it."""
    found: Dict[str, str] = {}  # noqa: UP006
    for path in sorted(folder.glob("heads/*/runs/*/secrets/environment.json"), key=mtime_of):
        found.update(read(path))
    return found


def delete_itself(how: Json) -> None:
    """Ask the cloud to delete the machine, with the token of its own identity; without one it stays stopped,
    and the disk is deleted by whoever looks next from the laptop."""
    try:
        names = {name: metadata(how, path).rpartition("/")[2] for name, path in how["name_paths"].items()}
        token = json.loads(metadata(how, how["token_path"]))["access_token"]
        request = urllib.request.Request(  # noqa: S310 the cloud's own address
            how["url"].format(**names), method="DELETE", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=20):  # noqa: S310
            time.sleep(OFF_S)  # it is on its way
    except (OSError, ValueError, KeyError) as problem:
        print(f"it cannot delete itself: {problem}", flush=True)


def metadata(how: Json, path: str) -> str:
    """Return the answer of the cloud's metadata service. Raises `OSError`."""
    url = how["metadata_url"] + path  # plain HTTP, on a link of its own
    request = urllib.request.Request(url, headers=how["headers"])  # noqa: S310
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
