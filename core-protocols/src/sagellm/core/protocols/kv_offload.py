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
from sagellm.core.protocols.prefix_cache_types import EvictedBlocks
from sagellm.core.tokens import TokenIds

FetchRule: TypeAlias = Literal["cheaper", "always", "never"]
"""Whether a block is fetched: where that is cheaper than computing it, or without asking."""


class KVAccess(Protocol):
    """Copies KV between blocks and host memory before a call returns, as a forward backend does."""

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[memoryview]) -> None:
        """Copy the KV of blocks to host memory."""

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Put what `read_blocks` gave into blocks."""


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
    num_done: int = 0  # from the first on, without a gap
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every block has arrived."""
        return self.num_done == len(self.headers)


@dataclass(kw_only=True)
class OffloadMetrics:
    """What went down and came back; the tiers' own counts."""

    num_kept_blocks: int = 0
    num_not_kept_blocks: int = 0  # evicted while too many were in transit, or without memory for buffers
    num_fetches: int = 0
    num_fetched_blocks: int = 0
    num_staged_blocks: int = 0  # of the fetched ones, taken from the buffer of a save that was under way
    num_computed_instead: int = 0  # blocks that were stored, and computing them was cheaper
    num_lost_blocks: int = 0  # that a tier had in its index, but a fetch did not get
    expected_fetch_ns: int = 0  # what the tiers expected the fetches to take
    prefill_tokens_a_second: float = 0.0
    tiers: KVTierMetrics = field(default_factory=KVTierMetrics)


class KVOffloadProtocol(ABC):
    """Between one engine's KV memory and what is below it.

    Providers are called as `factory(memory, tiers=..., rule=..., clock=...)`: a KVMemory, tiers by name,
    the fastest first, and a FetchRule. One thread makes all calls: `poll` once per step, `keep` in the
    moment of an eviction. No call waits for a tier.

    A block has one copy on its way in each direction. What is being saved is not saved again, and a fetch of
    it takes the copy that is at hand. Who wants a block that is being fetched asks `fetch_of`, and waits for
    that fetch instead of beginning one.
    """

    @abstractmethod
    def keep(self, evicted: EvictedBlocks) -> None:
        """Copy blocks that are not kept yet; called while their KV is whole."""

    @abstractmethod
    def find(self, token_ids: TokenIds, namespace: Namespace, num_cached: int) -> list[BlockHeader]:
        """Return the blocks behind `num_cached` tokens that are worth a fetch: a run of what is kept."""

    @abstractmethod
    def fetch_of(self, header: BlockHeader) -> Fetch | None:
        """Return the fetch that has a block on its way, if there is one."""

    @abstractmethod
    def begin(self, headers: list[BlockHeader], block_ids: list[BlockId]) -> Fetch:
        """Start bringing blocks into the memory of these ids, which nobody else has until it is over.

        A fetch always ends, at the latest by the deadline of its tier. What did not arrive is lost.
        """

    @abstractmethod
    def copy_now(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy between blocks before a fetch writes to any."""

    @abstractmethod
    def poll(self) -> None:
        """Let fetches and saves move on."""

    @abstractmethod
    def measure_prefill(self, num_tokens: int, sum_context: float, duration_ns: int) -> None:
        """Note a step: its tokens, and the sum of how many tokens each of them attended to."""

    @abstractmethod
    def metrics(self) -> OffloadMetrics:
        """Return the counts so far."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""

    @abstractmethod
    def close(self) -> None:
        """Close the tiers, whose files and connections go now if they do not stay."""


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
        """Return a fetch that got nothing."""
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

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """There is nothing to close."""
