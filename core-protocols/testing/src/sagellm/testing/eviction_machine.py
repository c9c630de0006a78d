"""Random operations of a prefix cache on its eviction policy, checked against a model."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode, EvictionPolicyProtocol

_PICK = st.integers(0, 15)
_STEPS_PER_NS = 3  # so that some nodes are equally old


def make_node(node_id: int, **values: int) -> CachedNode:
    """Return a node with defaults for the fields that a test does not set."""
    fields = {"num_blocks": 1, "depth": 16, "created_ns": node_id, "last_access_ns": node_id} | values
    return CachedNode(node_id=NodeId(node_id), **fields)  # type: ignore[arg-type]


class EvictionPolicyMachine(RuleBasedStateMachine):
    """Calls a policy as a cache would, and knows which nodes are unlocked leaves.

    `names_victims` says that the policy names a victim whenever there is a candidate, and counts.
    """

    def __init__(self, policy: EvictionPolicyProtocol, *, names_victims: bool) -> None:
        super().__init__()
        self.policy = policy
        self.names_victims = names_victims
        self.now = 0  # and the id of the last node
        self.num_hits = 0
        self.locked: list[CachedNode] = []
        self.leaves: list[CachedNode] = []

    def step(self, random: Random) -> CachedNode | None:
        """Do what a cache could do next and return the victim, if one went.

        A node enters, is hit and locked, is unlocked, or is evicted.
        """
        kind, pick = random.random(), random.randrange(1 << 16)
        if kind < 0.3 or not (self.locked or self.leaves):
            self.insert(num_blocks=random.randrange(1, 9))
        elif kind < 0.6 and self.locked:
            self.unlock(pick=pick)
        elif kind < 0.8 and self.leaves:
            self.lock(pick=pick, is_hit=True)
        elif victim := self.policy.victim():
            assert victim in self.leaves, f"node {victim.node_id} was named: {self._what_is(victim)}"
            self._remove(victim)
            return victim
        return None

    @rule(num_blocks=st.integers(1, 4))
    def insert(self, num_blocks: int) -> None:
        """A request adds a node and locks it."""
        self.now += 1
        time_ns = self.now // _STEPS_PER_NS
        node = make_node(
            self.now,
            num_blocks=num_blocks,
            depth=16 * num_blocks,
            created_ns=time_ns,
            last_access_ns=time_ns,
        )
        self.policy.on_insert(node)
        self.locked.append(node)

    @rule(pick=_PICK)
    def unlock(self, pick: int) -> None:
        """A request ended; the node is a leaf."""
        if self.locked:
            node = self.locked.pop(pick % len(self.locked))
            self.policy.add_candidate(node)
            self.leaves.append(node)

    @rule(pick=_PICK, is_hit=st.booleans())
    def lock(self, pick: int, is_hit: bool) -> None:  # noqa: FBT001  (hypothesis calls it)
        """A request uses the node, or gives it a child."""
        if self.leaves:
            node = self.leaves.pop(pick % len(self.leaves))
            self.policy.remove_candidate(node)
            self.locked.append(node)
            if is_hit:
                self._hit(node)

    @rule(pick=_PICK)
    def hit_a_locked_node(self, pick: int) -> None:
        """A second request uses a node that a first one holds."""
        if self.locked:
            self._hit(self.locked[pick % len(self.locked)])

    def _hit(self, node: CachedNode) -> None:
        self.now += 1
        node.last_access_ns = self.now // _STEPS_PER_NS
        node.access_count += 1
        self.num_hits += 1
        self.policy.on_hit(node)

    @rule(pick=_PICK)
    def split(self, pick: int) -> None:
        """A new branch splits a node in its middle; the lower part keeps its identity."""
        lower = (self.locked + self.leaves)[pick % (len(self.locked) + len(self.leaves) or 1) :][:1]
        if lower and lower[0].num_blocks > 1:
            self.now += 1
            upper = make_node(self.now, last_access_ns=lower[0].last_access_ns)
            lower[0].num_blocks -= 1
            self.policy.on_split(upper, lower[0])
            self.locked.append(upper)  # it has a child

    @rule(pick=_PICK, num_more=st.sampled_from([1, 3, -1]))
    def resize(self, pick: int, num_more: int) -> None:
        """A leaf grows at its end or gives up part of it, locked or not."""
        nodes = self.locked + self.leaves
        if nodes and nodes[pick % len(nodes)].num_blocks + num_more > 0:
            node = nodes[pick % len(nodes)]
            node.num_blocks += num_more
            node.depth += 16 * num_more
            self.policy.on_resize(node, num_more)

    @rule()
    def evict(self) -> None:
        """The cache asks for the victim and takes its blocks."""
        self._remove(self.policy.victim())

    @rule(num_blocks=st.integers(1, 12))
    def evict_at_once(self, num_blocks: int) -> None:
        """The cache takes whole leaves, at most this many blocks."""
        for node in self.policy.victims(num_blocks):
            assert node in self.leaves, f"node {node.node_id} was yielded: {self._what_is(node)}"
            num_blocks -= node.num_blocks
            assert num_blocks >= 0, f"node {node.node_id} was yielded and is larger than what was wanted"
            self.leaves.remove(node)

    @rule(pick=_PICK)
    def drop(self, pick: int) -> None:
        """The cache is cleared without consulting the policy."""
        self._remove(self.leaves[pick % len(self.leaves)] if self.leaves else None)

    def _remove(self, node: CachedNode | None) -> None:
        if node is not None and node in self.leaves:  # the invariant catches any other node
            self.policy.remove_candidate(node)
            self.policy.on_remove(node)
            self.leaves.remove(node)

    @invariant()
    def the_victim_is_an_unlocked_leaf(self) -> None:
        """The same one when asked twice, and there is one as long as there are leaves."""
        victim = self.policy.victim()
        if victim is not None:
            assert victim in self.leaves, f"node {victim.node_id} was named: {self._what_is(victim)}"
        assert self.policy.victim() is victim, "two questions in a row got two answers"
        if self.names_victims:
            assert victim is not None or not self.leaves, f"none was named of {len(self.leaves)} candidates"
            metrics = self.policy.metrics()
            counted = (metrics.num_candidates, metrics.num_hits)
            expected = (len(self.leaves), self.num_hits)
            assert counted == expected, f"candidates and hits are counted as {counted}; they are {expected}"

    def _what_is(self, node: CachedNode) -> str:
        return "it is locked or has a child" if node in self.locked else "it is not in the tree"
