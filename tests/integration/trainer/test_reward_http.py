"""Rewards from an endpoint that is slow, busy, broken or gone: tried again within the deadline, else 0."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import HttpReward
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.trainer.rewards.outcome import Reward
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

pytestmark = pytest.mark.integration


class Endpoint(BaseHTTPRequestHandler):
    """What it does is what the response asks for: a status, or a number of seconds to wait."""

    seen: Counter[str]
    together: int
    most_together: int
    lock: threading.Lock

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in body:
            self._as_a_server_of_models(body)
            return
        said, kind = body["response"], type(self)
        with kind.lock:
            kind.seen[said] += 1
            kind.together += 1
            kind.most_together = max(kind.most_together, kind.together)
        try:
            self._answer(said, body, kind.seen[said])
        finally:
            with kind.lock:
                kind.together -= 1

    def _as_a_server_of_models(self, body: dict[str, Any]) -> None:
        """Answers as vLLM and others do, and refuses what they would refuse."""
        if self.headers["Authorization"] != "Bearer k3y":
            self.send_error(401)
            return
        assert body["model"] == "judge-7b"
        last = body["messages"][-1]["content"]
        if self.path == "/pooling":
            assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
            score = {"tokens": [[0.5], [-1.25]], "none": []}.get(last, [float(len(last))])
            answer: dict[str, Any] = {"object": "list", "data": [{"index": 0, "data": score}]}
        else:
            marks = body["response_format"]["json_schema"]["schema"]["properties"]["mark"]["enum"]
            assert body["temperature"] == 0
            said = next((word for word in ("prose", "eleven") if word in last), None)
            mark = json.dumps({"mark": len(marks) if said else last.count("!")})
            content = "I would say 7." if said == "prose" else mark
            answer = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def _answer(self, said: str, body: dict[str, Any], times: int) -> None:
        if said == "busy" and times < 3:
            self.send_response(503)
            self.send_header("Retry-After", "0")
            self.end_headers()
        elif said == "odd" and times < 2:
            self.send_response(503)
            self.send_header("Retry-After", "\u00b2")
            self.end_headers()
        elif said in ("500", "429"):
            self.send_error(int(said))
        elif said == "hang up" and times < 2:
            self.close_connection = True
            self.connection.close()
        elif said == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        else:
            if said == "slow":
                time.sleep(0.3)
            self.send_response(200)
            self.end_headers()
            answer = {"text": "abc", "nan": "NaN", "deep": "[" * 60_000}.get(said)
            text = answer or json.dumps({"reward": len(body["prompt"]) + body["row"]["bonus"]})
            self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, address: object) -> None:
        """The client hung up, as it should."""


@pytest.fixture
def server() -> Iterator[Server]:
    fields = {"seen": Counter(), "together": 0, "most_together": 0, "lock": threading.Lock()}
    made = Server(("127.0.0.1", 0), type("OneTest", (Endpoint,), fields))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def served(server: Server, path: str, **options: object) -> HttpReward:
    url = f"http://127.0.0.1:{server.server_port}{path}"
    return HttpReward(http=url, model="judge-7b", key_variable="JUDGE_KEY", **options)


def score(server: Server, folder: Path, *said: str, timeout_s: float = 10.0, **options: int) -> list[Reward]:
    reward = HttpReward(http=f"http://127.0.0.1:{server.server_port}/score", **options)
    with RewardScorer(reward, folder, timeout_s=timeout_s, log_file=folder / "log") as rewards:
        return rewards.score(RewardCall("p", each, {"bonus": 10}) for each in said)


def test_an_endpoint_that_is_busy_or_drops_a_connection_is_asked_again(server, tmp_path):
    assert score(server, tmp_path, "fine", "busy", "hang up") == [Reward(11.0)] * 3
    assert dict(server.RequestHandlerClass.seen) == {"fine": 1, "busy": 3, "hang up": 2}


def test_an_error_is_said_at_once_and_endless_lateness_in_the_end(server, tmp_path):
    broken, busy, text, nan = score(server, tmp_path, "500", "429", "text", "nan", tries=2)
    assert [r.failure for r in (broken, busy)] == [RewardFailure.RAISED] * 2
    assert "HTTP 500" in broken.problem
    assert "HTTP 429" in busy.problem
    assert "(2 tries)" in busy.problem
    assert text.failure is RewardFailure.NOT_A_NUMBER
    assert "abc" in text.problem
    assert nan.failure is RewardFailure.NOT_FINITE
    assert {r.value for r in (broken, busy, text, nan)} == {0.0}
    assert dict(server.RequestHandlerClass.seen) == {"500": 1, "429": 2, "text": 1, "nan": 1}


def test_whatever_is_answered_or_cannot_be_asked_is_a_failure_of_one_response(server, tmp_path):
    assert score(server, tmp_path, "odd") == [Reward(11.0)], "a Retry-After that is no number"
    (deep,) = score(server, tmp_path, "deep")
    assert deep.failure is RewardFailure.NOT_A_NUMBER
    reward = HttpReward(http=f"http://127.0.0.1:{server.server_port}/score")
    with RewardScorer(reward, tmp_path, timeout_s=10, log_file=tmp_path / "log") as rewards:
        asked = [RewardCall("p", "fine", row) for row in ({(1, 2): "no JSON key", "bonus": 1}, {"bonus": 10})]
        unsaid, fine = rewards.score(asked)
    assert unsaid.failure is RewardFailure.RAISED
    assert "no request can be built from the row" in unsaid.problem
    assert fine == Reward(11.0)


def test_the_deadline_is_for_the_whole_answer_however_slowly_it_drips(server, tmp_path):
    started = time.monotonic()
    (drip,) = score(server, tmp_path, "drip", timeout_s=0.5)
    assert drip.failure is RewardFailure.TIMEOUT
    assert time.monotonic() - started < 3


def test_many_are_asked_at_once_and_no_more_than_allowed(server, tmp_path):
    found = score(server, tmp_path, *["slow"] * 24, concurrency=8)
    assert found == [Reward(11.0)] * 24
    assert 4 <= server.RequestHandlerClass.most_together <= 8


def test_nobody_listens(server, tmp_path):
    server.server_close()
    (gone,) = score(server, tmp_path, "fine", tries=2)
    assert gone.failure is RewardFailure.RAISED
    assert "2 tries" in gone.problem


def test_what_is_no_url_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="not an http or https URL"):
        RewardScorer(HttpReward(http="ftp://x"), tmp_path, timeout_s=1, log_file=tmp_path / "log")


def test_a_served_model_gives_marks(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y\n")
    question = "Of {best_mark}, for {topic}: {response}"
    reward = served(server, "/v1/chat/completions", speaks="chat", best_mark=4, question=question)
    said = ["!!!", "{topic}!", "prose", "eleven", "fine"]
    rows = [{"topic": "a"}, {"topic": "none!"}, {"topic": "a"}, {"topic": "a"}, {"subject": "a"}]
    calls = [RewardCall("p", each, row) for each, row in zip(said, rows, strict=True)]
    with RewardScorer(reward, tmp_path, timeout_s=10, log_file=tmp_path / "log") as rewards:
        three, braces, prose, eleven, lacking = rewards.score(calls)
    assert (three.value, three.failure) == (0.75, None)
    assert braces == Reward(0.5), "what a response has in braces is no placeholder"
    assert prose.failure is eleven.failure is RewardFailure.NOT_A_NUMBER
    assert "I would say 7" in prose.problem
    assert "mark 5" in eleven.problem
    assert lacking.failure is RewardFailure.RAISED
    assert "{topic}" in lacking.problem


def test_a_served_reward_model_gives_its_raw_score(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    reward = served(server, "/pooling", speaks="pooling")
    with RewardScorer(reward, tmp_path, timeout_s=10, log_file=tmp_path / "log") as rewards:
        one, tokens, none = rewards.score(RewardCall("p", each, {}) for each in ("abc", "tokens", "none"))
    assert (one, tokens) == (Reward(3.0), Reward(-1.25))
    assert none.failure is RewardFailure.NOT_A_NUMBER


def test_a_key_that_is_not_there_is_said_at_the_start_and_a_wrong_one_by_the_server(
    server, tmp_path, monkeypatch
):
    reward = served(server, "/pooling", speaks="pooling")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        RewardScorer(reward, tmp_path, timeout_s=1, log_file=tmp_path / "log")
    monkeypatch.setenv("JUDGE_KEY", "other")
    with RewardScorer(reward, tmp_path, timeout_s=10, log_file=tmp_path / "log") as rewards:
        (refused,) = rewards.score([RewardCall("p", "abc", {})])
    assert "HTTP 401" in refused.problem


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"speaks": "chat"}, "there is no model"), ({"question": "Good?"}, "lacks {response}")],
)
def test_what_could_never_work_is_no_job(fields, told):
    with pytest.raises(ValidationError, match=told):
        HttpReward(http="http://x", **fields)
