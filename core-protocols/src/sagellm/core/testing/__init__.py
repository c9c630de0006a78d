"""The conformance kit: one contract class per protocol, subclassed by built-ins and third parties alike.

    from sagellm.core.testing import EvictionPolicyContract

    class TestMine(EvictionPolicyContract):
        def make(self):
            return MyPolicy()

Needs the extra `testing` of core (pytest and hypothesis).
"""

from typing import TYPE_CHECKING

import pytest

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.errors import AuditError as AuditError
    from sagellm.core.testing.eviction import (
        EvictionPolicyContract as EvictionPolicyContract,
        RankingEvictionPolicyContract as RankingEvictionPolicyContract,
    )
    from sagellm.core.testing.eviction_audit import AuditingEvictionPolicy as AuditingEvictionPolicy
    from sagellm.core.testing.installed import installed_contract as installed_contract
    from sagellm.core.testing.kv_allocator import KVAllocatorContract as KVAllocatorContract
    from sagellm.core.testing.kv_pool import KVPoolContract as KVPoolContract
    from sagellm.core.testing.kv_tier import KVTierContract as KVTierContract
    from sagellm.core.testing.lifetime import LifetimePredictorContract as LifetimePredictorContract
    from sagellm.core.testing.logits_processor import LogitsProcessorContract as LogitsProcessorContract
    from sagellm.core.testing.prefix_cache import (
        KeepingPrefixCacheContract as KeepingPrefixCacheContract,
        PrefixCacheContract as PrefixCacheContract,
    )
    from sagellm.core.testing.prefix_cache_model import (
        PrefixCacheMachine as PrefixCacheMachine,
        PrefixCacheModel as PrefixCacheModel,
    )
    from sagellm.core.testing.quantizer import QuantizerContract as QuantizerContract
    from sagellm.core.testing.schedule_simulation import ScheduleSimulation as ScheduleSimulation
    from sagellm.core.testing.scheduler import (
        SchedulerContract as SchedulerContract,
        SchedulerPlanContract as SchedulerPlanContract,
    )
    from sagellm.core.testing.scheduler_pass import SchedulerPassContract as SchedulerPassContract
    from sagellm.core.testing.threads import run_in_threads as run_in_threads
    from sagellm.core.testing.topology import TopologyContract as TopologyContract
    from sagellm.core.testing.trace import TraceReaderContract as TraceReaderContract

_TABLE = {
    "AuditError": "sagellm.core.errors",
    "AuditingEvictionPolicy": ".eviction_audit",
    "EvictionPolicyContract": ".eviction",
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
    "ScheduleSimulation": ".schedule_simulation",
    "SchedulerContract": ".scheduler",
    "SchedulerPassContract": ".scheduler_pass",
    "SchedulerPlanContract": ".scheduler",
    "TopologyContract": ".topology",
    "TraceReaderContract": ".trace",
    "installed_contract": ".installed",
    "run_in_threads": ".threads",
}

__all__ = sorted(_TABLE)

# So that a failing `assert` of the kit shows its values, as in a test file.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("eviction_machine", "kv_tier_model")),
    *(f"{__name__}{module}" for module in sorted(set(_TABLE.values())) if module.startswith(".")),
)

__getattr__ = lazy(__name__, _TABLE)
