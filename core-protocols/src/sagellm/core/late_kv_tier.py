"""A tier that answers late and sometimes fails, from a seed, to test the code that waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.protocols.kv_tier import (
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierRequest,
    TierResult,
    check_requests,
)


class LateKVTier(KVTierProtocol):
    """Forwards everything to a tier, and returns results some polls later, out of order.

    `failure_rate` is the share of puts and gets that fail: they are not forwarded, and the buffer of a get
    then holds anything.
    """

    def __init__(self, tier: KVTierProtocol, random: Random, *, failure_rate: float = 0.0) -> None:
        self._tier, self._random, self._failure_rate = tier, random, failure_rate
        self._late: list[TierResult] = []
        self._failed: dict[Ticket, list[bool]] = {}  # for each request of a submit

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Forward the requests that do not fail."""
        check_requests(requests)
        failed = [each.action != "delete" and self._fails() for each in requests]
        for request, fails in zip(requests, failed, strict=True):
            if fails and request.action == "get" and request.data is not None:
                request.data.cast("B")[:] = self._random.randbytes(request.data.nbytes)
        ticket = self._tier.submit([each for each, fails in zip(requests, failed, strict=True) if not fails])
        self._failed[ticket] = failed
        return ticket

    def poll(self) -> list[TierResult]:
        """Return about a third of the finished results."""
        self._late += self._tier.poll()
        ready: list[TierResult] = []
        late: list[TierResult] = []
        for result in self._late:
            (ready if self._random.random() < 0.3 else late).append(result)
        self._late = late
        return [self._with_failures(result) for result in ready]

    def contains(self, key: BlockKey) -> bool:
        """Pass on."""
        return self._tier.contains(key)

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Pass on."""
        return self._tier.touch(keys)

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Pass on."""
        return self._tier.stored()

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Pass on."""
        return self._tier.get_cost_ns(keys)

    def metrics(self) -> KVTierMetrics:
        """Pass on."""
        return self._tier.metrics()

    def check_integrity(self) -> None:
        """Pass on."""
        self._tier.check_integrity()

    def close(self) -> None:
        """Pass on."""
        self._tier.close()

    def _fails(self) -> bool:
        return self._failure_rate > 0 and self._random.random() < self._failure_rate

    def _with_failures(self, result: TierResult) -> TierResult:
        outcomes = iter(result.outcomes)
        failed = self._failed.pop(result.ticket)
        return TierResult(result.ticket, tuple("failed" if fails else next(outcomes) for fails in failed))
