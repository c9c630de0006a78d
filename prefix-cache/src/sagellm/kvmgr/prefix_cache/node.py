"""The node of the radix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from sagellm.core.ids import BlockId, NodeId
from sagellm.core.protocols.eviction import CachedNode
from sagellm.core.protocols.prefix_cache import TenantUsage

TOKEN_BYTES = 4
"""Bytes of one packed token id."""

_MAX_STALE_HEADS = 64


@dataclass(slots=True, eq=False)
class PartialBlock:
    """A block that is not full, after the end of a node; nothing writes to it any more."""

    block_id: BlockId
    tokens: bytes = field(repr=False)
    node: PrefixNode = field(repr=False)
    usage: TenantUsage = field(repr=False)  # of its owner


NO_CHILDREN: dict[bytes, PrefixNode] = {}
"""Shared by all nodes that never had a child, which are most, and never written to; so is `NO_HEADS`."""

NO_HEADS: dict[bytes, bytes] = {}


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixNode(CachedNode):
    """A run of consecutive cached blocks; the root of a namespace has none.

    `edge` is the packed tokens of the run, whole blocks of them. Children are found by the bytes
    of their first block. A lock on a node protects all its ancestors too: `lock_count` counts
    the locks that end here (`num_own_locks`) or further down.
    """

    # tokens of a path, by node:
    # [0, start)      the ancestors' edges
    # [start, depth)  this edge, in `block_ids`
    edge: bytes = field(repr=False)  # omitted: may be long, as may the blocks; `repr` shows their number
    block_ids: list[BlockId] = field(repr=False)
    parent: PrefixNode | None = field(default=None, repr=False)
    children: dict[bytes, PrefixNode] = field(default_factory=lambda: NO_CHILDREN, repr=False)
    heads: dict[bytes, bytes] = field(
        default_factory=lambda: NO_HEADS, repr=False
    )  # first token → first block
    lock_count: int = 0
    num_own_locks: int = 0
    num_pins: int = 0  # that end here or below
    usage: TenantUsage = field(default_factory=TenantUsage, repr=False)  # of its owner; a root has none
    partials: tuple[PartialBlock, ...] = field(default=(), repr=False)
    keys: list[int] | None = field(default=None, repr=False)  # of its blocks' contents, once computed
    hashes: list[bytes] | None = field(default=None, repr=False)  # the same for KV events

    @property
    def parent_id(self) -> NodeId | None:
        """The node that this one continues; None at the top."""
        return None if self.parent is None or self.parent.parent is None else self.parent.node_id

    def adopt(self, child: PrefixNode, first_block: bytes) -> None:
        """Add a child; it becomes the latest one that begins with its first token."""
        if self.heads is NO_HEADS:
            self.children, self.heads = {}, {}
        self.children[first_block] = child
        self.heads[first_block[:TOKEN_BYTES]] = first_block
        if len(self.heads) > 2 * len(self.children) + _MAX_STALE_HEADS:
            self.heads = {key[:TOKEN_BYTES]: key for key in self.children}

    @property
    def start(self) -> int:
        """Tokens from the root to the node's beginning."""
        return self.depth - len(self.edge) // TOKEN_BYTES

    def path(self) -> list[PrefixNode]:
        """Return the node and its ancestors, deepest first, without the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes
