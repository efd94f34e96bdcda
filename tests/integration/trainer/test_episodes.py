"""Episodes, played by real processes of user code at the real endpoint of episodes; the test plays the
coordinator."""

from __future__ import annotations

import asyncio
import os
import tempfile
import textwrap
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.inference.__main__ import bind_loopback, bind_unix
from rlboost_runtime.inference.episode_app import make_episode_app
from rlboost_runtime.inference.episodes import Episodes
from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.service import Service
from rlboost_runtime.job import Job
from rlboost_runtime.protocol.episode_failures import EpisodeFailure
from rlboost_runtime.run.folder import RunFolder, write_atomically
from rlboost_runtime.seams import SystemClock
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.outcome import (
    HOPELESS,
    NOTHING,
    EpisodeResult,
    EpisodeWatch,
    episode_metrics,
    require_some_episode,
)
from rlboost_runtime.trainer.episodes.runner import EpisodeRunner, StepOfEpisodes
from tests.unit.inference.played_coordinator import MODEL, Coordinator, Letters

pytestmark = pytest.mark.integration

TOKEN = "the-run's-token"
CHAT = ({"role": "user", "content": "begin"},)


class Talking(Letters):
    """The tokenizer with a template that only adds to the conversation."""

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: Any, **options: Any) -> str:
        lines = [f"{m['role']}: {m['content']}\n" for m in messages]
        return "".join([f"{len(tools or ())} tools\n", *lines, "assistant: "])


class Endpoint:
    """The endpoint of episodes in a thread, over a coordinator that answers like emulated engines."""

    def __init__(self, run: RunFolder) -> None:
        self.coordinator = Coordinator()
        self.coordinator.longest = 12
        self.episodes = Episodes()
        self._run = run
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    async def _serve(self) -> None:
        fleet = Fleet("run", self.coordinator.dial, SystemClock())
        model = replace(MODEL, tokenizer=Talking(), max_model_len=4000)
        app = make_episode_app(Service(fleet, lambda: model, 1000), self.episodes, TOKEN, 3000)
        config = uvicorn.Config(
            app, loop="none", lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        linked = asyncio.create_task(fleet.run())
        with bind_unix(self._run) as listener, bind_loopback(self._run) as loopback:
            serving = asyncio.create_task(self._server.serve(sockets=[listener, loopback]))
            while not (self._server.started and fleet.is_up):  # noqa: ASYNC110 - neither says so otherwise
                await asyncio.sleep(0.01)
            self._up.set()
            await serving
        linked.cancel()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


class Play:
    """A run with an environment; its episodes."""

    def __init__(self, run: RunFolder, runner: EpisodeRunner) -> None:
        self.run, self.runner = run, runner
        self.ended: dict[int, int] = {}
        self.problems: list[BaseException] = []
        runner.on_end(lambda step, number, tokens: self.ended.update({number: tokens}), self.problems.append)

    def __call__(self, rows: list[dict[str, Any]], step: int = 0, **prompt: Any) -> list[EpisodeResult]:
        self.begin(rows, step, **prompt)
        self.wait(lambda: len(self.ended) == len(rows))
        return self.runner.results(step, range(len(rows)))

    def begin(self, rows: list[dict[str, Any]], step: int = 0, **prompt: Any) -> None:
        prompt = {"messages": CHAT} | prompt
        prompts = [Prompt(i, "begin ", (1,), row, **prompt) for i, row in enumerate(rows)]
        self.runner.play(StepOfEpisodes(step, 0, 100, prompts, [1] * len(rows)))

    def wait(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < deadline, (self.ended, self.problems)
            assert not self.problems
            time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / ("a-name-that-makes-the-path-of-a-socket-much-too-long" * 2))
    folder.files.mkdir(parents=True)
    folder.token.parent.mkdir()
    write_atomically(folder.token, TOKEN.encode())
    return folder


@pytest.fixture
def endpoint(run: RunFolder) -> Iterator[Endpoint]:
    found = Endpoint(run)
    yield found
    found.stop()


@contextmanager
def environment(run: RunFolder, code: str, **settings: Any) -> Iterator[Play]:
    (run.files / "env.py").write_text(textwrap.dedent(code))
    asked = {"timeout_s": 20.0, "processes": 1} | settings
    if "command" not in asked and "openenv" not in asked:
        asked.setdefault("python", "env.py:Env")
    job = Job.model_validate(
        {
            "name": "run",
            "model": {"init": "tiny"},
            "data": {"reasoning_gym": ["spell_backward"]},
            "environment": asked,
            "algorithm": {"temperature": 1.0},
            "reward_network": "command" in asked,
        }
    )
    with EpisodeRunner(job, run, run.path / "environment.log") as runner:
        yield Play(run, runner)


TALKS = """
class Env:
    def reset(self, turns):
        self.left, self.heard = turns, []
        return f" for {turns}"
    def step(self, response):
        self.heard.append(response)
        self.left -= 1
        return f"seen {len(response)}" if self.left else None
    def get_reward(self):
        return len(self.heard) / 10
"""


def test_a_class_with_step_is_a_conversation(run: RunFolder, endpoint: Endpoint) -> None:
    with environment(run, TALKS) as play:
        results = play([{"turns": n, "unused": 1} for n in (1, 3, 2)])
    assert [result.reward for result in results] == [0.1, 0.3, 0.2]
    assert [result.record.num_turns for result in results] == [1, 3, 2]
    for number, result in enumerate(results):
        (sample,) = result.record.samples
        assert (
            bytes(sample.prompt_ids)[::4] == b"0 tools\nuser: begin for %d\nassistant: " % (1, 3, 2)[number]
        )
        assert result.num_sampled == play.ended[number] == sum(sample.sampled)
        assert result.record.versions == (0,)
    told = bytes(results[1].record.samples[0].token_ids)[::4]
    assert told.count(b"user: seen ") == 2
    asked = [request for request in endpoint.coordinator.asked if request.episode == 101]
    assert len(asked) == 3
    assert len({request.session for request in asked}) == 1


def test_a_text_prompt_needs_no_chat_template(run: RunFolder, endpoint: Endpoint) -> None:
    with environment(run, TALKS) as play:
        (result,) = play([{"turns": 2}], messages=None)
    (sample,) = result.record.samples
    assert bytes(sample.prompt_ids)[::4] == b"begin  for 2"
    assert b"seen " in bytes(sample.token_ids)[::4]
    assert result.record.num_turns == 2


def test_turns_may_have_rewards_of_their_own(run: RunFolder, endpoint: Endpoint) -> None:
    code = TALKS.replace("return len(self.heard) / 10", "return [0.5 * k for k in range(len(self.heard))]")
    with environment(run, code) as play:
        one, three = play([{"turns": 1}, {"turns": 3}])
    assert (one.reward, one.rewards) == (0.0, (0.0,))
    assert (three.reward, three.rewards) == (1.5, (0.0, 0.5, 1.0))
    (sample,) = three.record.samples
    assert [turn for turn, _ in sample.turns] == [0, 1, 2]
    for _, at in sample.turns:
        assert sample.sampled[at]
        assert at == 0 or not sample.sampled[at - 1], "a turn begins after what the environment wrote"


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[0.5] * 3", "returned 3 rewards for 2 turns"),
        ("[0.5, None]", "returned a NoneType"),
        ("[0.5, float('nan')]", "returned nan"),
    ],
)
def test_rewards_that_do_not_fit_the_turns_are_no_reward(
    run: RunFolder, endpoint: Endpoint, returned: str, problem: str
) -> None:
    code = TALKS.replace("return len(self.heard) / 10", f"return {returned}")
    with environment(run, code, tries=1) as play:
        (result,) = play([{"turns": 2}])
    assert (result.failure, result.problem) == (EpisodeFailure.NO_NUMBER, problem)


def test_a_request_that_is_refused_is_no_turn(run: RunFolder, endpoint: Endpoint) -> None:
    code = TALKS.replace('f"seen {len(response)}"', '"x" * 900')
    with environment(run, code, max_turns=50) as play:
        (result,) = play([{"turns": 9}])
    asked = [request for request in endpoint.coordinator.asked if request.episode == 100]
    assert result.record.limit == "tokens"
    assert result.record.num_turns == len(asked) == 4


FUNCTION = """
import asyncio
async def play(client, row):
    messages = [{"role": "user", "content": row["q"]}]
    await client.chat.completions.create(model="any", messages=messages)
    many = await asyncio.gather(*[
        client.completions.create(model="any", prompt=row["q"], max_tokens=4) for _ in range(row["more"])
    ])
    return row.get("reward")
"""


def test_a_function_gets_an_openai_client_and_the_row(run: RunFolder, endpoint: Endpoint) -> None:
    rows = [
        {"q": "one", "more": 0, "reward": 0.5},
        {"q": "two", "more": 3},
        {"q": "x", "more": 0, "reward": "?"},
    ]
    with environment(run, FUNCTION, python="env.py:play", tries=1) as play:
        one, two, bad = play(rows)
    assert (one.reward, one.record.num_turns, len(one.record.samples)) == (0.5, 1, 1)
    assert (two.reward, two.failure, two.record.num_turns) == (None, "", 4), "the job's reward scores it"
    assert len(two.record.samples) == 4, "requests at the same time share no sample"
    assert (bad.failure, bad.problem) == (EpisodeFailure.NO_NUMBER, "returned '?'")


PROGRAM = """
import json, os, sys, openai
row = json.load(sys.stdin)["row"]
print("some talk")
client = openai.OpenAI()
answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": row["q"]}])
assert answer.choices[0].message.content
if row["q"] == "fail":
    sys.exit("no luck")
print(json.dumps({"reward": 0.75}))
"""


def test_a_program_finds_the_model_by_its_environment(run: RunFolder, endpoint: Endpoint) -> None:
    with environment(run, PROGRAM, command=["python", "env.py"], tries=1) as play:
        good, bad = play([{"q": "one"}, {"q": "fail"}])
    assert (good.reward, good.record.num_turns) == (0.75, 1)
    assert (bad.failure, bad.problem) == (EpisodeFailure.RAISED, "ChildProcessError: exit code 1: no luck")


def test_a_program_has_a_python_environment_of_its_own_in_a_folder_that_the_sandbox_hides(
    run: RunFolder, endpoint: Endpoint
) -> None:
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        own = Path(folder, "agent")
        venv.create(own, symlinks=True)
        packages = next(own.glob("lib/python*/site-packages"))
        (packages / "of_its_own.py").write_text("WORTH = 0.25")
        code = """
        import json, importlib.util, os, sys, of_its_own
        print("PYTHONPATH" in os.environ, importlib.util.find_spec("torch"), file=sys.stderr)
        ours = "PYTHONPATH" in os.environ or importlib.util.find_spec("rlboost_runtime")
        print(json.dumps({"reward": -1 if ours else of_its_own.WORTH}))
        """
        command = [str(own / "bin" / "python"), "env.py"]
        with environment(run, textwrap.dedent(code), command=command, tries=1) as play:
            (found,) = play([{}])
    assert (found.reward, found.problem) == (0.25, "")


TOOLS = '''
class Env:
    def reset(self, **row):
        self.total = 0
    def add(self, number: int, times: int = 1) -> int:
        """Add a number.

        Args:
            number: what to add
        """
        self.total += number * times
        return self.total
    def get_reward(self):
        return self.total
'''


def test_public_methods_are_tools(
    run: RunFolder, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(
        [
            '<tool_call>{"name": "add", "arguments": {"number": 2, "times": 3}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"wrong": 1}}</tool_call>'
            '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
            "done",
        ]
    )
    monkeypatch.setattr(
        "tests.unit.inference.played_coordinator.emulated_response",
        lambda prompt, limit, sampling: (list(next(said).encode()), [-0.5] * 200),
    )
    with environment(run, TOOLS) as play:
        (result,) = play([{}])
    assert (result.reward, result.record.num_turns, result.record.last_response) == (6.0, 3, "done")
    told = b"".join(bytes(sample.token_ids)[::4] for sample in result.record.samples)
    prompts = b"".join(bytes(sample.prompt_ids)[::4] for sample in result.record.samples)
    assert b"1 tools" in prompts
    assert b"tool: 6" in told + prompts
    assert b"unexpected keyword argument 'wrong'" in told + prompts
    assert b"there is no tool none; there are add" in told + prompts


def test_what_fails_is_played_again_and_then_left_out(run: RunFolder, endpoint: Endpoint) -> None:
    code = """
    import pathlib, time, os
    async def play(client, row):
        await client.completions.create(model="any", prompt="x", max_tokens=4)
        tried = pathlib.Path(row["mark"])
        times = len(tried.read_text()) if tried.exists() else 0
        tried.write_text("x" * (times + 1))
        if times < row["fails"]:
            raise KeyError("not yet")
        return times
    """
    marks = run.path / "marks"
    marks.mkdir()
    rows = [{"mark": str(marks / str(fails)), "fails": fails} for fails in (0, 1, 9)]
    with sandbox_off(), environment(run, code, python="env.py:play", tries=2) as play:
        results = play(rows)
    assert [(r.reward, r.failure, r.num_tries) for r in results] == [
        (0.0, "", 1), (1.0, "", 2), (None, EpisodeFailure.RAISED, 2),
    ]  # fmt: skip
    assert "env.py:9: KeyError: 'not yet'" in results[2].problem
    assert results[2].record.samples == ()
    assert "KeyError" in (run.path / "environment.log").read_text()


@contextmanager
def sandbox_off() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlboost_runtime.trainer.rewards.sandbox._problem", lambda: "the test writes files")
        yield


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("await asyncio.sleep(600)", EpisodeFailure.TIMEOUT),
        ("time.sleep(600)", EpisodeFailure.TIMEOUT),
        ("os.kill(os.getpid(), 9)", EpisodeFailure.DIED),
        ("raise SystemExit(3)", EpisodeFailure.RAISED),
    ],
)
def test_one_that_hangs_or_dies_does_not_take_others_along(
    run: RunFolder, endpoint: Endpoint, body: str, failure: EpisodeFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost_runtime.trainer.episodes.runner.GRACE_S", 0.5)
    code = f"""
    import asyncio, os, time
    async def play(client, row):
        if row["bad"]:
            {body}
        for _ in range(3):
            await client.completions.create(model="any", prompt="x", max_tokens=4)
        return 1.0
    """
    rows = [{"bad": number == 2} for number in range(5)]
    with environment(run, code, python="env.py:play", tries=1, timeout_s=1.5, processes=1) as play:
        results = play(rows)
    assert [result.failure for result in results] == ["", "", failure, "", ""]
    assert [result.reward for result in results] == [1.0, 1.0, None, 1.0, 1.0]


def test_one_that_runs_out_of_memory_is_left_out_as_such(run: RunFolder, endpoint: Endpoint) -> None:
    code = """
    class Env:
        def reset(self, bad):
            self.data = bytearray(1 << 46 if bad else 1)
        def step(self, response):
            return None
        def get_reward(self):
            return 1
    """
    with environment(run, code, tries=2) as play:
        results = play([{"bad": True}, {"bad": False}])
    assert [result.failure for result in results] == [EpisodeFailure.MEMORY, ""]
    assert [result.num_tries for result in results] == [2, 1]
    assert episode_metrics(results)["episodes_left_out_memory"] == 1.0


VANISHES = """
import json, sys, websockets.sync.server
from websockets.datastructures import Headers
from websockets.http11 import Response

ACTION = {"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]}
left = int(sys.argv[2])

def schema(connection, request):
    if request.path == "/schema":
        return Response(200, "OK", Headers(), json.dumps({"action": ACTION}).encode())

def play(connection):
    global left
    for message in connection:
        asked = json.loads(message)
        if asked["type"] == "close":
            return
        is_step = asked["type"] == "step"
        if is_step and left:
            left -= 1
            connection.socket.close()
            return
        told = {"text": asked["data"].get("greeting", "more")} if not is_step else {"text": "well"}
        answer = {"observation": told, "reward": 0.5 if is_step else None, "done": is_step}
        connection.send(json.dumps({"type": "observation", "data": answer}))

with websockets.sync.server.serve(play, "127.0.0.1", int(sys.argv[1]), process_request=schema) as server:
    server.serve_forever()
"""


@pytest.mark.parametrize(("vanishings", "failure", "tries"), [(1, "", 2), (9, EpisodeFailure.UNREACHABLE, 2)])
def test_a_server_that_vanishes_in_mid_episode_is_no_reward_of_0(
    run: RunFolder, endpoint: Endpoint, vanishings: int, failure: str, tries: int
) -> None:
    (run.files / "server.py").write_text(VANISHES)
    server = {"command": ["python", "server.py", "{port}", str(vanishings)]}
    with environment(run, "", python=None, openenv=server, tries=2) as play:
        (result,) = play([{"greeting": "hello", "prompt": "unused"}])
    assert (result.failure, result.num_tries) == (failure, tries)
    assert result.reward == (None if failure else 0.5)
    if not failure:
        assert result.rewards == (0.5,), "a server's steps have a reward each"
        (sample,) = result.record.samples
        assert bytes(sample.prompt_ids)[::4] == b"0 tools\nuser: beginhello\nassistant: "


def test_a_server_that_dies_takes_its_process_along_and_its_episodes_are_played_again(
    run: RunFolder, endpoint: Endpoint
) -> None:
    dies = VANISHES.replace("connection.socket.close()", "import os; os._exit(7)")
    (run.files / "server.py").write_text(dies)
    server = {"command": ["python", "server.py", "{port}", "1"]}
    with environment(run, "", python=None, openenv=server, tries=1) as play:
        (result,) = play([{}])
    assert (result.failure, result.reward) == (EpisodeFailure.DIED, None)
    assert "ended with exit code 7" in (run.path / "environment.log").read_text()


def test_a_thread_that_hangs_costs_its_process_not_the_run(run: RunFolder, endpoint: Endpoint) -> None:
    code = """
    import time
    class Env:
        def reset(self, bad):
            if bad:
                time.sleep(600)
        def step(self, response):
            return None
        def get_reward(self):
            return 1
    """
    with environment(run, code, tries=1, timeout_s=1.0) as play:
        first = play([{"bad": True}, {"bad": False}])
        play.ended.clear()
        second = play([{"bad": False}] * 2, step=1)
    assert [result.failure for result in first] == [EpisodeFailure.TIMEOUT, ""]
    assert [result.reward for result in second] == [1.0, 1.0]


def test_waiting_for_the_model_is_not_an_environments_time(run: RunFolder, endpoint: Endpoint) -> None:
    endpoint.coordinator.holds.clear()
    with environment(run, TALKS, timeout_s=0.8, tries=1) as play:
        play.begin([{"turns": 1}])
        play.wait(lambda: bool(endpoint.coordinator.asked))
        time.sleep(2.0)
        endpoint.coordinator.holds.set()
        play.wait(lambda: bool(play.ended))
        (result,) = play.runner.results(0, range(1))
    assert (result.failure, result.reward) == ("", 0.1)


def test_an_endpoint_that_restarts_costs_no_try(run: RunFolder) -> None:
    endpoint = Endpoint(run)
    endpoint.coordinator.holds.clear()
    with environment(run, TALKS, tries=1) as play:
        play.begin([{"turns": 2}])
        play.wait(lambda: bool(endpoint.coordinator.asked))
        endpoint.stop()
        again = Endpoint(run)
        play.wait(lambda: bool(play.ended))
        (result,) = play.runner.results(0, range(1))
        again.stop()
    assert (result.failure, result.reward) == ("", 0.2)
    assert result.num_tries > 1


def test_tokens_of_another_version_are_sampled_again(
    run: RunFolder, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment(run, TALKS, tries=1) as play:
        prompts = [Prompt(0, "begin ", (1,), {"turns": 1}, messages=CHAT)]
        monkeypatch.setattr("rlboost_runtime.trainer.episodes.runner.LOST_TRIES", 2)
        play.runner.play(StepOfEpisodes(0, 7, 100, prompts, [1]))
        play.wait(lambda: bool(play.ended))
        (result,) = play.runner.results(0, range(1))
    assert (result.failure, result.problem) == (
        EpisodeFailure.LOST,
        "its tokens are of several policy versions",
    )


def test_a_trainer_that_comes_back_plays_only_what_was_not_over(run: RunFolder, endpoint: Endpoint) -> None:
    rows = [{"turns": 2}, {"turns": 2}]  # either may be over first
    with environment(run, TALKS) as play:
        first = play(rows)
    (kept,) = run.episodes.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-5])
    asked = len(endpoint.coordinator.asked)
    with environment(run, TALKS) as play:
        second = play(rows)
    assert any(new == old for new, old in zip(second, first, strict=True)), "the one whose record is whole"
    assert len(endpoint.coordinator.asked) == asked + 2, "the other's turns"
    assert second[1].reward == first[1].reward
    play.runner.saved(0)
    assert not list(run.episodes.iterdir())


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        ("class Env: pass", "Env", "Env has no method reset"),
        ("class Env:\n    def reset(self): ...", "Env", "neither a method step nor a tool"),
        ("class Env:\n    def reset(self): ...\n    def f(self, x): ...", "Env", "parameter x has no type"),
        ("def play(client, row): ...", "play", "neither a class nor an async function"),
        ("async def play(row): ...", "play", "two parameters: client and row"),
        ("import nonsense_that_is_not_there", "Env", "env.py:1: ModuleNotFoundError"),
        ("x = 1", "Env", "has no function Env"),
    ],
)
def test_an_environment_that_cannot_be_played_is_said_at_the_start(
    run: RunFolder, code: str, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem), environment(run, code, python=f"env.py:{name}"):
        pass


def test_no_process_is_left(run: RunFolder, endpoint: Endpoint) -> None:
    mine = psutil.Process(os.getpid())
    with environment(run, TALKS, processes=3) as play:
        play([{"turns": 2}] * 6)
        assert any("episodes.child" in " ".join(each.cmdline()) for each in mine.children(recursive=True))
    assert not any("episodes.child" in " ".join(each.cmdline()) for each in mine.children(recursive=True))


def test_a_broken_environment_is_noticed_early() -> None:
    def left_out() -> EpisodeResult:
        return EpisodeResult(NOTHING, None, str(EpisodeFailure.RAISED), "env.py:3: KeyError: 'x'")

    watch = EpisodeWatch("env.py:Env")
    watch.saw(left_out() for _ in range(HOPELESS - 1))
    with pytest.raises(RuntimeFault, match=r"failed for the first 16 episodes; the last one raised an error"):
        watch.saw([left_out()])
    good = EpisodeWatch("env.py:Env")
    good.saw([EpisodeResult(NOTHING, 1.0)])
    good.saw(left_out() for _ in range(100))
    with pytest.raises(RuntimeFault, match="failed for all 3 episodes of the step"):
        require_some_episode([left_out()] * 3, "env.py:Env")
