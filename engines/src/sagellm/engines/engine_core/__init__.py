"""What happens between a queued request and its tokens: scheduling, KV, and the loop over steps."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core import TokenOutput as TokenOutput
    from sagellm.engines.engine_core.core import EngineCore as EngineCore
    from sagellm.engines.engine_core.scheduler import Scheduler as Scheduler
    from sagellm.engines.worker.model_runner import ModelRunner as ModelRunner
    from sagellm.engines.worker.worker import Worker as Worker

_MODULE_OF = {
    "EngineCore": ".core",
    "ModelRunner": "sagellm.engines.worker.model_runner",
    "Scheduler": ".scheduler",
    "TokenOutput": "sagellm.core",
    "Worker": "sagellm.engines.worker.worker",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
