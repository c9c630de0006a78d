"""What must be true of a tree at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from sagellm.core.ids import BlockId, NodeId
from sagellm.core.namespace import Namespace
from sagellm.kvmgr.prefix_cache.node import NO_CHILDREN, NO_HEADS, TOKEN_BYTES, PartialBlock, PrefixNode
from sagellm.kvmgr.prefix_cache.partials import Partials


class TreeCount(NamedTuple):
    """What a walk over all nodes found."""

    num_nodes: int
    num_evictable: int
    block_ids: set[BlockId]
    leaves: dict[NodeId, int]  # the unlocked ones, by the time of their last use
    num_blocks_of: dict[str, tuple[int, int]]  # full and partial ones, by account


def check_tree(roots: Mapping[Namespace, PrefixNode], block_bytes: int, partials: Partials) -> TreeCount:
    """Check every node against its parent and count. Raises AssertionError."""
    found = TreeCount(0, 0, set(), {}, {})
    assert not NO_CHILDREN, "what all leaves share was written to"
    assert not NO_HEADS, "what all leaves share was written to"
    full: Counter[str] = Counter()
    num_nodes = 0
    num_evictable = num_blocks = len(partials)
    node_ids: set[NodeId] = set()
    stack: list[PrefixNode] = []
    for namespace, root in roots.items():
        assert root.namespace == namespace, f"the root of {root.namespace} is filed under {namespace}"
        assert root.parent is None, f"the root of {namespace} has a parent"
        assert root.children or root.partials, f"namespace {namespace} has no blocks, yet a root"
        stack.append(root)
    while stack:
        parent = stack.pop()
        for key, node in parent.children.items():
            _check_node(node, parent, key, block_bytes)
            num_nodes += 1
            num_blocks += node.num_blocks
            node_ids.add(node.node_id)
            found.block_ids.update(node.block_ids)
            full[node.namespace.account] += node.num_blocks
            if not node.lock_count:
                num_evictable += node.num_blocks
                if not node.children:
                    found.leaves[node.node_id] = node.last_access_ns
            stack.append(node)
    for partial in partials.values():
        _check_partial(partial, roots, block_bytes)
        found.block_ids.add(partial.block_id)
    assert len(found.block_ids) == num_blocks, "a block is in the tree twice"
    assert len(node_ids) == num_nodes, "two nodes have one id"
    partial_ones = Counter(partial.node.namespace.account for partial in partials.values())
    by_account = {name: (full[name], partial_ones[name]) for name in full | partial_ones}
    return found._replace(num_nodes=num_nodes, num_evictable=num_evictable, num_blocks_of=by_account)


def _check_node(node: PrefixNode, parent: PrefixNode, key: bytes, block_bytes: int) -> None:
    name = f"node {node.node_id}"
    assert node.parent is parent, f"{name}: wrong parent"
    assert key == node.edge[:block_bytes], f"{name}: filed under another block"
    assert node.num_blocks == len(node.block_ids) > 0, f"{name}: {node.num_blocks} blocks"
    assert len(node.edge) == node.num_blocks * block_bytes, f"{name}: edge and blocks differ in length"
    assert node.depth == parent.depth + len(node.edge) // TOKEN_BYTES, f"{name}: wrong depth"
    assert node.namespace == parent.namespace, f"{name}: in the tree of another namespace"
    below = sum(child.lock_count for child in node.children.values())
    assert node.lock_count == node.num_own_locks + below, f"{name}: {node.lock_count} locks"
    assert node.num_own_locks >= 0, f"{name}: unlocked too often"
    is_top = parent.parent is None
    assert is_top or parent.last_access_ns >= node.last_access_ns, f"{name}: used later than its parent"


def _check_partial(partial: PartialBlock, roots: Mapping[Namespace, PrefixNode], block_bytes: int) -> None:
    name = f"partial block {partial.block_id}"
    assert 0 < len(partial.tokens) < block_bytes, f"{name}: {len(partial.tokens)} bytes of tokens"
    assert partial in partial.node.partials, f"{name}: unknown to its node"
    root = partial.node
    while root.parent is not None:
        root = root.parent
    assert roots.get(root.namespace) is root, f"{name}: its node has left the tree"
