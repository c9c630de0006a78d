"""What the matches that callers hand back stand for, now."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.errors import InvalidInputError, StaleMatchError
from sagellm.core.protocols.prefix_cache import CachedRun, KVBlockDescriptor, PrefixMatch
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.prefix_cache.node import PrefixNode
from sagellm.kvmgr.prefix_cache.tree import RadixTree


def owned_node(match: PrefixMatch, tree: RadixTree) -> PrefixNode | None:
    """Return the node of a match if it is in this tree now."""
    node = match.node
    return node if isinstance(node, PrefixNode) and tree.owns(node) else None


def end_of(match: PrefixMatch, tree: RadixTree) -> PrefixNode | None:
    """Return the node in which the whole blocks of a match end; None if it has none.

    Raises StaleMatchError if blocks entered or left since, or if the match is another cache's, and
    InvalidInputError for one that was made longer or cut inside a block.
    """
    if match.version != tree.version:
        raise StaleMatchError("blocks entered or left the cache since this match; match again")
    num_partial = match.match_length % tree.block_size
    depth = match.match_length - num_partial
    if num_partial and (match.partial is None or match.partial.num_tokens != num_partial):
        raise InvalidInputError(
            f"a match of {match.match_length} tokens; shorten one to whole blocks of {tree.block_size}"
        )
    if not depth:
        return None
    node = owned_node(match, tree)
    if node is None:
        raise StaleMatchError("this match is another cache's; match again in this one")
    if depth > node.depth:
        raise InvalidInputError(
            f"a match of {match.match_length} tokens ends at {node.depth}; make it no longer than it was"
        )
    while depth <= node.start and node.parent is not None:
        node = node.parent  # the caller shortened the match, or the node was split since
    return node


def describe(match: PrefixMatch, block_size: int) -> list[KVBlockDescriptor]:
    """Return which block holds which tokens of a match."""
    found = [(block_id, block_size) for block_id in match.block_ids]
    if match.partial is not None:
        found.append(match.partial)
    return [
        KVBlockDescriptor(
            block_id=block_id, start=index * block_size, num_tokens=num_tokens, namespace=match.namespace
        )
        for index, (block_id, num_tokens) in enumerate(found)
    ]


def describe_runs(nodes: Sequence[PrefixNode]) -> list[CachedRun]:
    """Return what is in nodes, which come parents first."""
    places = {node.node_id: place for place, node in enumerate(nodes)}
    return [
        CachedRun(
            token_ids=TokenIds(node.edge),
            block_ids=list(node.block_ids),
            namespace=node.namespace,
            parent=None if node.parent_id is None else places[node.parent_id],
        )
        for node in nodes
    ]
