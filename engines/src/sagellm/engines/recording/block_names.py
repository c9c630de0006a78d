"""Names the blocks of prompts and outputs so that equal beginnings have equal names and no token shows."""

from __future__ import annotations

from bisect import bisect, insort
from hashlib import blake2b
from typing import NamedTuple

from sagellm.core import Namespace

_TOKEN_BYTES = 4
_ID_BITS = 53  # up to which JSON's numbers are exact
_MAX_REMEMBERED = 1 << 16


class Names(NamedTuple):
    """What is written about the tokens of one request."""

    block_ids: list[int]  # of the prompt, the last block perhaps partial
    output_block_ids: list[int]  # behind the prompt's whole blocks, the last one perhaps partial
    agreement: tuple[int, int, int] | None  # place, id of another block, tokens that both begin with
    conversation: int
    turn: int  # from 1


class BlockNames:
    """Hashes with a salt that is never written: an id stands for all tokens up to the end of its block.

    A prefix cache also reuses parts of blocks, of which ids say nothing. So the first block that was not seen
    before is compared with those seen at the same place, and the agreement is written beside the ids. A
    prompt that begins with all that a cache kept of an earlier request, its answer included, is the next turn
    of its conversation. Up to 65,536 blocks are remembered, with their tokens; then it forgets them all.
    """

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self._salted = blake2b(key=salt, digest_size=8)
        self._block_tokens = block_tokens
        self._roots: dict[Namespace, int] = {}
        self._ids: dict[tuple[int, bytes], int] = {}  # by parent and tokens
        self._children: dict[int, list[tuple[bytes, int]]] = {}  # by parent, sorted
        self._turns: dict[int, tuple[int, int]] = {}  # by the last block of a sequence
        self._num_conversations = 0

    def name(self, namespace: Namespace, tokens: bytes, num_prompt_tokens: int) -> Names:
        """Name the blocks of the packed tokens of a prompt and the output behind it that a cache keeps."""
        if len(self._ids) > _MAX_REMEMBERED:
            for each in (self._roots, self._ids, self._children, self._turns):
                each.clear()
        size, end = self._block_tokens * _TOKEN_BYTES, num_prompt_tokens * _TOKEN_BYTES
        num_whole, tail = divmod(end, size)
        parent = self._root(namespace)
        ids: list[int] = []
        prompt_ids: list[int] = []
        agreement: tuple[int, int, int] | None = None
        earlier: int | None = None  # the block that ends the turn before
        is_known = True
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            if tail and len(ids) == num_whole:
                prompt_ids = [*ids, self._hash(parent, chunk[:tail])]
            block_id = self._ids.get((parent, chunk)) if is_known else None
            if block_id is None:
                block_id = self._hash(parent, chunk)
                if is_known:
                    is_known = False
                    agreement, whole_id = _agreement(len(ids), chunk, self._children.get(parent, []))
                    if agreement is not None and start + agreement[2] * _TOKEN_BYTES <= end:
                        earlier = whole_id if whole_id in self._turns else earlier
                self._ids[parent, chunk] = block_id
                if (siblings := self._children.get(parent)) is None:
                    self._children[parent] = [(chunk, block_id)]
                else:
                    insort(siblings, (chunk, block_id))
            elif block_id in self._turns and start + len(chunk) <= end:
                earlier = block_id
            ids.append(block_id)
            parent = block_id
        has_output = len(tokens) > end
        turn = self._turn_of(earlier, parent if has_output else None)
        output_ids = ids[num_whole:] if has_output else []
        return Names(prompt_ids or ids[:num_whole], output_ids, agreement, *turn)

    def _root(self, namespace: Namespace) -> int:
        """Return what stands for the parent of first blocks."""
        root = self._roots.get(namespace)
        if root is None:
            parts = (each.encode(errors="surrogatepass") for each in namespace)
            text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
            root = self._roots[namespace] = self._hash(1 << _ID_BITS, text)
        return root

    def _hash(self, parent: int, data: bytes) -> int:
        state = self._salted.copy()
        state.update(parent.to_bytes(8, "little") + data)
        return int.from_bytes(state.digest(), "little") >> (64 - _ID_BITS)

    def _turn_of(self, earlier: int | None, last_id: int | None) -> tuple[int, int]:
        """Return conversation and turn of a sequence, given the end of the turn before and its own."""
        if earlier is None:
            self._num_conversations += 1
            found = self._num_conversations, 1
        else:
            conversation, turn = self._turns[earlier]
            found = conversation, turn + 1
        if last_id is not None:
            self._turns.setdefault(last_id, found)
        return found


def _agreement(
    place: int, chunk: bytes, siblings: list[tuple[bytes, int]]
) -> tuple[tuple[int, int, int] | None, int | None]:
    """Return the longest agreement with a sibling, and the sibling's id if all of it agrees."""
    at = bisect(siblings, (chunk, 0))  # the one that agrees most is a neighbour in the order
    found, whole_id = (place, 0, 0), None
    for other, block_id in siblings[max(0, at - 1) : at + 1]:
        num_tokens = _count_common(chunk, other)
        if num_tokens > found[2]:
            found = place, block_id, num_tokens
            whole_id = block_id if num_tokens * _TOKEN_BYTES == len(other) else None
    return (found if found[2] else None), whole_id


def _count_common(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * _TOKEN_BYTES
        low, high = (middle, high) if one[:end] == other[:end] else (low, middle - 1)
    return low
