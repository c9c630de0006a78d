"""KV events: made from the nodes of a tree when blocks enter and leave, and sent to subscribers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sagellm.core.kv_block import ROOT_HASH, BlockHeader, KVIdentity
from sagellm.core.logging import get_logger
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventSink,
)
from sagellm.core.protocols.prefix_cache import EvictedBlocks
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.prefix_cache.ghosts import Departure
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode

_log = get_logger(__name__)


class Events:
    """Tells sinks about the full blocks of a tree. An event costs 5 µs per block."""

    def __init__(self, block_bytes: int, identity: KVIdentity) -> None:
        self.sinks: list[KVEventSink] = []
        self.keep: Callable[[EvictedBlocks], None] | None = None
        self._block_bytes = block_bytes
        self._identity = identity

    def add(self, sink: KVEventSink, nodes: Sequence[PrefixNode]) -> None:
        """Tell a sink about all nodes, parents first, and about everything that happens from now on."""
        for node in nodes:
            sink(self._stored(node, node.num_blocks))
        self.sinks.append(sink)

    def entered(self, node: PrefixNode, num_blocks: int) -> None:
        """Announce that the last blocks of a node are new."""
        self._tell(self._stored(node, num_blocks))

    def leaving(self, node: PrefixNode, num_blocks: int, departure: Departure) -> None:
        """Announce that the last blocks of a node, which are still there, are about to leave."""
        if departure.reason != "cleared":
            self._show(node, num_blocks)
        if not self.sinks:
            return
        gone = self._hashes_of(node)[: -num_blocks - 1 : -1]  # the last first
        self._tell(BlockRemoved(block_hashes=gone, reason=departure.reason, tenant=node.namespace.account))

    def emptied(self) -> None:
        """Announce that the cache is empty."""
        self._tell(AllBlocksCleared())

    def _show(self, node: PrefixNode, num_blocks: int) -> None:
        """Show the last blocks of a node, before they go, to the keeper of evicted blocks."""
        if self.keep is None:
            return
        hashes, size = self._hashes_of(node), self._block_bytes
        headers = []
        for index in range(node.num_blocks - num_blocks, node.num_blocks):
            parent = hashes[index - 1] if index else self._end_hash(node.parent)
            tokens = TokenIds(node.edge[index * size : (index + 1) * size])
            headers.append(BlockHeader.of(parent, tokens, node.namespace, self._identity))
        with contained() as failure:
            self.keep(EvictedBlocks(node.block_ids[-num_blocks:], headers))
        if failure.error is not None:
            _log.error("what was evicted could not be kept; it is not tried again", exc_info=failure.error)
            self.keep = None

    def _tell(self, event: KVCacheEvent) -> None:
        for sink in list(self.sinks):
            with contained() as failure:
                sink(event)
            if failure.error is not None:
                _log.error("a sink of KV events failed; it is told nothing more", exc_info=failure.error)
                self.sinks.remove(sink)

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
        """Return the chain hashes of a node's blocks, which are stored on it and its ancestors."""
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
                parent = BlockHeader.of(parent, tokens, step.namespace, self._identity).hash
                hashes.append(parent)
        assert node.hashes is not None, "made just now"
        return node.hashes
