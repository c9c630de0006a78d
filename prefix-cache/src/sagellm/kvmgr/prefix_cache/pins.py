"""Prefixes that stay whatever is evicted: within a budget, and for a time after their last hit."""

from __future__ import annotations

from sagellm.core.protocols.prefix_cache import PrefixMatch
from sagellm.kvmgr.prefix_cache.node import PrefixNode
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_NEVER = 2**63


class Pin:
    """One pinned prefix; it ends with its node. `ttl_ns` counts from the last hit."""

    __slots__ = ("expires_ns", "ttl_ns")

    def __init__(self, ttl_ns: int | None, now_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self.expires_ns = _NEVER if ttl_ns is None else now_ns + ttl_ns


class Pins:
    """The pins of one tree, each a lock on the path to a node. What is pinned more than once counts once."""

    def __init__(self, tree: RadixTree, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._tree = tree
        self._pins: dict[PrefixNode, Pin] = {}
        self._next_ns = _NEVER  # no pin expires before

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._pins

    def set(self, match: PrefixMatch, ttl_ns: int | None, now_ns: int) -> int:
        """Pin as many blocks of a match as the budget allows and return how many tokens that is."""
        self.expire(now_ns)
        node = match.node
        if not isinstance(node, PrefixNode):
            return 0
        size = self._tree.block_size
        held = sum(step.num_blocks for step in node.path() if step.num_pins)
        depth = min(len(match.block_ids), held + self.max_blocks - self.num_blocks) * size
        if depth <= 0:
            return 0
        while depth <= node.start and node.parent is not None:
            node = node.parent
        if node.depth != depth or node not in self._pins:
            node = self._tree.lock(node, depth, now_ns, is_hit=False)
            for step in node.path():
                self.num_blocks += 0 if step.num_pins else step.num_blocks
                step.num_pins += 1
        pin = self._pins[node] = Pin(ttl_ns, now_ns)
        self._next_ns = min(self._next_ns, pin.expires_ns)
        return depth

    def end(self, node: PrefixNode) -> bool:
        """End the pin at a node, if there is one."""
        if self._pins.pop(node, None) is None:
            return False
        for step in node.path():
            step.num_pins -= 1
            self.num_blocks -= 0 if step.num_pins else step.num_blocks
        self._tree.unlock(node)
        return True

    def refresh(self, node: PrefixNode, now_ns: int) -> None:
        """Note a hit of a path: the pins on it live on from now."""
        for step in node.path():
            pin = self._pins.get(step) if step.num_pins else None
            if pin is not None and pin.ttl_ns is not None:
                pin.expires_ns = now_ns + pin.ttl_ns

    def expire(self, now_ns: int) -> None:
        """End the pins whose time is over. O(1) before the first one's is."""
        if now_ns < self._next_ns:
            return
        for node in [node for node, pin in self._pins.items() if pin.expires_ns <= now_ns]:
            self.end(node)
        self._next_ns = min((pin.expires_ns for pin in self._pins.values()), default=_NEVER)

    def check_integrity(self, nodes: list[PrefixNode]) -> None:
        """Raise AssertionError if the counts on the nodes of the tree contradict the pins."""
        counted = dict.fromkeys(nodes, 0)
        for pinned in self._pins:
            assert pinned.num_own_locks, f"node {pinned.node_id} is pinned, yet not locked"
            for step in pinned.path():
                counted[step] += 1
        for node, num_pins in counted.items():
            assert node.num_pins == num_pins, f"node {node.node_id}: {node.num_pins} pins, {num_pins} found"
        num_blocks = sum(node.num_blocks for node, num_pins in counted.items() if num_pins)
        assert num_blocks == self.num_blocks, f"{num_blocks} blocks are pinned, {self.num_blocks} counted"
