"""A tier under eight threads at once, each of which waits for its own results."""

from __future__ import annotations

import time

from sagellm.core.protocols.kv_tier import KVTierProtocol, Ticket, TierResult
from sagellm.core.runtime import Randomness
from sagellm.core.testing.kv_tier_model import count_hits, random_requests
from sagellm.core.testing.threads import NUM_THREADS, run_in_threads

_PATIENCE_S = 10.0


class ThreadedKVTier:
    """Runs random operations in eight threads and passes each result to the thread that submitted it.

    Checks that every submit ends once, a hit has the bytes of its block, and the bookkeeping is consistent.
    """

    def __init__(self, tier: KVTierProtocol) -> None:
        self._tier = tier
        self._results: dict[Ticket, TierResult] = {}

    def run(self, num_operations: int, seed: int = 0) -> int:
        """Submit this often, an eighth in each thread; return the number of hits. Raises AssertionError."""
        num_hits = [0] * NUM_THREADS

        def work(thread: int) -> None:
            random = Randomness(seed * NUM_THREADS + thread).stream("threads")
            for index in range(num_operations // NUM_THREADS):
                requests = random_requests(random)
                ticket = self._tier.submit(requests)
                num_hits[thread] += count_hits(requests, self._wait_for(ticket))
                if index % 20 == thread:
                    self._tier.check_integrity()
                    self._tier.metrics()

        run_in_threads(work, num_threads=NUM_THREADS)
        assert not self._tier.poll(), "a submit ended twice"
        assert not self._results, "two submits had the same ticket, or one ended twice"
        self._tier.check_integrity()
        return sum(num_hits)

    def _wait_for(self, ticket: Ticket) -> TierResult:
        deadline_s = time.monotonic() + _PATIENCE_S
        while (mine := self._results.pop(ticket, None)) is None:
            for result in self._tier.poll():
                assert result.ticket not in self._results, "a submit ended twice"
                self._results[result.ticket] = result
            assert time.monotonic() < deadline_s, f"a submit did not end within {_PATIENCE_S:g} s"
            time.sleep(0)
        return mine
