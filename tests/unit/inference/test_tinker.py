"""The real Tinker SDK samples from the endpoint, over HTTP and a coordinator that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.server import Keys, make_app
from rlboost_runtime.inference.service import Service
from rlboost_runtime.seams import SystemClock
from tests.unit.inference.played_coordinator import MODEL, Coordinator
from tests.unit.inference.test_endpoint_server import expected

CLIENT = Path(__file__).with_name("tinker_client.py")
STOP = expected("hello", 20)[5]


class Head:
    """The endpoint in a thread of its own: the SDK blocks."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "api_keys"
        keys.write_text("sk-one\n")
        self._ready, self._leave = threading.Event(), threading.Event()
        self.url = ""
        self._keys = Keys(keys)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        fleet = Fleet("run", Coordinator().dial, SystemClock())
        app = make_app(Service(fleet, lambda: MODEL, 64), self._keys)
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
        server.install_signal_handlers = lambda: None
        linked, serving = asyncio.create_task(fleet.run()), asyncio.create_task(server.serve())
        while not (server.started and fleet.is_up):  # noqa: ASYNC110 - moments
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self._ready.set()
        while not self._leave.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.02)
        server.should_exit = True
        linked.cancel()
        await serving

    def __enter__(self) -> Head:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(20)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with Head(tmp_path_factory.mktemp("tinker")) as found:
        yield found


@pytest.fixture(scope="module")
def sampled(head: Head) -> dict[str, Any]:
    """What the client got."""
    command = [sys.executable, str(CLIENT), head.url, "tml-sk-one", MODEL.name, str(STOP)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sample_has_the_fleets_tokens_and_logprobs(sampled: dict[str, Any]) -> None:
    (sequence,) = sampled["one"]
    assert sequence["tokens"] == expected("hello", 20)
    assert (sequence["logprobs"], sequence["reason"]) == (20, "length")


def test_each_of_several_samples_has_an_id_of_its_own(sampled: dict[str, Any]) -> None:
    assert len({each["id"] for each in sampled["three"]}) == 3
    assert all(len(each["tokens"]) == 20 for each in sampled["three"])


def test_a_stop_token_ends_a_sample(sampled: dict[str, Any]) -> None:
    whole = expected("hello", 20)
    (sequence,) = sampled["stopped"]
    assert sequence["reason"] == "stop"
    assert sequence["tokens"] == whole[: whole.index(STOP) + 1]


def test_what_cannot_be_done_is_refused_by_name(sampled: dict[str, Any]) -> None:
    first, second = sampled["refused"]
    assert "top_k is not supported" in first
    assert "prompt_logprobs is not supported" in second


def test_another_model_and_another_key_are_refused(head: Head) -> None:
    def asked(path: str, body: dict[str, Any], **headers: str) -> int:
        return httpx.post(f"{head.url}/api/v1/{path}", json=body, headers=headers).status_code

    with_key = {"X-Api-Key": "tml-sk-one"}
    assert asked("create_sampling_session", {"base_model": "other"}, **with_key) == 404
    assert asked("retrieve_future", {"request_id": "gone"}, **with_key) == 410
    assert asked("asample", {}, **with_key) == 400
    for wrong in ({}, {"X-Api-Key": "tml-sk-two"}, {"X-Api-Key": "sk-one"}):
        assert asked("asample", {}, **wrong) == asked("no_such_route", {}, **wrong) == 401
