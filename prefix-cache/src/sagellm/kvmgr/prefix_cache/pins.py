"""Prefixes that stay whatever is evicted: within a budget, and for a time after their last hit."""

from __future__ import annotations

from sagellm.core.protocols.prefix_cache import PinnedPrefix, PinResult
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.prefix_cache.edges import Found
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

    def pin(self, found: Found, num_tokens: int, ttl_ns: int | None, now_ns: int) -> PinResult:
        """Pin what was found of so many tokens, as far as the budget allows, and say why it is no more."""
        num_pinned = self._set(found, ttl_ns, now_ns)
        return PinResult(
            num_tokens=num_tokens,
            num_pinned_tokens=num_pinned,
            num_pinned_blocks=self.num_blocks,
            max_pinned_blocks=self.max_blocks,
            reason=self._reason(found, num_tokens, num_pinned),
        )

    def prefixes(self, now_ns: int) -> list[PinnedPrefix]:
        """Return what is pinned, in the order in which it was."""
        self.expire(now_ns)
        return [
            PinnedPrefix(
                token_ids=TokenIds(b"".join(step.edge for step in reversed(node.path()))),
                namespace=node.namespace,
                ttl_s=None if pin.ttl_ns is None else pin.ttl_ns / 1e9,
                left_s=None if pin.ttl_ns is None else (pin.expires_ns - now_ns) / 1e9,
            )
            for node, pin in self._pins.items()
        ]

    def _reason(self, found: Found, num_tokens: int, num_pinned: int) -> str:
        size = self._tree.block_size
        num_cached = len(found.block_ids) * size
        if num_tokens < size:
            return f"a block has {size} tokens, and only whole blocks are pinned"
        if num_pinned < num_cached:
            return f"{self.num_blocks} of the {self.max_blocks} blocks that may be pinned are"
        if num_cached == num_tokens // size * size:
            return ""
        whose = found.namespace
        if whose not in self._tree.roots:
            name = f"the public namespace {whose.salt!r}" if whose.is_public else f"tenant {whose.tenant!r}"
            salted = " with this salt" if whose.salt and not whose.is_public else ""
            return f"nothing at all is cached for {name}{salted}"
        if not num_cached:
            return "nothing of it is cached; send the prompt once, then pin it"
        return f"only {num_cached} tokens are cached; send the prompt once, then pin it"

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

    def _set(self, found: Found, ttl_ns: int | None, now_ns: int) -> int:
        """Return how many tokens are pinned."""
        self.expire(now_ns)
        node = found.node
        if node is None:
            return 0
        size = self._tree.block_size
        held = sum(step.num_blocks for step in node.path() if step.num_pins)
        depth = min(len(found.block_ids), held + self.max_blocks - self.num_blocks) * size
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
