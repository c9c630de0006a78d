"""Tiers without bytes: what a tier would hold and what it would take, for replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sagellm.core import (
    BlockHeader,
    BlockId,
    BlockKey,
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierOutcome,
    TierRequest,
    TierResult,
)
from sagellm.core.protocols.forward import NullForwardBackend
from sagellm.core.protocols.kv_tier import check_requests


class CostedKVTier(KVTierProtocol):
    """Stores only headers; a get leaves the buffer unchanged and takes no time, but has a cost.

    So TieredKVStorage and the engine decide as they do over real tiers, from the given costs.
    """

    def __init__(self, max_blocks: int, *, get_ns: int) -> None:
        self._max_blocks, self._get_ns = max_blocks, get_ns
        self._headers: dict[BlockKey, BlockHeader] = {}
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._metrics = KVTierMetrics()

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Decide at once. Raises InvalidInputError for a put or get without data."""
        check_requests(requests)
        ticket = Ticket(self._num_submits)
        self._num_submits += 1
        self._results.append(TierResult(ticket, tuple(map(self._do, requests))))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return the results of everything submitted."""
        results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Say whether it was put."""
        return key in self._headers

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Return the cost of those that are stored."""
        return self._get_ns * sum(key in self._headers for key in keys)

    def metrics(self) -> KVTierMetrics:
        """Return the counts so far; bytes are 0."""
        return replace(self._metrics, num_blocks=len(self._headers))

    def check_integrity(self) -> None:
        """Raise AssertionError if there are more blocks than room."""
        assert len(self._headers) <= self._max_blocks, f"{len(self._headers)} of {self._max_blocks} blocks"

    def close(self) -> None:
        """Forget everything."""
        self._headers.clear()

    def _do(self, request: TierRequest) -> TierOutcome:
        header = request.header
        if request.action == "delete":
            return "done" if self._headers.pop(header.key, None) is not None else "missing"
        if request.action == "get":
            is_hit = self._headers.get(header.key) == header
            self._metrics.num_gets += 1
            self._metrics.num_hits += is_hit
            return "done" if is_hit else "missing"
        if header.key in self._headers:
            return "done"
        if len(self._headers) >= self._max_blocks:
            self._metrics.num_full += 1
            return "full"
        self._headers[header.key] = header
        self._metrics.num_puts += 1
        return "done"


class NoBytes(NullForwardBackend):
    """KV memory of a replay, which holds nothing: copies to and from it do nothing."""

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[memoryview]) -> None:
        """Do nothing: there is nothing to copy."""

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Do nothing: there is nothing to copy."""
