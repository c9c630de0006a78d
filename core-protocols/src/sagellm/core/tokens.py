"""Token ids, packed once and never copied element by element again."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

from sagellm.core.errors import InvalidInputError


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids in native int32 bytes.

    `data` is what hot paths compare: `tokens.data.startswith(edge, 4 * position)` is one memcmp.
    Slices are TokenIds too. `pack` makes them of a list, at about 8 ns per token, once per request. Raises
    InvalidInputError for what is not a whole number of int32.
    """

    __slots__ = ("_ints", "data")

    def __init__(self, data: bytes) -> None:
        try:
            self._ints = memoryview(data).cast("i")
        except TypeError:
            raise _not_packed(data) from None
        self.data = data

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if not isinstance(index, slice):
            return self._ints[index]
        start, stop, step = index.indices(len(self._ints))
        if step != 1:
            return pack(self._ints[index].tolist())
        return TokenIds(self.data[4 * start : 4 * stop])

    def __len__(self) -> int:
        return len(self._ints)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ints)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.data == other.data
        return isinstance(other, (list, tuple)) and self._ints.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(self.data)

    def __add__(self, other: Sequence[int]) -> TokenIds:
        return TokenIds(self.data + pack(other).data)

    def __reduce__(self) -> tuple[type[TokenIds], tuple[bytes]]:
        return TokenIds, (self.data,)

    def __repr__(self) -> str:
        ids = self.tolist()
        shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
        return f"TokenIds([{shown}], {len(ids)} tokens)"

    def tolist(self) -> list[int]:
        """Return the ids as a list of Python ints."""
        return self._ints.tolist()


def _not_packed(data: object) -> InvalidInputError:
    if isinstance(data, bytes | bytearray):
        return InvalidInputError(f"packed token ids must be a multiple of 4 bytes, not {len(data)}")
    return InvalidInputError(
        f"TokenIds takes the bytes of int32 numbers, not {type(data).__name__}; pack(ids) makes TokenIds of "
        "any sequence of ints, and calls take such a sequence as it is"
    )


TokenIdsLike: TypeAlias = Sequence[int]
"""What calls accept: TokenIds, any sequence of ints, or an integer array."""

EMPTY = TokenIds(b"")


def pack(ids: TokenIdsLike) -> TokenIds:
    """Pack token ids; TokenIds pass through untouched.

    Raises InvalidInputError for bytes, text and mappings, for a non-int, and for ids
    outside 0 … 2³¹ - 1.
    """
    if isinstance(ids, TokenIds):
        return ids
    if isinstance(ids, (str, bytes, bytearray, dict)):
        raise InvalidInputError(f"token ids must be a sequence of ints, not {type(ids).__name__}")
    if hasattr(ids, "tolist"):  # array.array, numpy and torch arrays
        ids = ids.tolist()
    try:
        data = array("I", ids).tobytes()  # a quarter faster than struct.pack, twice as fast as array("i")
    except (OverflowError, TypeError) as error:
        if isinstance(error, OverflowError) and -(2**31) <= (smallest := min(ids)) < 0:
            raise InvalidInputError(f"token ids must not be negative; the smallest is {smallest}") from None
        raise InvalidInputError(f"token ids must be ints in 0 … 2147483647: {error}") from error
    # If the top bytes of all ids are ASCII, no id has its sign bit set.
    if not data[_TOP_BYTE::4].isascii():
        raise InvalidInputError(f"token ids must be ints in 0 … 2147483647; the largest is {max(ids)}")
    return TokenIds(data)


_TOP_BYTE = 3 if struct.pack("i", 1)[0] else 0
