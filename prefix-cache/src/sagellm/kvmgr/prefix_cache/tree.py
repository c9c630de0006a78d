"""The radix tree: nodes, locks, and which leaves may go. Knows no threads and no clock."""

from __future__ import annotations

from itertools import count

from sagellm.core.errors import PluginError
from sagellm.core.ids import BlockId, NodeId
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import PrefixMatch
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of, split, walk
from sagellm.kvmgr.prefix_cache.ghosts import Ghost, Ghosts
from sagellm.kvmgr.prefix_cache.guarded_order import GuardedOrder
from sagellm.kvmgr.prefix_cache.integrity import check_tree
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU, LeafOrder
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode


class RadixTree:
    """Path-compressed, block-aligned, one root for each namespace that has blocks.

    Tells `order` which nodes there are and which of them are unlocked leaves. `version` rises
    when blocks enter or leave; a split keeps every match valid and does not count.
    """

    def __init__(self, block_size: int, order: LeafOrder, max_ghost_blocks: int = 0) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.order = GuardedOrder(order, self._unlocked_leaves)
        self.roots: dict[Namespace, PrefixNode] = {}
        self.cached: set[BlockId] = set()
        self.ghosts = Ghosts(max_ghost_blocks)
        self.version = 0
        self.num_nodes = 0
        self.num_evictable = 0
        self._node_ids = map(NodeId, count(1))

    def match(self, data: bytes, namespace: Namespace) -> PrefixMatch:
        """Find how many whole blocks of packed tokens are in the tree."""
        root = self.roots.get(namespace)
        if root is not None:
            node, num_bytes, block_ids = walk(root, data, self.block_bytes)
            if num_bytes:
                return PrefixMatch(num_bytes // TOKEN_BYTES, block_ids, namespace, node, self.version)
        return PrefixMatch(0, [], namespace, None, self.version)

    def owns(self, node: PrefixNode) -> bool:
        """Say whether a node is in this tree now."""
        while node.parent is not None:
            node = node.parent
        return self.roots.get(node.namespace) is node

    def lock(self, node: PrefixNode, depth: int, now_ns: int, *, is_hit: bool) -> PrefixNode:
        """Lock the path down to `depth`, which is in `node`; split it if that is not its end."""
        num_blocks = (depth - node.start) // self.block_size
        if num_blocks < node.num_blocks:
            node = self._split(node, num_blocks)
        elif self._is_candidate(node):
            self.order.remove_candidate(node)
        for step in node.path():
            if not step.lock_count:
                self.num_evictable -= step.num_blocks
            step.lock_count += 1
            step.last_access_ns = now_ns
            if is_hit:
                step.access_count += 1
                self.order.on_hit(step)
        node.num_own_locks += 1
        return node

    def unlock(self, node: PrefixNode) -> None:
        """Undo one lock that ends at the node."""
        node.num_own_locks -= 1
        for step in node.path():
            step.lock_count -= 1
            if not step.lock_count:
                self.num_evictable += step.num_blocks
        if self._is_candidate(node):
            self.order.add_candidate(node)

    def touch(self, node: PrefixNode, now_ns: int) -> None:
        """Note a use of the path to a node that is no hit."""
        is_candidate = self._is_candidate(node)
        if is_candidate:
            self.order.remove_candidate(node)
        for step in node.path():
            step.last_access_ns = now_ns
        if is_candidate:
            self.order.add_candidate(node)

    def extend(
        self, match: PrefixMatch, tail: bytes, new: list[BlockId], *, priority: int, now_ns: int
    ) -> None:
        """Put blocks behind the end of a match: into the unlocked leaf there, or as a new leaf."""
        self.version += 1
        self.cached.update(new)
        self.num_evictable += len(new)
        node, depth = match.node, match.match_length
        assert node is None or isinstance(node, PrefixNode), "the match is this tree's"
        if node is None:
            node = self.roots.get(match.namespace) or self._add_root(match.namespace)
        elif depth < node.depth:
            node = self._split(node, (depth - node.start) // self.block_size)
        elif self._is_candidate(node):
            if node.priority == priority:
                if len(self.ghosts):
                    self.ghosts.revive(end_key(node, self.block_bytes), tail, self.block_bytes)
                node.edge += tail
                node.keys = None
                node.block_ids += new
                node.num_blocks += len(new)
                node.depth += len(new) * self.block_size
                return
            self.order.remove_candidate(node)
        leaf = PrefixNode(
            node_id=next(self._node_ids),
            num_blocks=len(new),
            depth=depth + len(new) * self.block_size,
            created_ns=now_ns,
            last_access_ns=now_ns,
            priority=priority,
            namespace=match.namespace,
            edge=tail,
            block_ids=list(new),
            parent=node,
        )
        if len(self.ghosts):
            self._revive(leaf, node)
        node.children[tail[: self.block_bytes]] = leaf
        self.num_nodes += 1
        self.order.on_insert(leaf)
        self.order.add_candidate(leaf)

    def evict(self, num_blocks: int, now_ns: int) -> list[BlockId]:
        """Drop blocks of unlocked leaves in order. Raises PluginError when the order names another node."""
        dropped: list[BlockId] = []
        while (wanted := num_blocks - len(dropped)) > 0:
            node = self.order.victim()
            if node is None:
                break
            if not isinstance(node, PrefixNode) or node.parent is None or not self._is_candidate(node):
                if dropped:  # the caller must learn of these; the next call raises
                    break
                policy = type(self.order.current).__qualname__
                raise PluginError(
                    f"{policy} named node {node.node_id} as a victim, which is no unlocked leaf"
                )
            given = min(max(1, self.order.num_victim_blocks(node, wanted)), wanted, node.num_blocks)
            if self.ghosts.max_blocks:
                self._remember(node, given, now_ns)
            dropped += self._drop(node) if given == node.num_blocks else self._shorten(node, given)
        return dropped

    def clear(self) -> list[BlockId]:
        """Drop every unlocked node."""
        dropped: list[BlockId] = []
        for node in reversed(self._nodes()):
            if node.parent is not None and not node.lock_count:
                dropped += self._drop(node)
        return dropped

    def check_integrity(self) -> None:
        """Raise AssertionError if nodes, counters and order contradict each other. O(tree)."""
        found = check_tree(self.roots, self.block_bytes)
        assert found.block_ids == self.cached, "the set of cached blocks differs from the tree"
        assert found.num_nodes == self.num_nodes, f"{found.num_nodes} nodes, {self.num_nodes} counted"
        counted = f"{found.num_evictable} blocks are evictable, {self.num_evictable} counted"
        assert found.num_evictable == self.num_evictable, counted
        order = self.order.current
        if isinstance(order, LeafLRU):
            assert order.candidates() == found.leaves, "the order of leaves differs from the tree"

    def _nodes(self) -> list[PrefixNode]:
        """Return all nodes, parents before their children, the roots too."""
        nodes = [*self.roots.values()]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        return nodes

    def _unlocked_leaves(self) -> list[PrefixNode]:
        return [node for node in self._nodes() if node.parent is not None and self._is_candidate(node)]

    def _is_candidate(self, node: PrefixNode) -> bool:
        return not node.children and not node.lock_count

    def _add_root(self, namespace: Namespace) -> PrefixNode:
        root = PrefixNode(
            node_id=NodeId(0),
            num_blocks=0,
            depth=0,
            created_ns=0,
            last_access_ns=0,
            namespace=namespace,
            edge=b"",
            block_ids=[],
        )
        self.roots[namespace] = root
        return root

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        upper = split(node, num_blocks, next(self._node_ids), self.block_bytes)
        self.num_nodes += 1
        self.order.on_split(upper, node)
        return upper

    def _drop(self, node: PrefixNode) -> list[BlockId]:
        self.order.remove_candidate(node)
        parent = node.parent
        assert parent is not None, "a root is no victim"
        del parent.children[node.edge[: self.block_bytes]]
        node.parent = None
        self.num_nodes -= 1
        self._forget(node.block_ids)
        self.order.on_remove(node)
        if not parent.children:
            if parent.parent is None:  # a namespace goes with its last node
                del self.roots[parent.namespace]
            elif not parent.lock_count:
                self.order.add_candidate(parent)
        return node.block_ids

    def _shorten(self, node: PrefixNode, num_blocks: int) -> list[BlockId]:
        dropped = node.block_ids[-num_blocks:]
        del node.block_ids[-num_blocks:]
        node.edge = node.edge[: -num_blocks * self.block_bytes]
        node.num_blocks -= num_blocks
        if node.keys is not None:
            del node.keys[-num_blocks:]
        node.depth -= num_blocks * self.block_size
        self._forget(dropped)
        return dropped

    def _remember(self, node: PrefixNode, num_blocks: int, now_ns: int) -> None:
        ghost = Ghost(
            node.node_id,
            node.access_count,
            node.last_access_ns,
            now_ns,
            type(self.order.current).__name__,
        )
        self.ghosts.remember(keys_of(node, self.block_bytes)[-num_blocks:], ghost)

    def _revive(self, leaf: PrefixNode, parent: PrefixNode) -> None:
        """Let a new leaf go on from what it was before it was evicted."""
        key = end_key(parent, self.block_bytes)
        ghost, num_bytes = self.ghosts.revive(key, leaf.edge, self.block_bytes)
        if ghost is not None:
            leaf.former_id, leaf.former_access_ns = ghost.node_id, ghost.last_access_ns
            leaf.former_depth = parent.depth + num_bytes // TOKEN_BYTES
            leaf.access_count = ghost.access_count + 1

    def _forget(self, block_ids: list[BlockId]) -> None:
        self.version += 1
        self.cached.difference_update(block_ids)
        self.num_evictable -= len(block_ids)
