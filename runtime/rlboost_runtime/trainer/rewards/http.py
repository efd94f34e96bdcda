"""Rewards from an HTTP endpoint: many requests at once, each with a deadline, tried again where that helps.

A request must be safe to repeat: one whose answer got lost is sent again. All tries of a response together
have `timeout_s`; connections that fail and answers that mean "later" (429, 502, 503, 504) are tried again
after a pause with jitter, or after `Retry-After`. Anything else is a failure at once.

Requests and answers by dialect:

- plain: {"prompt", "response", "row"} -> {"reward": number}, or just the number.
- chat: an OpenAI-compatible server's chat completions, greedily. The served model is asked for a mark from 0
  to `best_mark`, and its answer is bound to {"mark": whole number} by a JSON schema (structured outputs; an
  answer of a server without them counts if it is such JSON by itself). The reward is mark / best_mark.
- pooling: vLLM's pooling endpoint (`vllm serve MODEL --runner pooling`) with a sequence-classification reward
  model; prompt and response are a conversation. The reward is the last number that it gives, raw: without
  the sigmoid that vLLM puts behind classifiers, and of models that score every token the last token's.

Pure: no text of a prompt or a response is ever taken for a placeholder.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import aiohttp

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import HttpReward
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.seams import Backoff
from rlboost_runtime.trainer.rewards.child import judge
from rlboost_runtime.trainer.rewards.outcome import Answer, Reward, RewardCall, failed

LATER = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
"""An answer is a number, or a mark with what a model thought before; more is a mistake and not worth the
memory."""


class HttpRewards:
    """Asks the endpoint, from a thread of its own. `submit` may be called from any thread."""

    def __init__(self, reward: HttpReward, *, timeout_s: float) -> None:
        if not reward.http.startswith(("http://", "https://")):
            raise ConfigError(
                f"reward: {reward.http} is not an http or https URL", "write a URL such as https://HOST/score"
            )
        self._reward = reward
        self._dialect = _DIALECTS[reward.speaks](reward)
        self._headers = {"Content-Type": "application/json", **_authorisation(reward.key_variable)}
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(reward.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-http")
        self._thread.start()

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Reward]]:
        """Ask in the background; the futures never raise unless they are cancelled by `close`."""
        return [asyncio.run_coroutine_threadsafe(self._score(call), self._loop) for call in calls]

    def close(self) -> None:
        """Drop what waits and close the connections. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _hang_up(self) -> None:
        ours = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not ours]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _score(self, call: RewardCall) -> Reward:
        try:
            data = json.dumps(self._dialect.request(call), default=str).encode()
        except (TypeError, ValueError, RecursionError, LookupError) as problem:
            return failed(RewardFailure.RAISED, f"no request can be built from the row: {problem}")
        async with self._slots:  # the deadline begins once it is this one's turn
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._try_again_and_again(data)
            except TimeoutError:
                return failed(RewardFailure.TIMEOUT, f"no answer within {self._timeout_s:g} s")
        if answer.failure:
            return failed(RewardFailure(answer.failure), answer.problem)
        return Reward(answer.reward)

    async def _try_again_and_again(self, data: bytes) -> Answer:
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        for tries_left in reversed(range(self._reward.tries)):
            wait_s = backoff.next_s()
            try:
                found = await self._ask(data)
            except (aiohttp.ClientError, OSError) as problem:
                found = _Later(f"{type(problem).__name__}: {problem}", None)
            if isinstance(found, Answer):
                return found
            if not tries_left:
                break
            await asyncio.sleep(wait_s if found.after_s is None else found.after_s)
        return Answer(failure="raised", problem=f"{found.problem} ({self._reward.tries} tries)")

    async def _ask(self, data: bytes) -> Answer | _Later:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),  # the whole has one
                connector=aiohttp.TCPConnector(limit=self._reward.concurrency),
                headers=self._headers,
            )
        async with self._session.post(self._reward.http, data=data) as response:
            if response.status in LATER:
                return _Later(f"HTTP {response.status} {response.reason}", _retry_after(response))
            if response.status != 200:
                return Answer(failure="raised", problem=f"HTTP {response.status} {response.reason}")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    break
            return self._read(bytes(body))

    def _read(self, body: bytes) -> Answer:
        if len(body) > MAX_ANSWER_BYTES:
            return Answer(failure="not_a_number", problem=f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            return Answer(failure="not_a_number", problem=f"answered {body[:200]!r}, which is not JSON")
        return self._dialect.read(answer)


@dataclass(frozen=True, slots=True)
class _Later:
    """The request must be repeated, after `after_s` if the endpoint gave that."""

    problem: str
    after_s: float | None


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _authorisation(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"reward.key_variable: the environment variable {variable} is not set on the head",
            f"export {variable} before rlboost launch",
        )
    return {"Authorization": f"Bearer {key}"}


JUDGE = """\
Mark the answer to a question with a whole number from 0 (wrong or useless) to {best_mark} (right, complete).

# Question
{prompt}

# Answer
{response}"""
"""The default instruction to a model that judges."""

_PLACE = re.compile(r"\{(\w+)\}")
_TOLD = 200  # characters of an answer that a person is shown


class _Plain:
    """Of every dialect: `request` returns the body, as JSON values, and raises `LookupError` for a row that
    lacks a field; `read` returns the reward in an endpoint's answer and never raises."""

    def __init__(self, _: HttpReward) -> None:
        pass

    def request(self, call: RewardCall) -> object:
        return {"prompt": call.prompt, "response": call.response, "row": call.row}

    def read(self, answer: object) -> Answer:
        return judge(answer.get("reward") if isinstance(answer, dict) else answer)


class _Chat:
    def __init__(self, reward: HttpReward) -> None:
        self._reward = reward
        self._question = JUDGE if reward.question is None else reward.question
        mark = {"type": "integer", "enum": list(range(reward.best_mark + 1))}
        schema = {
            "type": "object",
            "properties": {"mark": mark},
            "required": ["mark"],
            "additionalProperties": False,
        }
        self._fixed = {
            "model": reward.model,
            "temperature": 0,
            "max_tokens": reward.max_answer_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "mark", "strict": True, "schema": schema},
            },
        }

    def request(self, call: RewardCall) -> object:
        known = {
            **call.row,
            "prompt": call.prompt,
            "response": call.response,
            "best_mark": self._reward.best_mark,
        }

        def fill(place: re.Match[str]) -> str:
            if place[1] not in known:
                raise LookupError(f"reward.question has {place[0]}, but the row has no such field")
            return str(known[place[1]])

        question = _PLACE.sub(fill, self._question)
        return {**self._fixed, "messages": [{"role": "user", "content": question}]}

    def read(self, answer: object) -> Answer:
        try:
            content = answer["choices"][0]["message"]["content"]  # type: ignore[index]
            mark = json.loads(content)["mark"]
        except (LookupError, TypeError, ValueError, RecursionError):
            return Answer(failure="not_a_number", problem=f"no mark in {answer!r:.{_TOLD}}")
        if type(mark) is not int or not 0 <= mark <= self._reward.best_mark:
            return Answer(
                failure="not_a_number", problem=f"mark {mark!r:.{_TOLD}}, not 0 to {self._reward.best_mark}"
            )
        return Answer(reward=mark / self._reward.best_mark)


class _Pooling:
    def __init__(self, reward: HttpReward) -> None:
        self._model = reward.model

    def request(self, call: RewardCall) -> object:
        turns = [("user", call.prompt), ("assistant", call.response)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"model": self._model, "messages": messages, "use_activation": False}

    def read(self, answer: object) -> Answer:
        try:
            found = answer["data"][0]["data"]  # type: ignore[index]
            while isinstance(found, list):
                found = found[-1]
        except (LookupError, TypeError):
            return Answer(failure="not_a_number", problem=f"no score in {answer!r:.{_TOLD}}")
        return judge(found)


_DIALECTS: dict[str, Callable[[HttpReward], _Plain | _Chat | _Pooling]] = {
    "plain": _Plain,
    "chat": _Chat,
    "pooling": _Pooling,
}
