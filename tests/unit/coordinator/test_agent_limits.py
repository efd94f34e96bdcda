"""What a machine that was taken over may send: refused at the door, and no other's tokens are touched."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire

HELLO = wire.AgentHello(wire.SCHEMA, "run", "spot-1/0", "spot-1", "spot", 8, 1000, "vllm")
BEAT = wire.HeartbeatMessage(1, 2, 3, 4.0)
READY = wire.InstanceReadyMessage(3)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (wire.NoticeReceivedMessage(5.0, "cloud"), {"seconds": math.nan}),
        (wire.NoticeReceivedMessage(5.0, "cloud"), {"seconds": math.inf}),
        (wire.NoticeReceivedMessage(5.0, "cloud"), {"seconds": -1.0}),
        (HELLO, {"max_running": 0}),
        (HELLO, {"kv_tokens": 2**60}),
        (HELLO, {"install_s": {"pip": math.nan}}),
        (HELLO, {"engine": "x" * 100_001}),
        (HELLO, {"epoch": -1}),
        (BEAT, {"tokens_per_s": math.nan}),
        (BEAT, {"waiting": -1}),
        (BEAT, {"pulling": (1, -1, 2)}),
        (READY, {"pull_s": math.inf}),
        (READY, {"kv_tokens": -5}),
        (READY, {"sources": {str(i): 1 for i in range(1_001)}}),
        (wire.VersionRefusedMessage(1, "why"), {"problem": "x" * 100_001}),
        (wire.Goodbye("noticed"), {"reason": "x" * 100_001}),
    ],
)
def test_a_number_or_a_text_that_makes_no_sense_is_refused(message: Any, changes: dict[str, Any]) -> None:
    assert wire.agent_message_decoder.decode(wire.encode(message)) == message
    spoilt = msgspec.structs.replace(message, **changes)
    with pytest.raises(msgspec.ValidationError):
        wire.agent_message_decoder.decode(wire.encode(spoilt))


def frame(token_ids: list[int], logprobs: list[float]) -> wire.Frame:
    counts = np.array([len(token_ids)], "<u2").tobytes()
    first = np.zeros(1, "<u4").tobytes()
    columns = np.array(token_ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes()
    return wire.Frame(0, 0, first, first, counts, *columns)


@pytest.mark.parametrize(
    ("token_id", "logprob", "said"),
    [
        (3, math.nan, "a logprob is not a number"),
        (3, -math.inf, "a logprob is not a number"),
        (3, math.inf, "a logprob is not a number"),
        (3, 0.5, "above 0.1"),
        (100, -1.0, "token id 100 is not of a vocabulary of 100"),
        (-1, -1.0, "token id -1 is negative"),
    ],
)
def test_tokens_that_no_engine_can_have_sampled_are_refused_whole(
    token_id: int, logprob: float, said: str
) -> None:
    store = TokenStore()
    store.open_step(0, range(2), [10] * 2, (), 100)
    store.assign(0, 0, "a")
    with pytest.raises(ProtocolError, match=said):
        store.accept(frame([5, token_id, 7], [-1.0, logprob, -1.0]))
    assert store.length(0) == 0
    store.check()
    assert store.accept(frame([5, 99, 7], [-1.0, 0.0, -1e4])).num_accepted == 3
