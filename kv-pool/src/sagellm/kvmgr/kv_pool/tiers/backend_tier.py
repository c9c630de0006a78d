"""A tier over one backend: an index by key, and self-describing records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from sagellm.core.errors import OutOfMemoryError
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
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.backends import TierBackend
from sagellm.kvmgr.kv_pool.tiers.rates import TransferRate, is_logged
from sagellm.kvmgr.kv_pool.tiers.record import PREFIX_BYTES, Checksums, RecordFormat, num_head_bytes

_FAST_BYTES_PER_S, _SLOW_BYTES_PER_S = 4e9, 0.5e9
"""Assumed rates of memory and of a device behind it, until they are measured."""

_MAX_GAP_BYTES = 1 << 28
"""Gap without a record at which the search of a file stops; a written file has hardly any."""

_PACE, _PAUSE_NS = 256, 1_000_000
"""Offsets examined before each pause, about 1 ms of work, and the pause for other threads."""

_log = get_logger(__name__)


class Record(NamedTuple):
    """Where a block is stored, and what a get must find there."""

    offset: int
    header: BlockHeader
    num_head_bytes: int
    num_data_bytes: int
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of head and data."""
        return self.num_head_bytes + self.num_data_bytes


class BackendTier(KVTierProtocol):
    """Blocks on one backend: with xxh3 checksums in memory, sealed with a key in a file.

    `submit` does all work itself; a tier on a slow device runs in a BackgroundTier. A record that differs
    from what was put is dropped, so the next get is a plain miss. `recover` finds the records of a persistent
    file by their heads; data is verified when it is read. One lock guards each request; `contains`, `stored`
    and `get_cost_ns` take none.

    Without a `store_key` the backend chooses: none for memory, the user's for a persistent file.
    """

    def __init__(
        self, backend: TierBackend, *, store_key: StoreKey | None = None, clock: Clock | None = None
    ) -> None:
        self.backend = backend
        store_key = store_key if backend.leaves_process else None
        self._format = RecordFormat(store_key or backend.default_key() or Checksums())
        self._clock = SystemClock() if clock is None else clock
        self._lock = Lock()
        self._records: dict[BlockKey, Record] = {}
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._metrics = KVTierMetrics(max_bytes=backend.total_bytes)
        self._fast, self._slow = TransferRate(_FAST_BYTES_PER_S), TransferRate(_SLOW_BYTES_PER_S)

    def __repr__(self) -> str:
        sizes = f"{self._metrics.num_bytes:,} of {self._metrics.max_bytes:,} bytes"
        backend = type(self.backend).__name__
        return f"<{type(self).__name__} {len(self._records):,} blocks in {sizes} on {backend}>"

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Process the requests."""
        check_requests(requests)
        with self._lock:
            ticket = Ticket(self._num_submits)
            self._num_submits += 1
        outcomes = tuple(map(self._do, requests))
        with self._lock:
            self._results.append(TierResult(ticket, outcomes))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return what has finished."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Look into the index."""
        return key in self._records

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Return what `recover` found and what was put since."""
        records = list(self._records.values())  # atomic for other threads
        return [(record.header, record.num_data_bytes) for record in records]

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Apply the measured rate of memory or of the device, as the backend says where each lies."""
        cost_ns = 0
        for key in keys:
            record = self._records.get(key)
            if record is not None:
                is_fast = self.backend.is_fast(record.offset, record.num_bytes)
                cost_ns += (self._fast if is_fast else self._slow).cost_ns(record.num_data_bytes)
        return cost_ns

    def metrics(self) -> KVTierMetrics:
        """Return the counts so far."""
        with self._lock:
            return replace(self._metrics, num_blocks=len(self._records))

    def rates(self) -> dict[str, float]:
        """Return the estimated bytes per second from memory and from the device behind it."""
        return {"fast": self._fast.bytes_per_s, "slow": self._slow.bytes_per_s}

    def check_integrity(self) -> None:
        """Compare the index with the ranges. O(blocks)."""
        with self._lock:
            ranges = self.backend.ranges
            ranges.check_integrity()
            assert sorted(record.offset for record in self._records.values()) == ranges.offsets(), (
                "a range has no record, or a record no range"
            )
            for record in self._records.values():
                assert ranges.size_of(record.offset) >= record.num_bytes, (
                    f"the record at {record.offset} does not fit"
                )
            num_bytes = sum(record.num_data_bytes for record in self._records.values())
            assert num_bytes == self._metrics.num_bytes, (
                f"{num_bytes} bytes, {self._metrics.num_bytes} counted"
            )

    def close(self) -> None:
        """Forget all blocks and close the backend."""
        with self._lock:
            self._records.clear()
            self._metrics.num_bytes = 0
            self.backend.close()

    def recover(self) -> int:
        """Index the records that another process left in the file; return their number. For an empty tier.

        O(bytes of the file) whatever its contents, with pauses for other threads: 96 bytes are read where
        there is no record, and no length is trusted without a valid seal.
        """
        assert not self._records, "recover is called once, first"
        ranges, num_written = self.backend.ranges, self.backend.written_bytes
        found: list[tuple[int, int]] = []
        offset = end = num_looked_at = 0  # end: of the last record
        while offset + PREFIX_BYTES <= num_written and offset - end < _MAX_GAP_BYTES:
            num_looked_at += 1
            if num_looked_at % _PACE == 0:
                self._clock.sleep_ns(_PAUSE_NS)
            try:
                record = self._recover_at(offset)
            except OSError:  # one unreadable place must not keep an engine from starting
                self._metrics.num_failed += 1
                record = None
            if record is None or record.header.key in self._records:
                offset += ranges.alignment
                continue
            self._records[record.header.key] = record
            self._metrics.num_bytes += record.num_data_bytes
            found.append((offset, record.num_bytes))
            offset += -(-record.num_bytes // ranges.alignment) * ranges.alignment
            end = offset
        ranges.restore(found)
        if self._metrics.num_foreign or self._metrics.num_corrupt:
            _log.warning(
                "the %s has %d records of another key or an older format and %d damaged ones; none is used",
                self.backend.label,
                self._metrics.num_foreign,
                self._metrics.num_corrupt,
            )
        return len(found)

    def _recover_at(self, offset: int) -> Record | None:
        bare = bytearray(PREFIX_BYTES)
        if not self.backend.read(offset, [memoryview(bare)]):
            return None
        prefix = self._format.read_prefix(bytes(bare), offset)
        if prefix is None:
            refusal = self._format.refusal_of(bytes(bare))
            self._metrics.num_foreign += refusal == "foreign"
            self._metrics.num_corrupt += refusal == "corrupt"
            return None
        if offset + prefix.num_head_bytes + prefix.num_data_bytes > self.backend.total_bytes:
            return None  # written when the file was larger
        head = bytearray(prefix.num_head_bytes)
        if not self.backend.read(offset, [memoryview(head)]):
            return None
        read = self._format.decode_head(bytes(head), offset)
        if read is None:
            self._metrics.num_corrupt += 1
            return None
        return Record(offset, read.header, len(head), read.num_data_bytes, read.digest)

    def _do(self, request: TierRequest) -> TierOutcome:
        with self._lock:
            try:
                if request.action == "delete":
                    return self._delete(request.header.key)
                assert request.data is not None, "submit has looked"
                do = self._put if request.action == "put" else self._get
                return do(request.header, request.data.cast("B"))
            except OSError as error:
                self._metrics.num_failed += 1
                if is_logged(self._metrics.num_failed):
                    _log.warning(
                        "the %s failed to %s a block, %d times so far: %s",
                        self.backend.label,
                        request.action,
                        self._metrics.num_failed,
                        error.strerror or error,
                    )
                self._drop(request.header.key)
                return "failed"

    def _put(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        key = header.key
        if key in self._records:
            return "done"
        started_ns = self._clock.now_ns()
        num_in_head = num_head_bytes(header)
        try:
            offset = self.backend.allocate(num_in_head + len(data))
        except OutOfMemoryError:
            self._metrics.num_full += 1
            return "full"
        record = Record(offset, header, num_in_head, len(data), self._format.digest_of(header, data))
        self._records[key] = record
        self._metrics.num_bytes += len(data)
        self.backend.write(offset, [self._head_of(header, record), data])
        self._metrics.num_puts += 1
        self._metrics.put_bytes += len(data)
        self._metrics.put_ns += self._clock.now_ns() - started_ns
        return "done"

    def _get(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        self._metrics.num_gets += 1
        key = header.key
        record = self._records.get(key)
        if record is None or record.num_data_bytes != len(data):
            return "missing"
        is_fast = self.backend.is_fast(record.offset, record.num_bytes)
        started_ns = self._clock.now_ns()
        head = bytearray(record.num_head_bytes)
        is_whole = self.backend.read(record.offset, [memoryview(head), data])
        # The head of the requested block, with the recorded digest: all of it must match.
        if (
            not is_whole
            or head != self._head_of(header, record)
            or self._format.digest_of(header, data) != record.digest
        ):
            self._metrics.num_corrupt += 1
            if is_logged(count := self._metrics.num_corrupt):
                _log.warning(
                    "the %s had %d blocks that were not what was stored; they are dropped and computed again",
                    self.backend.label,
                    count,
                )
            self._drop(key)
            return "corrupt"
        took_ns = self._clock.now_ns() - started_ns
        (self._fast if is_fast else self._slow).measure(len(data), took_ns)
        self._metrics.num_hits += 1
        self._metrics.get_bytes += len(data)
        self._metrics.get_ns += took_ns
        return "done"

    def _head_of(self, header: BlockHeader, record: Record) -> bytes:
        return self._format.encode_head(header, record.num_data_bytes, record.digest, record.offset)

    def _delete(self, key: BlockKey) -> TierOutcome:
        return "done" if self._drop(key) else "missing"

    def _drop(self, key: BlockKey) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._metrics.num_bytes -= record.num_data_bytes
        self.backend.deallocate(record.offset)
        return True
