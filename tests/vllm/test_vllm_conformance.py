"""The endpoint beside vLLM's own server: the openai client gets equal greedy answers from both."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from rlboost_runtime.run.engine_python import find_engine_python
from tests.e2e.e2e_rig import Cli, cli_of_its_own
from tests.openai_cases import CASES, MAX_PROMPT, MAX_RESPONSE, MODEL, Server, memorised_model
from tests.vllm.vllm_rig import SLOWNESS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400 * SLOWNESS)]

KEY = "a-key-of-the-test"
DIFFERENCES = {
    "a character cut in the middle": "vLLM leaves an incomplete character out, we give U+FFFD for it",
    "more tokens than there is room for": "vLLM gives fewer, we refuse",
    "several choices that are greedy": "vLLM refuses them, we give equal ones",
}
"""Where answers differ on purpose; docs/endpoint.md lists them."""


def server_of(url: str, key: str, certificate: str | None = None) -> Server:
    verify: Any = True if certificate is None else ssl.create_default_context(cafile=certificate)
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "timeout": 60.0, "max_retries": 0}
    return Server(
        openai.OpenAI(**options, http_client=openai.DefaultHttpxClient(verify=verify)),
        lambda: openai.AsyncOpenAI(**options, http_client=openai.DefaultAsyncHttpxClient(verify=verify)),
        httpx2.Client(base_url=url, verify=verify, headers={"Authorization": f"Bearer {key}"}, timeout=60.0),
    )


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("by-heart", memorised_model)


@pytest.fixture(scope="module")
def vllms_own(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """Returns the server once it answers; it starts while ours does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [
        find_engine_python(None).path, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port, "--api-key", KEY, "--dtype",
        "float32", "--max-model-len", MAX_PROMPT + MAX_RESPONSE, "--max-num-seqs", 16, "--enforce-eager",
        "--generation-config", "vllm", "--kv-cache-memory-bytes", 64 << 20, "--block-size", 32,
        "--logprobs-mode", "processed_logprobs", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not re.fullmatch(r"PYTHON\w*", name)}
    environment = kept | {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=file, stderr=file, cwd=log.parent
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> Server:
        deadline = time.monotonic() + 180 * SLOWNESS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                    return server_of(url, KEY)
            except httpx2.HTTPError:
                time.sleep(0.5)

    try:
        yield ready
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def both(
    vllms_own: Callable[[], Server], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Our endpoint, over one machine with vLLM, and vLLM's own server."""
    with cli_of_its_own(tmp_path_factory.mktemp("endpoint")) as cli:
        servers = _ours(cli, model), vllms_own()
        yield servers
        for server in servers:
            server.sync.close()
            server.http.close()
        cli("down", MODEL, "--yes")


def _ours(cli: Cli, model: Path) -> Server:
    spot = {
        "min_instances": 1,
        "max_instances": 1,
        "any_of": [{"infra": "local", "price_usd_per_hour": 2.66}],
    }
    job = cli.job(
        MODEL,
        model=str(model),
        algorithm={"max_prompt_tokens": MAX_PROMPT, "max_response_tokens": MAX_RESPONSE},
        trainer={"local_engines": 0},
        endpoint={"trains": False},
        rollout={"engine": "vllm", "engine_args": {"max_running": 16}, "spot": spot},
    )
    cli("serve", job, "--yes", "--detach")
    cli.wait(MODEL, lambda s: any(i["state"] == "ready" for i in s["instances"]), timeout_s=200 * SLOWNESS)
    run = cli.run_folder(MODEL)
    url = json.loads(run.api_endpoint.read_bytes())["url"]
    return server_of(url, run.api_keys.read_text().split()[0], str(run.certificate))


def answer(server: Server, name: str) -> Any:
    """What a case got; an error of the client counts as an answer, a broken promise of the case does not."""
    try:
        return CASES[name](server)
    except openai.APIStatusError as exc:
        return type(exc).__name__, exc.status_code


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENCES])
def test_ours_answers_as_vllms_own_server(both: tuple[Server, Server], name: str) -> None:
    ours, theirs = map(partial(answer, name=name), both)
    print(ours)
    assert same(ours, theirs)


def same(ours: Any, theirs: Any) -> bool:
    """Equal, logprobs to 0.002."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=2e-3)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), (ours, theirs)
        assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    else:
        assert ours == theirs
    return True


@pytest.mark.parametrize("name", DIFFERENCES)
def test_known_differences_are_differences(both: tuple[Server, Server], name: str) -> None:
    ours, theirs = map(partial(answer, name=name), both)
    print(ours, theirs)
    assert ours != theirs
