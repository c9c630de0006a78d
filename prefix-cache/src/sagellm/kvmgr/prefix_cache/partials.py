"""Partial blocks, kept after the ends of nodes, and full blocks of which only a part agrees."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

from sagellm.core.ids import BlockId
from sagellm.core.protocols.prefix_cache import PartialMatch, TenantUsage
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PartialBlock, PrefixNode

_MAX_SIBLINGS = 8
_MAX_PARTIALS = 4


class Partials:
    """The partial blocks of a tree, least recently used first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockId, PartialBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def values(self) -> list[PartialBlock]:
        """Return them all, in eviction order."""
        return list(self._blocks.values())

    def get(self, block_id: BlockId) -> PartialBlock | None:
        """Return a partial block by its id."""
        return self._blocks.get(block_id)

    def add(
        self, node: PrefixNode, tokens: bytes, block_id: BlockId, usage: TenantUsage
    ) -> list[BlockId] | None:
        """Keep a block after a node and return those that it replaces; None if it adds nothing.

        `usage` is the account of its tenant.
        """
        if any(each.tokens.startswith(tokens) for each in node.partials):
            return None
        if any(first.startswith(tokens) for first in islice(reversed(node.children), _MAX_SIBLINGS)):
            return None
        replaced = self.supersede(node, tokens)
        if len(node.partials) == _MAX_PARTIALS:
            replaced.append(self._remove(node.partials[0]))
        partial = PartialBlock(block_id, tokens, node, usage)
        usage.num_partial_blocks += 1
        node.partials += (partial,)
        self._blocks[block_id] = partial
        return replaced

    def supersede(self, node: PrefixNode, tokens: bytes) -> list[BlockId]:
        """Drop the partial blocks that the tokens now following a node begin with."""
        if not node.partials:
            return []
        return [self._remove(each) for each in node.partials if tokens.startswith(each.tokens)]

    def touch(self, block_id: BlockId) -> None:
        """Record a use, if it is a partial block."""
        if block_id in self._blocks:
            self._blocks.move_to_end(block_id)

    def drop_behind(self, node: PrefixNode) -> list[BlockId]:
        """Drop the partial blocks of a node that leaves."""
        return [self._remove(each) for each in node.partials]

    def first(self) -> PartialBlock | None:
        """Return the one unused for the longest time."""
        return next(iter(self._blocks.values()), None)

    def drop(self, partial: PartialBlock) -> BlockId:
        """Drop one and return its block."""
        return self._remove(partial)

    def move(self, moved: Mapping[BlockId, BlockId]) -> None:
        """Replace the blocks that are keys by their values, in the same order."""
        if moved.keys().isdisjoint(self._blocks):
            return
        for partial in self._blocks.values():
            partial.block_id = moved.get(partial.block_id, partial.block_id)
        self._blocks = OrderedDict((partial.block_id, partial) for partial in self._blocks.values())

    def _remove(self, partial: PartialBlock) -> BlockId:
        node = partial.node
        node.partials = tuple(each for each in node.partials if each is not partial)
        partial.usage.num_partial_blocks -= 1
        del self._blocks[partial.block_id]
        return partial.block_id


def find_partial(node: PrefixNode, data: bytes, position: int, block_bytes: int) -> PartialMatch | None:
    """Find the block whose beginning agrees best with what follows `position`, where a walk ended.

    Inside an edge that is the edge's next block; at the end of a node, one of its partial blocks, its few
    latest children, or the latest child that begins with the same token.
    """
    rest = data[position : position + block_bytes]
    inside = position - node.depth * TOKEN_BYTES + len(node.edge)
    if inside < len(node.edge):
        num_tokens = count_common_tokens(rest, node.edge[inside : inside + block_bytes])
        return PartialMatch(node.block_ids[inside // block_bytes], num_tokens) if num_tokens else None
    best, found = 0, None
    first = rest[:TOKEN_BYTES]
    for partial in node.partials:
        if partial.tokens.startswith(first):
            num_tokens = count_common_tokens(rest, partial.tokens)
            if num_tokens > best:
                best, found = num_tokens, partial.block_id
    latest = node.heads.get(first)
    if latest is None:
        return None if found is None else PartialMatch(found, best)
    for key in (latest, *islice(reversed(node.children), _MAX_SIBLINGS)):
        if key.startswith(first) and key in node.children:
            num_tokens = count_common_tokens(rest, key)
            if num_tokens > best:
                best, found = num_tokens, node.children[key].block_ids[0]
    return None if found is None else PartialMatch(found, best)


def count_common_tokens(one: bytes, other: bytes) -> int:
    """Return how many packed tokens agree from the start."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
