"""Keeps what the prefix cache evicts in tiers below the device, and brings it back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal

from sagellm.core import (
    BlockId,
    EvictedBlocks,
    ForwardBackendProtocol,
    KVIdentity,
    KVTierMetrics,
    KVTierProtocol,
    Namespace,
    Ticket,
    TierRequest,
    TokenIds,
    get_logger,
    headers_of,
)
from sagellm.core.chaos import flaky
from sagellm.core.kv_block import BlockHeader
from sagellm.engines.core.prefill_rate import PrefillRate

FetchRule = Literal["cheaper", "always", "never"]
"""Whether a block is fetched: where that is cheaper than computing it, or without asking."""

_CHUNK_BYTES = 64 << 20
"""KV of one fetch that is in flight at once, and of one put; a block at least."""

_MAX_PUT_BYTES = 1 << 30
"""KV on its way to tiers; what is evicted beyond that while they are slow is not kept."""

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one prompt on their way from the tiers to the device."""

    headers: list[BlockHeader]
    block_ids: list[BlockId]
    num_done: int = 0  # from the first on, without a gap
    is_over: bool = False
    buffers: list[memoryview] = field(default_factory=list)


@dataclass(kw_only=True)
class OffloadMetrics:
    """What went down and came back; the tiers' own counts."""

    num_kept_blocks: int = 0
    num_not_kept_blocks: int = 0  # evicted while too many were in transit, or without memory for buffers
    num_fetches: int = 0
    num_fetched_blocks: int = 0
    num_computed_instead: int = 0  # blocks that were stored, and computing them was cheaper
    num_lost_blocks: int = 0  # that a tier had in its index, but a fetch did not get
    prefill_tokens_a_second: float = 0.0
    tiers: KVTierMetrics = field(default_factory=KVTierMetrics)


class KVOffload:
    """Between one engine's KV memory and its tiers.

    What is evicted is copied to host memory at once, as its block is about to be overwritten, and given to
    the tiers. A fetch goes the other way by way of buffers, so that a late answer never lands in a block
    that is somebody else's by then. `poll` moves both on, a chunk of each fetch a step.
    """

    def __init__(
        self,
        tiers: KVTierProtocol,
        memory: ForwardBackendProtocol,
        identity: KVIdentity,
        *,
        block_size: int,
        block_bytes: int,
        rule: FetchRule = "cheaper",
    ) -> None:
        self.tiers = tiers
        self.identity = identity
        self.prefill = PrefillRate()
        self.rule: FetchRule = rule
        self._memory = memory
        self._block_size, self._block_bytes = block_size, block_bytes
        self._chunk = max(1, _CHUNK_BYTES // block_bytes)
        self._buffers: list[memoryview] = []
        self._puts: dict[Ticket, list[memoryview]] = {}
        self._gets: dict[Ticket, Fetch] = {}
        self._asked: tuple[TokenIds, Namespace, list[BlockHeader]] | None = None
        self._counted: object = None
        self._metrics = OffloadMetrics()

    @flaky("offload.keep")
    def keep(self, evicted: EvictedBlocks) -> None:
        """Give blocks to the tiers that want them; called while their KV is whole."""
        is_wanted = self.tiers.touch([header.key for header in evicted.headers])
        wanted = list(compress(zip(evicted.block_ids, evicted.headers, strict=True), is_wanted))
        for start in range(0, len(wanted), self._chunk):
            part = wanted[start : start + self._chunk]
            if sum(map(len, self._puts.values())) * self._block_bytes >= _MAX_PUT_BYTES:
                self._metrics.num_not_kept_blocks += len(part)
                continue
            buffers = self._take_buffers(len(part))
            if buffers is None:
                self._metrics.num_not_kept_blocks += len(part)
                continue
            self._memory.read_blocks([block_id for block_id, _ in part], buffers)
            requests = [
                TierRequest("put", header, data) for (_, header), data in zip(part, buffers, strict=True)
            ]
            self._puts[self.tiers.submit(requests)] = buffers
            self._metrics.num_kept_blocks += len(part)
            self.poll()

    def find(self, token_ids: TokenIds, namespace: Namespace, num_cached: int) -> list[BlockHeader]:
        """Return the blocks behind `num_cached` tokens that are to be fetched: a run of what is stored."""
        if self.rule == "never":
            return []
        first = num_cached // self._block_size
        stored: list[BlockHeader] = []
        for header in self._headers_of(token_ids, namespace)[first:]:
            if not self.tiers.contains(header.key):
                break
            stored.append(header)
        self.tiers.touch([header.key for header in stored])  # room for them is not made at their cost
        return self._cheaper_part(stored, first * self._block_size) if self.rule == "cheaper" else stored

    def begin(self, headers: list[BlockHeader], block_ids: list[BlockId]) -> Fetch:
        """Start bringing blocks into the memory of these ids, which are nobody else's until it is over."""
        fetch = Fetch(headers, block_ids)
        self._metrics.num_fetches += 1
        self._go_on(fetch)
        self.poll()
        return fetch

    def copy_now(self, pairs: Seq[tuple[BlockId, BlockId]]) -> None:
        """Copy between blocks before a fetch writes to any."""
        self._memory.copy_blocks(pairs)

    @flaky("offload.poll")
    def poll(self) -> None:
        """Take note of what the tiers have done."""
        for result in self.tiers.poll():
            if (buffers := self._puts.pop(result.ticket, None)) is not None:
                self._give_back(buffers)
            elif (fetch := self._gets.pop(result.ticket, None)) is not None:
                self._arrived(fetch, list(result.outcomes))

    def metrics(self) -> OffloadMetrics:
        """Return the counts so far."""
        second_ns = max(1, self.prefill.cost_ns(0, 1000))
        return replace(
            self._metrics, prefill_tokens_a_second=1000 * 1e9 / second_ns, tiers=self.tiers.metrics()
        )

    def close(self) -> None:
        """Close the tiers."""
        self.tiers.close()

    def _cheaper_part(self, stored: list[BlockHeader], start: int) -> list[BlockHeader]:
        """Return the beginning of a run that saves the most time; what is behind it is computed.

        Computing a block is the dearer the deeper it is, fetching it depends on the tier that has it: so a
        slow block may pay for the fast ones behind it, and the end of a run may not pay at all.
        """
        saved_ns = most_ns = num_best = 0
        for number, header in enumerate(stored, start=1):
            saved_ns += self.prefill.cost_ns(start, self._block_size) - self.tiers.get_cost_ns([header.key])
            start += self._block_size
            if saved_ns > most_ns:
                most_ns, num_best = saved_ns, number
        if self._asked is not self._counted:  # a prompt that waits is asked for at every step
            self._counted = self._asked
            self._metrics.num_computed_instead += len(stored) - num_best
        return stored[:num_best]

    def _headers_of(self, token_ids: TokenIds, namespace: Namespace) -> list[BlockHeader]:
        """Name the blocks of a prompt; one that waits for its admission is asked for at every step."""
        if self._asked is None or self._asked[:2] != (token_ids, namespace):
            headers = headers_of(token_ids, self._block_size, namespace, self.identity)
            self._asked = token_ids, namespace, headers
        return self._asked[2]

    def _go_on(self, fetch: Fetch) -> None:
        headers = fetch.headers[fetch.num_done : fetch.num_done + self._chunk]
        if not headers:
            fetch.is_over = True
            return
        buffers = self._take_buffers(len(headers))
        if buffers is None:
            self._give_up(fetch)
            return
        fetch.buffers = buffers
        requests = [
            TierRequest("get", header, data) for header, data in zip(headers, fetch.buffers, strict=True)
        ]
        self._gets[self.tiers.submit(requests)] = fetch

    def _arrived(self, fetch: Fetch, outcomes: Seq[str]) -> None:
        num_good = next((n for n, outcome in enumerate(outcomes) if outcome != "done"), len(outcomes))
        targets = fetch.block_ids[fetch.num_done : fetch.num_done + num_good]
        try:
            self._memory.write_blocks(targets, fetch.buffers[:num_good])
        except KeyboardInterrupt:
            raise
        except BaseException:
            _log.exception("fetched KV could not be written; it is computed")
            num_good = 0
        fetch.num_done += num_good
        self._metrics.num_fetched_blocks += num_good
        self._give_back(fetch.buffers)
        fetch.buffers = []
        if num_good < len(outcomes):
            self._give_up(fetch)
        else:
            self._go_on(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """End a fetch; the blocks that did not arrive are computed."""
        self._metrics.num_lost_blocks += len(fetch.headers) - fetch.num_done
        fetch.is_over = True

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
        return self._buffers.pop() if self._buffers else memoryview(bytearray(self._block_bytes))
