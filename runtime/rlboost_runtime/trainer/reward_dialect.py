"""What a reward's endpoint is sent and how its answer reads, for each way in which endpoints speak.

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

import json
import re
from typing import Protocol, assert_never

from rlboost_runtime.job import HttpReward
from rlboost_runtime.trainer.reward_child import Answer, RewardCall, judge

JUDGE = """\
Mark the answer to a question with a whole number from 0 (wrong or useless) to {best_mark} (right, complete).

# Question
{prompt}

# Answer
{response}"""
"""What a model is asked where the job says nothing."""

_PLACE = re.compile(r"\{(\w+)\}")
_TOLD = 200  # characters of an answer that a person is shown


class Dialect(Protocol):
    """One way of asking."""

    def request(self, call: RewardCall) -> object:
        """Return the body, as JSON values. Raises `LookupError` for a row that lacks a field."""

    def read(self, answer: object) -> Answer:
        """Return the reward in an endpoint's answer. Never raises."""


def dialect_of(reward: HttpReward) -> Dialect:
    """Return the way in which the reward's endpoint speaks."""
    match reward.speaks:
        case "plain":
            return _Plain()
        case "chat":
            return _Chat(reward)
        case "pooling":
            return _Pooling(reward)
        case _:
            assert_never(reward.speaks)


class _Plain:
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
        said = [("user", call.prompt), ("assistant", call.response)]
        messages = [{"role": role, "content": content} for role, content in said]
        return {"model": self._model, "messages": messages, "use_activation": False}

    def read(self, answer: object) -> Answer:
        try:
            found = answer["data"][0]["data"]  # type: ignore[index]
            while isinstance(found, list):
                found = found[-1]
        except (LookupError, TypeError):
            return Answer(failure="not_a_number", problem=f"no score in {answer!r:.{_TOLD}}")
        return judge(found)
