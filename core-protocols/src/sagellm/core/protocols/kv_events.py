"""What enters and leaves a prefix cache, published so that another process can mirror its tree.

Classes, and fields up to `lora_name`, are named and ordered as in vLLM's KV events; `medium` is vLLM's term
for the tier in which blocks are computed. Later fields are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sagellm.core.tokens import TokenIds

RemovalReason: TypeAlias = Literal["evicted", "quota", "cleared"]
"""Evicted by the policy, because their tenant was at its quota, or on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full blocks were cached, in sequence after the block `parent_block_hash`.

    A hash covers all tokens up to the end of its block and the namespace: blake2b, 16 bytes, over the
    parent's hash and length-prefixed fields. A parent of None means the beginning of a prompt.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: TokenIds  # of these blocks, block_size each
    block_size: int
    lora_id: int | None = None  # vLLM's field; vLLM now uses the name
    medium: str = "GPU"
    lora_name: str | None = None
    reason: Literal["computed"] = "computed"
    tenant: str = "default"  # its account: the tenant, or public:NAME
    tier: str = "device"
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks are no longer cached. A block never leaves before those after it."""

    block_hashes: list[bytes]
    medium: str = "GPU"
    reason: RemovalReason = "evicted"
    tenant: str = "default"
    tier: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is cached any more."""

    reason: RemovalReason = "cleared"
    tier: str = "device"


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

KVEventSink: TypeAlias = Callable[[KVCacheEvent], None]
"""Receives an event in the middle of a change: must be quick and never call back. Dropped if it raises."""
