"""What front and core say to each other: typed messages, in MessagePack, one frame each.

A frame is its length in four bytes, little-endian, and the message. Both sides are of one version: the
core is started by the front.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sagellm.core import EngineError, FinishReason, Namespace, RequestId, SequenceId
from sagellm.engines.core.engine_core import TokenOutput
from sagellm.engines.input_processor import RequestLimits
from sagellm.engines.sampling.params import SamplingParams

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that passed all checks. Its sequences share everything but their id and seed."""

    request_id: RequestId
    token_ids: bytes  # packed int32
    max_tokens: int
    priority: int
    arrival_ns: int  # of the clock that all processes of a machine share
    namespace: Namespace
    params: SamplingParams
    stop_token_ids: frozenset[int]
    sequences: list[tuple[SequenceId, int]]  # id and seed


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """To the core: queue these."""

    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the core: end these sequences; those that have ended are passed over."""

    sequence_ids: list[SequenceId]
    finish_reason: FinishReason


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """To the core: run an operation between two steps and answer with a Reply of the same number."""

    number: int
    operation: str
    arguments: dict[str, Any]


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """From the core, first of all: what it runs. Its model is loaded."""

    config: dict[str, Any]  # dotted keys, with what was chosen for "auto"
    limits: RequestLimits
    default_params: SamplingParams
    pid: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """From the core, instead of Hello: why it cannot start."""

    kind: str  # the error's class
    message: str


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """From the core: what a step did to the sequences of this connection."""

    outputs: list[TokenOutput]


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """From the core: the answer to a Call, or why there is none."""

    number: int
    result: Any = None
    error: str | None = None
    error_kind: str | None = None


ToCore = Add | Abort | Call
FromCore = Hello | Failed | Step | Reply

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToCore | FromCore) -> bytes:
    """Return a message as a frame."""
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    size = len(frame) - _LENGTH_BYTES
    if size > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {size} bytes is longer than a frame may be ({MAX_FRAME_BYTES})")
    frame[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "little")
    return bytes(frame)


class FrameReader:
    """Cuts what arrives into messages; a frame may come in any number of pieces."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take in bytes and return the messages that are complete.

        Raises EngineError for what is no message of ours; the connection is of no use then.
        """
        self._pending += data
        messages: list[Any] = []
        begin = 0
        while (body := begin + _LENGTH_BYTES) <= len(self._pending):
            size = int.from_bytes(self._pending[begin:body], "little")
            if size > MAX_FRAME_BYTES:
                raise EngineError(f"a frame claims {size} bytes; at most {MAX_FRAME_BYTES} are read")
            if len(self._pending) < body + size:
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._pending)[body : body + size]))
            except msgspec.MsgspecError as error:
                raise EngineError(f"a message cannot be read: {error}") from error
            begin = body + size
        del self._pending[:begin]
        return messages
