"""Tiers without bytes: what a tier would hold and what it would take, for replays and simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sagellm.core import (
    BlockHeader,
    BlockId,
    BlockKey,
    Clock,
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
    """Stores only headers; a get leaves the buffer unchanged, but has a cost.

    So TieredKVStorage and the engine decide as they do over real tiers, from the given costs. On a `clock`,
    fetches follow one another on one link and arrive after their time; without one, and for puts, no time
    passes.
    """

    def __init__(self, max_blocks: int, *, get_ns: int, clock: Clock | None = None) -> None:
        self._max_blocks, self._get_ns, self._clock = max_blocks, get_ns, clock
        self._headers: dict[BlockKey, BlockHeader] = {}
        self._results: list[tuple[int, TierResult]] = []  # when each arrives
        self._free_ns = 0  # when the link has nothing to do
        self._num_submits = 0
        self._metrics = KVTierMetrics()

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Decide at once what is found, and when it arrives. Raises InvalidInputError without data."""
        check_requests(requests)
        ticket = Ticket(self._num_submits)
        self._num_submits += 1
        outcomes = tuple(map(self._do, requests))
        self._results.append((self._due_ns(requests, outcomes), TierResult(ticket, outcomes)))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return the results that have arrived."""
        now_ns = 0 if self._clock is None else self._clock.now_ns()
        arrived = [result for due_ns, result in self._results if due_ns <= now_ns]
        self._results = [each for each in self._results if each[0] > now_ns]
        return arrived

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

    def _due_ns(self, requests: Sequence[TierRequest], outcomes: Sequence[TierOutcome]) -> int:
        if self._clock is None:
            return 0
        pairs = zip(requests, outcomes, strict=True)
        fetched = [each.header.key for each, outcome in pairs if (each.action, outcome) == ("get", "done")]
        now_ns = self._clock.now_ns()
        if not fetched:
            return now_ns
        self._free_ns = max(now_ns, self._free_ns) + self.get_cost_ns(fetched)
        return self._free_ns

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

    def read_blocks(
        self, block_ids: Sequence[BlockId], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Do nothing: there is nothing to copy."""

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Do nothing: there is nothing to copy."""
