"""Messages between an engine's parent (the agent) and its child process, over a socket pair.

Each message is a 4-byte big-endian length followed by msgpack; both ends are this machine's and this
version's, so there is no schema number. Tickets pair a command with its `Done`.
"""

from __future__ import annotations

import struct

import msgspec

from rlboost_runtime.engines.base import EngineOutput, EngineSpec, KvCache, Request

_LENGTH = struct.Struct(">I")


class ChannelMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: tagged with its class name."""


# --- parent -> child -------------------------------------------------------------------------------------


class Configure(ChannelMessage, frozen=True):
    """First message."""

    spec: EngineSpec
    parent_pid: int


class Submit(ChannelMessage, frozen=True):
    """Queue requests."""

    requests: list[Request]


class AbortRequests(ChannelMessage, frozen=True):
    """Drop these; `Done` comes after the last output of any of them."""

    ticket: int
    request_ids: list[int]


class LoadWeights(ChannelMessage, frozen=True):
    """Take the version in `folder`."""

    ticket: int
    version: int
    folder: str


class ProbeRequest(ChannelMessage, frozen=True):
    """Continue greedily; `Done` carries ids and logprobs."""

    ticket: int
    token_ids: list[int]
    max_new_tokens: int


class DropWeights(ChannelMessage, frozen=True):
    """Free weights and KV cache (sleep)."""

    ticket: int


class TakeMemory(ChannelMessage, frozen=True):
    """Allow `LoadWeights` again (wake)."""

    ticket: int


class Hold(ChannelMessage, frozen=True):
    """Stop generating (`on`) because the tokens are not being read, or go on."""

    on: bool


class Quit(ChannelMessage, frozen=True):
    """End."""


# --- child -> parent -------------------------------------------------------------------------------------


class Ready(ChannelMessage, frozen=True, omit_defaults=True):
    """The child can load weights. Seconds since its own start, by phase."""

    phases_s: dict[str, float]


class Tokens(ChannelMessage, frozen=True, omit_defaults=True):
    """What one decode step brought."""

    output: EngineOutput
    counter: int
    running: int
    waiting: int
    kv_free_tokens: int | None = None


class Alive(ChannelMessage, frozen=True):
    """The counter moved without tokens: a load, a probe, a long prefill."""

    counter: int


class Done(ChannelMessage, frozen=True, omit_defaults=True):
    """The command under `ticket` is carried out, or failed with `problem`."""

    ticket: int
    problem: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    kv_cache: KvCache | None = None
    """After a load: the cache that the model's batch allocated."""


IdleCommand = LoadWeights | ProbeRequest | DropWeights | TakeMemory
"""A command that needs an engine without requests."""
ToChild = Configure | Submit | AbortRequests | IdleCommand | Hold | Quit
ToParent = Ready | Tokens | Alive | Done

to_child_decoder: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(
    ToChild,
    dec_hook=lambda kind, value: kind(value),  # paths
)
to_parent_decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_encoder = msgspec.msgpack.Encoder(enc_hook=str)


def pack(message: ToChild | ToParent) -> bytes:
    """Return one message, with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies completed by `data`, in order."""
        buffer = self._buffer
        buffer += data
        bodies, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies
