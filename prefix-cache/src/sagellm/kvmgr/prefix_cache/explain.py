"""Why a prompt did not match further."""

from __future__ import annotations

from itertools import islice

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import MissCause, MissExplanation
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of, walk
from sagellm.kvmgr.prefix_cache.ghosts import Ghost, block_key, block_keys
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode
from sagellm.kvmgr.prefix_cache.partials import count_common_tokens
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_MAX_OTHERS = 256
"""Other namespaces that are searched, the latest first."""

_MAX_SIBLINGS = 64
"""Children of a node that are searched for what agrees longest, the latest first."""


def explain_miss(tree: RadixTree, data: bytes, namespace: Namespace) -> MissExplanation:
    """Compare packed tokens with what is cached, what was, and what others have.

    Costs a match, a comparison of the first token with the latest 64 children of the last node, and a
    match in each other namespace, the 256 latest at most, where the next block was never this one's.
    """
    match = tree.match(data, namespace)
    root = tree.roots.get(namespace)
    position = len(match.block_ids) * tree.block_bytes
    node = match.node if isinstance(match.node, PrefixNode) else root
    diverges_at = (position + _common_bytes(node, data, position, tree)) // TOKEN_BYTES
    cause: MissCause
    ghost, num_evicted = None, 0
    if match.match_length * TOKEN_BYTES == len(data):
        cause = "none"
    elif len(data) - position < tree.block_bytes:
        cause = "block_border"
    else:
        key = _key_at(node, namespace, position, tree)
        ghost, num_evicted = _find_ghosts(tree, key, data[position:])
        if ghost is not None:
            cause = "evicted"
        elif _others_have(tree, data, position, namespace):
            cause = "other_tenant"
        elif _may_be_forgotten(tree, key, data[position : position + tree.block_bytes]):
            cause = "unknown"
        else:
            cause = "block_border" if diverges_at > match.match_length else "never_seen"
    departure = ghost.departure if ghost else None
    return MissExplanation(
        cause=cause,
        num_tokens=len(data) // TOKEN_BYTES,
        match_length=match.match_length,
        diverges_at=diverges_at,
        policy=departure.policy if departure else None,
        evicted_ns=departure.now_ns if departure else None,
        evicted_for=departure.evicted_for if departure else None,
        num_evicted_blocks=num_evicted,
    )


def _common_bytes(node: PrefixNode | None, data: bytes, position: int, tree: RadixTree) -> int:
    """Return how many bytes after `position` some cached block has there, whether they were reused or not."""
    if node is None:
        return 0
    size = tree.block_bytes
    inside = position - node.start * TOKEN_BYTES
    if inside < len(node.edge):
        candidates = [node.edge[inside : inside + size]]
    else:
        latest = islice(reversed(node.children), _MAX_SIBLINGS)
        candidates = [*latest, *(partial.tokens for partial in node.partials)]
    rest = data[position : position + size]
    alike = (each for each in candidates if each.startswith(rest[:TOKEN_BYTES]))
    return max((count_common_tokens(rest, each) for each in alike), default=0) * TOKEN_BYTES


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


def _others_have(tree: RadixTree, data: bytes, position: int, namespace: Namespace) -> bool:
    return any(
        walk(root, data, tree.block_bytes)[1] > position
        for other, root in islice(reversed(tree.roots.items()), _MAX_OTHERS + 1)
        if other != namespace and other.adapter == namespace.adapter
    )


def _may_be_forgotten(tree: RadixTree, key: int, tokens: bytes) -> bool:
    return len(tree.roots) > _MAX_OTHERS or tree.ledger.ghosts.may_have_forgotten(block_key(key, tokens))
