"""The conformance kit: one contract class per protocol, subclassed by built-ins and third parties alike.

    from sagellm.testing import EvictionPolicyContract

    class TestMine(EvictionPolicyContract):
        def make(self):
            return MyPolicy()

`sage llm plugins check` runs it on an installed distribution (`sagellm.testing.conformance`).
"""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.errors import AuditError as AuditError
    from sagellm.testing.draft_proposer import DraftProposerContract as DraftProposerContract
    from sagellm.testing.engine_adapter import EngineAdapterContract as EngineAdapterContract
    from sagellm.testing.eviction import (
        EvictionPolicyContract as EvictionPolicyContract,
        RankingEvictionPolicyContract as RankingEvictionPolicyContract,
    )
    from sagellm.testing.eviction_audit import AuditingEvictionPolicy as AuditingEvictionPolicy
    from sagellm.testing.grammar import GrammarContract as GrammarContract
    from sagellm.testing.installed import installed_contract as installed_contract
    from sagellm.testing.kv_allocator import KVAllocatorContract as KVAllocatorContract
    from sagellm.testing.kv_pool import KVPoolContract as KVPoolContract
    from sagellm.testing.kv_tier import KVTierContract as KVTierContract
    from sagellm.testing.lifetime import LifetimePredictorContract as LifetimePredictorContract
    from sagellm.testing.logits_processor import LogitsProcessorContract as LogitsProcessorContract
    from sagellm.testing.parsers import (
        ReasoningParserContract as ReasoningParserContract,
        ToolParserContract as ToolParserContract,
    )
    from sagellm.testing.prefix_cache import (
        KeepingPrefixCacheContract as KeepingPrefixCacheContract,
        PrefixCacheContract as PrefixCacheContract,
    )
    from sagellm.testing.prefix_cache_model import (
        PrefixCacheMachine as PrefixCacheMachine,
        PrefixCacheModel as PrefixCacheModel,
    )
    from sagellm.testing.quantizer import QuantizerContract as QuantizerContract
    from sagellm.testing.schedule_simulation import ScheduleSimulation as ScheduleSimulation
    from sagellm.testing.scheduler import (
        SchedulerContract as SchedulerContract,
        SchedulerPlanContract as SchedulerPlanContract,
    )
    from sagellm.testing.scheduler_pass import SchedulerPassContract as SchedulerPassContract
    from sagellm.testing.sparsifier import SparsifierContract as SparsifierContract
    from sagellm.testing.threads import run_in_threads as run_in_threads
    from sagellm.testing.topology import TopologyContract as TopologyContract
    from sagellm.testing.trace import TraceReaderContract as TraceReaderContract

__version__ = "0.2.0"

_TABLE = {
    "AuditError": "sagellm.core.errors",
    "AuditingEvictionPolicy": ".eviction_audit",
    "DraftProposerContract": ".draft_proposer",
    "EngineAdapterContract": ".engine_adapter",
    "EvictionPolicyContract": ".eviction",
    "GrammarContract": ".grammar",
    "KVAllocatorContract": ".kv_allocator",
    "KVPoolContract": ".kv_pool",
    "KVTierContract": ".kv_tier",
    "KeepingPrefixCacheContract": ".prefix_cache",
    "LifetimePredictorContract": ".lifetime",
    "LogitsProcessorContract": ".logits_processor",
    "PrefixCacheContract": ".prefix_cache",
    "PrefixCacheMachine": ".prefix_cache_model",
    "PrefixCacheModel": ".prefix_cache_model",
    "QuantizerContract": ".quantizer",
    "RankingEvictionPolicyContract": ".eviction",
    "ReasoningParserContract": ".parsers",
    "ScheduleSimulation": ".schedule_simulation",
    "SchedulerContract": ".scheduler",
    "SchedulerPassContract": ".scheduler_pass",
    "SchedulerPlanContract": ".scheduler",
    "SparsifierContract": ".sparsifier",
    "ToolParserContract": ".parsers",
    "TopologyContract": ".topology",
    "TraceReaderContract": ".trace",
    "installed_contract": ".installed",
    "run_in_threads": ".threads",
}

__all__ = sorted(["__version__", *_TABLE])

__getattr__ = lazy(__name__, _TABLE)
