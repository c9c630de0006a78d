"""What is noted when blocks enter and leave: who has how many, what became of them, and who is told."""

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
"""Stands in a table of quotas for every account that it does not name."""

_MAX_IDLE = 10_000


class Ledger:
    """Accounts by tenant, ghosts by content, and KV events for subscribers.

    Of the accounts without blocks about 10,000 are kept, the latest.
    """

    def __init__(
        self, block_bytes: int, max_ghost_blocks: int, quotas: Mapping[str, int], identity: KVIdentity
    ) -> None:
        self.ghosts = Ghosts(max_ghost_blocks)
        self.events = Events(block_bytes, identity)
        self.accounts: dict[str, TenantUsage] = {}
        self._max_accounts = _MAX_IDLE  # so many, and those without blocks are looked through
        self._quotas = quotas
        self._block_bytes = block_bytes

    @property
    def has_quotas(self) -> bool:
        """Whether anybody has one."""
        return bool(self._quotas)

    def quota_of(self, account: str) -> int | None:
        """Return how many full blocks an account may have."""
        return self._quotas.get(account, self._quotas.get(ANY_ACCOUNT))

    def account(self, namespace: Namespace) -> TenantUsage:
        """Return whose blocks those of a namespace are."""
        name = namespace.account
        found = self.accounts.get(name)
        if found is None:
            if len(self.accounts) >= self._max_accounts:
                self._forget_idle()
            found = self.accounts[name] = TenantUsage(max_blocks=self.quota_of(name))
        return found

    def entered(self, node: PrefixNode, num_blocks: int) -> None:
        """Note that the last blocks of a node are new."""
        node.usage.num_blocks += num_blocks
        if self.events.sinks:
            self.events.entered(node, num_blocks)

    def leaving(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Note that the last blocks of a node, which are still there, are going."""
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
        """Whether there is anybody to tell about evictions."""
        return bool(self.events.sinks) or self.events.keep is not None

    def tell(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Announce that the last blocks of a node, which are still there, are about to leave."""
        if self.events.keep is not None and departure.reason != "cleared":
            self.events.show(node, num_blocks)
        if self.events.sinks:
            self.events.leaving(node, num_blocks, departure)

    def left(self, nodes: list[PrefixNode], departure: Departure) -> None:
        """Record that whole nodes have left; they know their keys if ghosts are remembered."""
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
        """Let a new leaf go on from what it was before it was evicted."""
        if not self.ghosts.max_blocks:
            return
        keys: list[int] = []
        ghost, num_bytes = self.ghosts.revive(
            end_key(parent, self._block_bytes), leaf.edge, self._block_bytes, keys
        )
        leaf.keys = keys  # of its first blocks; the rest are made when they are wanted
        if ghost is not None:
            leaf.former_id, leaf.former_access_ns = ghost.node_id, ghost.last_access_ns
            leaf.former_depth = parent.depth + num_bytes // TOKEN_BYTES
            leaf.access_count = ghost.access_count + 1

    def revive_behind(self, node: PrefixNode, tail: bytes) -> None:
        """Forget the ghosts of what a node is being extended with."""
        if self.ghosts:
            self.ghosts.revive(end_key(node, self._block_bytes), tail, self._block_bytes, [])

    def _forget_idle(self) -> None:
        """Let the older accounts without blocks go; nobody else holds one. O(1) a new account, amortised."""
        idle = [name for name, usage in self.accounts.items() if not usage.has_blocks]
        for name in idle[: -_MAX_IDLE // 2]:
            del self.accounts[name]
        self._max_accounts = len(self.accounts) + _MAX_IDLE // 2
