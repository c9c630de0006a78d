"""Where KV of blocks is kept beyond the device: in host memory, a file, or another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple, NewType, TypeAlias

from sagellm.core.errors import EngineError, InvalidInputError
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.runtime import SystemClock

Ticket = NewType("Ticket", int)
"""Names one `submit` of one tier."""

_BUSY_POLLS, _POLL_NS = 100, 50_000

TierAction: TypeAlias = Literal["put", "get", "delete"]

TierOutcome: TypeAlias = Literal["done", "missing", "full", "corrupt", "failed"]
"""`corrupt`: the stored bytes were not those put, and have been dropped. `failed`: a device error, logged."""


class TierRequest(NamedTuple):
    """One operation. `data` is what a put stores, and where a get writes what was stored."""

    action: TierAction
    header: BlockHeader
    data: memoryview | None = None


class TierResult(NamedTuple):
    """The result of a `submit`: one outcome per request, in order."""

    ticket: Ticket
    outcomes: tuple[TierOutcome, ...]


@dataclass(kw_only=True)
class KVTierMetrics:
    """Counts of one tier since it was made; bytes are those of KV."""

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_puts: int = 0  # those that stored something
    num_gets: int = 0
    num_hits: int = 0
    num_corrupt: int = 0
    num_foreign: int = 0  # records sealed with another key or in an older format; treated as absent
    num_full: int = 0  # puts that found no room
    num_failed: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    put_ns: int = 0
    get_ns: int = 0


class KVTierProtocol(ABC):
    """Keeps blocks of KV by their key: bytes in, the same bytes out, or a miss.

    Providers are called as `factory(runtime=..., store_key=...)` with the option `max_bytes`,
    which every tier takes. `store_key` is the StoreKey of `kv.store_key`, or None: a tier whose blocks leave
    the process seals them with it and accepts only sealed ones. `tiers` are those that `tiered` joins. The
    engine calls from one thread; calls from several are safe, and any caller of `poll` gets all
    results.

    `submit` starts requests and `poll`, called once per step, returns the finished ones. Neither waits for a
    peer or a device, and each request ends by an absolute deadline, however slowly a peer answers. The
    caller's buffers are not touched after the result. Requests of one `submit` for the same key are processed
    in order.

    A get is a hit only if the stored header equals the requested one, including tokens and namespace,
    and the bytes are those that were put with it; otherwise it is a miss, and the buffer may hold
    anything. A put that finds no room changes nothing. Device errors are not raised: each is an outcome, and
    is counted.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Begin. The buffers belong to the tier until `poll` has returned the result.

        Raises InvalidInputError for a put or get without data.
        """

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Return what has ended since the last call."""

    @abstractmethod
    def contains(self, key: BlockKey) -> bool:
        """Say whether a get of this key may hit. Asks no device; a get decides."""

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Note that blocks are in use on the device, or soon will be; by default does nothing.

        Returns for each whether a put is wanted: true for blocks that are not stored, or slow to get.
        """
        return [not self.contains(key) for key in keys]

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Return what was found when the tier was made or last connected, with its bytes; default nothing."""
        return ()

    @abstractmethod
    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Estimate the time to get these blocks now, from measurements so far.

        Keys that are not there cost nothing. About a microsecond per key.
        """

    @abstractmethod
    def metrics(self) -> KVTierMetrics:
        """Return the counts so far."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and connections. What is not persistent is deleted."""


def check_requests(requests: Sequence[TierRequest]) -> None:
    """Raise InvalidInputError for a put or get without data."""
    for request in requests:
        if request.data is None and request.action != "delete":
            raise InvalidInputError(f"a {request.action} of block {request.header.hash.hex()} has no data")


def run_to_end(
    tier: KVTierProtocol, requests: Sequence[TierRequest], max_polls: int = 200_000
) -> tuple[TierOutcome, ...]:
    """Submit and poll until the result is there, for the only caller of a tier.

    Sleeps between polls, except the first 100, so that a tier's own thread can run. Raises EngineError after
    `max_polls` polls, by default at least ten seconds.
    """
    ticket, clock = tier.submit(requests), SystemClock()
    for number in range(max_polls):
        for result in tier.poll():
            if result.ticket == ticket:
                return result.outcomes
        if number >= _BUSY_POLLS:
            clock.sleep_ns(_POLL_NS)
    raise EngineError(f"a tier did not finish {len(requests)} requests within {max_polls} polls")


class NullKVTier(KVTierProtocol):
    """Has no room: every put is full, every get a miss."""

    def __init__(self, max_bytes: int = 0, **_: object) -> None:
        del max_bytes
        self._metrics = KVTierMetrics()
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._lock = Lock()

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Decide at once. Raises InvalidInputError for a put or get without data."""
        check_requests(requests)
        with self._lock:
            ticket = Ticket(self._num_submits)
            self._num_submits += 1
            outcomes = tuple(self._outcome(request) for request in requests)
            self._results.append(TierResult(ticket, outcomes))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return all that was submitted."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Return False."""
        return False

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Return 0."""
        return 0

    def metrics(self) -> KVTierMetrics:
        """Return the counts of what was refused."""
        return self._metrics

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """There is nothing to close."""

    def _outcome(self, request: TierRequest) -> TierOutcome:
        if request.action == "put":
            self._metrics.num_full += 1
            return "full"
        self._metrics.num_gets += request.action == "get"
        return "missing"
