"""Frames: a message's length in four bytes, little-endian, then the message. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from sagellm.core import EngineError, TokenIds

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4


def _encode_other(value: object) -> bytes:
    """Encode a type that MessagePack lacks: token ids are their bytes."""
    if isinstance(value, TokenIds):
        return value.data
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _decode_other(kind: type, value: object) -> TokenIds:
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds(value)
    raise TypeError(f"a {kind.__name__} cannot be made of {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)


def packed(value: object) -> bytes:
    """Return any value that may be part of a message in MessagePack."""
    return _encoder.encode(value)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    size = len(frame) - _LENGTH_BYTES
    if size > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {size} bytes is longer than a frame may be ({MAX_FRAME_BYTES})")
    frame[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "little")
    return bytes(frame)


@cache
def _decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a union of messages; creating one takes about 1 ms."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


class FrameReader:
    """Decodes messages from a byte stream, however it is split."""

    def __init__(self, kind: Any) -> None:
        self._decoder = _decoder_of(kind)
        self._pending = bytearray()

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._pending += data

    @property
    def has_next(self) -> bool:
        """Whether `next` would return a message, or raise."""
        claimed = int.from_bytes(self._pending[:_LENGTH_BYTES], "little")
        enough = _LENGTH_BYTES + (claimed if claimed <= MAX_FRAME_BYTES else 0)
        return len(self._pending) >= enough

    def next(self) -> Any | None:
        """Return the next complete message, or None.

        Raises EngineError for an invalid message, after which the connection must be closed.
        """
        body = _LENGTH_BYTES
        if len(self._pending) < body:
            return None
        end = body + int.from_bytes(self._pending[:body], "little")
        if end - body > MAX_FRAME_BYTES:
            raise EngineError(f"a frame claims {end - body} bytes; the limit is {MAX_FRAME_BYTES}")
        if len(self._pending) < end:
            return None
        frame = bytes(memoryview(self._pending)[body:end])
        del self._pending[:end]
        try:
            return self._decoder.decode(frame)
        except Exception as error:  # from msgspec, invalid UTF-8, or a message type's own checks
            raise EngineError(f"a message cannot be read: {error}") from error

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes and return an iterator over the complete messages, as of `next`."""
        self.add(data)
        return iter(self.next, None)
