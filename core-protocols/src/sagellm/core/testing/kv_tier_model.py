"""Random operations on a tier, beside a dict of what was stored."""

from __future__ import annotations

from random import Random

from sagellm.core.kv_block import BlockHeader
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_tier import KVTierProtocol, Ticket, TierRequest
from sagellm.core.tokens import pack

_NUM_NAMES, _MAX_IN_FLIGHT = 60, 6
_SIZES = (64, 192, 256, 4032)


class KVTierMachine:
    """Keeps a few requests in flight; a hit must have the bytes that belong to its header.

    A block's bytes follow from its header, as KV follows from tokens, so that any hit can be judged.
    """

    def __init__(self, tier: KVTierProtocol, random: Random) -> None:
        self.tier = tier
        self.num_hits = 0
        self._random = random
        self._open: dict[Ticket, list[TierRequest]] = {}
        self._headers = [_header(number) for number in range(_NUM_NAMES)]

    def run(self, num_operations: int, *, check_every: int) -> None:
        """Do random things, then let everything end. Raises AssertionError at the first wrong byte."""
        for step in range(num_operations):
            if self._open and (len(self._open) >= _MAX_IN_FLIGHT or self._random.random() < 0.5):
                self._poll()
            else:
                self._submit()
            if step % check_every == 0:
                self.tier.check_integrity()
        for _ in range(100_000):
            if not self._open:
                break
            self._poll()
        assert not self._open, f"{len(self._open)} submits never ended"
        self.tier.check_integrity()

    def _submit(self) -> None:
        requests = [self._request() for _ in range(self._random.choice((1, 1, 1, 3)))]
        self._open[self.tier.submit(requests)] = requests

    def _request(self) -> TierRequest:
        number = self._random.randrange(_NUM_NAMES)
        header, kind = self._headers[number], self._random.random()
        if kind < 0.1:
            return TierRequest("delete", header)
        if kind < 0.55:
            return TierRequest("put", header, memoryview(bytearray(_content(number))))
        return TierRequest("get", header, memoryview(bytearray(_SIZES[number % len(_SIZES)])))

    def _poll(self) -> None:
        for result in self.tier.poll():
            requests = self._open.pop(result.ticket)
            assert len(result.outcomes) == len(requests), "an outcome for each request"
            for request, outcome in zip(requests, result.outcomes, strict=True):
                if request.action == "get" and outcome == "done":
                    assert request.data is not None
                    number = self._headers.index(request.header)
                    assert request.data == _content(number), f"block {number} came back with other bytes"
                    self.num_hits += 1


def _header(number: int) -> BlockHeader:
    return BlockHeader(
        parent_hash=bytes(16),
        token_ids=pack([number // 2]),
        namespace=Namespace(("a", "b")[number % 2]),
        model_fingerprint="model",
        layout="layout",
        dtype="bfloat16",
    )


def _content(number: int) -> bytes:
    return bytes([number]) * _SIZES[number % len(_SIZES)]
