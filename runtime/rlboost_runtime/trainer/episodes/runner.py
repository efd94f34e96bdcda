"""Plays the episodes of the step that is rolled out, in processes of the user's code, and collects what was
sampled.

It has a thread with an event loop. An episode is opened at the endpoint, played by the process with the
fewest, and closed at the endpoint, which returns its samples. `outcome` has the rule for failures.
Guarantees: every episode of a step ends once, with its samples or left out; one that is over is on disk
before anybody learns of it; all tokens of an episode are of the step's policy version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2
import msgspec

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.inference.episodes import (
    SOCKET_NAME,
    EpisodeClock,
    EpisodeOpening,
    EpisodeRecord,
)
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.episode_failures import EpisodeFailure
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.security import read_token
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.episode_process import EpisodeProcess
from rlboost_runtime.trainer.episodes.outcome import (
    NOTHING,
    EpisodeCall,
    EpisodeResult,
    EpisodeSetup,
    Played,
)
from rlboost_runtime.trainer.episodes.results import EpisodeFiles, StepKey
from rlboost_runtime.trainer.episodes.taskset import taskset_setup
from rlboost_runtime.trainer.rewards.sandbox import Sandbox
from rlboost_runtime.trainer.rewards.scorer import default_processes, memory_limit

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between two attempts to reach an endpoint that restarts."""
SUSPECTS = 2
"""Episodes that are played in processes of their own at a time: each has to load the environment."""
LOST_TRIES = 20
"""So often an episode is begun again that was lost; then it is left out, too."""
WATCH_S = 1.0
GRACE_S = 5.0
"""A process ends an episode by itself; one that has not after so much longer hangs, and is killed."""

Ended = Callable[[int, int, int], None]
"""Called with step, number and sampled tokens of an episode that is over."""
_decode_record = msgspec.msgpack.Decoder(EpisodeRecord).decode
_decode_clock = msgspec.msgpack.Decoder(EpisodeClock).decode


@dataclass(frozen=True, slots=True)
class StepOfEpisodes:
    """The episodes of a step: `counts` per prompt, counted through. `first_response`: number of the first
    one's response in the run."""

    step: int
    policy_version: int
    first_response: int
    prompts: Sequence[Prompt]
    counts: Sequence[int]

    def key(self) -> StepKey:
        """Return what its episodes belong to."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt, count in zip(self.prompts, self.counts, strict=True):
            digest.update(repr((prompt.index, prompt.text, count, prompt.evaluation)).encode())
        return StepKey(self.step, self.policy_version, digest.hexdigest())


def setup_of(job: Job, files: Path, tokenizer: Path) -> EpisodeSetup:
    """Return how a job's episodes are played; its files lie in `files`. Raises what `taskset_setup` does."""
    settings = job.episodes
    assert settings is not None
    return EpisodeSetup(
        folder=str(files.absolute()), python=settings.python,
        command=None if settings.command is None else tuple(settings.command),
        max_turns=settings.max_turns, timeout_s=settings.timeout_s,
        memory_bytes=memory_limit(job.reward_memory_mib), openenv=settings.openenv,
        taskset=None if settings.verifiers is None
        else taskset_setup(settings.verifiers, files, tokenizer),
    )  # fmt: skip


def try_to_load(job: Job, files: Path, scratch: Path) -> None:
    """Load a job's environment in a process as a run does, and end that. Raises `ConfigError`."""

    async def load() -> None:
        sandbox = Sandbox.of(job).or_off(lambda problem: None)
        log_file = scratch / "environment.log"
        process = EpisodeProcess(
            setup_of(job, files, scratch / "tokenizer"), scratch / "sockets", log_file, sandbox
        )
        await process.start()
        await process.kill()

    asyncio.run(load())


class EpisodeRunner:
    """Plays episodes; `with` starts and ends its thread and processes."""

    def __init__(self, job: Job, run: RunFolder, log_file: Path) -> None:
        """`job` has an environment."""
        settings = job.episodes
        assert settings is not None
        self.name = settings.name
        self._job = job
        self._run = run
        self._settings = settings
        self._log_file = log_file
        self._owner = secrets.token_hex(8)
        self._on_end: Ended = lambda step, number, num_tokens: None
        self._on_problem: Callable[[BaseException], None] = lambda problem: None
        self._files = EpisodeFiles(run.episodes)
        self._num_processes = settings.processes or default_processes()
        self._results: dict[int, dict[int, EpisodeResult]] = {}
        self._playing: StepOfEpisodes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._problem: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._leave: asyncio.Event
        self._thread = threading.Thread(target=self._main, name="episodes", daemon=True)

    # --- for the training thread and the stream's ----------------------------------------------------------

    def __enter__(self) -> Self:
        """Start, and load the environment. Raises `ConfigError`."""
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leave.set)
            self._thread.join()

    def on_end(self, ended: Ended, failed: Callable[[BaseException], None]) -> None:
        """Have `ended` called for each episode that is over, and `failed` if no more can be played; both on a
        thread of its own."""
        self._on_end, self._on_problem = ended, failed

    def play(self, step: StepOfEpisodes) -> None:
        """Play a step's episodes; those of a former step that are not over end. Idempotent."""
        self._loop.call_soon_threadsafe(self._begin, step)

    def results(self, step: int, numbers: range) -> list[EpisodeResult]:
        """Return episodes that are over."""
        return [self._results[step][number] for number in numbers]

    def trained(self, step: int) -> None:
        """Forget a step that is trained."""
        self._results.pop(step, None)

    def saved(self, step: int) -> None:
        """A step is in a checkpoint: its episodes are needed no more."""
        if not self._job.evidence.keep_journal:
            self._files.drop_through(step)

    # --- the thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as problem:  # noqa: BLE001 - the thread's edge: raised by whoever waits
            self._problem = problem
            event(log, "episodes.failed", level=logging.ERROR, exc_info=not isinstance(problem, ConfigError))
            self._on_problem(problem)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        self._sandbox = Sandbox.of(self._job).or_off(
            lambda problem: event(log, "environment.no_sandbox", level=logging.WARNING, problem=problem)
        )
        self._setup = setup_of(self._job, self._run.files, self._run.tokenizer)
        self._slots = asyncio.Semaphore(self._settings.concurrency)
        self._suspects = asyncio.Semaphore(SUSPECTS)
        self._starting = asyncio.Lock()
        self._processes = [await self._new_process()]
        async with self._connected() as self._endpoint:
            self._started.set()
            await self._leave.wait()
            await self._end_all()
        for process in self._processes:
            await process.kill()
        self._files.close()

    def _connected(self) -> httpx2.AsyncClient:
        folder = self._run.sockets
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        return httpx2.AsyncClient(
            base_url="http://rlboost", timeout=httpx2.Timeout(60.0), trust_env=False,
            headers={"Authorization": f"Bearer {read_token(self._run)}"},
            transport=httpx2.AsyncHTTPTransport(uds=f"/proc/self/fd/{self._folder}/{SOCKET_NAME}"),
        )  # fmt: skip

    async def _new_process(self) -> EpisodeProcess:
        process = EpisodeProcess(self._setup, self._run.sockets, self._log_file, self._sandbox)
        await process.start()
        return process

    # --- a step --------------------------------------------------------------------------------------------

    def _begin(self, step: StepOfEpisodes) -> None:
        if self._playing is not None and self._playing.key() == step.key():
            self._tell_again(step)
            return
        for task in self._tasks:
            task.cancel()
        self._playing = step
        known = self._files.begin(step.key())
        self._results[step.step] = dict(known)
        event(
            log, "episodes.begun", step=step.step, policy_version=step.policy_version,
            episodes=sum(step.counts), known=len(known),
        )  # fmt: skip
        self._tell_again(step)
        number = 0
        for prompt, count in zip(step.prompts, step.counts, strict=True):
            for _ in range(count):
                if number not in known:
                    task = self._loop.create_task(self._play(step, number, prompt))
                    self._tasks.add(task)
                    task.add_done_callback(self._played)
                number += 1

    def _tell_again(self, step: StepOfEpisodes) -> None:
        for number, result in self._results[step.step].items():
            self._on_end(step.step, number, result.num_sampled)

    def _played(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            event(log, "episodes.failed", level=logging.ERROR, problem=repr(problem))
            self._on_problem(problem)

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _play(self, step: StepOfEpisodes, number: int, prompt: Prompt) -> None:
        """Play an episode until it is over or left out."""
        tries = losses = 0
        is_suspect = False
        while True:
            async with self._suspects if is_suspect else self._slots:
                began = time.monotonic()
                played, record = await self._attempt(step, number, prompt, alone=is_suspect)
            failure, problem = played.failure, played.problem
            if played.num_ended > 1:
                is_suspect = True
                continue
            if record is None or (failure and record.problem):
                failure, problem = EpisodeFailure.LOST, record.problem if record else "the endpoint was lost"
            elif not failure and set(record.versions) - {step.policy_version}:
                failure, problem = EpisodeFailure.LOST, "its tokens are of several policy versions"
            elif not failure and (num := len(played.rewards or ())) > record.num_turns:
                failure = EpisodeFailure.NO_NUMBER
                problem = f"returned {num} rewards for {record.num_turns} turns"
            if failure == EpisodeFailure.LOST:
                losses += 1
            else:
                tries += 1
            if not failure:
                assert record is not None
                result = EpisodeResult(
                    record, played.reward, num_tries=tries + losses, rewards=played.rewards,
                    environment_s=max(0.0, time.monotonic() - began - record.model_s),
                )  # fmt: skip
                break
            event(
                log, "episode.failed", level=logging.WARNING, step=step.step, episode=number, kind=failure,
                problem=problem, tries=tries,
            )  # fmt: skip
            if tries >= self._settings.tries or losses >= LOST_TRIES:
                result = EpisodeResult(NOTHING, None, str(failure), problem, tries + losses)
                break
            await asyncio.sleep(RETRY_S)
        self._files.add(number, result)
        self._results[step.step][number] = result
        self._on_end(step.step, number, result.num_sampled)

    async def _attempt(
        self, step: StepOfEpisodes, number: int, prompt: Prompt, *, alone: bool
    ) -> tuple[Played, EpisodeRecord | None]:
        sampling = prompt.sampling(self._job.algorithm)
        name, key = f"{step.step}-{number}-{secrets.token_hex(6)}", secrets.token_urlsafe(24)
        opening = EpisodeOpening(
            name, self._owner, key, step.first_response + number, self._settings.max_turns,
            sampling.temperature, sampling.top_p, prompt.chat.template, dict(prompt.chat.args),
        )  # fmt: skip
        await self._open(opening)
        process = await (self._new_process() if alone else self._process())
        url = str((read_json(self._run.episodes_endpoint) or {}).get("url", ""))
        call = EpisodeCall(
            0,
            name,
            key,
            prompt.text,
            prompt.messages,
            prompt.row,
            url,
            prompt.chat.template,
            prompt.chat.args,
        )
        playing = asyncio.create_task(process.play(call))
        try:
            await self._watch(playing, process, name)
            played = await playing
        finally:
            playing.cancel()
            if alone or (process.is_retired and not process.num_open):
                await process.kill()
        return played, await self._close(name)

    async def _watch(self, playing: asyncio.Task[Played], process: EpisodeProcess, name: str) -> None:
        """Wait for an episode; kill a process that does not end it in time. Where the process does not know
        the time, have it end the episode first."""
        began = time.monotonic()
        is_told = self._setup.times_itself
        limit_s = self._settings.timeout_s + (GRACE_S if is_told else 0.0)
        while not playing.done():
            left = began + limit_s - time.monotonic()
            await asyncio.wait({playing}, timeout=max(WATCH_S, left))
            if playing.done() or time.monotonic() - began < limit_s:
                continue
            clock = await self._clock(name)
            if clock is None or clock.is_waiting or time.monotonic() - began - clock.model_s < limit_s:
                continue
            if is_told:
                await process.kill(hung=True)
            else:
                process.end(name)
                is_told, limit_s = True, time.monotonic() - began - clock.model_s + GRACE_S

    async def _process(self) -> EpisodeProcess:
        """Return a process that may play another episode."""
        async with self._starting:
            for process in [p for p in self._processes if not p.is_alive and not p.num_open]:
                self._processes.remove(process)
                await process.kill()
            alive = [process for process in self._processes if process.is_alive]
            if len(alive) < self._num_processes and all(process.num_open for process in alive):
                alive.append(await self._new_process())
                self._processes.append(alive[-1])
            return min(alive, key=lambda each: each.num_open)

    # --- the endpoint --------------------------------------------------------------------------------------

    async def _open(self, opening: EpisodeOpening) -> None:
        """Open an episode; waits for an endpoint that restarts."""
        while True:
            with contextlib.suppress(httpx2.TransportError):
                found = await self._endpoint.post("/episodes", content=msgspec.msgpack.encode(opening))
                if found.status_code != httpx2.codes.SERVICE_UNAVAILABLE:
                    found.raise_for_status()
                    return
            await asyncio.sleep(RETRY_S)

    async def _close(self, name: str) -> EpisodeRecord | None:
        """Return what was recorded of an episode; None: it is lost."""
        found = await self._asked("DELETE", f"/episodes/{name}")
        return None if found is None else _decode_record(found)

    async def _clock(self, name: str) -> EpisodeClock | None:
        found = await self._asked("GET", f"/episodes/{name}/clock")
        return None if found is None else _decode_clock(found)

    async def _asked(self, method: str, path: str) -> bytes | None:
        """Return the answer of the endpoint; None where it cannot be reached or knows nothing of that."""
        try:
            found = await self._endpoint.request(method, path)
        except httpx2.TransportError:
            return None
        return found.content if found.is_success else None
