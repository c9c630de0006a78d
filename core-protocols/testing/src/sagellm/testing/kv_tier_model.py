"""Random operations on a tier, alone and in eight threads, checked against the expected data."""

from __future__ import annotations

import time
from functools import cache
from random import Random

from sagellm.core.kv_block import BlockHeader
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_tier import KVTierProtocol, Ticket, TierOutcome, TierRequest, TierResult
from sagellm.core.runtime import Randomness
from sagellm.core.tokens import pack
from sagellm.testing.patience import PATIENCE_S
from sagellm.testing.threads import NUM_THREADS, run_in_threads

_NUM_NAMES, _MAX_IN_FLIGHT = 60, 6
_SIZES = (64, 192, 256, 4032)
MODEL = "model"
"""The fingerprint of the model whose blocks the kit stores."""


class KVTierMachine:
    """Keeps a few requests in flight; a hit must return the bytes that belong to its header.

    A block's bytes follow from its header, as KV follows from tokens, so that any hit can be checked.
    """

    def __init__(self, tier: KVTierProtocol, random: Random) -> None:
        self.tier = tier
        self.num_hits = 0
        self._random = random
        self._open: dict[Ticket, list[TierRequest]] = {}

    def run(self, num_operations: int, *, check_every: int) -> None:
        """Run random operations, then wait for all to end. Raises AssertionError at the first wrong byte."""
        for step in range(num_operations):
            if self._open and (len(self._open) >= _MAX_IN_FLIGHT or self._random.random() < 0.5):
                self._poll()
            else:
                requests = random_requests(self._random)
                self._open[self.tier.submit(requests)] = requests
            if step % check_every == 0:
                self.tier.check_integrity()
        for _ in range(100_000):
            if not self._open:
                break
            self._poll()
        assert not self._open, f"{len(self._open)} submits never ended"
        self.tier.check_integrity()

    def _poll(self) -> None:
        for result in self.tier.poll():
            self.num_hits += count_hits(self._open.pop(result.ticket), result)


def random_requests(random: Random) -> list[TierRequest]:
    """Return one to three requests for any of sixty blocks of two tenants."""
    return [_random_request(random) for _ in range(random.choice((1, 1, 1, 3)))]


def count_hits(requests: list[TierRequest], result: TierResult) -> int:
    """Return how many gets were hits. Raises AssertionError if one has other bytes than its block."""
    assert len(result.outcomes) == len(requests), "an outcome for each request"
    return sum(map(_is_hit, requests, result.outcomes))


def _is_hit(request: TierRequest, outcome: TierOutcome) -> bool:
    if request.action != "get" or outcome != "done":
        return False
    header = request.header  # tokens and tenant say which block it is; keys of two blocks may be equal
    number = 2 * header.token_ids[0] + ("a", "b").index(header.namespace.tenant)
    assert request.data is not None, "submit has looked"
    assert bytes(request.data) == _content(number), f"block {number} came back with other bytes"
    return True


def _random_request(random: Random) -> TierRequest:
    number = random.randrange(_NUM_NAMES)
    header, kind = _headers()[number], random.random()
    if kind < 0.1:
        return TierRequest("delete", header)
    if kind < 0.55:
        return TierRequest("put", header, memoryview(bytearray(_content(number))))
    return TierRequest("get", header, memoryview(bytearray(_SIZES[number % len(_SIZES)])))


@cache
def _headers() -> tuple[BlockHeader, ...]:
    return tuple(
        BlockHeader(
            parent_hash=bytes(16),
            token_ids=pack([number // 2]),
            namespace=Namespace(("a", "b")[number % 2]),
            model_fingerprint=MODEL,
            layout="layout",
            dtype="bfloat16",
        )
        for number in range(_NUM_NAMES)
    )


def _content(number: int) -> bytes:
    return bytes([number]) * _SIZES[number % len(_SIZES)]


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
        deadline_s = time.monotonic() + PATIENCE_S
        while (mine := self._results.pop(ticket, None)) is None:
            for result in self._tier.poll():
                assert result.ticket not in self._results, "a submit ended twice"
                self._results[result.ticket] = result
            assert time.monotonic() < deadline_s, f"a submit did not end within {PATIENCE_S:g} s"
            time.sleep(0)
        return mine
