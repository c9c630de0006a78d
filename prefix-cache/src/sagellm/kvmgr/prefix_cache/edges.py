"""What a radix tree over packed tokens does to its edges: follow them, and split one."""

from __future__ import annotations

from typing import NamedTuple

from sagellm.core.ids import BlockId, NodeId
from sagellm.core.namespace import Namespace
from sagellm.kvmgr.prefix_cache.ghosts import block_keys
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode


class Found(NamedTuple):
    """The cached whole blocks at the start of packed tokens."""

    namespace: Namespace
    node: PrefixNode | None  # where they end, a root if there are no blocks; None if there is no root
    block_ids: list[BlockId]


def walk(root: PrefixNode, data: bytes, block_bytes: int) -> tuple[PrefixNode, int, list[BlockId]]:
    """Follow packed tokens down from a root while whole blocks agree.

    Returns the node in which they end, how many bytes agree, and the blocks that hold them. One
    comparison per node, plus a binary search in the node where they diverge.
    """
    node, position = root, 0
    block_ids: list[BlockId] = []
    while (child := node.children.get(data[position : position + block_bytes])) is not None:
        node = child
        edge = node.edge
        if not data.startswith(edge, position):
            num_blocks = _count_common_blocks(data, position, edge, block_bytes)
            block_ids += node.block_ids[:num_blocks]
            return node, position + num_blocks * block_bytes, block_ids
        block_ids += node.block_ids
        position += len(edge)
    return node, position, block_ids


def _count_common_blocks(data: bytes, position: int, edge: bytes, block_bytes: int) -> int:
    # [0, low)      equal; the first block is equal, or the node would not have been found
    # [high, …)     not equal, or after the end of the data
    # Comparing stops at the first difference, so all probes together read each equal byte once.
    low, high = 1, min(len(edge), len(data) - position) // block_bytes
    view = memoryview(edge)
    probe = high
    while low < high:
        if data.startswith(view[low * block_bytes : probe * block_bytes], position + low * block_bytes):
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low


def keys_of(node: PrefixNode, block_bytes: int) -> list[int]:
    """Return the content keys of a node's blocks, which are stored on it and its ancestors."""
    keys = node.keys
    if keys is not None and len(keys) == node.num_blocks:
        return keys
    behind, above = [node], node.parent
    assert above is not None, "the root has no edge"
    if keys is None and above.keys and (above.parent is None or len(above.keys) == above.num_blocks):
        key, edge = above.keys[-1], node.edge
        node.keys = keys = [hash((key, edge))] if node.num_blocks == 1 else block_keys(key, edge, block_bytes)
        return keys
    while above.parent is not None and (above.keys is None or len(above.keys) < above.num_blocks):
        behind.append(above)
        above = above.parent
    key = end_key(above, block_bytes)
    for step in reversed(behind):
        if step.keys:  # it has grown since
            key = step.keys[-1]
            step.keys += block_keys(key, step.edge[len(step.keys) * block_bytes :], block_bytes)
        else:
            step.keys = block_keys(key, step.edge, block_bytes)
        key = step.keys[-1]
    assert node.keys is not None, "made just now"
    return node.keys


def end_key(node: PrefixNode, block_bytes: int) -> int:
    """Return the key of a node's last block; a root's key is that of its namespace."""
    if node.parent is not None:
        return keys_of(node, block_bytes)[-1]
    if node.keys is None:
        node.keys = [hash(node.namespace)]
    return node.keys[0]


def split(lower: PrefixNode, num_blocks: int, node_id: NodeId, block_bytes: int) -> PrefixNode:
    """Give the first `num_blocks` of a node to a new parent and return the parent.

    The lower part keeps its id and its object, so references to it still point to the same end.
    """
    parent = lower.parent
    assert parent is not None, "the root has no edge"
    assert 0 < num_blocks < lower.num_blocks, "only inside an edge"
    cut = num_blocks * block_bytes
    upper = PrefixNode(
        node_id=node_id,
        num_blocks=num_blocks,
        depth=lower.start + cut // TOKEN_BYTES,
        created_ns=lower.created_ns,
        last_access_ns=lower.last_access_ns,
        access_count=lower.access_count,
        priority=lower.priority,
        namespace=lower.namespace,
        edge=lower.edge[:cut],
        block_ids=lower.block_ids[:num_blocks],
        parent=parent,
        lock_count=lower.lock_count,
        num_pins=lower.num_pins,
        usage=lower.usage,
        former_id=lower.former_id,
        former_access_ns=lower.former_access_ns,
        former_depth=lower.former_depth,
    )
    if lower.keys is not None:
        upper.keys, lower.keys = lower.keys[:num_blocks], lower.keys[num_blocks:]
    if lower.hashes is not None:
        upper.hashes, lower.hashes = lower.hashes[:num_blocks], lower.hashes[num_blocks:]
    parent.children[lower.edge[:block_bytes]] = upper  # replaces `lower`
    lower.parent = upper
    lower.edge = lower.edge[cut:]
    lower.num_blocks -= num_blocks
    del lower.block_ids[:num_blocks]
    upper.adopt(lower, lower.edge[:block_bytes])
    return upper
