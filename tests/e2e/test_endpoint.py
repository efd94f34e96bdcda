"""The endpoint of a run that only serves, with the unmodified openai client: a stream survives SIGKILLs of
its machines and of the coordinator, and its bytes are those of a quiet one."""

from __future__ import annotations

import json
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.e2e_rig import Cli, cli_of_its_own, varied_model

pytestmark = pytest.mark.e2e

JOB: dict[str, Any] = {
    "algorithm": {"temperature": 0.0, "max_prompt_tokens": 64, "max_response_tokens": 192},
    "trainer": {"local_engines": 0},
    "endpoint": {"trains": False},
    "rollout": {
        "engine_args": {"max_running": 8, "tokens_per_s_per_response": 20},
        "spot": {
            "min_instances": 2,
            "max_instances": 2,
            "any_of": [{"infra": "local", "price_usd_per_hour": 2.66, "preload": True}],
        },
    },
}
ASKED: dict[str, Any] = {"model": "served", "prompt": "spell: cab", "max_tokens": 160}
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with cli_of_its_own(tmp_path_factory.mktemp("endpoint")) as tool:
        yield tool


@pytest.fixture(scope="module")
def served(cli: Any) -> Iterator[openai.OpenAI]:
    model = str(varied_model(cli.home / "model", 256))
    cli("serve", cli.job("served", model=model, **JOB), "--yes", "--detach")
    cli.wait("served", lambda s: sum(i["state"] == "ready" for i in s["instances"]) == 2, timeout_s=90)
    run = cli.run_folder("served")
    context = ssl.create_default_context(cafile=str(run.certificate))
    client = openai.OpenAI(
        base_url=json.loads(run.api_endpoint.read_bytes())["url"] + "/v1",
        api_key=run.api_keys.read_text().strip(),
        http_client=openai.DefaultHttpxClient(verify=context),
        timeout=120.0,
        max_retries=0,
    )
    with client:
        yield client
    cli("down", "served", "--yes")


def streamed(client: openai.OpenAI) -> tuple[str, list[int], list[str], str | None]:
    """Return text, ids, pieces and finish reason of one stream."""
    ids: list[int] = []
    pieces: list[str] = []
    reason = None
    for chunk in client.completions.create(**ASKED, stream=True, extra_body=IDS):
        (choice,) = chunk.choices
        pieces.append(choice.text)
        ids += choice.model_extra["token_ids"]
        reason = choice.finish_reason or reason
    return "".join(pieces), ids, pieces, reason


def test_a_stream_through_kills_has_the_bytes_of_a_quiet_one(served: openai.OpenAI, cli: Any) -> None:
    quiet = streamed(served)
    assert (len(quiet[1]), quiet[3]) == (160, "length")
    assert len(set(quiet[1])) > 50, "in a monotonous stream no repetition would be seen"
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(streamed(served)))
    reader.start()
    killed_at = 0.0
    for number, kill in enumerate(("machine", "coordinator")):

        def is_news(status: dict[str, Any], since: float = killed_at) -> bool:
            return status["at"] > since and (_busy(status) is not None or not reader.is_alive())

        machine = _busy(cli.wait("served", is_news, timeout_s=30, poll_s=0.05))
        assert machine is not None, f"the stream ended after {number} kills: {found}"
        time.sleep(0.4)
        if kill == "machine":
            cli("preempt", "served", machine)
        else:
            cli.process("served", "coordinator").send_signal(signal.SIGKILL)
        killed_at = time.time() + 0.5
    reader.join(120)
    assert found, "the stream has not ended"
    assert cli.json("status", "served")["preemptions"]["reset"] >= 1
    assert found[0][:2] == quiet[:2]
    assert found[0][3] == quiet[3]
    whole = served.completions.create(**(ASKED | {"max_tokens": 40}), logprobs=0, extra_body=IDS)
    assert whole.choices[0].model_extra["token_ids"] == quiet[1][:40]
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens == 40


def test_a_client_that_leaves_frees_its_response(served: openai.OpenAI, cli: Any) -> None:
    stream = served.completions.create(**ASKED, stream=True, extra_body=IDS)
    next(iter(stream))
    cli.wait("served", lambda s: _busy(s) is not None, timeout_s=10)
    stream.close()
    cli.wait("served", lambda s: _busy(s) is None, timeout_s=4)


def _busy(status: dict[str, Any]) -> str | None:
    for instance in status["instances"]:
        if instance["state"] == "ready" and instance["in_flight"]:
            return str(instance["machine"])
    return None


def test_a_batch_through_a_kill_of_itself_has_each_row_once(served: openai.OpenAI, cli: Any) -> None:
    rows, out = cli.home / "in.jsonl", cli.home / "out.jsonl"
    texts = [f"row {i}" for i in range(16)]
    rows.write_text("".join(json.dumps({"prompt": text, "max_tokens": 16}) + "\n" for text in texts))
    first = cli.start("generate", "served", rows, out, "--parallel", "3")
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.communicate()
    assert out.read_bytes().count(b"\n") < 16
    cli("generate", "served", rows, out)
    found = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda each: each["row"])
    assert [each["row"] for each in found] == list(range(16))
    for text, each in zip(texts[:3], found, strict=False):
        again = served.completions.create(model="served", prompt=text, max_tokens=16)
        assert each["response"]["choices"][0]["text"] == again.choices[0].text
