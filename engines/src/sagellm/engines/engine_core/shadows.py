"""Shadow caches: what other eviction policies would have saved of the prompts that an engine serves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    BlockId,
    ConfigError,
    EvictionPolicyProtocol,
    FinishReason,
    Namespace,
    PrefixCacheProtocol,
    ProviderSpec,
    TokenIds,
    VirtualClock,
)
from sagellm.engines.engine_core.policy_metrics import ShadowFigures, ShadowMetrics
from sagellm.engines.modules import Modules

if TYPE_CHECKING:
    from sagellm.core.protocols.prefix_cache import CachedRun
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
    from sagellm.engines.engine_core.sequence import Sequence

Places = npt.NDArray[np.int64]

NUM_PARTS = 4
"""Into which a sample of blocks is divided, each in a cache of its own: how far they differ says how sure the
estimate is, and how far their mean is from the whole sample's what small caches get wrong."""

_T = 3.182
"""Of Student's distribution with three degrees of freedom: 95 % lie within."""

_BEYOND = 1.5
"""How far the truth may be behind the sample, in distances between it and its parts. If errors fell with the
root of a cache's size, it would be once."""

_MAX_SAMPLE = NUM_PARTS / (NUM_PARTS + 1)

_MIN_BLOCKS = 256
"""Capacity of a sample; a smaller one would behave unlike the cache that it stands for."""

_MAX_HELD = 4096
"""Requests that wait for an earlier one to end; beyond that, that one counts without its output."""

_MAX_A_STEP = 8
"""Requests that are taken in behind a step."""

WINDOW = 1000
"""Requests in the latest window of the figures, at most; at least half of them, and none before a switch."""


class Served(NamedTuple):
    """What an engine computed for one request."""

    kept: TokenIds  # its prompt and output, without the last token, whose KV is never computed
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, in the engine's own cache
    namespace: Namespace
    priority: int
    arrival_ns: int


class ShadowCache:
    """A prefix cache without KV that processes one request after another.

    A prompt is matched, given blocks, cached and released at once, with its output, exactly as in a replay of
    a recording: 0.05 to 0.1 ms for a request of ten blocks.
    """

    def __init__(
        self, cache: PrefixCacheProtocol, num_blocks: int, block_size: int, *, num_computed: int = 1
    ) -> None:
        """The last `num_computed` tokens are computed in any case, as their logits are wanted."""
        self.cache = cache
        self._num_computed = num_computed
        self._size, self._num_blocks = block_size, num_blocks
        self._free = [BlockId(each) for each in range(num_blocks)]

    def take(self, served: Served) -> int:
        """Process a request, and return how many tokens of its prompt were cached."""
        cache, namespace, tokens = self.cache, served.namespace, served.kept
        reusable = tokens[: len(tokens) - self._num_computed]
        match = cache.lock(cache.match_prefix(reusable, namespace), num_lookup_tokens=len(tokens))
        try:
            own = self._allocate(-(-len(tokens) // self._size) - len(match.block_ids), namespace)
            if own is None:
                return 0
            self._keep(served, match.block_ids, own)
        finally:
            cache.unlock(match)
        return min(match.match_length, served.num_prompt_tokens - self._num_computed)

    def seed(self, tokens: TokenIds, namespace: Namespace) -> None:
        """Cache a prefix as far as there is room."""
        match = self.cache.match_prefix(tokens, namespace)
        num_new = len(tokens) // self._size - len(match.block_ids)
        own = [self._free.pop() for _ in range(min(num_new, len(self._free)))]
        served = Served(tokens, 0, 0, namespace, 0, 0)
        self._keep(served, match.block_ids, own)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost, or both free and cached."""
        self.cache.check_integrity()
        cached = self.cache.metrics().num_blocks
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert len(self._free) + cached == self._num_blocks, "a block is neither free nor cached"

    def _allocate(self, num_blocks: int, namespace: Namespace) -> list[BlockId] | None:
        free = self._free
        missing = num_blocks - len(free)
        while missing > 0 and (dropped := self.cache.evict(missing, namespace=namespace)):
            free += dropped
            missing -= len(dropped)
        if missing > 0:
            return None
        at = len(free) - num_blocks
        own = free[at:]
        del free[at:]
        return own

    def _keep(self, served: Served, cached: list[BlockId], own: list[BlockId]) -> None:
        """Cache what a request computed; what the cache does not take is free again."""
        cache, tokens, namespace = self.cache, served.kept, served.namespace
        blocks = cached + own
        result = cache.insert_prefix(tokens, blocks, namespace, priority=served.priority)
        taken = {*result.block_ids, result.partial_block_id}
        self._free += result.released_block_ids
        num_kept = len(result.block_ids)
        if num_kept < min(len(blocks), len(tokens) // self._size):  # a smaller cache than pool, or a quota
            locked = cache.lock(cache.match_prefix(tokens[: num_kept * self._size], namespace))
            try:
                dropped = cache.make_room(len(tokens) // self._size - num_kept, namespace)
            finally:
                cache.unlock(locked)
            if dropped:
                self._free += dropped
                result = cache.insert_prefix(tokens, blocks, namespace, priority=served.priority)
                taken |= {*result.block_ids, result.partial_block_id}
                self._free += result.released_block_ids
        self._free += [each for each in own if each not in taken]


@dataclass(slots=True)
class _Held:
    """A request that has arrived; `served` once it has ended, and `is_over`."""

    arrival_ns: int
    sequence: Sequence | None
    served: Served | None = None


class ShadowCaches:
    """Runs candidates beside the policy that evicts, on the same requests in order of arrival.

    Nothing that it does changes what the engine does. A request is taken in once it and all that arrived
    before it have ended, behind a step or while the engine is idle.

    With `sample` below 1, each policy manages a sample of the blocks, chosen by a hash of all tokens up to a
    block's end, in a cache that is smaller by as much (after Waldspurger et al., "Efficient MRC Construction
    with SHARDS", FAST 2015), and once more in four parts. What is estimated is the difference from the
    engine's own hits of these blocks.
    """

    def __init__(
        self, modules: Modules, specs: Seq[ProviderSpec], kv: KVCacheManager, *, sample: float = 1.0
    ) -> None:
        """Raises ConfigError for a sample that is too small, an unknown policy or wrong options."""
        if not (0 < sample <= _MAX_SAMPLE or sample == 1):
            raise ConfigError(
                f"the sample is {sample:g}; it must be above 0 and at most {_MAX_SAMPLE:g}, or 1 for all"
            )
        size, num_blocks = kv.seats.block_size, kv.total_blocks
        self._clock, self._now_ns = VirtualClock(), kv.clock.now_ns
        self._size, self._total_blocks = size, num_blocks
        self._sampler: BlockSampler | None = None
        if sample < 1:
            self._sampler = BlockSampler(size, sample, num_blocks)
            size, num_blocks = 1, self._sampler.num_blocks(num_blocks)
        self._names = [spec.text for spec in specs]
        if len(set(self._names)) < len(self._names):
            raise ConfigError(f"the shadows are {', '.join(self._names)}; name each once")
        part = max(1, num_blocks // NUM_PARTS)
        sizes = (num_blocks,) if self._sampler is None else (num_blocks, *([part] * NUM_PARTS))
        self._policies: dict[str, EvictionPolicyProtocol] = {}  # of the last cache of each
        self._shadows = [[self._shadow(modules, spec, each, size) for each in sizes] for spec in specs]
        self._runs: Seq[CachedRun] = []  # of a cache whose content these begin with …
        self._ends: deque[int] = deque()  # … and which of them are leaves that were not taken in yet
        self._held: deque[_Held] = deque()
        self._by_id: dict[str, _Held] = {}
        self._hits = np.zeros((len(specs), len(sizes)))  # tokens; sampled blocks, and those of each part
        self._own = np.zeros(len(sizes))  # the engine's of those blocks
        self._num_query = self._num_hit = self._num_requests = self._took_ns = 0
        self._marks: deque[Total] = deque([_ZERO], maxlen=2)

    def begin_like(self, cache: PrefixCacheProtocol) -> None:
        """Cache what another cache has now, in order of last use, so that all begin warm.

        Each following step takes in some of it, before any request.
        """
        self._runs = cache.runs()
        parents = {run.parent for run in self._runs}
        ends = (place for place in range(len(self._runs)) if place not in parents)
        self._ends = deque(sorted(ends, key=lambda each: self._runs[each].last_use_ns))

    def _seed(self, run: CachedRun) -> None:
        """Cache a run and what it follows, in all shadows."""
        namespace, edges = run.namespace, [run.token_ids.data]
        self._clock.advance_ns(max(0, run.last_use_ns - self._clock.now_ns()))
        while run.parent is not None:
            run = self._runs[run.parent]
            edges.append(run.token_ids.data)
        tokens = TokenIds(b"".join(reversed(edges)))
        samples = [tokens] if self._sampler is None else self._sampler.of_tokens(tokens, namespace)
        for shadows in self._shadows:
            for shadow, some in zip(shadows, samples, strict=True):
                if len(some):
                    shadow.seed(some, namespace)

    def arrived(self, sequence: Sequence) -> None:
        """Note that a sequence arrived."""
        held = _Held(sequence.request.arrival_ns, sequence)
        self._by_id[sequence.sequence_id] = held
        place = len(self._held)
        while place and self._held[place - 1].arrival_ns > held.arrival_ns:
            place -= 1
        self._held.insert(place, held)

    def ended(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Note what became of a sequence. One that failed, or was never admitted, does not count."""
        held = self._by_id.pop(sequence.sequence_id, None)
        if held is None:
            return
        held.sequence = None
        if reason != "error" and sequence.num_cached_tokens is not None:
            held.served = _served(sequence)

    def stepped(self, now_ns: int) -> None:
        """Take in some requests that have ended. Called behind each step, and while the engine is idle."""
        if self._ends:
            for _ in range(min(_MAX_A_STEP, len(self._ends))):
                self._seed(self._runs[self._ends.popleft()])
            return
        self._runs = []
        held = self._held
        for _ in range(min(_MAX_A_STEP, len(held))):
            first = held[0]
            if first.sequence is not None:
                if len(held) <= _MAX_HELD or first.sequence.num_cached_tokens is None:
                    return
                first.served = _served(first.sequence)
                self._by_id.pop(first.sequence.sequence_id, None)
            held.popleft()
            if first.served is not None:
                self.take(first.served)

    @property
    def is_behind(self) -> bool:
        """Whether the next call of `stepped` takes something in."""
        return bool(self._ends or (self._held and self._held[0].sequence is None))

    def take(self, served: Served) -> None:
        """Take in a request, in all shadows."""
        began_ns = self._now_ns()
        self._clock.advance_ns(max(0, served.arrival_ns - self._clock.now_ns()))
        samples = [served] if self._sampler is None else self._sampler.of_request(served)
        for place, some in enumerate(samples):
            if len(some.kept):
                self._own[place] += some.num_cached_tokens
                for row, shadows in enumerate(self._shadows):
                    self._hits[row, place] += shadows[place].take(some)
        self._num_query += served.num_prompt_tokens
        self._num_hit += served.num_cached_tokens
        self._num_requests += 1
        if not self._num_requests % (WINDOW // 2):
            self._marks.append(self.total())
        self._took_ns += self._now_ns() - began_ns

    def learnt(self, name: str) -> EvictionPolicyProtocol | None:
        """Return the policy of a name that has managed all blocks; None for a sample, and after a failure."""
        if self._sampler is not None or name not in self._policies:
            return None
        (shadow,) = self._shadows[self._names.index(name)]
        return None if shadow.cache.metrics().policy_failure else self._policies[name]

    def begin_window(self) -> None:
        """Let the latest window begin now."""
        self._marks = deque([self.total()], maxlen=2)

    def total(self) -> Total:
        """Return what was counted so far."""
        return Total(self._num_requests, self._num_query, self._num_hit, self._hits - self._own)

    def rates(self, since: Total, until: Total) -> list[Rate]:
        """Return the hit rate of each policy between two moments."""
        num_query = max(until.num_query - since.num_query, 1)
        own = (until.num_hit - since.num_hit) / num_query
        differences = (until.differences - since.differences) / num_query  # (policies, samples)
        if self._sampler is None:
            return [Rate(own + float(row[0])) for row in differences]
        differences *= self._size / self._sampler.share
        return [_estimate(own, float(row[0]), NUM_PARTS * row[1:]) for row in differences]

    def metrics(self) -> ShadowMetrics:
        """Return the figures so far, and those of the latest window of 500 to 1,000 requests."""
        now, recent = self.total(), self._marks[0]
        of_all, of_recent = self.rates(_ZERO, now), self.rates(recent, now)
        return ShadowMetrics(
            sample=1.0 if self._sampler is None else self._sampler.share,
            num_requests=self._num_requests,
            num_waiting=len(self._held),
            num_query_tokens=now.num_query,
            num_hit_tokens=now.num_hit,
            hit_rate=now.num_hit / max(now.num_query, 1),
            recent_hit_rate=(now.num_hit - recent.num_hit) / max(now.num_query - recent.num_query, 1),
            num_recent=now.num_requests - recent.num_requests,
            seconds=self._took_ns / 1e9,
            shadows=[
                ShadowFigures(
                    policy=name,
                    hit_rate=rate.value,
                    low=rate.low,
                    high=rate.high,
                    recent_hit_rate=latest.value,
                    recent_low=latest.low,
                    recent_high=latest.high,
                    num_hit_tokens=round(rate.value * now.num_query),
                    failure=shadows[0].cache.metrics().policy_failure,
                )
                for name, shadows, rate, latest in zip(
                    self._names, self._shadows, of_all, of_recent, strict=True
                )
            ],
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if a shadow contradicts itself."""
        for shadow in chain.from_iterable(self._shadows):
            shadow.check_integrity()

    def _shadow(self, modules: Modules, spec: ProviderSpec, num_blocks: int, size: int) -> ShadowCache:
        prefix = modules.config.prefix_cache
        share = num_blocks / self._total_blocks
        max_blocks = num_blocks
        if prefix.max_blocks is not None:
            max_blocks = min(num_blocks, max(1, round(prefix.max_blocks * share)))
        self._policies[spec.text] = policy = modules.eviction_policy(spec)
        cache: PrefixCacheProtocol = modules.make(
            "prefix_cache",
            _scaled(prefix.name, share),
            max_blocks,
            size,
            eviction_policy=policy,
            clock=self._clock,
        )
        return ShadowCache(cache, num_blocks, size, num_computed=int(self._sampler is None))


class Total(NamedTuple):
    """What was counted until some moment."""

    num_requests: int
    num_query: int
    num_hit: int
    differences: npt.NDArray[np.float64]  # (policies, samples): hits less the engine's own


_ZERO = Total(0, 0, 0, np.zeros((1, 1)))


class Rate(NamedTuple):
    """A share of prompt tokens, with a 95 % interval if it is an estimate."""

    value: float
    low: float | None = None
    high: float | None = None


def _estimate(own: float, whole: float, parts: npt.NDArray[np.float64]) -> Rate:
    """Return the engine's own rate plus the difference in a sample, with an interval.

    The interval has Student's for a difference of two means of the parts: what is estimated is one run of a
    policy, which may adapt, and the sample is another. What small caches get wrong comes on top.
    """
    error = float(parts.std(ddof=1)) * math.sqrt(2 / len(parts))
    half = _T * error + _BEYOND * abs(whole - float(parts.mean()))
    return Rate(*(min(max(each, 0.0), 1.0) for each in (own + whole, own + whole - half, own + whole + half)))


_FACTOR = 0x9E3779B97F4A7C15
"""Of the polynomial that hashes tokens: odd, so that none is lost."""


class BlockSampler:
    """Draws a sample of blocks by a hash of the tokens up to their end.

    Prompts that begin alike have the same blocks of their common beginning in a sample, so a sample of a tree
    of prefixes is a tree again, with `share` of its blocks. Each sampled block becomes one token, its hash.
    """

    def __init__(self, block_size: int, sample: float, num_blocks: int) -> None:
        """Raises ConfigError if the sample's cache would have too few blocks."""
        self._size = block_size
        self._num_classes = max(NUM_PARTS, math.floor(NUM_PARTS / sample))
        self.share = NUM_PARTS / self._num_classes
        self._powers: npt.NDArray[np.uint64] = np.ones(1, np.uint64)
        if self.num_blocks(num_blocks) < _MIN_BLOCKS:
            least = _MIN_BLOCKS / num_blocks
            advice = "do not sample" if least > 0.5 else f"sample {math.ceil(1000 * least) / 1000:g} or more"
            raise ConfigError(
                f"a sample of {sample:g} is a cache of {self.num_blocks(num_blocks)} blocks, as the engine "
                f"has {num_blocks:,}; it needs {_MIN_BLOCKS}: {advice}"
            )

    def num_blocks(self, num_blocks: int) -> int:
        """Return the capacity of a sample of a cache."""
        return round(num_blocks * self.share)

    def of_request(self, served: Served) -> list[Served]:
        """Return the sampled blocks of a request as tokens, and those of each part."""
        classes, hashes = self._hashed(served.kept, served.namespace)
        ends = np.arange(1, len(classes) + 1) * self._size
        return [
            served._replace(
                kept=TokenIds(hashes[places].tobytes()),
                num_prompt_tokens=int(np.count_nonzero(ends[places] <= served.num_prompt_tokens)),
                num_cached_tokens=int(np.count_nonzero(ends[places] <= served.num_cached_tokens)),
            )
            for places in self._places(classes)
        ]

    def of_tokens(self, tokens: TokenIds, namespace: Namespace) -> list[TokenIds]:
        """Return the sampled blocks of a prefix as tokens, and those of each part."""
        classes, hashes = self._hashed(tokens, namespace)
        return [TokenIds(hashes[places].tobytes()) for places in self._places(classes)]

    def _places(self, classes: Places) -> Iterator[Places]:
        yield np.flatnonzero(classes < NUM_PARTS)
        for part in range(NUM_PARTS):
            yield np.flatnonzero(classes == part)

    def _hashed(self, tokens: TokenIds, namespace: Namespace) -> tuple[Places, npt.NDArray[np.int32]]:
        """Return, for each whole block, its class and its token: hashes of all tokens up to its end."""
        ids = np.frombuffer(tokens.data, np.int32).astype(np.uint64)
        num_blocks = len(ids) // self._size
        if len(self._powers) < len(ids):
            with np.errstate(over="ignore"):
                factors = np.full(2 * len(ids), _FACTOR, np.uint64)
                self._powers = np.multiply.accumulate(factors, dtype=np.uint64)
        products = (ids + np.uint64(1)) * self._powers[: len(ids)]
        ends = np.add.accumulate(products, dtype=np.uint64)[self._size - 1 :: self._size]
        found = np.array(ends[:num_blocks] + np.uint64(_seed_of(namespace)), np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's
            found ^= found >> np.uint64(shift)
            found *= np.uint64(factor)
        found ^= found >> np.uint64(31)
        classes = ((found >> np.uint64(32)) % np.uint64(self._num_classes)).astype(np.int64)
        return classes, (found & np.uint64(0x7FFFFFFF)).astype(np.int32)


def _seed_of(namespace: Namespace) -> int:
    return int.from_bytes(blake2b("\0".join(map(str, namespace)).encode(), digest_size=8).digest(), "little")


def _scaled(spec: ProviderSpec, share: float) -> ProviderSpec:
    """Return a cache whose limits in blocks are smaller by as much as a sample is."""
    options = dict(spec.options)
    if share < 1:
        for name in ("max_ghost_blocks", "max_pinned_blocks"):
            if isinstance(options.get(name), int):
                options[name] = round(options[name] * share)
        if isinstance(quotas := options.get("tenant_quotas"), Mapping):
            options["tenant_quotas"] = {name: max(1, round(each * share)) for name, each in quotas.items()}
    return ProviderSpec(spec.name, options)


def _served(sequence: Sequence) -> Served:
    request, tokens = sequence.request, sequence.token_ids()
    num_prompt = len(request.token_ids)
    return Served(
        tokens[: max(num_prompt, len(tokens) - 1)],
        num_prompt,
        min(sequence.num_cached_tokens or 0, num_prompt - 1),
        request.namespace,
        request.priority,
        request.arrival_ns,
    )
