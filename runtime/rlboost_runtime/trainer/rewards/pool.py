"""A pool of child processes that compute rewards, so that a user's function cannot hurt the trainer.

Each child has a deadline per call and a limit on its memory. One that hangs or dies is killed with everything
in its session and a new one takes its place; one that runs out of memory says so and goes on. What the
function prints goes to a log file, the first megabyte per child; the rest is read and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.trainer.rewards.child import receive, send
from rlboost_runtime.trainer.rewards.outcome import Answer, Reward, RewardCall, Setup, failed
from rlboost_runtime.trainer.rewards.sandbox import OFF, Sandbox

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""A child may take so long to import the user's module (which may load a model)."""
OUTPUT_LIMIT_BYTES = 1024 * 1024
"""Of what a child prints, so much is kept."""

GRACE_S = 1.0
"""An asynchronous function is given so much longer than its own deadline before its process is killed."""

_SIGNALS = {each.value for each in signal.Signals}

_loaded = msgspec.msgpack.Decoder(Answer)
_answers = msgspec.msgpack.Decoder(list[Answer])


class RewardPool:
    """Scores responses in child processes; `submit` may be called from any thread. Close it at the end."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        *,
        timeout_s: float,
        log_file: Path,
        num_children: int,
        sandbox: Sandbox = OFF,
    ) -> None:
        """Raises `ConfigError` if the function cannot be loaded, or the sandbox is required and missing."""
        sandbox = sandbox.or_off(
            lambda problem: event(
                log, "reward.no_sandbox", level=logging.WARNING, reward=name, problem=problem
            )
        )
        self._children = [_Child(setup, name, timeout_s, log_file, sandbox) for _ in range(num_children)]
        self._children[0].start()  # here, so that a function that cannot be loaded is said at once
        self._takes_groups = self._children[0].takes_groups
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        self._pool = ThreadPoolExecutor(num_children, thread_name_prefix="reward")

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Reward]]:
        """Score the responses to one prompt in the background; the futures never raise."""
        if self._takes_groups:
            return _spread(self._pool.submit(self._score, calls), len(calls))
        return [future for call in calls for future in _spread(self._pool.submit(self._score, [call]), 1)]

    def close(self) -> None:
        """End the children; what still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._pool.shutdown(wait=True)
        for child in self._children:
            child.kill()  # a thread may have started one anew meanwhile

    def _score(self, calls: Sequence[RewardCall]) -> list[Reward]:
        child = self._idle.get()  # never empty: there are as many children as threads
        try:
            return child.score(calls)
        finally:
            self._idle.put(child)


def _spread(whole: Future[list[Reward]], num: int) -> list[Future[Reward]]:
    """Return a future for each of the `num` rewards."""
    parts: list[Future[Reward]] = [Future() for _ in range(num)]

    def done(finished: Future[list[Reward]]) -> None:
        for number, part in enumerate(parts):
            if finished.cancelled():
                part.cancel()
            else:
                part.set_result(finished.result()[number])

    whole.add_done_callback(done)
    return parts


class _Child:
    """One child process and its replacement after each death. Used by one thread; another may `close` it."""

    def __init__(self, setup: Setup, name: str, timeout_s: float, log_file: Path, sandbox: Sandbox) -> None:
        self._setup = setup
        self._sandbox = sandbox
        self._name = name
        self._timeout_s = timeout_s
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.takes_groups = False
        """True once it has loaded a function that gets all responses to a prompt at once."""

    def score(self, calls: Sequence[RewardCall]) -> list[Reward]:
        """Return the rewards of responses to one prompt. Never raises."""
        found = self._answers(calls)
        return [found] * len(calls) if isinstance(found, Reward) else [_reward(answer) for answer in found]

    def _answers(self, calls: Sequence[RewardCall]) -> list[Answer] | Reward:
        """Return the answers; else the failure of all."""
        try:
            data = pickle.dumps(list(calls))
        except Exception as problem:  # noqa: BLE001 - whatever the row's objects say to being pickled
            return failed(
                RewardFailure.RAISED, f"the row cannot be sent to the reward process: {problem!r:.200}"
            )
        try:
            process = self._process  # `close` may set it to None at any time
            if process is None or process.poll() is not None:
                self.start()
            return self._exchange(data)
        except TimeoutError:
            self._restart_after(RewardFailure.TIMEOUT)
            return failed(RewardFailure.TIMEOUT, f"no answer within {self._timeout_s:g} s")
        except (EOFError, OSError, msgspec.DecodeError) as exc:
            how = self._restart_after(RewardFailure.DIED)
            return failed(RewardFailure.DIED, f"its process ended: {how or exc}")
        except ConfigError as exc:  # it could be loaded before, but not this time
            return failed(RewardFailure.DIED, exc.problem)

    def start(self) -> None:
        """Start the process and let it load the function.

        Raises `ConfigError` if that fails, `EOFError` after `close`.
        """
        if self._is_closed:
            raise EOFError("the reward is closed")
        self.kill()
        ours, theirs = socket.socketpair()
        with theirs:
            module = "rlboost_runtime.trainer.rewards.child"
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            command, environment = self._sandbox.around(
                command, Path(self._setup.folder), child_environment()
            )
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
            )  # fmt: skip
        self._socket = ours
        assert process.stdout is not None
        threading.Thread(target=_keep_output, args=(process.stdout, self._log_file), daemon=True).start()
        self.takes_groups = self._load(ours)

    def _load(self, connection: socket.socket) -> bool:
        try:
            connection.settimeout(LOAD_TIMEOUT_S)
            send(connection, pickle.dumps(self._setup))
            answer = _loaded.decode(receive(connection))
        except (EOFError, OSError) as exc:
            self.kill()
            raise ConfigError(
                f"reward: {self._name} could not be loaded: its process ended or hung ({exc!r})",
                f"importing the file must return within {LOAD_TIMEOUT_S:g} s; what it printed is in"
                f" {self._log_file.name}",
            ) from exc
        if answer.failure:
            self.kill()
            raise ConfigError(
                f"reward: {self._name} cannot be loaded: {answer.problem.strip()}",
                "fix the file and try again",
            )
        return answer.takes_groups

    def _exchange(self, calls: bytes) -> list[Answer]:
        connection = self._socket
        if connection is None:
            raise EOFError("the reward is closed")
        connection.settimeout(self._timeout_s + GRACE_S * self.takes_groups)
        send(connection, calls)
        return _answers.decode(receive(connection))

    def _restart_after(self, failure: RewardFailure) -> str:
        how = self.kill()
        if not self._is_closed:
            event(
                log, "reward.child_replaced", level=logging.WARNING,
                reward=self._name, cause=failure, ending=how,
            )  # fmt: skip
        return how

    def close(self) -> None:
        """End the process for good: a call that it is answering fails, and no other process is started."""
        self._is_closed = True
        self.kill()

    def kill(self) -> str:
        """End the process and everything in its session; return how it had ended by itself, "" if it had
        not."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return ""
        how = _ending(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return how


def _reward(answer: Answer) -> Reward:
    return failed(RewardFailure(answer.failure), answer.problem) if answer.failure else Reward(answer.reward)


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=0.2)  # its socket closes a moment before it can be waited for
    except subprocess.TimeoutExpired:
        return ""
    number = -code if code < 0 else code - 128  # as a shell, and bubblewrap, put it
    return f"signal {signal.Signals(number).name}" if number in _SIGNALS else f"exit code {code}"


def child_environment() -> dict[str, str]:
    """Return ours, with our import path first: the child must find this package, however the trainer was
    started."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _keep_output(stream: IO[bytes], path: Path) -> None:
    """Append the first bytes of `stream` to `path`; read and drop the rest, so that the child never
    blocks."""
    left = OUTPUT_LIMIT_BYTES
    with stream, path.open("ab") as file:
        while part := os.read(stream.fileno(), 65536):
            if left > 0:
                file.write(part[:left])
                file.flush()
                left -= len(part)
                if left <= 0:
                    file.write(b"\n[further output of this process is dropped]\n")
                    file.flush()
