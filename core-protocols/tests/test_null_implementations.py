"""Every null implementation keeps the contract of its protocol."""

from __future__ import annotations

from io import StringIO
from typing import Any

from sagellm.core import (
    Clock,
    EvictionPolicyProtocol,
    KVAllocatorProtocol,
    KVPoolProtocol,
    LifetimePredictorProtocol,
    PredictionRequest,
    QuantizationConfig,
    QuantizerProtocol,
    SchedulerIRProtocol,
    SequenceId,
    SparsifierProtocol,
    TopologyProtocol,
)
from sagellm.core.protocols.kv_allocator import NullKVAllocator
from sagellm.core.protocols.kv_pool import NullKVPool
from sagellm.core.protocols.lifetime import NullLifetimePredictor
from sagellm.core.protocols.prefix_cache import NullPrefixCache
from sagellm.core.protocols.quantizer import NullQuantizer
from sagellm.core.protocols.scheduler_ir import NullSchedulerIR
from sagellm.core.protocols.sparsifier import NullSparsifier, SparsityConfig
from sagellm.core.protocols.topology import NullTopology
from sagellm.core.protocols.trace import NullTraceReader
from sagellm.testing import (
    KVAllocatorContract,
    KVPoolContract,
    LifetimePredictorContract,
    PrefixCacheContract,
)
from sagellm.testing.quantizer import QuantizerContract
from sagellm.testing.scheduler import SchedulerPlanContract
from sagellm.testing.sparsifier import SparsifierContract
from sagellm.testing.topology import TopologyContract


class TestNullKVAllocator(KVAllocatorContract):
    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        return NullKVAllocator(total_blocks)


class TestNullKVPool(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        return NullKVPool(total_blocks, block_size, clock=clock)


def test_a_null_pool_never_asks_its_evictor() -> None:
    pool = NullKVPool(8)
    pool.set_evictor(lambda num_blocks: num_blocks)
    assert pool.total_blocks == pool.evict_if_needed(8) == 0


class TestNullLifetimePredictor(LifetimePredictorContract):
    def make(self) -> LifetimePredictorProtocol:
        return NullLifetimePredictor()


def test_a_null_predictor_predicts_the_limit_without_confidence() -> None:
    request = PredictionRequest(
        sequence_id=SequenceId("a"), token_ids=[1, 2], current_length=30, max_length=100
    )
    prediction = NullLifetimePredictor().predict(request)
    assert (prediction.remaining_length, prediction.confidence) == (70, 0)


class TestNullPrefixCache(PrefixCacheContract):
    def make(
        self,
        max_blocks: int = 100,
        block_size: int = 4,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
    ) -> NullPrefixCache:
        return NullPrefixCache(max_blocks, block_size, eviction_policy=eviction_policy, clock=clock)

    # It holds nothing that a million operations could lose.
    test_a_million_random_operations_agree_with_a_plain_model = None
    test_threads_lose_no_block_in_a_million_operations = None


def test_every_lookup_of_a_null_cache_misses_and_every_block_stays_with_the_caller():
    cache = NullPrefixCache(1000, 16)
    assert cache.insert_prefix(range(32), [0, 1]) == ([], 0, [], None, ())
    match = cache.lock(cache.match_prefix(range(32)), num_lookup_tokens=32)
    cache.unlock(match)
    assert match.match_length == cache.num_idle_blocks(match) == 0
    assert cache.query_by_prefix(range(32)) is None
    metrics = cache.metrics()
    assert (metrics.num_lookups, metrics.num_hits, metrics.num_lookup_tokens) == (2, 0, 64)
    assert metrics.token_hit_rate == 0.0


class TestNullQuantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return NullQuantizer(config)


class TestNullSparsifier(SparsifierContract):
    def make(self, config: SparsityConfig | None = None) -> SparsifierProtocol:
        return NullSparsifier(config)


class TestNullSchedulerIR(SchedulerPlanContract):
    def make(self, **options: Any) -> SchedulerIRProtocol:
        return NullSchedulerIR(**options)


class TestNullTopology(TopologyContract):
    def make(self) -> TopologyProtocol:
        return NullTopology()

    def test_it_says_that_it_reads_nothing(self) -> None:
        assert "nothing" in self.make().metrics().warnings[0]


def test_a_null_reader_reads_nothing():
    reader = NullTraceReader(tokenize=list)
    assert not reader.can_read("trace.jsonl", '{"timestamp": 0}')
    assert list(reader.read(StringIO("anything\n"))) == []
