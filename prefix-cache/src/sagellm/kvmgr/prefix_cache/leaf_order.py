"""The order in which the cache gives up its leaves without a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from sagellm.core.errors import AuditError, PluginError
from sagellm.core.logging import get_logger
from sagellm.core.node_ranking import NodeRanking
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.eviction import CachedNode, EvictionPolicyProtocol
from sagellm.kvmgr.prefix_cache.node import PrefixNode


class LeafLRU(NodeRanking):
    """Unlocked leaves, least recently used first; the older node among equals."""

    add_candidate = NodeRanking.add
    remove_candidate = NodeRanking.discard
    victim = NodeRanking.first
    victims = NodeRanking.take
    candidates = NodeRanking.keys

    def __init__(self) -> None:
        super().__init__(attrgetter("last_access_ns"))

    def on_insert(self, *_: object) -> None:
        """Do nothing, here and below: a node's time is read when it becomes a candidate."""

    on_split = on_resize = on_hit = on_remove = on_insert

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Give up all that are wanted."""
        del node
        return num_wanted


LeafOrder: TypeAlias = EvictionPolicyProtocol | LeafLRU
"""What a cache calls; EvictionPolicyProtocol says what the calls mean."""

_log = get_logger(__name__)


class Leaves:
    """Ranks all unlocked leaves by a policy, and those of each account that has a quota by last use.

    The policy is asked until it raises or names a wrong node, and from then on `LeafLRU`. The error is logged
    and not raised: in the middle of a change of the tree it would leave blocks
    that are both cached and free. This includes AssertionError and SystemExit from the
    policy; only Ctrl-C passes, and AuditError, which accuses the cache. Who calls `policy` directly,
    as the tree does for hits and victims, passes on what it raises to `fail`.
    """

    def __init__(
        self,
        policy: LeafOrder,
        find_leaves: Callable[[], Iterable[CachedNode]],
        has_quota: Callable[[str], bool] | None,
    ) -> None:
        self.policy = policy
        self.failure = ""  # of the policy that was replaced
        self._find_leaves = find_leaves  # the unlocked ones
        self._own: dict[str, LeafLRU] = {}
        self._has_quota = has_quota
        self.has_quotas = has_quota is not None

    def of_account(self, account: str) -> LeafLRU:
        """Return the order of one account's leaves; empty for one without a quota."""
        return self._own.get(account) or LeafLRU()

    def on_insert(self, node: CachedNode) -> None:
        """Record that a node entered the tree."""
        try:
            self.policy.on_insert(node)
        except BaseException as error:
            self.fail(error)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Record that a node was split."""
        try:
            self.policy.on_split(upper, lower)
        except BaseException as error:
            self.fail(error)

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """Record that a node gained or lost blocks at its end."""
        try:
            self.policy.on_resize(node, num_more)
        except BaseException as error:
            self.fail(error)

    def leave(self, node: PrefixNode) -> None:
        """Record that an unlocked leaf has left the tree."""
        try:
            self.policy.remove_candidate(node)
            self.policy.on_remove(node)
        except BaseException as error:
            self.fail(error)
        if self.has_quotas:
            self.remove_own(node)

    def add(self, node: PrefixNode) -> None:
        """Record that a node became an unlocked leaf."""
        try:
            self.policy.add_candidate(node)
        except BaseException as error:
            self.fail(error).add_candidate(node)
        if self._has_quota is not None and self._has_quota(account := node.namespace.account):
            self._own.setdefault(account, LeafLRU()).add_candidate(node)

    def remove(self, node: PrefixNode) -> None:
        """Record that a node is no longer an unlocked leaf."""
        try:
            self.policy.remove_candidate(node)
        except BaseException as error:
            self.fail(error).remove_candidate(node)
        if self.has_quotas:
            self.remove_own(node)

    def remove_own(self, node: PrefixNode) -> None:
        """Remove a node from its account's own order, if there is one."""
        own = self._own.get(node.namespace.account)
        if own is not None:
            own.remove_candidate(node)

    def replace(self, policy: LeafOrder, nodes: Sequence[PrefixNode]) -> None:
        """Rank by another policy, once it knows all nodes of the tree in order of last use, parents first.

        If it raises, nothing has changed.
        """
        told: set[PrefixNode] = set()
        ends = [node for node in nodes if not node.children]
        for end in sorted(ends, key=attrgetter("last_access_ns")):
            for node in reversed(end.path()):
                if node not in told:
                    told.add(node)
                    policy.on_insert(node)
        for leaf in sorted(self._find_leaves(), key=attrgetter("last_access_ns")):
            policy.add_candidate(leaf)
        self.policy, self.failure = policy, ""

    def fail(self, error: BaseException) -> LeafLRU:
        """Replace the policy because of an error; return its successor, which ranks all unlocked leaves."""
        with contained(AuditError):  # that, and Ctrl-C, pass
            raise error
        assert not isinstance(self.policy, LeafLRU), f"the order of leaves is wrong: {error}"
        name = type(self.policy).__qualname__
        self.failure = f"{name}: {type(error).__name__}: {error}"
        _log.error(
            "eviction policy %s failed; the least recently used leaf goes first from now on",
            name,
            exc_info=error,
        )
        self.policy = order = LeafLRU()
        for leaf in self._find_leaves():
            order.add_candidate(leaf)
        return order

    def check_integrity(self, leaves: list[PrefixNode]) -> None:
        """Raise AssertionError if an account's own order differs from the leaves of the tree."""
        for account, own in self._own.items():
            expected = {leaf.node_id for leaf in leaves if leaf.namespace.account == account}
            assert own.candidates().keys() == expected, f"the order of {account}'s leaves is not the tree's"


def wrong_victim(node: object) -> PluginError:
    """Return the error for a victim that is not an unlocked leaf."""
    return PluginError(f"it chose node {getattr(node, 'node_id', node)}, which is not a leaf or is locked")
