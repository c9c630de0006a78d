"""Numbers for the contents of prompts' blocks, to tell which were computed before."""

from __future__ import annotations

from array import array

from sagellm.core import TokenIds


class BlockContents:
    """Gives equal numbers to blocks if all tokens up to their end, and the tenants, are equal."""

    def __init__(self, block_size: int) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # by the block before and the hash of the tokens
        self._block_bytes = 4 * block_size

    def path(self, tokens: TokenIds, tenant: str) -> array[int]:
        """Return the numbers of a prompt's full blocks, in order."""
        data, size, numbers = tokens.data, self._block_bytes, self._numbers
        path = array("q")
        parent = hash(tenant)
        for begin in range(0, len(data) // size * size, size):
            parent = numbers.setdefault((parent, hash(data[begin : begin + size])), len(numbers))
            path.append(parent)
        return path
