"""Why a prompt did not match further."""

from __future__ import annotations

from itertools import islice

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import MissCause, MissExplanation
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of
from sagellm.kvmgr.prefix_cache.ghosts import Ghost, block_key, block_keys
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode
from sagellm.kvmgr.prefix_cache.partials import find_partial
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_MAX_OTHERS, _MAX_STEPS = 256, 512
"""Other namespaces that are searched, the latest first, and nodes of all of them together."""


def explain_miss(tree: RadixTree, data: bytes, namespace: Namespace) -> MissExplanation:
    """Compare packed tokens with what is cached, what was, and what others have.

    Costs a match, and up to 512 steps in other namespaces where the next block was never this one's. It sees
    no more agreement inside a block than reuse does, but sees it where that is off.
    """
    found = tree.find(data, namespace)
    node, position = found.node, len(found.block_ids) * tree.block_bytes
    agreed = None if node is None else find_partial(node, data, position, tree.block_bytes)
    diverges_at = position // TOKEN_BYTES + (agreed.num_tokens if agreed else 0)
    match_length = diverges_at if tree.reuses_partial_blocks else position // TOKEN_BYTES
    cause: MissCause
    ghost, num_evicted = None, 0
    if match_length * TOKEN_BYTES == len(data):
        cause = "none"
    elif len(data) - position < tree.block_bytes:
        cause = "block_border" if agreed or position else "never_seen"
    else:
        key = _key_at(node, namespace, position, tree)
        ghost, num_evicted = _find_ghosts(tree, key, data[position:])
        if ghost is not None:
            cause = "evicted"
        else:
            cause = _others_have(tree, data, position, namespace)
            next_key = block_key(key, data[position : position + tree.block_bytes])
            if cause == "never_seen" and tree.ledger.ghosts.may_have_forgotten(next_key):
                cause = "unknown"
            elif cause == "never_seen" and diverges_at > match_length:
                cause = "block_border"
    departure = ghost.departure if ghost else None
    return MissExplanation(
        cause=cause,
        num_tokens=len(data) // TOKEN_BYTES,
        match_length=match_length,
        diverges_at=diverges_at,
        reason=departure.reason if departure else None,
        policy=departure.policy if departure else None,
        evicted_ns=departure.now_ns if departure else None,
        evicted_for=departure.evicted_for if departure else None,
        num_evicted_blocks=num_evicted,
    )


def _key_at(node: PrefixNode | None, namespace: Namespace, position: int, tree: RadixTree) -> int:
    """Return the key of the last whole block that matched."""
    if node is None:
        return hash(namespace)
    num_inside = (position - node.start * TOKEN_BYTES) // tree.block_bytes
    if num_inside == node.num_blocks:
        return end_key(node, tree.block_bytes)
    return keys_of(node, tree.block_bytes)[num_inside - 1]


def _find_ghosts(tree: RadixTree, key: int, rest: bytes) -> tuple[Ghost | None, int]:
    """Return what became of the next block, and how many in a row were evicted."""
    ghosts, size = tree.ledger.ghosts, tree.block_bytes
    first, num_found = ghosts.find(block_key(key, rest[:size])), 0
    if first is not None:
        for each in block_keys(key, rest[: len(rest) // size * size], size):
            if ghosts.find(each) is None:
                break
            num_found += 1
    return first, num_found


def _others_have(tree: RadixTree, data: bytes, position: int, namespace: Namespace) -> MissCause:
    """Say whether another namespace has the next block; `unknown` if there are too many to look at."""
    num_steps = _MAX_STEPS
    end = position + tree.block_bytes
    for other, root in islice(reversed(tree.roots.items()), _MAX_OTHERS + 1):
        if other == namespace or other.adapter != namespace.adapter:
            continue
        depth, node = 0, root.children.get(data[: tree.block_bytes])
        while node is not None and num_steps > 0:
            num_steps -= 1
            num_wanted = min(len(node.edge), end - depth)
            if node.edge[:num_wanted] != data[depth : depth + num_wanted]:
                break
            depth += num_wanted
            if depth == end:
                return "other_tenant"
            node = node.children.get(data[depth : depth + tree.block_bytes])
    return "unknown" if num_steps == 0 or len(tree.roots) > _MAX_OTHERS + 1 else "never_seen"
