"""What is noted when blocks enter and leave: who has how many, what became of them, and who is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sagellm.core.kv_block import ROOT_HASH, BlockHeader
from sagellm.core.logging import get_logger
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventSink,
)
from sagellm.core.protocols.prefix_cache import TenantUsage
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.prefix_cache.edges import end_key, keys_of
from sagellm.kvmgr.prefix_cache.ghosts import Departure, Ghosts
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode

ANY_ACCOUNT = "*"
"""Stands in a table of quotas for every account that it does not name."""

_log = get_logger(__name__)


class Ledger:
    """Accounts by tenant, ghosts by content, and the sinks of KV events."""

    def __init__(self, block_bytes: int, max_ghost_blocks: int, quotas: Mapping[str, int]) -> None:
        self.ghosts = Ghosts(max_ghost_blocks)
        self.accounts: dict[str, TenantUsage] = {}
        self._quotas = quotas
        self._block_bytes = block_bytes
        self._sinks: list[KVEventSink] = []

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
            found = self.accounts[name] = TenantUsage(max_blocks=self.quota_of(name))
        return found

    def add_sink(self, sink: KVEventSink, nodes: Sequence[PrefixNode]) -> None:
        """Tell a sink of all nodes, parents first, and of all that happens from now on."""
        for node in nodes:
            sink(self._stored(node, node.num_blocks))
        self._sinks.append(sink)

    def entered(self, node: PrefixNode, num_blocks: int) -> None:
        """Note that the last blocks of a node are new."""
        node.usage.num_blocks += num_blocks
        if self._sinks:
            self._tell(self._stored(node, num_blocks))

    def leaving(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Note that the last blocks of a node, which are still there, are going."""
        usage = node.usage
        usage.num_blocks -= num_blocks
        usage.num_evicted_blocks += num_blocks
        if self.ghosts.max_blocks:
            keys = keys_of(node, self._block_bytes)
            gone_keys = keys if num_blocks == len(keys) else keys[-num_blocks:]
            self.ghosts.remember(gone_keys, node, departure)
        if self._sinks:
            gone = self._hashes_of(node)[: -num_blocks - 1 : -1]  # the last first
            tenant = node.namespace.account
            self._tell(BlockRemoved(block_hashes=gone, reason=departure.reason, tenant=tenant))

    def emptied(self) -> None:
        """Note that nothing is left."""
        if self._sinks:
            self._tell(AllBlocksCleared())

    def revive(self, leaf: PrefixNode, parent: PrefixNode) -> None:
        """Let a new leaf go on from what it was before it was evicted."""
        if not self.ghosts:
            return
        ghost, num_bytes = self.ghosts.revive(
            end_key(parent, self._block_bytes), leaf.edge, self._block_bytes
        )
        if ghost is not None:
            leaf.former_id, leaf.former_access_ns = ghost.node_id, ghost.last_access_ns
            leaf.former_depth = parent.depth + num_bytes // TOKEN_BYTES
            leaf.access_count = ghost.access_count + 1

    def revive_behind(self, node: PrefixNode, tail: bytes) -> None:
        """Forget the ghosts of what a node is being extended with."""
        if self.ghosts:
            self.ghosts.revive(end_key(node, self._block_bytes), tail, self._block_bytes)

    def _tell(self, event: KVCacheEvent) -> None:
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception:
                _log.exception("a sink of KV events failed; it is told nothing more")
                self._sinks.remove(sink)

    def _stored(self, node: PrefixNode, num_blocks: int) -> BlockStored:
        hashes, size = self._hashes_of(node), self._block_bytes
        before = len(hashes) - num_blocks
        parent = hashes[before - 1] if before else self._end_hash(node.parent)
        return BlockStored(
            block_hashes=hashes[before:],
            parent_block_hash=None if parent == ROOT_HASH else parent,
            token_ids=TokenIds(node.edge[before * size :]),
            block_size=size // TOKEN_BYTES,
            lora_name=node.namespace.adapter or None,
            tenant=node.namespace.account,
            salt=node.namespace.salt,
        )

    def _end_hash(self, node: PrefixNode | None) -> bytes:
        return ROOT_HASH if node is None or node.parent is None else self._hashes_of(node)[-1]

    def _hashes_of(self, node: PrefixNode) -> list[bytes]:
        """Return the chain hashes of a node's blocks, which are kept with it and its ancestors."""
        behind: list[PrefixNode] = []
        step = node
        while step.parent is not None and len(step.hashes or ()) < step.num_blocks:
            behind.append(step)
            step = step.parent
        for step in reversed(behind):
            hashes = step.hashes = [] if step.hashes is None else step.hashes
            parent = hashes[-1] if hashes else self._end_hash(step.parent)
            for begin in range(len(hashes) * self._block_bytes, len(step.edge), self._block_bytes):
                tokens = TokenIds(step.edge[begin : begin + self._block_bytes])
                parent = chain_hash(parent, tokens, step.namespace)
                hashes.append(parent)
        assert node.hashes is not None, "made just now"
        return node.hashes


def chain_hash(parent_hash: bytes, tokens: TokenIds, namespace: Namespace) -> bytes:
    """Return the hash of a block as KV events name it. About 5 µs."""
    header = BlockHeader(
        parent_hash=parent_hash,
        token_ids=tokens,
        namespace=namespace,
        model_fingerprint="",
        layout="",
        dtype="",
    )
    return header.hash
