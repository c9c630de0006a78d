"""A tier that may raise, as plugins may, though a tier must report its errors as outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from sagellm.core.errors import PluginError
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.logging import get_logger
from sagellm.core.protocols.kv_tier import (
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierOutcome,
    TierRequest,
    TierResult,
    check_requests,
)

P = ParamSpec("P")
T = TypeVar("T")

_log = get_logger(__name__)


class GuardedTier(KVTierProtocol):
    """Forwards to a tier until it raises; from then on it has no blocks, and every request fails.

    The error is logged and not raised: no request needs what a tier has, since it can be computed. Only
    Ctrl-C passes, and what `check_integrity` raises.
    """

    def __init__(self, name: str, tier: KVTierProtocol) -> None:
        self.tier = tier
        self._name = name
        self._is_broken = False
        self._open: dict[Ticket, tuple[Ticket, int]] = {}  # by the tier's ticket: ours, its size
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._num_failed = 0

    def __repr__(self) -> str:
        return repr(self.tier)

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Begin, or fail at once. Raises InvalidInputError for a put or get without data."""
        check_requests(requests)
        ticket = Ticket(self._num_submits)
        self._num_submits += 1
        begun = self._ask(None, self._submitted, requests)
        if begun is None:
            self._fail(ticket, len(requests))
        else:
            self._open[begun] = ticket, len(requests)
        return ticket

    def poll(self) -> list[TierResult]:
        """Return what has ended or failed."""
        self._ask(None, self._take_results)
        results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Ask the tier. Called for each block of each waiting prompt, so without `_ask`."""
        try:
            return not self._is_broken and self.tier.contains(key)
        except BaseException as error:
            self._give_up(error)
            return False

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the tier; nothing is wanted by a broken one."""
        return self._ask([False] * len(keys), self.tier.touch, keys)

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Ask the tier."""
        nothing: Sequence[tuple[BlockHeader, int]] = ()
        return self._ask(nothing, self.tier.stored)

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Ask the tier."""
        return self._ask(0, self.tier.get_cost_ns, keys)

    def metrics(self) -> KVTierMetrics:
        """Return the tier's counts; of a broken one, the requests that have failed since, at least 1."""
        broken = KVTierMetrics(num_failed=max(1, self._num_failed))
        return self._ask(broken, self.tier.metrics)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tier does, unless it is broken."""
        if not self._is_broken:
            self.tier.check_integrity()

    def close(self) -> None:
        """Close the tier, a broken one too."""
        try:
            self.tier.close()
        except BaseException as error:
            self._give_up(error)

    def _submitted(self, requests: Sequence[TierRequest]) -> Ticket:
        ticket = self.tier.submit(requests)
        if not isinstance(ticket, int):
            raise PluginError(f"submit returned {ticket!r} instead of a ticket")
        return ticket

    def _take_results(self) -> None:
        for result in self.tier.poll():
            if (begun := self._open.get(result.ticket)) is None:
                continue
            ticket, num_requests = begun
            if len(result.outcomes) != num_requests:
                raise PluginError(f"poll returned {len(result.outcomes)} outcomes of {num_requests} requests")
            del self._open[result.ticket]
            self._results.append(TierResult(ticket, result.outcomes))

    def _ask(self, otherwise: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_broken:
            return otherwise
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self._give_up(error)
            return otherwise

    def _give_up(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        if not self._is_broken:
            _log.error("the KV tier %r failed and is no longer used", self._name, exc_info=error)
        self._is_broken = True
        begun, self._open = self._open, {}
        for ticket, num_requests in begun.values():
            self._fail(ticket, num_requests)

    def _fail(self, ticket: Ticket, num_requests: int) -> None:
        self._num_failed += num_requests
        outcome: TierOutcome = "failed"
        self._results.append(TierResult(ticket, (outcome,) * num_requests))
