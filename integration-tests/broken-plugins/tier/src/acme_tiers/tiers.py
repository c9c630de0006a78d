"""A good tier, and five that each do one thing otherwise."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from sagellm.core import (
    BlockHeader,
    BlockKey,
    InvalidInputError,
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierOutcome,
    TierRequest,
    TierResult,
)


class DictTier(KVTierProtocol):
    """Keeps copies in a dict. This one keeps the contract."""

    def __init__(self, max_bytes: int, *, runtime: Any = None) -> None:
        self._blocks: dict[Any, tuple[BlockHeader, bytes]] = {}
        self._results: list[TierResult] = []
        self._metrics = KVTierMetrics(max_bytes=max_bytes)
        self._num_submits = 0
        self._lock = Lock()

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        for request in requests:
            if request.data is None and request.action != "delete":
                raise InvalidInputError("no data")
        with self._lock:
            self._num_submits += 1
            ticket = Ticket(self._num_submits)
            self._results.append(TierResult(ticket, tuple(map(self._do, requests))))
            return ticket

    def poll(self) -> list[TierResult]:
        with self._lock:
            results, self._results = self._results, []
            return results

    def contains(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        return sum(1000 for key in keys if key in self._blocks)

    def metrics(self) -> KVTierMetrics:
        with self._lock:
            return replace(self._metrics, num_blocks=len(self._blocks), num_bytes=self._num_bytes())

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        self._blocks.clear()

    def _do(self, request: TierRequest) -> TierOutcome:
        if request.action == "delete":
            return "missing" if self._blocks.pop(self._key(request.header), None) is None else "done"
        assert request.data is not None, "submit has looked"
        do = self._put if request.action == "put" else self._get
        return do(request.header, request.data.cast("B"))

    def _put(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        if self._num_bytes() + len(data) > self._metrics.max_bytes:
            return "full"
        self._blocks[self._key(header)] = header, bytes(data)
        return "done"

    def _get(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        stored, content = self._blocks.get(self._key(header), (None, b""))
        if stored is None or not self._is_same(stored, header) or len(content) != len(data):
            return "missing"
        data[:] = content
        self._metrics.num_hits += 1
        return "done"

    def _key(self, header: BlockHeader) -> Any:
        return header.key

    def _is_same(self, stored: BlockHeader, asked: BlockHeader) -> bool:
        return stored == asked

    def _num_bytes(self) -> int:
        return sum(len(content) for _, content in self._blocks.values())


class Open(DictTier):
    """Finds blocks by their tokens, whoever's they are."""

    def _key(self, header: BlockHeader) -> Any:
        return (header.parent_hash, header.token_ids.data, header.model_fingerprint, header.group)

    def _is_same(self, stored: BlockHeader, asked: BlockHeader) -> bool:
        return replace(stored, namespace=asked.namespace) == asked

    def contains(self, key: BlockKey) -> bool:
        return any(header.key == key for header, _ in self._blocks.values())


class Stale(DictTier):
    """Keeps the bytes of what was deleted, and gives them back when it is put again."""

    def __init__(self, max_bytes: int, *, runtime: Any = None) -> None:
        super().__init__(max_bytes)
        self._seen: dict[Any, bytes] = {}

    def _put(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        outcome = super()._put(header, data)
        if outcome == "done":
            content = self._seen.setdefault(header.key, bytes(data))
            self._blocks[header.key] = header, content
        return outcome


class Late(DictTier):
    """Says that a get is done; the last bytes arrive with the next call."""

    def __init__(self, max_bytes: int, *, runtime: Any = None) -> None:
        super().__init__(max_bytes)
        self._under_way: list[tuple[memoryview, bytes]] = []

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        for buffer, content in self._under_way:
            buffer[:] = content
        self._under_way.clear()
        return super().submit(requests)

    def _get(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        outcome = super()._get(header, data)
        if outcome == "done":
            self._under_way.append((data, bytes(data)))
        return outcome


class Lossy(DictTier):
    """Says that every put is done, and forgets one in seven."""

    def _put(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        self._metrics.num_puts += 1
        return "done" if self._metrics.num_puts % 7 == 0 else super()._put(header, data)


class Endless(DictTier):
    """Takes whatever it is given."""

    def _put(self, header: BlockHeader, data: memoryview) -> TierOutcome:
        self._blocks[self._key(header)] = header, bytes(data)
        return "done"
