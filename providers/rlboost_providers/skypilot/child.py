"""Speaks for SkyPilot: runs in SkyPilot's own venv, JSON lines on standard input and output.

Started by `process.SkyPilotProcess` as a script; imports the standard library and `sky` only. Each request
has an `id` and runs in a thread of its own, so launches go on side by side. For one request come any number
of `{"id", "said"}` lines, then one `{"id", "ok"}` or `{"id", "error": {"kind", "text"}}`. Ends with its
input. Whatever SkyPilot prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # nothing but answers may reach our reader
_LOCK = threading.Lock()
_WATCHED: set[int] = set()
START_S = 150.0
JOIN_S = 90.0
"""Longest wait for a former API server of ours that is about to end."""
KEEPS_CREDENTIALS = ("aws", "gcp", "azure", "kubernetes", "ssh", "slurm", "oci", "vast", "nebius")
"""Clouds for which SkyPilot can be told to upload no credential; the task removes those of others."""
_SKYPILOTS_OWN = ("LOCAL_CREDENTIALS", "SERVICE_ACCOUNT", "NO_UPLOAD")
_CONFIGURATION = threading.Lock()
for _name in [name for name in os.environ if name.startswith("RLBOOST_")]:
    del os.environ[_name]  # the API server is not of the run that happens to start it, nor ends with it


def _api_server() -> Any:  # a sibling, in a folder whose names are not to hide SkyPilot's
    path = Path(__file__).with_name("api_server.py")
    spec = importlib.util.spec_from_file_location("rlboost_api_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SERVER = _api_server()
_USE = _SERVER.ServerUse(Path("~/.sky").expanduser())
os.environ["TMPDIR"] = str(_USE.temporary)


def answer(**line: Any) -> None:
    """Send one line."""
    with _LOCK:
        _ANSWERS.write(json.dumps(line) + "\n")
        _ANSWERS.flush()


class Sayings(io.TextIOBase):
    """Passes what SkyPilot says about a request on, line by line."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rest = ""

    def write(self, text: str) -> int:
        """Send complete lines."""
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                answer(id=self._number, said=line.rstrip())
        return len(text)


def _sky() -> Any:  # SkyPilot ships no types
    import sky

    return sky


def start(number: int) -> str:
    """Start the API server where none answers; return SkyPilot's version.

    SkyPilot gives a server 60 s to come up, too little for a busy machine: it is asked until START_S is over.
    """
    sky = _sky()
    from sky.server import common as server_common

    deadline = time.monotonic() + START_S
    while True:
        try:
            if server_common.is_api_server_local():
                with _outside_the_run():
                    sky.api_start()
            sky.api_info()
            return str(sky.__version__)
        except Exception as problem:  # its own, requests' and RuntimeError alike
            if time.monotonic() > deadline:
                raise
            answer(id=number, said=f"SkyPilot's API server does not answer yet: {str(problem)[:200]}")
            time.sleep(2)


@contextlib.contextmanager
def _outside_the_run() -> Iterator[None]:
    """Have what is started now not depend on files of the run: it serves others, and outlives them."""
    with _CONFIGURATION:
        project = os.environ.pop(_SERVER.PROJECT, None)
        try:
            yield
        finally:
            if project is not None:
                os.environ[_SERVER.PROJECT] = project


def watch_ours() -> None:
    """Have an API server that was started by us watched: SkyPilot starts one whenever it finds none."""
    import psutil

    with _LOCK:
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if process.pid not in _WATCHED and "sky.server.server" in process.cmdline():
                    _USE.started(process.pid)
                    _WATCHED.add(process.pid)


def prices(
    number: int, infra: str, accelerators: str | None, instance_type: str | None, spot: bool
) -> list[Any]:
    """Return [{cloud, region, zone, instance_type, spot, usd_per_hour}] of what the catalogue has.

    `spot` false although spot machines were asked for: that cloud sells none, these are on demand.
    """
    sky = _sky()
    wanted = sky.Resources(infra=infra, accelerators=accelerators, instance_type=instance_type)
    as_spot = spot and _sells_spot(sky, wanted)
    asked = wanted.copy(use_spot=as_spot)
    feasible = asked.cloud.get_feasible_launchable_resources(asked, num_nodes=1)
    return [place for resources in feasible.resources_list for place in _places(resources, asked, as_spot)]


def _sells_spot(sky: Any, wanted: Any) -> bool:
    """Return True if SkyPilot has spot machines of that cloud: where not, it leaves it out silently."""
    try:
        wanted.cloud.check_features_are_supported(
            wanted, {sky.clouds.CloudImplementationFeatures.SPOT_INSTANCE}
        )
    except sky.exceptions.NotSupportedError:
        return False
    return True


def _places(resources: Any, wanted: Any, spot: bool) -> list[dict[str, Any]]:
    from sky import catalog

    cloud, name = wanted.cloud, str(wanted.cloud).lower()
    kind = resources.instance_type
    regions = cloud.regions_with_offering(kind, resources.accelerators, spot, wanted.region, wanted.zone)
    places = []
    for region in regions:
        for zone in [z.name for z in region.zones or []] or [None]:
            price = catalog.get_hourly_cost(kind, spot, region.name, zone, name)
            if name == "gcp" and resources.accelerators:
                gpu, count = next(iter(resources.accelerators.items()))
                price += catalog.get_accelerator_hourly_cost(gpu, count, spot, region.name, zone, name)
            place = {"cloud": name, "region": region.name, "zone": zone, "instance_type": kind}
            places.append({**place, "spot": spot, "usd_per_hour": float(price)})
    return places


def launch(number: int, cluster: str, task: str, idle_minutes: int, role: str, only: bool) -> dict[str, Any]:
    """Launch the task in the YAML file `task` on a new cluster; return where it is.

    On AWS the machine is given `role`; where that is not the `only` one, the role that the user's
    configuration names comes first. Without a name SkyPilot would give it one of its own, which may do
    everything in EC2 and S3.
    """
    sky = _sky()
    made = sky.Task.from_yaml(task)
    with _CONFIGURATION:  # a request takes along what is configured when it is made
        _configure(str(next(iter(made.resources)).cloud).lower(), role, only)
        request = sky.launch(made, cluster_name=cluster, idle_minutes_to_autostop=idle_minutes, down=True)
    answer(id=number, said=f"request {request}")
    _, handle = sky.stream_and_get(request, output_stream=Sayings(number))
    if handle is None:
        raise RuntimeError(f"SkyPilot launched nothing for {cluster}")
    return _where(handle)


def _configure(cloud: str, role: str, only: bool) -> None:
    """Let SkyPilot upload no credential: not of `cloud`, where the machine has a role, nor of any other."""
    from sky import skypilot_config

    lines = [f"{each}: {{remote_identity: NO_UPLOAD}}" for each in KEEPS_CREDENTIALS if each != "aws"]
    if cloud == "aws":
        theirs = skypilot_config.get_user_config().get_nested(("aws", "remote_identity"), None)
        is_named = not only and isinstance(theirs, str) and theirs.upper() not in _SKYPILOTS_OWN
        lines.append(f"aws: {{remote_identity: {json.dumps(theirs if is_named else role)}}}")
    else:
        lines.append("aws: {remote_identity: NO_UPLOAD}")
    path = os.environ[_SERVER.PROJECT]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    skypilot_config.reload_config()


def _where(handle: Any) -> dict[str, Any]:
    launched = handle.launched_resources
    return {
        "cloud": str(launched.cloud).lower(),
        "region": launched.region,
        "zone": launched.zone,
        "instance_type": launched.instance_type,
        "address": handle.head_ip,
        "internal": (handle.cached_internal_ips or [None])[0],
        "port": handle.head_ssh_port or 22,
        "labels": launched.labels or {},
    }


def clusters(number: int, names: list[str] | None, force: bool) -> list[dict[str, Any]]:
    """Return the user's clusters: from SkyPilot's memory, or (`force`) as their clouds see them now."""
    sky = _sky()
    mode = sky.StatusRefreshMode.FORCE if force else sky.StatusRefreshMode.NONE
    found = []
    for record in sky.get(sky.status(names, refresh=mode)):
        status = record["status"]
        row = {"name": record["name"], "status": getattr(status, "value", str(status))}
        row["launched_at"] = record["launched_at"]
        if record.get("handle") is not None and record["handle"].launched_resources is not None:
            row |= _where(record["handle"])
        found.append(row)
    return found


def down(number: int, cluster: str, request: str) -> bool:
    """End a cluster, and before it its launch, where `request` names one; False where there was none."""
    sky = _sky()
    from sky import exceptions

    if request:
        sky.get(sky.api_cancel([request], silent=True))
    try:
        sky.get(sky.down(cluster))
    except exceptions.ClusterDoesNotExist:
        return False
    return True


def key(number: int) -> str:
    """Return the path of the private key by which SkyPilot reaches its machines."""
    from sky import authentication

    return str(authentication.get_or_generate_keys()[0])


ACTIONS = {action.__name__: action for action in (start, prices, launch, clusters, down, key)}


def explain(problem: BaseException) -> dict[str, str]:
    """Return {"kind", "text"}: the class by its name, and its words with those of all attempts before it."""
    history = [str(each) for each in getattr(problem, "failover_history", [])]
    return {"kind": type(problem).__name__, "text": "\n".join([str(problem), *history])}


def obey(line: str) -> None:
    """Carry out one request."""
    request = json.loads(line)
    number = request.pop("id")
    try:
        result = ACTIONS[request.pop("do")](number, **request)
    except BaseException as problem:  # noqa: BLE001 the edge: SkyPilot raises what it likes, SystemExit included
        answer(id=number, error=explain(problem))
    else:
        watch_ours()
        answer(id=number, ok=result)


def main() -> None:
    """Serve until standard input ends; what still runs then goes on at the API server."""
    _USE.join(JOIN_S)
    for line in sys.stdin:
        threading.Thread(target=obey, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
