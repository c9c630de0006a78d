"""The engine's core: scheduling, KV, the model runner and the step loop."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core import TokenOutput as TokenOutput
    from sagellm.engines.core.engine_core import CoreParts as CoreParts, EngineCore as EngineCore
    from sagellm.engines.core.kv_cache_manager import KVCacheManager as KVCacheManager
    from sagellm.engines.core.scheduler import Scheduler as Scheduler
    from sagellm.engines.core.sequence import Sequence as Sequence
    from sagellm.engines.core.step_runner import StepRunner as StepRunner
    from sagellm.engines.worker.model_runner import ModelRunner as ModelRunner
    from sagellm.engines.worker.worker import Worker as Worker

__all__ = [
    "CoreParts",
    "EngineCore",
    "KVCacheManager",
    "ModelRunner",
    "Scheduler",
    "Sequence",
    "StepRunner",
    "TokenOutput",
    "Worker",
]

__getattr__ = lazy(
    __name__,
    {
        "CoreParts": ".engine_core",
        "EngineCore": ".engine_core",
        "KVCacheManager": ".kv_cache_manager",
        "ModelRunner": "sagellm.engines.worker.model_runner",
        "Scheduler": ".scheduler",
        "Sequence": ".sequence",
        "StepRunner": ".step_runner",
        "TokenOutput": "sagellm.core",
        "Worker": "sagellm.engines.worker.worker",
    },
)
