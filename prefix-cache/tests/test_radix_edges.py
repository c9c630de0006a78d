from __future__ import annotations

import pytest

from sagellm.core import NodeId, pack
from sagellm.kvmgr.prefix_cache.node import PrefixNode, split, walk

BLOCK_BYTES = 8  # two tokens


def make_node(node_id, tokens, block_ids, parent=None, **values):
    node = PrefixNode(
        node_id=NodeId(node_id),
        num_blocks=len(block_ids),
        depth=len(tokens) + (parent.depth if parent else 0),
        created_ns=1,
        last_access_ns=2,
        edge=pack(tokens).data,
        block_ids=list(block_ids),
        parent=parent,
        **values,
    )
    if parent is not None:
        parent.adopt(node, node.edge[:BLOCK_BYTES])
    return node


def test_a_walk_finds_the_last_common_block_wherever_it_is():
    root = make_node(0, [], [])
    tokens = list(range(200))
    leaf = make_node(1, tokens, range(100), root)
    for num_equal in range(len(tokens) + 1):
        for num_more in (0, 1, 7, 50):
            asked = pack([*tokens[:num_equal], *[999] * num_more]).data
            node, num_bytes, block_ids = walk(root, asked, BLOCK_BYTES)
            assert num_bytes == num_equal // 2 * BLOCK_BYTES
            assert block_ids == list(range(num_equal // 2))
            assert node is (leaf if num_equal >= 2 else root)


def test_bytes_that_agree_across_tokens_do_not_match():
    root = make_node(0, [], [])
    make_node(1, [0x01020304, 0x01020304], [5], root)
    shifted = b"\x00" + pack([0x01020304, 0x01020304]).data + b"\x00\x00\x00"
    assert walk(root, shifted, BLOCK_BYTES)[1] == 0


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_split_leaves_the_end_where_it_was(num_blocks):
    root = make_node(0, [], [])
    lower = make_node(
        1, range(6), [10, 11, 12], root, lock_count=2, num_own_locks=1, access_count=3, priority=4
    )
    make_node(2, [7, 8], [13], lower, lock_count=1, num_own_locks=1)
    upper = split(lower, num_blocks, NodeId(3), BLOCK_BYTES)
    assert (upper.start, upper.depth) == (0, 2 * num_blocks)
    assert (lower.start, lower.depth) == (2 * num_blocks, 6)
    assert upper.block_ids + lower.block_ids == [10, 11, 12]
    assert (upper.lock_count, upper.num_own_locks, lower.lock_count, lower.num_own_locks) == (2, 0, 2, 1)
    assert (upper.access_count, upper.priority, upper.created_ns, upper.last_access_ns) == (3, 4, 1, 2)
    assert lower.path() == [lower, upper]
    assert walk(root, pack([*range(6), 7, 8]).data, BLOCK_BYTES)[2] == [10, 11, 12, 13]
