"""A coordinator that a test plays for the endpoint, and a model of bytes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from rlboost_runtime.engines.emulated import emulated_response
from rlboost_runtime.inference.model import EndpointModel
from rlboost_runtime.protocol.messages import (
    EndpointHello,
    EndpointWelcome,
    GenerateMessage,
    Sampling,
    TokensMessage,
    WithdrawMessage,
    encode,
    endpoint_message_decoder,
)

STOP_ID = 10  # a line's end
LENGTH = 300


class Letters:
    """A tokenizer whose tokens are bytes, with a chat template of one line per message."""

    chat_template = "lines"

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(i for i in token_ids if i < 256).decode("latin-1")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(i) for i in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: Any, **options: Any) -> str:
        if messages[0]["role"] == "nobody":
            raise ValueError("unknown role")
        lines = [f"{m['role']}: {m['content']}" for m in messages]
        return "\n".join([*lines, f"tools: {len(tools or ())}", ""])


class Coordinator:
    """The test's end of the connection: answers like emulated engines, three tokens at a time."""

    def __init__(self) -> None:
        self.asked: list[GenerateMessage] = []
        self.open: set[str] = set()
        self.withdrawn: list[str] = []
        self.drop_after: int | None = None
        """Tokens after which the connection is lost, once."""
        self.longest = LENGTH
        """Tokens of the longest response."""
        self.problem = ""
        self.holds = asyncio.Event()
        self.holds.set()

    async def dial(self) -> Line:
        return Line(self)


class Line:
    def __init__(self, coordinator: Coordinator) -> None:
        self._its, self._down = coordinator, asyncio.Queue[bytes | None]()
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, message: bytes) -> None:
        match endpoint_message_decoder.decode(message):
            case EndpointHello():
                self._down.put_nowait(encode(EndpointWelcome(0)))
            case GenerateMessage() as asked:
                self._its.asked.append(asked)
                self._its.open.add(asked.request_id)
                self._tasks.append(asyncio.create_task(self._answer(asked)))
            case WithdrawMessage(request_id=name):
                self._its.open.discard(name)
                self._its.withdrawn.append(name)

    async def _answer(self, asked: GenerateMessage) -> None:
        name, its = asked.request_id, self._its
        if its.problem:
            self._down.put_nowait(encode(TokensMessage(name, asked.offset, problem=its.problem)))
            return
        ids, logprobs = emulated_response(
            list(array("i", asked.token_ids)), min(asked.max_tokens, its.longest), asked.sampling
        )
        reason = "stop" if ids[-1] in asked.sampling.stop_token_ids else "length"
        for at in range(asked.offset, len(ids), 3):
            await its.holds.wait()
            await asyncio.sleep(0)
            if its.drop_after is not None and at >= its.drop_after:
                its.drop_after = None
                self._down.put_nowait(None)
                return
            end = at + 3
            self._down.put_nowait(
                encode(
                    TokensMessage(
                        name, at, array("i", ids[at:end]).tobytes(), array("f", logprobs[at:end]).tobytes(),
                        ((0, len(ids[at:end])),), reason if end >= len(ids) else "",
                    )
                )
            )  # fmt: skip

    async def receive(self) -> bytes:
        message = await self._down.get()
        if message is None:
            raise ConnectionError("cut")
        return message

    async def close(self) -> None: ...


MODEL = EndpointModel("tiny", Letters(), (STOP_ID,), LENGTH, 1, Sampling(0.7, 0.9), is_greedy_only=False)
