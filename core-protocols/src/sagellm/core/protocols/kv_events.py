"""What enters and leaves a prefix cache, told so that another process can keep a copy of its tree.

Classes, and fields up to `lora_name`, are named and ordered as in vLLM's KV events; `medium` is its word for
the tier that blocks are computed in. What comes after is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sagellm.core.tokens import TokenIds

RemovalReason: TypeAlias = Literal["evicted", "quota", "cleared"]
"""By the policy, because their tenant was at its quota, or on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full blocks were cached, one after another behind the block `parent_block_hash`.

    A hash covers all tokens up to the end of its block and the namespace: blake2b, 16 bytes, over the
    parent's hash and length-prefixed fields. None as parent is the beginning of a prompt.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: TokenIds  # of these blocks, block_size each
    block_size: int
    lora_id: int | None = None  # vLLM's; it goes by the name now
    medium: str = "GPU"
    lora_name: str | None = None
    reason: Literal["computed"] = "computed"
    tenant: str = "default"  # its account: the tenant, or public:NAME
    tier: str = "device"
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks are no longer cached. Those behind a block always go before it."""

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
"""Takes an event amid a change: quick, never calling back. One that raises is told nothing more."""
