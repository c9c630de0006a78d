"""Keeps what the prefix cache evicts in tiers below the device, and brings it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from sagellm.core.chaos import flaky
from sagellm.core.ids import BlockId
from sagellm.core.kv_block import BlockHeader, BlockKey, headers_of
from sagellm.core.logging import get_logger
from sagellm.core.namespace import Namespace
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.kv_offload import Fetch, FetchRule, KVMemory, KVOffloadProtocol, OffloadMetrics
from sagellm.core.protocols.kv_tier import KVTierProtocol, Ticket, TierOutcome, TierRequest
from sagellm.core.protocols.prefix_cache import EvictedBlocks
from sagellm.core.runtime import Clock
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.kv_pool.prefill_rate import PrefillRate
from sagellm.kvmgr.kv_pool.tiers.classifier import HotColdClassifier
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage

_CHUNK_BYTES = 64 << 20
"""Bytes of KV per fetch in flight at once, and per put; at least one block."""

_MAX_PUT_BYTES = 1 << 30
"""Bytes of KV on its way to tiers; blocks evicted beyond that, while tiers are slow, are not kept."""

_log = get_logger(__name__)


class _Staged(NamedTuple):
    """A block on its way to a tier."""

    header: BlockHeader
    data: memoryview


class _Get(NamedTuple):
    """The chunk of a fetch that is on its way from a tier."""

    fetch: Fetch
    buffers: list[memoryview]


def tiered(
    memory: KVMemory,
    *,
    tiers: Mapping[str, KVTierProtocol],
    rule: FetchRule = "cheaper",
    clock: Clock | None = None,
    **thresholds: float,
) -> KVOffload:
    """Join tiers, the fastest first; `thresholds` are the classifier's. Raises ConfigError without tiers."""
    classifier = HotColdClassifier(**thresholds)  # type: ignore[arg-type]
    return KVOffload(memory, TieredKVStorage(tiers, classifier=classifier, clock=clock), rule=rule)


class KVOffload(KVOffloadProtocol):
    """Copies blocks to host memory as they are evicted, and gives those buffers to the tiers.

    A fetch goes through buffers too, so that a late answer never overwrites a block that has been
    reallocated. `poll` advances both: one chunk of each fetch per step.
    """

    def __init__(self, memory: KVMemory, tiers: KVTierProtocol, *, rule: FetchRule = "cheaper") -> None:
        self.tiers = tiers
        self.prefill = PrefillRate()
        self.rule: FetchRule = rule
        self._memory = memory
        self._chunk = max(1, _CHUNK_BYTES // memory.block_bytes)
        self._buffers: list[memoryview] = []
        self._saving: dict[BlockKey, _Staged] = {}
        self._puts: dict[Ticket, list[_Staged]] = {}
        self._fetching: dict[BlockKey, Fetch] = {}  # the blocks of all unfinished fetches
        self._gets: dict[Ticket, _Get] = {}
        self._paused: list[Fetch] = []  # until the next poll
        self._asked: tuple[TokenIds, Namespace, list[BlockHeader]] | None = None
        self._counted: object = None
        self._metrics = OffloadMetrics()

    @flaky("offload.keep")
    def keep(self, evicted: EvictedBlocks) -> None:
        """Give blocks to the tiers that want them, except those already on their way there."""
        is_wanted = self.tiers.touch([header.key for header in evicted.headers])
        wanted = [
            (block_id, header)
            for block_id, header, wants in zip(evicted.block_ids, evicted.headers, is_wanted, strict=True)
            if wants and header.key not in self._saving
        ]
        for start in range(0, len(wanted), self._chunk):
            part = wanted[start : start + self._chunk]
            has_room = len(self._saving) * self._memory.block_bytes < _MAX_PUT_BYTES
            buffers = self._take_buffers(len(part)) if has_room else None
            if buffers is None:
                self._metrics.num_not_kept_blocks += len(part)
                continue
            self._memory.access.read_blocks([block_id for block_id, _ in part], buffers)
            staged = [_Staged(header, data) for (_, header), data in zip(part, buffers, strict=True)]
            ticket = self.tiers.submit([TierRequest("put", *each) for each in staged])
            self._saving.update((each.header.key, each) for each in staged)
            self._puts[ticket] = staged
            self._metrics.num_kept_blocks += len(part)
            self.poll()

    def find(self, token_ids: TokenIds, namespace: Namespace, num_cached: int) -> list[BlockHeader]:
        """Return a run of blocks that tiers have or will soon have, as long as `rule` wants it."""
        if self.rule == "never":
            return []
        first = num_cached // self._memory.block_size
        stored: list[BlockHeader] = []
        for header in self._headers_of(token_ids, namespace)[first:]:
            if self._staged(header) is None and not self.tiers.contains(header.key):
                break
            stored.append(header)
        self.tiers.touch([header.key for header in stored])  # so that they are not evicted to make room
        return self._cheaper_part(stored, num_cached) if self.rule == "cheaper" else stored

    def fetch_of(self, header: BlockHeader) -> Fetch | None:
        """Look among unfinished fetches; different blocks may have equal keys."""
        fetch = self._fetching.get(header.key)
        return fetch if fetch is not None and header in fetch.headers else None

    def begin(self, headers: list[BlockHeader], block_ids: list[BlockId]) -> Fetch:
        """Start with the first chunk."""
        fetch = Fetch(headers, block_ids)
        keys = [header.key for header in headers]
        self._metrics.num_fetches += 1
        self._metrics.expected_fetch_ns += self.tiers.get_cost_ns(keys)
        self._fetching.update(dict.fromkeys(keys, fetch))
        self._go_on(fetch)
        self.poll()
        return fetch

    def copy_now(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy at once."""
        self._memory.access.copy_blocks(pairs)

    @flaky("offload.poll")
    def poll(self) -> None:
        """Process what the tiers have finished."""
        for result in self.tiers.poll():
            if (saved := self._puts.pop(result.ticket, None)) is not None:
                for each in saved:
                    self._saving.pop(each.header.key, None)
                self._give_back([each.data for each in saved])
            elif (get := self._gets.pop(result.ticket, None)) is not None:
                self._arrived(get, result.outcomes)
        paused, self._paused = self._paused, []
        for fetch in paused:
            self._go_on(fetch)

    def measure_prefill(self, num_tokens: int, sum_context: float, duration_ns: int) -> None:
        """Learn the cost of computing."""
        self.prefill.measure(num_tokens, sum_context, duration_ns)

    def metrics(self) -> OffloadMetrics:
        """Return the counts so far."""
        second_ns = max(1, self.prefill.cost_ns(0, 1000))
        return replace(
            self._metrics, prefill_tokens_a_second=1000 * 1e9 / second_ns, tiers=self.tiers.metrics()
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if a save or a fetch is lost. O(blocks in transit)."""
        self.tiers.check_integrity()
        saving = {each.header.key for saved in self._puts.values() for each in saved}
        assert saving == self._saving.keys(), "a save is forgotten, or is over"
        under_way = [get.fetch for get in self._gets.values()] + self._paused
        assert set(self._fetching.values()) <= set(under_way), "a fetch is forgotten, or is over"
        assert len(under_way) == len(set(under_way)), "a fetch goes on twice"

    def close(self) -> None:
        """Close the tiers."""
        self.tiers.close()

    def _staged(self, header: BlockHeader) -> memoryview | None:
        """Return the KV of a block that is on its way to a tier."""
        staged = self._saving.get(header.key)
        return staged.data if staged is not None and staged.header == header else None

    def _cheaper_part(self, stored: list[BlockHeader], start: int) -> list[BlockHeader]:
        """Return the beginning of a run that saves the most time; the blocks after it are computed.

        The cost of computing a block grows with its depth; the cost of fetching it depends on its tier. So
        a slow block may pay for the fast ones after it, and the end of a run may not pay at all.
        """
        saved_ns = most_ns = num_best = 0
        for number, header in enumerate(stored, start=1):
            saved_ns += self.prefill.cost_ns(start, self._memory.block_size)
            if self._staged(header) is None:
                saved_ns -= self.tiers.get_cost_ns([header.key])
            start += self._memory.block_size
            if saved_ns > most_ns:
                most_ns, num_best = saved_ns, number
        if self._asked is not self._counted:  # a waiting prompt is looked up at every step
            self._counted = self._asked
            self._metrics.num_computed_instead += len(stored) - num_best
        return stored[:num_best]

    def _headers_of(self, token_ids: TokenIds, namespace: Namespace) -> list[BlockHeader]:
        """Name the blocks of a prompt; a prompt awaiting admission is looked up at every step."""
        if self._asked is None or self._asked[:2] != (token_ids, namespace):
            headers = headers_of(token_ids, self._memory.block_size, namespace, self._memory.identity)
            self._asked = token_ids, namespace, headers
        return self._asked[2]

    def _go_on(self, fetch: Fetch) -> None:
        """Fetch the next blocks from the source of the first of them: the buffer of a save, or a tier."""
        chunk = fetch.headers[fetch.num_done : fetch.num_done + self._chunk]
        if not chunk:
            self._end(fetch)
            return
        is_staged, run = next(groupby(chunk, lambda header: self._staged(header) is not None))
        headers = list(run)
        if is_staged:
            self._metrics.num_staged_blocks += len(headers)
            is_written = self._write(fetch, [self._saving[header.key].data for header in headers])
            if is_written and not fetch.is_whole:
                self._paused.append(fetch)
            else:
                self._end(fetch)
            return
        buffers = self._take_buffers(len(headers))
        if buffers is None:
            self._end(fetch)
            return
        requests = [TierRequest("get", header, data) for header, data in zip(headers, buffers, strict=True)]
        self._gets[self.tiers.submit(requests)] = _Get(fetch, buffers)

    def _arrived(self, get: _Get, outcomes: Sequence[TierOutcome]) -> None:
        num_good = next((n for n, outcome in enumerate(outcomes) if outcome != "done"), len(outcomes))
        is_written = self._write(get.fetch, get.buffers[:num_good])
        if "failed" not in outcomes:  # a tier that broke its contract may still write to them
            self._give_back(get.buffers)
        if is_written and num_good == len(outcomes):
            self._go_on(get.fetch)
        else:
            self._end(get.fetch)

    def _write(self, fetch: Fetch, data: Sequence[memoryview]) -> bool:
        """Write the next blocks of a fetch; say whether that worked."""
        targets = fetch.block_ids[fetch.num_done : fetch.num_done + len(data)]
        with contained() as failure:
            self._memory.access.write_blocks(targets, data)
        if failure.error is not None:
            _log.error("fetched KV could not be written; it is computed", exc_info=failure.error)
            return False
        fetch.num_done += len(data)
        self._metrics.num_fetched_blocks += len(data)
        return True

    def _end(self, fetch: Fetch) -> None:
        """End a fetch; the blocks that did not arrive are computed."""
        self._metrics.num_lost_blocks += len(fetch.headers) - fetch.num_done
        fetch.is_over = True
        for header in fetch.headers:
            if self._fetching.get(header.key) is fetch:
                del self._fetching[header.key]

    def _give_back(self, buffers: list[memoryview]) -> None:
        self._buffers += buffers
        del self._buffers[2 * self._chunk :]

    def _take_buffers(self, number: int) -> list[memoryview] | None:
        """Return buffers of one block each, or None if the host has no memory for them."""
        taken: list[memoryview] = []
        try:
            for _ in range(number):
                taken.append(self._take_buffer())
        except MemoryError:
            _log.warning("no memory for buffers of %d KV blocks to or from a tier", number)
            self._give_back(taken)
            return None
        return taken

    @flaky("offload.buffer", MemoryError)
    def _take_buffer(self) -> memoryview:
        return self._buffers.pop() if self._buffers else memoryview(bytearray(self._memory.block_bytes))
