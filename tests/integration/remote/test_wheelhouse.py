"""Machines install from their head: it fetches each list once, and every file is checked where it arrives."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.deploy import wheelhouse
from rlboost_runtime.deploy.wheelhouse import Wheelhouse
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.remote import wheels
from rlboost_runtime.run import security
from rlboost_runtime.run.credentials import Readers, make_credential
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import url_for
from rlboost_runtime.weights.serve.catalog import StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.serve.server import bind as bind_weights
from rlboost_runtime.weights.store.store import WeightStore

WAIT_S = 60.0


def make_package(folder: Path, name: str, size: int = 10) -> None:
    """Write a wheel that pip accepts."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "x = 1\n" + "#" * size)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip on the head sees, and nothing else."""
    folder = tmp_path / "registry"
    folder.mkdir()
    make_package(folder, "alpha", 3_000_000)
    make_package(folder, "beta")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(wheelhouse, "find_uv", lambda: "uv")
    monkeypatch.setattr(wheelhouse, "_pip", lambda uv: [sys.executable, "-m", "pip", "-q"])
    return folder


@pytest.fixture
def house(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch) -> Wheelhouse:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    shipment = tmp_path / "shipment"
    shipment.mkdir()
    (shipment / "machine.txt").write_text("alpha==1.0\nbeta==1.0\n")
    (shipment / "secret.txt").write_text("alpha==1.0\n")
    return Wheelhouse(lambda: shipment)


def filled(house: Wheelhouse, name: str = "machine") -> wheelhouse.Files:
    deadline = time.monotonic() + WAIT_S
    while (found := house.contents(name)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_list_is_fetched_once_and_kept(house: Wheelhouse, registry: Path) -> None:
    assert house.contents("machine") is None, "nobody waits in there"
    files = filled(house)
    assert set(files) == {"alpha-1.0-py3-none-any.whl", "beta-1.0-py3-none-any.whl"}
    for path in registry.iterdir():
        path.unlink()
    assert Wheelhouse(house._shipment).contents("machine") == files, "another run of this machine has it, too"


@pytest.mark.parametrize("name", ["secret", "../machine", "vllm-gpu", "anything"])
def test_nothing_but_the_lists_of_the_shipment_is_fetched(house: Wheelhouse, name: str) -> None:
    with pytest.raises(RuntimeFault, match="install no"):
        house.contents(name)


def test_a_list_that_cannot_be_fetched_is_refused_with_the_reason(house: Wheelhouse, registry: Path) -> None:
    (registry / "beta-1.0-py3-none-any.whl").unlink()
    with pytest.raises(RuntimeFault, match=r"beta==1\.0"):
        filled(house)


# --- as machines reach it -----------------------------------------------------------------------------------


async def _nothing(*_: object) -> bytes:
    return b""


@pytest.fixture
def bootstrap(house: Wheelhouse, tmp_path: Path) -> Iterator[Path]:
    """The file that a machine is given; both servers of its head are up."""
    run = RunFolder(tmp_path / "home/runs/demo")
    run.path.mkdir(parents=True)
    security.create_secrets(run)

    async def contents(machine: str, name: str) -> dict[str, object] | None:
        files = house.contents(name)
        served = url_for(read_json(run.weights_endpoint), on_head=False)
        return None if files is None else {"url": f"{served}/v1/wheels/", "files": files}

    stop, listener = threading.Event(), bind_weights(run)
    catalog = StoreCatalog(WeightStore(run.weights), 1.0)
    bytes_server = WeightHttpServer(
        listener, security.server_context(run), Readers(run).status_for, catalog, wheelhouse.wheel_files()
    )
    write_json(run.weights_endpoint, {"url": f"https://127.0.0.1:{listener.getsockname()[1]}"})
    handlers = Handlers(
        agent=_nothing, trainer=_nothing, requests=_nothing, status=dict, preempt=_nothing,
        stop=lambda *_: None, runtime=_nothing, wheels=contents, is_live=lambda machine: True,
    )  # type: ignore[arg-type] # fmt: skip
    control = bind(run)
    server = make_server(make_app(handlers, security.read_token(run)), run)
    threads = [
        threading.Thread(target=bytes_server.serve_until, args=(stop,)),
        threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[control]))),
    ]
    for thread in threads:
        thread.start()
    path = tmp_path / "bootstrap.json"
    told = {
        "coordinator_url": read_json(run.endpoint)["url"],
        "token": make_credential(security.read_token(run), "spot-1"),
        "certificate": run.certificate.read_text(),
    }
    path.write_text(json.dumps(told))
    try:
        yield path
    finally:
        stop.set()
        server.should_exit = True
        for thread in threads:
            thread.join(10)
        control.close()


def fetch(bootstrap: Path, name: str, target: Path) -> subprocess.CompletedProcess[str]:
    """Fetch as a machine does, with a Python that has none of our packages."""
    command = [sys.executable, "-I", str(wheels.__file__), str(bootstrap), name, str(target)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env={"PATH": os.environ["PATH"]}
    )


def test_a_machine_waits_for_its_head_and_has_every_file_checked(
    bootstrap: Path, house: Wheelhouse, registry: Path, tmp_path: Path
) -> None:
    target = tmp_path / "wheels"
    done = fetch(bootstrap, "machine", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the head is fetching machine" in done.stdout
    assert {path.name for path in target.iterdir()} == {path.name for path in registry.iterdir()}
    for path in registry.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    alpha = target / "alpha-1.0-py3-none-any.whl"
    whole = alpha.read_bytes()
    alpha.with_name(alpha.name + ".part").write_bytes(whole[:1_000_000])  # cut off, then typed again
    alpha.unlink()
    assert fetch(bootstrap, "machine", target).returncode == 0
    assert alpha.read_bytes() == whole


def test_a_file_that_was_changed_on_the_way_is_not_installed(
    bootstrap: Path, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(house)
    changed = wheelhouse.wheel_files() / "beta-1.0-py3-none-any.whl"
    content = bytearray(changed.read_bytes())
    content[50] ^= 1
    changed.write_bytes(content)
    monkeypatch.setattr(wheels, "_PAUSE_S", 0.01)
    assert wheels.main(str(bootstrap), "machine", str(tmp_path / "wheels")) == 1
    assert not (tmp_path / "wheels" / changed.name).exists()


def test_a_machine_is_told_at_once_what_its_head_does_not_have(bootstrap: Path, tmp_path: Path) -> None:
    done = fetch(bootstrap, "vllm-gpu", tmp_path / "wheels")
    assert done.returncode == 1
    assert "machines of this run install no vllm-gpu" in done.stdout
