"""KV in a Redis or Valkey server, which other engines may share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from sagellm.core.errors import ConfigError
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
from sagellm.kvmgr.kv_pool.tiers.faults import is_logged
from sagellm.kvmgr.kv_pool.tiers.rates import TransferRate
from sagellm.kvmgr.kv_pool.tiers.record import checksum_of, encode_head, num_head_bytes
from sagellm.kvmgr.kv_pool.tiers.redis_scan import find_stored, name_of

if TYPE_CHECKING:
    from redis import Connection

_BYTES_PER_S = 0.5e9
_RECONNECT_AFTER_NS, _MAX_PAUSE_NS = 1_000_000_000, 64_000_000_000

_NOBODYS = Ticket(-1)

_log = get_logger(__name__)


class _Asked(NamedTuple):
    """A request, and its outcome where the server was not asked."""

    request: TierRequest
    outcome: TierOutcome | None


@dataclass(slots=True, eq=False)
class _Sent:
    """A submit whose commands are on their way, or nobody's."""

    ticket: Ticket
    asked: list[_Asked]
    sent_ns: int


class RedisTier(KVTierProtocol):
    """One key a block, `prefix:` and the block's hash; the value is the record that files hold, too.

    Commands are sent by `submit` and replies are read by `poll`, in their order, once they have begun to
    arrive; `timeout_s` bounds the wait for them. While the server cannot be reached everything fails, and
    it is tried again after a second, and after ever longer pauses. `max_bytes` bounds what is stored under
    the prefix, as far as this tier knows: what others stored is found if it was there when the connection
    began. What the server evicts by itself is a miss. No reply is longer than the record that was asked
    for, and a byte. One lock guards it all; `contains` takes none.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        url: str = "redis://127.0.0.1:6379/0",
        prefix: str = "sagellm",
        timeout_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        try:
            from redis import ConnectionPool, ResponseError
        except ImportError as error:
            raise ConfigError(
                "the tier 'redis' needs the package redis; pip install 'sagellm-kv-pool[redis]'"
            ) from error

        self._pool = ConnectionPool.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._refusals = ResponseError
        self._prefix = prefix.encode() + b":"
        self._lock = Lock()
        self._timeout_ns = round(timeout_s * 1e9)
        self._clock = SystemClock() if clock is None else clock
        self._connection: Connection | None = None
        self._retry_ns = -(1 << 62)  # not before
        self._num_refused = 0  # times in a row
        self._replied_ns = self._retry_ns
        self._sizes: dict[BlockKey, int] = {}
        self._num_bytes = 0  # the sum of the sizes
        self._corrupt: list[BlockHeader] = []  # what the server is to delete
        self._found: list[tuple[BlockHeader, int]] = []
        self._sent: deque[_Sent] = deque()
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._metrics = KVTierMetrics(max_bytes=max_bytes)
        self._rate = TransferRate(_BYTES_PER_S)
        self._connect()

    def __repr__(self) -> str:
        kept = f"{len(self._sizes):,} blocks in {self._num_bytes:,} of {self._metrics.max_bytes:,} bytes"
        return f"<{type(self).__name__} {kept}>"

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Send a command for each request that the server has to be asked about."""
        check_requests(requests)
        with self._lock:
            ticket = Ticket(self._num_submits)
            self._num_submits += 1
            self._begin(ticket, requests)
        return ticket

    def poll(self) -> list[TierResult]:
        """Read the replies that have begun to arrive."""
        with self._lock:
            while self._sent and self._read_first(self._sent[0]):
                pass
            if self._corrupt:
                deletes = [TierRequest("delete", header) for header in self._corrupt]
                self._corrupt.clear()
                self._begin(_NOBODYS, deletes)
            results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Say what is known of the server."""
        return key in self._sizes

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Return what the server had when the last connection began."""
        with self._lock:
            return list(self._found)

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
            self._fail(ConnectionError("closed"))
            self._retry_ns = 1 << 62
            self._results.clear()
            self._pool.disconnect()

    def _begin(self, ticket: Ticket, requests: Sequence[TierRequest]) -> None:
        connection = self._connect()
        asked: list[_Asked] = []
        commands: list[tuple[Any, ...]] = []
        for request in requests:
            outcome, command = (None, self._delete(request)) if ticket == _NOBODYS else self._plan(request)
            asked.append(_Asked(request, outcome))
            if command is not None:
                commands.append(command)
        self._sent.append(_Sent(ticket, asked, self._clock.now_ns()))
        if commands:
            self._send(connection, commands)

    def _read_first(self, sent: _Sent) -> bool:
        """Read what belongs to the oldest submit; say whether it has ended and the next one may have, too."""
        try:
            if any(each.outcome is None for each in sent.asked):
                if self._connection is None or not self._connection.can_read(timeout=0):
                    if self._clock.now_ns() - sent.sent_ns > self._timeout_ns:
                        raise TimeoutError("no answer")
                    return False
                outcomes = tuple(map(self._read, sent.asked))
                self._measure(sent, outcomes)
            else:
                outcomes = tuple(each.outcome or "failed" for each in sent.asked)
        except Exception as error:
            self._fail(error)
            return False
        self._sent.popleft()
        if sent.ticket != _NOBODYS:
            self._results.append(TierResult(sent.ticket, outcomes))
        return True

    def _delete(self, request: TierRequest) -> tuple[Any, ...]:
        return "DEL", name_of(self._prefix, request.header.key)

    def _note(self, key: BlockKey, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes

    def _forget(self, key: BlockKey) -> bool:
        num_bytes = self._sizes.pop(key, None)
        self._num_bytes -= num_bytes or 0
        return num_bytes is not None

    def _plan(self, request: TierRequest) -> tuple[TierOutcome | None, tuple[Any, ...] | None]:
        """Return the outcome if it is known already, else the command that finds it."""
        key = request.header.key
        if request.action == "delete":
            return (None, self._delete(request)) if self._forget(key) else ("missing", None)
        assert request.data is not None, "submit has looked"
        name, num_bytes, known = name_of(self._prefix, key), request.data.nbytes, self._sizes.get(key)
        if request.action == "get":
            self._metrics.num_gets += 1
            if known != num_bytes:
                return "missing", None
            return None, ("GETRANGE", name, 0, num_head_bytes(request.header) + num_bytes)
        if known is not None:
            return "done", None
        if self._num_bytes + num_bytes > self._metrics.max_bytes:
            self._metrics.num_full += 1
            return "full", None
        self._note(key, num_bytes)
        head = encode_head(request.header, num_bytes, checksum_of(request.data), 0)
        return None, ("SET", name, head + request.data.cast("B"))

    def _read(self, asked: _Asked) -> TierOutcome:
        """Take the next reply, if the server was asked, and say what it means."""
        if asked.outcome is not None:
            return asked.outcome
        assert self._connection is not None, "poll has looked"
        request = asked.request
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except self._refusals as error:  # the server's own words, as that it is out of memory
            self._metrics.num_failed += 1
            if is_logged(self._metrics.num_failed):
                _log.warning("a KV tier was refused by its server: %s", error)
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

    def _take(self, request: TierRequest, reply: bytes) -> TierOutcome:
        """Compare a stored record with what was asked for, and copy its data."""
        assert request.data is not None, "submit has looked"
        header, num_bytes = request.header, request.data.nbytes
        if not reply:
            self._forget(header.key)
            return "missing"
        record, num_in_head = memoryview(reply), num_head_bytes(header)
        head, data = record[:num_in_head], record[num_in_head:]
        if len(data) != num_bytes or head != encode_head(header, num_bytes, checksum_of(data), 0):
            self._metrics.num_corrupt += 1
            if is_logged(count := self._metrics.num_corrupt):
                _log.warning("a KV tier's server had %d blocks that were not what was stored", count)
            self._forget(header.key)
            self._corrupt.append(header)
            return "corrupt"
        request.data.cast("B")[:] = data
        self._metrics.num_hits += 1
        return "done"

    def _measure(self, sent: _Sent, outcomes: Sequence[TierOutcome]) -> None:
        now_ns = self._clock.now_ns()
        duration_ns = now_ns - max(sent.sent_ns, self._replied_ns)  # those before it took the time until then
        self._replied_ns = now_ns
        num_bytes = {"put": 0, "get": 0, "delete": 0}
        for (request, _), outcome in zip(sent.asked, outcomes, strict=True):
            if outcome == "done" and request.data is not None:
                num_bytes[request.action] += request.data.nbytes
        self._metrics.put_bytes += num_bytes["put"]
        self._metrics.get_bytes += num_bytes["get"]
        if num_bytes["get"]:
            self._rate.measure(num_bytes["get"], duration_ns)
            self._metrics.get_ns += duration_ns
        elif num_bytes["put"]:
            self._metrics.put_ns += duration_ns

    def _send(self, connection: Connection | None, commands: Sequence[tuple[Any, ...]]) -> None:
        try:
            if connection is None:
                raise ConnectionError("not connected")
            connection.send_packed_command(connection.pack_commands(commands))
        except Exception as error:
            self._fail(error)

    def _connect(self) -> Connection | None:
        """Return the connection; if there is none try to make one, after ever longer pauses."""
        if self._connection is None and self._clock.now_ns() >= self._retry_ns:
            try:
                connection = self._pool.make_connection()
                connection.connect()
                self._find_stored(connection)
                self._connection, self._num_refused = connection, 0
            except Exception as error:
                self._num_refused += 1
                if is_logged(self._num_refused):
                    _log.warning("a KV tier's server cannot be reached: %s", type(error).__name__)
                pause_ns = min(_RECONNECT_AFTER_NS << min(self._num_refused - 1, 6), _MAX_PAUSE_NS)
                self._retry_ns = self._clock.now_ns() + pause_ns
        return self._connection

    def _find_stored(self, connection: Connection) -> None:
        """Learn which blocks are there, by the heads of all keys with the prefix."""
        self._sizes.clear()
        self._num_bytes = 0
        self._found.clear()
        for header, num_bytes in find_stored(connection, self._prefix):
            self._note(header.key, num_bytes)
            self._found.append((header, num_bytes))

    def _fail(self, error: Exception) -> None:
        """End everything that is under way, and the connection."""
        if self._connection is not None:
            _log.warning("a KV tier lost its server: %s", type(error).__name__)
            self._connection.disconnect()
            self._connection = None
            self._retry_ns = self._clock.now_ns() + _RECONNECT_AFTER_NS
        for sent in self._sent:
            outcomes: list[TierOutcome] = []
            for request, outcome in sent.asked:
                outcomes.append(outcome or "failed")
                self._metrics.num_failed += outcome is None
                if outcome is None:
                    self._forget(request.header.key)
            if sent.ticket != _NOBODYS:
                self._results.append(TierResult(sent.ticket, tuple(outcomes)))
        self._sent.clear()
