"""Keeps the KV that the prefix cache evicts below the device, and brings it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from sagellm.core.ids import BlockId
from sagellm.core.kv_block import BlockHeader, KVIdentity
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_tier import KVTierMetrics
from sagellm.core.protocols.prefix_cache import EvictedBlocks
from sagellm.core.tokens import TokenIds

FetchRule: TypeAlias = Literal["cheaper", "always", "never"]
"""Whether to fetch a block: only if that is cheaper than computing it, or always."""


class KVAccess(Protocol):
    """Copies KV between blocks and host memory synchronously, as a forward backend does."""

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of each pair's first block to its second, pair by pair in order."""

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[memoryview]) -> None:
        """Copy the KV of blocks to host memory."""

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy what `read_blocks` returned into blocks."""


class KVMemory(NamedTuple):
    """The KV of one device: how to copy it, the size of a block, and what else must match to reuse it."""

    access: KVAccess
    block_size: int  # tokens
    block_bytes: int
    identity: KVIdentity


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one prompt on their way from the tiers to the device."""

    headers: list[BlockHeader]
    block_ids: list[BlockId]
    num_done: int = 0  # from the first, without gaps
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every block has arrived."""
        return self.num_done == len(self.headers)


@dataclass(kw_only=True)
class OffloadMetrics:
    """What was stored and fetched; the tiers' own counts."""

    num_kept_blocks: int = 0
    num_not_kept_blocks: int = 0  # evicted while too many were in transit or without memory for buffers
    num_fetches: int = 0
    num_fetched_blocks: int = 0
    num_staged_blocks: int = 0  # of the fetched ones, from the buffer of a save in progress
    num_computed_instead: int = 0  # stored blocks that were cheaper to compute
    num_lost_blocks: int = 0  # in a tier's index, but not returned to a fetch
    expected_fetch_ns: int = 0  # what the tiers expected the fetches to take
    prefill_tokens_a_second: float = 0.0
    tiers: KVTierMetrics = field(default_factory=KVTierMetrics)


class KVOffloadProtocol(ABC):
    """Moves KV between one engine's memory and the tiers below it.

    Providers are called as `factory(memory, tiers=..., rule=..., clock=...)`: a KVMemory, tiers by name,
    the fastest first, and a FetchRule. One thread makes all calls: `poll` once per step, `keep` at the
    moment of eviction. No call waits for a tier.

    A block has at most one copy in transit in each direction. A block being saved is not saved again, and a
    fetch of it uses the copy at hand. A caller that needs a block being fetched calls `fetch_of`, and waits
    for that fetch instead of beginning one.
    """

    @abstractmethod
    def keep(self, evicted: EvictedBlocks) -> None:
        """Copy blocks that are not stored yet; called while their KV is intact."""

    @abstractmethod
    def find(self, token_ids: TokenIds, namespace: Namespace, num_cached: int) -> list[BlockHeader]:
        """Return the blocks after `num_cached` tokens that are worth fetching: a run of stored blocks."""

    @abstractmethod
    def fetch_of(self, header: BlockHeader) -> Fetch | None:
        """Return the fetch in progress of this block, if any."""

    @abstractmethod
    def begin(self, headers: list[BlockHeader], block_ids: list[BlockId]) -> Fetch:
        """Start copying blocks into the memory of these ids, which nothing else uses until it is over.

        A fetch always ends, at the latest by its tier's deadline. Blocks that did not arrive are lost.
        """

    @abstractmethod
    def copy_now(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy between blocks now, before any fetch writes to one."""

    @abstractmethod
    def poll(self) -> None:
        """Advance fetches and saves."""

    @abstractmethod
    def measure_prefill(self, num_tokens: int, sum_context: float, duration_ns: int) -> None:
        """Record a step: its tokens, and the sum of how many tokens each of them attended to."""

    @abstractmethod
    def metrics(self) -> OffloadMetrics:
        """Return the counts so far."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""

    @abstractmethod
    def close(self) -> None:
        """Close the tiers, whose files and connections end now unless they are persistent."""


class NullKVOffload(KVOffloadProtocol):
    """Keeps nothing, so there is nothing to fetch."""

    def __init__(self, memory: KVMemory | None = None, **_: object) -> None:
        self._memory = memory

    def keep(self, evicted: EvictedBlocks) -> None:
        """Let them go."""

    def find(self, token_ids: TokenIds, namespace: Namespace, num_cached: int) -> list[BlockHeader]:
        """Find nothing."""
        return []

    def fetch_of(self, header: BlockHeader) -> Fetch | None:
        """Return None."""
        return None

    def begin(self, headers: list[BlockHeader], block_ids: list[BlockId]) -> Fetch:
        """Return a fetch that received nothing."""
        return Fetch(headers, block_ids, is_over=True)

    def copy_now(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy."""
        if self._memory is not None:
            self._memory.access.copy_blocks(pairs)

    def poll(self) -> None:
        """Do nothing."""

    def measure_prefill(self, num_tokens: int, sum_context: float, duration_ns: int) -> None:
        """Do nothing."""

    def metrics(self) -> OffloadMetrics:
        """Return zeros."""
        return OffloadMetrics()

    check_integrity = close = poll
