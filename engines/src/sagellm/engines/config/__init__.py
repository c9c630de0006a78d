"""The engine's configuration: one typed schema, and where its values come from."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig as EngineConfig
    from sagellm.engines.config.schema import ForwardConfig as ForwardConfig
    from sagellm.engines.config.schema import KVConfig as KVConfig
    from sagellm.engines.config.schema import ModelConfig as ModelConfig
    from sagellm.engines.config.schema import PredictorConfig as PredictorConfig
    from sagellm.engines.config.schema import PrefixCacheConfig as PrefixCacheConfig
    from sagellm.engines.config.schema import SchedulerConfig as SchedulerConfig

__all__ = [
    "EngineConfig",
    "ForwardConfig",
    "KVConfig",
    "ModelConfig",
    "PredictorConfig",
    "PrefixCacheConfig",
    "SchedulerConfig",
]

__getattr__ = lazy(
    __name__,
    {
        "EngineConfig": ".schema",
        "ForwardConfig": ".schema",
        "KVConfig": ".schema",
        "ModelConfig": ".schema",
        "PredictorConfig": ".schema",
        "PrefixCacheConfig": ".schema",
        "SchedulerConfig": ".schema",
    },
)
