"""What enters and leaves a prefix cache, told so that another process can keep a copy of its tree.

The classes and their first fields are those of vLLM's KV events, so that consumers of those understand
them; `reason`, `tenant` and `tier` come after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sagellm.core.tokens import TokenIds


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
    lora_name: str | None = None
    medium: str = "device"
    reason: str = "computed"
    tenant: str = "default"  # its account: the tenant, or public:NAME
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks are no longer cached. Those behind a block always go before it."""

    block_hashes: list[bytes]
    medium: str = "device"
    reason: str = "evicted"  # evicted, quota or cleared
    tenant: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is cached any more."""

    medium: str = "device"
    reason: str = "cleared"


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

KVEventSink: TypeAlias = Callable[[KVCacheEvent], None]
"""Takes an event. It is called in the middle of a change: it must be quick and never call back."""
