"""Protocols, types and the plugin manager that every sageLLM package builds on."""

from typing import TYPE_CHECKING

from sagellm.core._lazy import lazy as lazy
from sagellm.core._moved import find_moved_modules, with_moved_names

if TYPE_CHECKING:
    from sagellm.core.checks import *
    from sagellm.core.errors import *
    from sagellm.core.ids import *
    from sagellm.core.kv_block import *
    from sagellm.core.kv_layout import *
    from sagellm.core.logging import *
    from sagellm.core.namespace import *
    from sagellm.core.node_ranking import *
    from sagellm.core.plugins.failure import *
    from sagellm.core.plugins.hookspecs import *
    from sagellm.core.plugins.options import *
    from sagellm.core.plugins.provider import *
    from sagellm.core.plugins.registry import *
    from sagellm.core.protocols.attention import *
    from sagellm.core.protocols.checkpoint_format import *
    from sagellm.core.protocols.draft_proposer import *
    from sagellm.core.protocols.engine import *
    from sagellm.core.protocols.engine_adapter import *
    from sagellm.core.protocols.eviction import *
    from sagellm.core.protocols.executor import *
    from sagellm.core.protocols.forward import *
    from sagellm.core.protocols.grammar import *
    from sagellm.core.protocols.kv_allocator import *
    from sagellm.core.protocols.kv_events import *
    from sagellm.core.protocols.kv_offload import *
    from sagellm.core.protocols.kv_pool import *
    from sagellm.core.protocols.kv_saves import *
    from sagellm.core.protocols.kv_tier import *
    from sagellm.core.protocols.lifetime import *
    from sagellm.core.protocols.logits_processor import *
    from sagellm.core.protocols.model_family import *
    from sagellm.core.protocols.model_spec import *
    from sagellm.core.protocols.parsers import *
    from sagellm.core.protocols.prefix_cache import *
    from sagellm.core.protocols.quantizer import *
    from sagellm.core.protocols.request_rows import *
    from sagellm.core.protocols.scheduler_ir import *
    from sagellm.core.protocols.sparsifier import *
    from sagellm.core.protocols.step import *
    from sagellm.core.protocols.topology import *
    from sagellm.core.protocols.trace import *
    from sagellm.core.request import *
    from sagellm.core.runtime import *
    from sagellm.core.step_cost import *
    from sagellm.core.store_key import *
    from sagellm.core.tenant import *
    from sagellm.core.tokens import *
    from sagellm.core.version import *

__version__ = "0.2.0"

# module → the public names that it defines
_NAMES = {
    "checks": "require_object",
    "errors": """
        AuditError BlockError CheckpointError ConfigError DeadlyRequestError DuplicateProviderError
        DuplicateRequestError EngineDeadError EngineError InvalidInputError InvalidRequestError
        OutOfBlocksError OutOfMemoryError PassError PluginError PluginHookError PluginImportError
        PluginMethodError PluginVersionError SageLLMError StaleMatchError UnknownKindError
        UnknownNameError UnknownProviderError UnknownRequestError UnsupportedModelError nearest
    """,
    "ids": "BlockId NodeId RequestId SequenceId",
    "kv_block": "BlockHeader BlockKey KVIdentity UNNAMED headers_of",
    "kv_layout": "KVGroup KVLayout",
    "logging": "get_logger",
    "namespace": "DEFAULT Namespace",
    "node_ranking": "NodeRanking RankingKey",
    "plugins.failure": "call_plugin plugin_failure",
    "plugins.hookspecs": "hookimpl",
    "plugins.options": "ProviderSpec",
    "plugins.provider": "Command KINDS Provider",
    "plugins.registry": "PluginRegistry",
    "protocols.attention": "AttentionBackendProtocol AttentionMetrics AttentionSpec InputBatch",
    "protocols.checkpoint_format": """
        Checkpoint CheckpointFormatProtocol Shard StoredTensor WHOLE WeightSource
    """,
    "protocols.draft_proposer": "DraftProposerMetrics DraftProposerProtocol",
    "protocols.engine": "EngineMetrics EngineProtocol TokenOutput",
    "protocols.engine_adapter": "EngineAdapterProtocol",
    "protocols.eviction": "CachedNode EvictionCandidate EvictionMetrics EvictionPolicyProtocol",
    "protocols.executor": "ExecutorProtocol StepWorker",
    "protocols.forward": "ForwardBackendProtocol ForwardMetrics ModelMetrics",
    "protocols.grammar": "GrammarProtocol",
    "protocols.kv_allocator": "AllocatorMetrics KVAllocatorProtocol",
    "protocols.kv_events": "AllBlocksCleared BlockRemoved BlockStored KVCacheEvent KVEventSink RemovalReason",
    "protocols.kv_offload": "KVMemory KVOffloadProtocol",
    "protocols.kv_pool": "BlockAllocationRequest BlockInfo Evictor KVPoolMetrics KVPoolProtocol",
    "protocols.kv_saves": "KVSavesProtocol KVSpace SaveProgress SaveStore",
    "protocols.kv_tier": "KVTierMetrics KVTierProtocol Ticket TierOutcome TierRequest TierResult run_to_end",
    "protocols.lifetime": "LifetimeMetrics LifetimePrediction LifetimePredictorProtocol PredictionRequest",
    "protocols.logits_processor": """
        ExtraArg LogitsProcessorMetrics LogitsProcessorProtocol LogitsRequest LogitsRow
    """,
    "protocols.model_family": "ModelFamilyProtocol",
    "protocols.model_spec": """
        DecoderSpec ExpertsSpec FeedForwardSpec HFConfig LayerSpec LinearSpec ModelGeometry ModelSpec
        NormSpec RopeSpec TensorSpec
    """,
    "protocols.parsers": "ReasoningParserProtocol ToolParserProtocol",
    "protocols.prefix_cache": """
        EvictedBlocks InsertResult KVBlockDescriptor MissCause PrefixCacheMetrics PrefixCacheProtocol
        PrefixMatch TenantUsage
    """,
    "protocols.quantizer": """
        QuantizationConfig QuantizationGranularity QuantizationOutput QuantizerMetrics
        QuantizerProtocol check_weight_shape
    """,
    "protocols.request_rows": "PrefixHit Probe RequestRows ScheduleRequest",
    "protocols.scheduler_ir": """
        Decision PassMetrics ScheduleIR SchedulePlan SchedulerIRProtocol SchedulerMetrics
        SchedulerPassProtocol
    """,
    "protocols.sparsifier": "SparsifierProtocol",
    "protocols.step": "StepInput StepOutput",
    "protocols.topology": "Topology TopologyMetrics TopologyProtocol",
    "protocols.trace": "Tokenize TraceReaderProtocol TraceRequest",
    "request": "FinishReason Request",
    "runtime": "Clock Randomness Runtime SystemClock VirtualClock",
    "step_cost": "StepCost StepWork",
    "store_key": "StoreKey",
    "tenant": "DEFAULT_TENANT Tenant",
    "tokens": "EMPTY TokenIds TokenIdsLike pack",
    "version": "SAGELLM_API",
}
_MODULE_OF = {name: f".{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", "lazy", *_MODULE_OF])

__getattr__ = with_moved_names(__name__, lazy(__name__, _MODULE_OF))

find_moved_modules()
