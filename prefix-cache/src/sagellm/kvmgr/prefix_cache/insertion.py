"""Puts the blocks of one prefix into a tree, as far as there is room."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.errors import BlockError
from sagellm.core.ids import BlockId
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import InsertResult
from sagellm.kvmgr.prefix_cache.edges import Found
from sagellm.kvmgr.prefix_cache.limits import check_block_ids
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES
from sagellm.kvmgr.prefix_cache.tree import RadixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Packed tokens and the blocks that hold them from the beginning, each block once."""

    data: bytes
    block_ids: list[BlockId]
    namespace: Namespace
    priority: int


def insert(tree: RadixTree, offer: Offer, max_blocks: int, now_ns: int) -> InsertResult:
    """Keep what is new of an offer, so many blocks that the tree has `max_blocks` at most.

    Raises BlockError, and changes nothing, if an id is none, or a block is in the tree for other
    tokens.
    """
    offered, size = offer.block_ids, tree.block_bytes
    num_full = min(len(offered), len(offer.data) // size)
    found = tree.find(offer.data[: num_full * size], offer.namespace)
    held = found.block_ids
    grown = _grown(tree, offer, found)
    changed = [block_id for block_id, cached in zip(offered, held, strict=False) if block_id != cached]
    if others := changed + offered[len(held) :]:  # what equals a cached one does not enter
        check_block_ids(others)
    _check_other_blocks(tree, changed + offered[len(held) + grown :])
    if held and found.node is not None:
        tree.touch(found.node, now_ns)
    new = offered[len(held) : num_full][: _room(tree, offer.namespace, max_blocks + grown)]
    released: list[BlockId] = []
    if new:
        if grown:  # it enters again, full
            tree.release_partial(new[0])
        tail = offer.data[len(held) * size : (len(held) + len(new)) * size]
        released = tree.extend(found, tail, new, priority=offer.priority, now_ns=now_ns)
    kept: BlockId | None = None
    if num_full < len(offered) and len(held) + len(new) == num_full and tree.reuses_partial_blocks:
        kept = _insert_partial(tree, offer, num_full * size, max_blocks, released)
    num_new = len(new) - (grown if new else 0)
    return InsertResult(held + new, num_new, changed, kept, tuple(released))


def _grown(tree: RadixTree, offer: Offer, found: Found) -> int:
    """Return 1 if the first block behind those found is one of the tree that was not full before."""
    num_held = len(found.block_ids)
    if num_held >= len(offer.block_ids):
        return 0
    partial = tree.partials.get(offer.block_ids[num_held])
    begin = num_held * tree.block_bytes
    if partial is None or partial.node.depth * TOKEN_BYTES != begin:
        return 0
    return int(partial.node is found.node and offer.data.startswith(partial.tokens, begin))


def _check_other_blocks(tree: RadixTree, block_ids: list[BlockId]) -> None:
    if not tree.cached.isdisjoint(block_ids):
        raise BlockError(f"blocks {sorted(tree.cached.intersection(block_ids))} are cached for other tokens")


def _room(tree: RadixTree, namespace: Namespace, max_blocks: int) -> int:
    """Return how many more full blocks a namespace may have."""
    room = max_blocks - len(tree.cached)
    account = tree.ledger.account(namespace)
    return room if account.max_blocks is None else max(0, min(room, account.max_blocks - account.num_blocks))


def _insert_partial(
    tree: RadixTree, offer: Offer, begin: int, max_blocks: int, released: list[BlockId]
) -> BlockId | None:
    """Keep the last block offered, which is not full; None if it is not the tree's, or was before."""
    block_id = offer.block_ids[-1]
    is_held = block_id in tree.cached
    if not is_held and len(tree.cached) >= max_blocks:
        return None
    node = tree.find(offer.data[:begin], offer.namespace).node
    if node is not None and node.depth * TOKEN_BYTES != begin:
        return None  # inside an edge; what follows there begins alike, or a node would be split for it
    if is_held:
        tree.release_partial(block_id)
    replaced = tree.keep_partial(node, offer.namespace, offer.data[begin:], block_id)
    if replaced is None:
        if is_held:
            released.append(block_id)
        return None
    released += replaced
    return None if is_held else block_id
