"""Bookkeeping when blocks enter and leave: who has how many, what became of them, whom to tell."""

from __future__ import annotations

from collections.abc import Mapping

from sagellm.core.kv_block import KVIdentity
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import TenantUsage
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of
from sagellm.kvmgr.prefix_cache.events import Events
from sagellm.kvmgr.prefix_cache.ghosts import Departure, Ghosts
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode

ANY_ACCOUNT = "*"
"""In a table of quotas, stands for every account that it does not name."""

_MAX_IDLE = 10_000


class Ledger:
    """Accounts by tenant, ghosts by content, and KV events for subscribers.

    About 10,000 accounts without blocks are kept, the latest ones.
    """

    def __init__(
        self, block_bytes: int, max_ghost_blocks: int, quotas: Mapping[str, int], identity: KVIdentity
    ) -> None:
        self.ghosts = Ghosts(max_ghost_blocks)
        self.events = Events(block_bytes, identity)
        self.accounts: dict[str, TenantUsage] = {}
        self._max_accounts = _MAX_IDLE  # at this number, accounts without blocks are dropped
        self._quotas = quotas
        self._block_bytes = block_bytes

    @property
    def has_quotas(self) -> bool:
        """Whether any account has a quota."""
        return bool(self._quotas)

    def quota_of(self, account: str) -> int | None:
        """Return how many full blocks an account may have; None without a quota."""
        return self._quotas.get(account, self._quotas.get(ANY_ACCOUNT))

    def account(self, namespace: Namespace) -> TenantUsage:
        """Return the account that owns the blocks of a namespace."""
        name = namespace.account
        found = self.accounts.get(name)
        if found is None:
            if len(self.accounts) >= self._max_accounts:
                self._forget_idle()
            found = self.accounts[name] = TenantUsage(max_blocks=self.quota_of(name))
        return found

    def entered(self, node: PrefixNode, num_blocks: int) -> None:
        """Record that the last blocks of a node are new."""
        node.usage.num_blocks += num_blocks
        if self.events.sinks:
            self.events.entered(node, num_blocks)

    def leaving(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Record that the last blocks of a node, which are still there, are about to leave."""
        usage = node.usage
        usage.num_blocks -= num_blocks
        usage.num_evicted_blocks += num_blocks
        if self.ghosts.max_blocks:
            keys = keys_of(node, self._block_bytes)
            gone_keys = keys if num_blocks == len(keys) else keys[-num_blocks:]
            self.ghosts.remember(gone_keys, node, departure)
        if self.tells:
            self.tell(node, num_blocks, departure)

    @property
    def remembers(self) -> bool:
        """Whether evicted blocks become ghosts, which need their keys."""
        return self.ghosts.max_blocks > 0

    @property
    def tells(self) -> bool:
        """Whether anything is notified of evictions."""
        return bool(self.events.sinks) or self.events.keep is not None

    def tell(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Announce that the last blocks of a node, which are still there, are about to leave."""
        if self.events.keep is not None and departure.reason != "cleared":
            self.events.show(node, num_blocks)
        if self.events.sinks:
            self.events.leaving(node, num_blocks, departure)

    def left(self, nodes: list[PrefixNode], departure: Departure) -> None:
        """Record that whole nodes have left; their keys are set if ghosts are kept."""
        usage, num_blocks = TenantUsage(), 0
        for node in nodes:
            if node.usage is not usage:
                usage.num_blocks -= num_blocks
                usage.num_evicted_blocks += num_blocks
                usage, num_blocks = node.usage, 0
            num_blocks += node.num_blocks
        usage.num_blocks -= num_blocks
        usage.num_evicted_blocks += num_blocks
        if self.ghosts.max_blocks:
            self.ghosts.remember_all(nodes, departure)

    def revive(self, leaf: PrefixNode, parent: PrefixNode) -> None:
        """Restore to a new leaf its state from before it was evicted."""
        if not self.ghosts.max_blocks:
            return
        keys: list[int] = []
        ghost, num_bytes = self.ghosts.revive(
            end_key(parent, self._block_bytes), leaf.edge, self._block_bytes, keys
        )
        leaf.keys = keys  # of its first blocks; the rest are computed on demand
        if ghost is not None:
            leaf.former_id, leaf.former_access_ns = ghost.node_id, ghost.last_access_ns
            leaf.former_depth = parent.depth + num_bytes // TOKEN_BYTES
            leaf.access_count = ghost.access_count + 1

    def revive_behind(self, node: PrefixNode, tail: bytes) -> None:
        """Forget the ghosts of the blocks that extend a node."""
        if self.ghosts:
            self.ghosts.revive(end_key(node, self._block_bytes), tail, self._block_bytes, [])

    def _forget_idle(self) -> None:
        """Drop the older accounts without blocks; nothing else holds them. O(1) per account, amortised."""
        idle = [name for name, usage in self.accounts.items() if not usage.has_blocks]
        for name in idle[: -_MAX_IDLE // 2]:
            del self.accounts[name]
        self._max_accounts = len(self.accounts) + _MAX_IDLE // 2
