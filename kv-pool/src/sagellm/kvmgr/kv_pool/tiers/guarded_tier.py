"""A tier that may raise, as plugins may, though a tier must report its errors as outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from sagellm.core.errors import PluginError
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.logging import get_logger
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.kv_tier import KVTierMetrics, KVTierProtocol, Ticket, TierOutcome, TierRequest

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

_log = get_logger(__name__)


class GuardedTier(Generic[W]):
    """Calls a tier, for waiters of one request each, until it raises: then it has no blocks, and all fail.

    The error is logged and not raised: no request needs what a tier has, since it can be computed. Only
    Ctrl-C passes, and what `check_integrity` raises.
    """

    def __init__(self, name: str, tier: KVTierProtocol) -> None:
        self.tier = tier
        self._name = name
        self._is_broken = False
        self._waiting: dict[Ticket, W] = {}
        self._ended: list[tuple[W, TierOutcome]] = []
        self._num_failed = 0

    def __repr__(self) -> str:
        return repr(self.tier)

    def submit(self, request: TierRequest, waiter: W) -> None:
        """Begin, or fail at once; `poll` returns the waiter."""
        ticket = self._ask(None, self._submitted, request)
        if ticket is None:
            self._fail(waiter)
        else:
            self._waiting[ticket] = waiter

    def poll(self) -> list[tuple[W, TierOutcome]]:
        """Return the waiters whose requests have ended or failed."""
        self._ask(None, self._take_results)
        ended, self._ended = self._ended, []
        return ended

    @property
    def is_waited_for(self) -> bool:
        """Whether `poll` will return a waiter."""
        return bool(self._waiting or self._ended)

    def contains(self, key: BlockKey) -> bool:
        """Ask the tier. Called for each block of each waiting prompt, so without `_ask`."""
        try:
            return not self._is_broken and self.tier.contains(key)
        except BaseException as error:
            self._give_up(error)
            return False

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
        with contained() as failure:
            self.tier.close()
        if failure.error is not None:
            self._give_up(failure.error)

    def _submitted(self, request: TierRequest) -> Ticket:
        ticket = self.tier.submit([request])
        if not isinstance(ticket, int):
            raise PluginError(f"submit returned {ticket!r} instead of a ticket")
        return ticket

    def _take_results(self) -> None:
        for result in self.tier.poll():
            if result.ticket not in self._waiting:
                continue
            if len(result.outcomes) != 1:
                raise PluginError(f"poll returned {len(result.outcomes)} outcomes for one request")
            self._ended.append((self._waiting.pop(result.ticket), result.outcomes[0]))

    def _ask(self, otherwise: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_broken:
            return otherwise
        with contained() as failure:
            return call(*args, **kwargs)
        assert failure.error is not None, "the call has not returned"
        self._give_up(failure.error)
        return otherwise

    def _give_up(self, error: BaseException) -> None:
        with contained():  # Ctrl-C passes
            raise error
        if not self._is_broken:
            _log.error("the KV tier %r failed and is no longer used", self._name, exc_info=error)
        self._is_broken = True
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            self._fail(waiter)

    def _fail(self, waiter: W) -> None:
        self._num_failed += 1
        self._ended.append((waiter, "failed"))
