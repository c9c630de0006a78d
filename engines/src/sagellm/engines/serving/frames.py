"""Frames: a message's length in four bytes, little-endian, and the message. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from sagellm.core import EngineError

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
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
