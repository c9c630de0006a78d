"""Which unlocked leaf goes next: of all, as the policy says, and of one tenant at its quota."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.prefix_cache.guarded_order import GuardedOrder
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU, LeafOrder
from sagellm.kvmgr.prefix_cache.node import PrefixNode


class Leaves:
    """The order of all leaves, and one more by last use for each account that has a quota."""

    def __init__(
        self,
        policy: LeafOrder,
        find_leaves: Callable[[], Iterable[CachedNode]],
        has_quota: Callable[[str], bool] | None,
    ) -> None:
        self.order = GuardedOrder(policy, find_leaves)
        self._own: dict[str, LeafLRU] = {}
        self._has_quota = has_quota
        self.has_quotas = has_quota is not None

    @property
    def policy_name(self) -> str:
        """The class of the policy that decides at this moment."""
        return type(self.order.current).__name__

    def of_account(self, account: str) -> LeafLRU:
        """Return the order of one account's leaves; empty for one without a quota."""
        return self._own.get(account) or LeafLRU()

    def add(self, node: PrefixNode) -> None:
        """Note that a node became an unlocked leaf."""
        self.order.add_candidate(node)
        if self._has_quota is not None and self._has_quota(account := node.namespace.account):
            self._own.setdefault(account, LeafLRU()).add_candidate(node)

    def remove(self, node: PrefixNode) -> None:
        """Note that a node is no unlocked leaf any more."""
        self.order.remove_candidate(node)
        if self._has_quota is not None:
            self.remove_own(node)

    def remove_own(self, node: PrefixNode) -> None:
        """Take a node out of the order of its account's leaves, if there is one."""
        own = self._own.get(node.namespace.account)
        if own is not None:
            own.remove_candidate(node)

    def check_integrity(self, leaves: list[PrefixNode]) -> None:
        """Raise AssertionError if the order of an account's own leaves differs from those of the tree."""
        for account, own in self._own.items():
            expected = {leaf.node_id for leaf in leaves if leaf.namespace.account == account}
            assert own.candidates().keys() == expected, f"the order of {account}'s leaves is not the tree's"
