"""Why a prompt did not match further."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import MissCause, MissExplanation
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of
from sagellm.kvmgr.prefix_cache.ghosts import Ghost, block_key, block_keys
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode
from sagellm.kvmgr.prefix_cache.partials import find_partial
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_MAX_OTHERS, _MAX_STEPS = 256, 512
"""Other namespaces that are searched, the latest first, and nodes of all of them together."""


class Miss(NamedTuple):
    """What must be recorded when a prompt does not match further; the rest can be found later."""

    namespace: Namespace
    now_ns: int
    position: int  # bytes of whole blocks that matched
    match_length: int
    diverges_at: int
    ghost: Ghost | None  # of the next block
    num_evicted: int  # blocks in a row from there on
    is_forgotten: bool  # the next block may have been evicted longer ago than ghosts last


def explain_miss(tree: RadixTree, data: bytes, namespace: Namespace, now_ns: int) -> MissExplanation:
    """Compare packed tokens with what is cached, what was, and what others have.

    Costs a match, and up to 512 steps in other namespaces where the next block was never this one's. It sees
    no more agreement inside a block than reuse does, but sees it where that is off.
    """
    found = tree.find(data, namespace)
    position = len(found.block_ids) * tree.block_bytes
    return explain(tree, data, note_miss(tree, data, found.node, position, namespace, now_ns))


def note_miss(
    tree: RadixTree, data: bytes, node: PrefixNode | None, position: int, namespace: Namespace, now_ns: int
) -> Miss:
    """Record what became of the block behind a match that ends at a byte in a node. 1 µs if it is new."""
    agreed = None if node is None else find_partial(node, data, position, tree.block_bytes)
    diverges_at = position // TOKEN_BYTES + (agreed.num_tokens if agreed else 0)
    match_length = diverges_at if tree.reuses_partial_blocks else position // TOKEN_BYTES
    ghost, num_evicted, is_forgotten = None, 0, False
    if len(data) - position >= tree.block_bytes:
        key = _key_at(node, namespace, position, tree)
        next_key = block_key(key, data[position : position + tree.block_bytes])
        ghost, num_evicted = _find_ghosts(tree, key, next_key, data, position)
        is_forgotten = ghost is None and tree.ledger.ghosts.may_have_forgotten(next_key)
    return Miss(namespace, now_ns, position, match_length, diverges_at, ghost, num_evicted, is_forgotten)


def explain(tree: RadixTree, data: bytes, miss: Miss) -> MissExplanation:
    """Say why packed tokens did not match further; blocks of others count only if they had them then."""
    departure = miss.ghost.departure if miss.ghost else None
    return MissExplanation(
        cause=_cause(tree, data, miss),
        num_tokens=len(data) // TOKEN_BYTES,
        match_length=miss.match_length,
        diverges_at=miss.diverges_at,
        reason=departure.reason if departure else None,
        policy=departure.policy if departure else None,
        evicted_ns=departure.now_ns if departure else None,
        evicted_for=departure.evicted_for if departure else None,
        num_evicted_blocks=miss.num_evicted,
    )


def _cause(tree: RadixTree, data: bytes, miss: Miss) -> MissCause:
    if miss.match_length * TOKEN_BYTES == len(data):
        return "none"
    is_inside = miss.diverges_at * TOKEN_BYTES > miss.position
    if len(data) - miss.position < tree.block_bytes:
        return "block_border" if is_inside or miss.position else "never_seen"
    if miss.ghost is not None:
        return "evicted"
    cause = _others_have(tree, data, miss)
    if cause == "never_seen" and miss.is_forgotten:
        return "unknown"
    if cause == "never_seen" and miss.diverges_at > miss.match_length:
        return "block_border"
    return cause


def _key_at(node: PrefixNode | None, namespace: Namespace, position: int, tree: RadixTree) -> int:
    """Return the key of the last whole block that matched."""
    if node is None:
        return hash(namespace)
    num_inside = (position - node.start * TOKEN_BYTES) // tree.block_bytes
    if num_inside == node.num_blocks:
        return end_key(node, tree.block_bytes)
    return keys_of(node, tree.block_bytes)[num_inside - 1]


def _find_ghosts(
    tree: RadixTree, key: int, next_key: int, data: bytes, position: int
) -> tuple[Ghost | None, int]:
    """Return what became of the next block, and how many in a row were evicted."""
    ghosts, size = tree.ledger.ghosts, tree.block_bytes
    first, num_found = ghosts.find(next_key), 0
    if first is not None:
        for each in block_keys(key, data[position : len(data) // size * size], size):
            if ghosts.find(each) is None:
                break
            num_found += 1
    return first, num_found


def _others_have(tree: RadixTree, data: bytes, miss: Miss) -> MissCause:
    """Say whether another namespace had the next block; `unknown` if there are too many to look at."""
    num_steps = _MAX_STEPS
    end = miss.position + tree.block_bytes
    for other, root in islice(reversed(tree.roots.items()), _MAX_OTHERS + 1):
        if other == miss.namespace or other.adapter != miss.namespace.adapter:
            continue
        depth, node = 0, root.children.get(data[: tree.block_bytes])
        while node is not None and num_steps > 0 and node.created_ns <= miss.now_ns:
            num_steps -= 1
            num_wanted = min(len(node.edge), end - depth)
            if node.edge[:num_wanted] != data[depth : depth + num_wanted]:
                break
            depth += num_wanted
            if depth == end:
                return "other_tenant"
            node = node.children.get(data[depth : depth + tree.block_bytes])
    return "unknown" if num_steps == 0 or len(tree.roots) > _MAX_OTHERS + 1 else "never_seen"
