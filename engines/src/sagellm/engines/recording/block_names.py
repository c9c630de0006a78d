"""Names the blocks of prompts and outputs so that equal beginnings have equal names and no token shows."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from sagellm.core import Namespace

_TOKEN_BYTES = 4
_UNUSED_BITS = 11  # of 64: JSON's numbers are exact up to 53 bits
_MAX_REMEMBERED = 1 << 16


class Names(NamedTuple):
    """What is written about the tokens of one request."""

    block_ids: tuple[int, ...]  # of the prompt, the last block perhaps partial
    output_block_ids: tuple[int, ...]  # behind the prompt's whole blocks, the last one perhaps partial
    agreement: tuple[int, int, int] | None  # place, id of another block, tokens that both begin with
    conversation: int
    turn: int  # from 1


class BlockNames:
    """Hashes with a salt that is never written: an id stands for all tokens up to the end of its block.

    A prefix cache also reuses parts of blocks, of which ids say nothing. So the first block that was not seen
    before is compared with those seen at the same place, and the agreement is written beside the ids. A
    prompt that begins with all that a cache kept of an earlier request, its answer included, is the next turn
    of its conversation. The last 65,536 blocks are remembered, with their tokens; nothing else is kept.
    """

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self._salt = salt
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._children: OrderedDict[int, list[tuple[bytes, int]]] = OrderedDict()  # by parent, sorted
        self._parent_of: dict[int, int] = {}
        self._turns: OrderedDict[int, tuple[int, int]] = OrderedDict()  # last block of a sequence → its turn
        self._num_conversations = 0

    def name(self, namespace: Namespace, tokens: bytes, num_prompt_tokens: int) -> Names:
        """Name the blocks of the packed tokens of a prompt and the output behind it that a cache keeps."""
        size, num_prompt_bytes = self._block_bytes, num_prompt_tokens * _TOKEN_BYTES
        state = blake2b(key=self._salt, digest_size=8)
        for part in namespace:
            encoded = part.encode(errors="surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        root = _number(state)
        chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        ids = []
        num_whole = num_prompt_bytes // size
        tail_id: tuple[int, ...] = ()
        for place, chunk in enumerate(chunks):
            if place == num_whole and num_prompt_bytes % size:
                tail = state.copy()
                tail.update(chunk[: num_prompt_bytes % size])
                tail_id = (_number(tail),)
            state.update(chunk)
            ids.append(_number(state))
        agreement, ended = self._remember(root, ids, chunks, num_prompt_tokens)
        has_output = len(tokens) > num_prompt_bytes
        conversation, turn = self._turn_of(ended, ids[-1] if has_output else None)
        output_ids = tuple(ids[num_whole:]) if has_output else ()
        return Names((*ids[:num_whole], *tail_id), output_ids, agreement, conversation, turn)

    def _remember(
        self, root: int, ids: list[int], chunks: list[bytes], num_prompt_tokens: int
    ) -> tuple[tuple[int, int, int] | None, int | None]:
        """Remember new blocks. Return the agreement of the first, and the block that ends the earlier turn.

        The agreement is None if all blocks are known, or if nothing else begins as the first new one does.
        The earlier turn is the longest sequence that all of the prompt begins with.
        """
        parent, agreement, ended = root, None, None
        is_new = False
        block_tokens = self._block_bytes // _TOKEN_BYTES
        for place, (block_id, chunk) in enumerate(zip(ids, chunks, strict=True)):
            if self._parent_of.get(block_id) == parent:
                self._children.move_to_end(parent)  # forgotten last
                if block_id in self._turns and (place + 1) * block_tokens <= num_prompt_tokens:
                    ended = block_id
            else:
                siblings = self._children.setdefault(parent, [])
                self._children.move_to_end(parent)
                if not is_new:
                    agreement, whole_id = _agreement(place, chunk, siblings)
                    is_new = True
                    if agreement is not None and whole_id in self._turns:
                        is_in_prompt = place * block_tokens + agreement[2] <= num_prompt_tokens
                        ended = whole_id if is_in_prompt else ended
                insort(siblings, (chunk, block_id))
                self._parent_of[block_id] = parent
            parent = block_id
        while len(self._parent_of) > _MAX_REMEMBERED:
            _, forgotten = self._children.popitem(last=False)
            for _, block_id in forgotten:
                del self._parent_of[block_id]
        return agreement, ended

    def _turn_of(self, ended: int | None, last_id: int | None) -> tuple[int, int]:
        """Return conversation and turn of a sequence, given the earlier one that it begins with."""
        if ended is None:
            self._num_conversations += 1
            found = self._num_conversations, 1
        else:
            conversation, turn = self._turns[ended]
            found = conversation, turn + 1
        if last_id is not None and last_id != ended:
            self._turns.setdefault(last_id, found)
            while len(self._turns) > _MAX_REMEMBERED:
                self._turns.popitem(last=False)
        return found


def _number(state: blake2b) -> int:
    return int.from_bytes(state.copy().digest(), "little") >> _UNUSED_BITS


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
