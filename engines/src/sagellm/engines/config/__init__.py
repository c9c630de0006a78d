"""The engine's configuration: one typed schema, and where its values come from."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig as EngineConfig
    from sagellm.engines.config.sections import (
        ForwardConfig as ForwardConfig,
        GrammarConfig as GrammarConfig,
        KVConfig as KVConfig,
        ModelConfig as ModelConfig,
        PredictorConfig as PredictorConfig,
        PrefixCacheConfig as PrefixCacheConfig,
        SchedulerConfig as SchedulerConfig,
        ServerConfig as ServerConfig,
    )

_MODULE_OF = {
    "EngineConfig": ".schema",
    "ForwardConfig": ".sections",
    "GrammarConfig": ".sections",
    "KVConfig": ".sections",
    "ModelConfig": ".sections",
    "PredictorConfig": ".sections",
    "PrefixCacheConfig": ".sections",
    "SchedulerConfig": ".sections",
    "ServerConfig": ".sections",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
