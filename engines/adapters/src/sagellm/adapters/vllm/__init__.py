"""vLLM with our passes and eviction policies: its V1 schedulers and cache policies, by import path.

    vllm serve MODEL --scheduler-cls sagellm.adapters.vllm.AsyncScheduler \\
        --additional-config '{"sagellm": {"passes": "order=shortest"}}'

Nothing here imports vLLM before one of the schedulers is asked for.
"""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.adapters.vllm.scheduler import AsyncScheduler as AsyncScheduler, Scheduler as Scheduler

__getattr__ = lazy(__name__, {"AsyncScheduler": ".scheduler", "Scheduler": ".scheduler"})
