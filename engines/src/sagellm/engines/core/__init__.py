"""The engine's core: scheduling, KV, the model runner and the step loop."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core import TokenOutput as TokenOutput
    from sagellm.engines.core.engine_core import CoreParts as CoreParts, EngineCore as EngineCore
    from sagellm.engines.core.kv_cache_manager import KVCacheManager as KVCacheManager
    from sagellm.engines.core.model_runner import ModelRunner as ModelRunner
    from sagellm.engines.core.scheduler import Scheduler as Scheduler
    from sagellm.engines.core.sequence import ScheduledSequence as ScheduledSequence, Sequence as Sequence
    from sagellm.engines.core.step_runner import StepRunner as StepRunner

__all__ = [
    "CoreParts",
    "EngineCore",
    "KVCacheManager",
    "ModelRunner",
    "ScheduledSequence",
    "Scheduler",
    "Sequence",
    "StepRunner",
    "TokenOutput",
]

__getattr__ = lazy(
    __name__,
    {
        "CoreParts": ".engine_core",
        "EngineCore": ".engine_core",
        "KVCacheManager": ".kv_cache_manager",
        "ModelRunner": ".model_runner",
        "ScheduledSequence": ".sequence",
        "Scheduler": ".scheduler",
        "Sequence": ".sequence",
        "StepRunner": ".step_runner",
        "TokenOutput": "sagellm.core",
    },
)
