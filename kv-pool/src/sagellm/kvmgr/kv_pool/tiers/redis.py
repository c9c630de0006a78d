"""A tier in a Redis or Valkey server, which several engines may share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

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
from sagellm.kvmgr.kv_pool.tiers.background import SEARCH_PAUSE_S
from sagellm.kvmgr.kv_pool.tiers.rates import TransferRate, is_logged
from sagellm.kvmgr.kv_pool.tiers.record import PREFIX_BYTES, RecordFormat, num_head_bytes
from sagellm.kvmgr.kv_pool.tiers.resp import (
    Command,
    Deadline,
    Refusal,
    Reply,
    RespConnection,
    RespError,
    parse_url,
)

_BYTES_PER_S = 0.5e9
_RECONNECT_AFTER_NS, _MAX_PAUSE_NS = 1_000_000_000, 64_000_000_000

_log = get_logger(__name__)


class RedisTier(KVTierProtocol):
    """Stores one key per block, `prefix:NAME`; the value is the same record as in a file.

    `submit` pipelines the commands of its requests and waits for the replies, at most `timeout_s` in all, so
    it is run in a BackgroundTier. Any failure closes the connection. It is retried after one second, then
    after pauses that double up to 64 s until an exchange succeeds; meanwhile gets miss and puts fail.

    `search` finds what others stored; call it until it returns None, and again after operations. `max_bytes`
    bounds what this tier knows to be stored under the prefix. What the server evicts is a miss. One lock
    guards all state; `contains` and `stored` take none.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        url: str = "redis://127.0.0.1:6379/0",
        prefix: str = "sagellm",
        timeout_s: float = 1.0,
        store_key: StoreKey | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ValueError if the URL is not a Redis URL."""
        self._server = parse_url(url)
        self.label = f"KV server {self._server.address}"
        self._prefix = prefix.encode() + b":"
        self._records = RecordFormat(store_key or StoreKey.of_user())
        self._timeout_s = timeout_s
        self._clock = SystemClock() if clock is None else clock
        self._lock = Lock()
        self._connection: RespConnection | None = None
        self._scan: Iterator[Found] | None = None
        self._retry_ns = -(1 << 62)  # earliest time to reconnect
        self._num_failures = 0  # consecutive
        self._num_lost = 0  # in total
        self._sizes: dict[BlockKey, int] = {}
        self._num_bytes = 0  # the sum of the sizes
        self._found: dict[BlockKey, tuple[BlockHeader, int]] = {}
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._metrics = KVTierMetrics(max_bytes=max_bytes)
        self._rate = TransferRate(_BYTES_PER_S)

    def __repr__(self) -> str:
        kept = f"{len(self._sizes):,} blocks in {self._num_bytes:,} of {self._metrics.max_bytes:,} bytes"
        return f"<{type(self).__name__} {kept}>"

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Process requests, waiting for the server's replies if any need it."""
        check_requests(requests)
        with self._lock:
            ticket = Ticket(self._num_submits)
            self._num_submits += 1
            self._results.append(TierResult(ticket, tuple(self._do(requests))))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return what has finished."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def search(self) -> float | None:
        """Scan the next batch of the server's names, connecting first if needed.

        Return the seconds until the next call; None when the scan of this connection is complete.
        """
        with self._lock:
            try:
                self._connect()
                found = None if self._scan is None else next(self._scan, None)
            except Exception as error:
                self._fail(error)
                found = None
            if found is None:
                self._scan = None
                left_ns = self._retry_ns - self._clock.now_ns()
                return max(0.0, left_ns / 1e9) + SEARCH_PAUSE_S if self._connection is None else None
            self._metrics.num_foreign += found.num_foreign
            self._metrics.num_corrupt += found.num_corrupt
            for header, num_bytes in found.blocks:
                self._note(header.key, num_bytes)
                self._found[header.key] = (header, num_bytes)
            self._answered()
            return SEARCH_PAUSE_S

    def contains(self, key: BlockKey) -> bool:
        """Look into the index of what is known to be stored."""
        return key in self._sizes

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Return what the scan of this connection has found so far."""
        return list(self._found.values())

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Apply the measured rate, round trip included."""
        return sum(self._rate.cost_ns(self._sizes.get(key, 0)) for key in keys)

    def metrics(self) -> KVTierMetrics:
        """Return the counts so far."""
        with self._lock:
            return replace(self._metrics, num_blocks=len(self._sizes), num_bytes=self._num_bytes)

    def check_integrity(self) -> None:
        """Compare the sum of the sizes with the sizes."""
        with self._lock:
            num_bytes = sum(self._sizes.values())
            assert num_bytes == self._num_bytes, f"{num_bytes} bytes, {self._num_bytes} counted"

    def close(self) -> None:
        """Close the connection; what is stored stays."""
        with self._lock:
            self._disconnect()
            self._retry_ns = 1 << 62
            self._results.clear()

    def _do(self, requests: Sequence[TierRequest]) -> Sequence[TierOutcome]:
        outcomes: list[TierOutcome] = ["failed"] * len(requests)
        asked: list[int] = []
        commands: list[Command] = []
        started_ns, deadline = self._clock.now_ns(), self._deadline()
        for place, request in enumerate(requests):
            outcome, command = self._plan(request)
            if command is None:
                outcomes[place] = outcome
            else:
                asked.append(place)
                commands.append(command)
        if not commands:
            return outcomes
        try:
            self._connect(deadline)
            if self._connection is None:
                raise ConnectionError("not connected")
            self._connection.send(commands, deadline)
            for place in asked:
                reply = self._connection.read(deadline, max_bytes=_max_reply_bytes(requests[place]))
                outcomes[place] = self._read(requests[place], reply)
            self._delete_corrupt(requests, outcomes, deadline)
        except Exception as error:
            self._fail(error)
            self._metrics.num_failed += len(asked)
            for place in asked:
                outcomes[place] = "failed"
            return outcomes
        self._answered()
        self._measure(requests, outcomes, self._clock.now_ns() - started_ns)
        return outcomes

    def _plan(self, request: TierRequest) -> tuple[TierOutcome, Command | None]:
        """Return the outcome and no command if it is known already, else the command to send."""
        key = request.header.key
        name, known = name_of(self._prefix, self._records, request.header), self._sizes.get(key)
        if request.action == "delete":
            return "missing", (b"DEL", name) if self._forget(key) else None
        assert request.data is not None, "submit has looked"
        num_bytes = request.data.nbytes
        if request.action == "get":
            self._metrics.num_gets += 1
            if known != num_bytes:
                return "missing", None
            return "missing", (b"GETRANGE", name, b"0", b"%d" % (num_head_bytes(request.header) + num_bytes))
        if self._is_down:
            self._metrics.num_failed += 1
            return "failed", None
        if known is not None:
            return "done", None
        if self._num_bytes + num_bytes > self._metrics.max_bytes:
            self._metrics.num_full += 1
            return "full", None
        self._note(key, num_bytes)
        data = request.data.cast("B")
        head = self._records.encode_head(
            request.header, num_bytes, self._records.digest_of(request.header, data), 0
        )
        return "done", (b"SET", name, head + data)

    def _read(self, request: TierRequest, reply: Reply) -> TierOutcome:
        """Return the outcome that a reply stands for."""
        if isinstance(reply, Refusal):  # such as being out of memory
            self._metrics.num_failed += 1
            if is_logged(self._metrics.num_failed):
                _log.warning(
                    "the %s refused a request, %d times so far: %r",
                    self.label,
                    self._metrics.num_failed,
                    reply.text,
                )
            self._forget(request.header.key)
            return "failed"
        match request.action:
            case "delete":
                return "done" if reply else "missing"
            case "put":
                self._metrics.num_puts += 1
                return "done"
            case "get":
                return self._take(request, reply)

    def _take(self, request: TierRequest, reply: Reply) -> TierOutcome:
        """Copy a record's data if all of it matches the block asked for."""
        assert request.data is not None, "submit has looked"
        header, num_bytes = request.header, request.data.nbytes
        if not reply:
            self._forget(header.key)
            return "missing"
        record = memoryview(reply if isinstance(reply, bytearray) else b"")
        head_end = num_head_bytes(header)
        head, data = record[:head_end], record[head_end:]
        is_whole = len(data) == num_bytes
        if not is_whole or head != self._records.encode_head(
            header, num_bytes, self._records.digest_of(header, data), 0
        ):
            self._metrics.num_corrupt += 1
            if is_logged(count := self._metrics.num_corrupt):
                _log.warning(
                    "the %s had %d blocks that were not what was stored; they are deleted and computed again",
                    self.label,
                    count,
                )
            self._forget(header.key)
            return "corrupt"
        request.data.cast("B")[:] = data
        self._metrics.num_hits += 1
        return "done"

    def _delete_corrupt(
        self, requests: Sequence[TierRequest], outcomes: Sequence[TierOutcome], deadline: Deadline
    ) -> None:
        names = [
            name_of(self._prefix, self._records, request.header)
            for request, outcome in zip(requests, outcomes, strict=True)
            if outcome == "corrupt"
        ]
        if names and self._connection is not None:
            self._connection.send([(b"DEL", *names)], deadline)
            self._connection.read(deadline)

    def _measure(
        self, requests: Sequence[TierRequest], outcomes: Sequence[TierOutcome], duration_ns: int
    ) -> None:
        num_bytes = {"put": 0, "get": 0, "delete": 0}
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome == "done" and request.data is not None:
                num_bytes[request.action] += request.data.nbytes
        self._metrics.put_bytes += num_bytes["put"]
        self._metrics.get_bytes += num_bytes["get"]
        if num_bytes["get"]:
            self._rate.measure(num_bytes["get"], duration_ns)
            self._metrics.get_ns += duration_ns
        elif num_bytes["put"]:
            self._metrics.put_ns += duration_ns

    def _note(self, key: BlockKey, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes

    def _forget(self, key: BlockKey) -> bool:
        num_bytes = self._sizes.pop(key, None)
        self._found.pop(key, None)
        self._num_bytes -= num_bytes or 0
        return num_bytes is not None

    def _deadline(self) -> Deadline:
        return Deadline(self._clock, self._timeout_s)

    @property
    def _is_down(self) -> bool:
        """Whether there is no connection and it is too early to reconnect."""
        return self._connection is None and self._clock.now_ns() < self._retry_ns

    def _connect(self, deadline: Deadline | None = None) -> None:
        """Connect unless connected or down. Raises OSError."""
        if self._connection is None and not self._is_down:
            self._connection = RespConnection(self._server, deadline or self._deadline())
            self._scan = StoreScan(self._connection, self._prefix, self._records).run(self._deadline)

    def _answered(self) -> None:
        """Record that the server is up, and log it if its absence was logged."""
        if self._num_failures and is_logged(self._num_lost):
            _log.warning("the %s answers again", self.label)
        self._num_failures = 0

    def _fail(self, error: Exception) -> None:
        """Disconnect, and schedule the next attempt."""
        if not self._is_down:
            self._num_failures += 1
            self._num_lost += 1
            pause_ns = min(_RECONNECT_AFTER_NS << min(self._num_failures - 1, 6), _MAX_PAUSE_NS)
            if is_logged(self._num_lost):
                _log.warning(
                    "the %s was given up, %d times so far: %s; it is tried again in %d s, and what it has is "
                    "computed meanwhile",
                    self.label,
                    self._num_lost,
                    type(error).__name__,
                    pause_ns // 1_000_000_000,
                )
            self._retry_ns = self._clock.now_ns() + pause_ns
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._scan = None
        self._sizes.clear()
        self._found.clear()
        self._num_bytes = 0


def _max_reply_bytes(request: TierRequest) -> int:
    """Return the length of the requested record, and one more byte to detect a longer one."""
    if request.action != "get" or request.data is None:
        return PREFIX_BYTES
    return num_head_bytes(request.header) + request.data.nbytes + 1


_BATCH = 64
"""Names requested per SCAN: about 1 ms of work."""

_MAX_BATCH, _MAX_NAME_BYTES = 64 * _BATCH, 1 << 16
"""Bounds of an answer: a server may return more names than requested, and others may have made them long."""

_PATTERN_BYTES = re.compile(rb"[*?\[\]^\\-]")
"""Characters with a meaning in a pattern unless escaped by a backslash."""


class Found(NamedTuple):
    """One batch of a scan."""

    blocks: list[tuple[BlockHeader, int]]  # header, bytes of data
    num_foreign: int
    num_corrupt: int


class StoreScan:
    """Iterates over all names with a prefix on one connection, in batches.

    Only sealed records under their own name count as blocks. An error of the connection ends the scan.
    """

    def __init__(self, connection: RespConnection, prefix: bytes, records: RecordFormat) -> None:
        self._connection, self._prefix, self._records = connection, prefix, records

    def run(self, make_deadline: Callable[[], Deadline]) -> Iterator[Found]:
        """Yield the blocks of each batch, each with its own deadline. Raises OSError."""
        pattern = _PATTERN_BYTES.sub(rb"\\\g<0>", self._prefix) + b"*"
        cursor: Reply = b"0"
        while isinstance(cursor, bytes | bytearray):
            deadline, connection = make_deadline(), self._connection
            connection.send([[b"SCAN", bytes(cursor), b"MATCH", pattern, b"COUNT", b"%d" % _BATCH]], deadline)
            connection.read_count(deadline, max_items=2)
            cursor = connection.read(deadline)
            count = connection.read_count(deadline, max_items=_MAX_BATCH)
            names = [connection.read(deadline, max_bytes=_MAX_NAME_BYTES) for _ in range(count)]
            yield self._look_at([bytes(name) for name in names if isinstance(name, bytearray)], deadline)
            if cursor == b"0":
                return
        raise RespError("a SCAN reply has no cursor")

    def _look_at(self, names: Sequence[bytes], deadline: Deadline) -> Found:
        starts = self._ask(
            [(b"GETRANGE", name, b"0", b"%d" % (PREFIX_BYTES - 1)) for name in names], deadline
        )
        prefixes = {
            name: prefix
            for name, start in zip(names, starts, strict=True)
            if (prefix := self._records.read_prefix(start, 0)) is not None
        }
        refusals = [self._records.refusal_of(start) for start in starts]
        num_foreign, num_corrupt = refusals.count("foreign"), refusals.count("corrupt") - len(prefixes)
        asked = [
            (b"GETRANGE", name, b"0", b"%d" % (prefix.num_head_bytes - 1))
            for name, prefix in prefixes.items()
        ]
        heads = self._ask(
            asked, deadline, max_bytes=max([p.num_head_bytes for p in prefixes.values()], default=0)
        )
        blocks = []
        for name, found in zip(prefixes, heads, strict=True):
            head = self._records.decode_head(found, 0)
            if head is not None and name == name_of(self._prefix, self._records, head.header):
                blocks.append((head.header, head.num_data_bytes))
            else:
                num_corrupt += 1
        return Found(blocks, num_foreign, num_corrupt)

    def _ask(
        self, commands: Sequence[Command], deadline: Deadline, *, max_bytes: int = PREFIX_BYTES
    ) -> list[bytes]:
        """Return the replies, b"" where the server refused, such as for a name that holds a list."""
        self._connection.send(commands, deadline)
        replies = [self._connection.read(deadline, max_bytes=max_bytes) for _ in commands]
        return [bytes(reply) if isinstance(reply, bytearray) else b"" for reply in replies]


def name_of(prefix: bytes, records: RecordFormat, header: BlockHeader) -> bytes:
    """Return the name under which a block is stored."""
    return prefix + records.name_of(header).hex().encode()
