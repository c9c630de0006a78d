"""Protocols, types and the plugin manager that every sageLLM package stands on."""

from typing import TYPE_CHECKING

from sagellm.core._lazy import lazy

if TYPE_CHECKING:
    from sagellm.core.errors import (
        BlockError as BlockError,
    )
    from sagellm.core.errors import (
        CheckpointError as CheckpointError,
    )
    from sagellm.core.errors import (
        ConfigError as ConfigError,
    )
    from sagellm.core.errors import (
        DuplicateProviderError as DuplicateProviderError,
    )
    from sagellm.core.errors import (
        DuplicateRequestError as DuplicateRequestError,
    )
    from sagellm.core.errors import (
        EngineError as EngineError,
    )
    from sagellm.core.errors import (
        InvalidInputError as InvalidInputError,
    )
    from sagellm.core.errors import (
        InvalidRequestError as InvalidRequestError,
    )
    from sagellm.core.errors import (
        OutOfBlocksError as OutOfBlocksError,
    )
    from sagellm.core.errors import (
        OutOfMemoryError as OutOfMemoryError,
    )
    from sagellm.core.errors import (
        PluginError as PluginError,
    )
    from sagellm.core.errors import (
        PluginHookError as PluginHookError,
    )
    from sagellm.core.errors import (
        PluginImportError as PluginImportError,
    )
    from sagellm.core.errors import (
        PluginVersionError as PluginVersionError,
    )
    from sagellm.core.errors import (
        SageLLMError as SageLLMError,
    )
    from sagellm.core.errors import (
        StaleMatchError as StaleMatchError,
    )
    from sagellm.core.errors import (
        UnknownKindError as UnknownKindError,
    )
    from sagellm.core.errors import (
        UnknownNameError as UnknownNameError,
    )
    from sagellm.core.errors import (
        UnknownProviderError as UnknownProviderError,
    )
    from sagellm.core.errors import (
        UnknownRequestError as UnknownRequestError,
    )
    from sagellm.core.errors import (
        UnsupportedModelError as UnsupportedModelError,
    )
    from sagellm.core.errors import (
        nearest as nearest,
    )
    from sagellm.core.ids import (
        BlockId as BlockId,
    )
    from sagellm.core.ids import (
        NodeId as NodeId,
    )
    from sagellm.core.ids import (
        RequestId as RequestId,
    )
    from sagellm.core.ids import (
        SequenceId as SequenceId,
    )
    from sagellm.core.kv_block import (
        BlockHeader as BlockHeader,
    )
    from sagellm.core.kv_block import (
        BlockKey as BlockKey,
    )
    from sagellm.core.kv_layout import (
        KVGroup as KVGroup,
    )
    from sagellm.core.kv_layout import (
        KVLayout as KVLayout,
    )
    from sagellm.core.logging import (
        get_logger as get_logger,
    )
    from sagellm.core.namespace import (
        DEFAULT as DEFAULT,
    )
    from sagellm.core.namespace import (
        Namespace as Namespace,
    )
    from sagellm.core.plugins.hookspecs import (
        hookimpl as hookimpl,
    )
    from sagellm.core.plugins.provider import (
        KINDS as KINDS,
    )
    from sagellm.core.plugins.provider import (
        Provider as Provider,
    )
    from sagellm.core.plugins.registry import (
        InstalledPlugin as InstalledPlugin,
    )
    from sagellm.core.plugins.registry import (
        InstalledProvider as InstalledProvider,
    )
    from sagellm.core.plugins.registry import (
        PluginRegistry as PluginRegistry,
    )
    from sagellm.core.protocols.attention import (
        AttentionBackendProtocol as AttentionBackendProtocol,
    )
    from sagellm.core.protocols.attention import (
        AttentionMetrics as AttentionMetrics,
    )
    from sagellm.core.protocols.attention import (
        AttentionSpec as AttentionSpec,
    )
    from sagellm.core.protocols.attention import (
        InputBatch as InputBatch,
    )
    from sagellm.core.protocols.attention import (
        NullAttentionBackend as NullAttentionBackend,
    )
    from sagellm.core.protocols.engine import (
        EngineMetrics as EngineMetrics,
    )
    from sagellm.core.protocols.engine import (
        EngineProtocol as EngineProtocol,
    )
    from sagellm.core.protocols.engine import (
        NullEngine as NullEngine,
    )
    from sagellm.core.protocols.eviction import (
        CachedNode as CachedNode,
    )
    from sagellm.core.protocols.eviction import (
        EvictionCandidate as EvictionCandidate,
    )
    from sagellm.core.protocols.eviction import (
        EvictionMetrics as EvictionMetrics,
    )
    from sagellm.core.protocols.eviction import (
        EvictionPolicyProtocol as EvictionPolicyProtocol,
    )
    from sagellm.core.protocols.eviction import (
        NullEvictionPolicy as NullEvictionPolicy,
    )
    from sagellm.core.protocols.forward import (
        ForwardBackendProtocol as ForwardBackendProtocol,
    )
    from sagellm.core.protocols.forward import (
        ForwardMetrics as ForwardMetrics,
    )
    from sagellm.core.protocols.forward import (
        NullForwardBackend as NullForwardBackend,
    )
    from sagellm.core.protocols.kv_allocator import (
        AllocatorMetrics as AllocatorMetrics,
    )
    from sagellm.core.protocols.kv_allocator import (
        KVAllocatorProtocol as KVAllocatorProtocol,
    )
    from sagellm.core.protocols.kv_allocator import (
        NullKVAllocator as NullKVAllocator,
    )
    from sagellm.core.protocols.kv_pool import (
        BlockAllocationRequest as BlockAllocationRequest,
    )
    from sagellm.core.protocols.kv_pool import (
        BlockInfo as BlockInfo,
    )
    from sagellm.core.protocols.kv_pool import (
        Evictor as Evictor,
    )
    from sagellm.core.protocols.kv_pool import (
        KVPoolMetrics as KVPoolMetrics,
    )
    from sagellm.core.protocols.kv_pool import (
        KVPoolProtocol as KVPoolProtocol,
    )
    from sagellm.core.protocols.kv_pool import (
        NullKVPool as NullKVPool,
    )
    from sagellm.core.protocols.lifetime import (
        LifetimeMetrics as LifetimeMetrics,
    )
    from sagellm.core.protocols.lifetime import (
        LifetimePrediction as LifetimePrediction,
    )
    from sagellm.core.protocols.lifetime import (
        LifetimePredictorProtocol as LifetimePredictorProtocol,
    )
    from sagellm.core.protocols.lifetime import (
        NullLifetimePredictor as NullLifetimePredictor,
    )
    from sagellm.core.protocols.lifetime import (
        PredictionRequest as PredictionRequest,
    )
    from sagellm.core.protocols.model_family import (
        BuildContext as BuildContext,
    )
    from sagellm.core.protocols.model_family import (
        CausalLM as CausalLM,
    )
    from sagellm.core.protocols.model_family import (
        HFConfig as HFConfig,
    )
    from sagellm.core.protocols.model_family import (
        ModelFamilyMetrics as ModelFamilyMetrics,
    )
    from sagellm.core.protocols.model_family import (
        ModelFamilyProtocol as ModelFamilyProtocol,
    )
    from sagellm.core.protocols.model_family import (
        ModelGeometry as ModelGeometry,
    )
    from sagellm.core.protocols.model_family import (
        NullModelFamily as NullModelFamily,
    )
    from sagellm.core.protocols.prefix_cache import (
        InsertResult as InsertResult,
    )
    from sagellm.core.protocols.prefix_cache import (
        KVBlockDescriptor as KVBlockDescriptor,
    )
    from sagellm.core.protocols.prefix_cache import (
        NullPrefixCache as NullPrefixCache,
    )
    from sagellm.core.protocols.prefix_cache import (
        PrefixCacheMetrics as PrefixCacheMetrics,
    )
    from sagellm.core.protocols.prefix_cache import (
        PrefixCacheProtocol as PrefixCacheProtocol,
    )
    from sagellm.core.protocols.prefix_cache import (
        PrefixMatch as PrefixMatch,
    )
    from sagellm.core.protocols.quantizer import (
        NullQuantizer as NullQuantizer,
    )
    from sagellm.core.protocols.quantizer import (
        QuantizationConfig as QuantizationConfig,
    )
    from sagellm.core.protocols.quantizer import (
        QuantizationGranularity as QuantizationGranularity,
    )
    from sagellm.core.protocols.quantizer import (
        QuantizationOutput as QuantizationOutput,
    )
    from sagellm.core.protocols.quantizer import (
        QuantizerMetrics as QuantizerMetrics,
    )
    from sagellm.core.protocols.quantizer import (
        QuantizerProtocol as QuantizerProtocol,
    )
    from sagellm.core.protocols.scheduler_ir import (
        NullSchedulerIR as NullSchedulerIR,
    )
    from sagellm.core.protocols.scheduler_ir import (
        NullSchedulerPass as NullSchedulerPass,
    )
    from sagellm.core.protocols.scheduler_ir import (
        Probe as Probe,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduledRequest as ScheduledRequest,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduleIR as ScheduleIR,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulePlan as SchedulePlan,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduleRequest as ScheduleRequest,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulerIRProtocol as SchedulerIRProtocol,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulerMetrics as SchedulerMetrics,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulerPassProtocol as SchedulerPassProtocol,
    )
    from sagellm.core.protocols.topology import (
        CPU as CPU,
    )
    from sagellm.core.protocols.topology import (
        GPU as GPU,
    )
    from sagellm.core.protocols.topology import (
        Cache as Cache,
    )
    from sagellm.core.protocols.topology import (
        Link as Link,
    )
    from sagellm.core.protocols.topology import (
        NetworkInterface as NetworkInterface,
    )
    from sagellm.core.protocols.topology import (
        NullTopology as NullTopology,
    )
    from sagellm.core.protocols.topology import (
        NumaNode as NumaNode,
    )
    from sagellm.core.protocols.topology import (
        Topology as Topology,
    )
    from sagellm.core.protocols.topology import (
        TopologyMetrics as TopologyMetrics,
    )
    from sagellm.core.protocols.topology import (
        TopologyProtocol as TopologyProtocol,
    )
    from sagellm.core.request import (
        FinishReason as FinishReason,
    )
    from sagellm.core.request import (
        KVEvent as KVEvent,
    )
    from sagellm.core.request import (
        Request as Request,
    )
    from sagellm.core.request import (
        RequestRecord as RequestRecord,
    )
    from sagellm.core.request import (
        RequestStatus as RequestStatus,
    )
    from sagellm.core.request import (
        StepRecord as StepRecord,
    )
    from sagellm.core.runtime import (
        Clock as Clock,
    )
    from sagellm.core.runtime import (
        Files as Files,
    )
    from sagellm.core.runtime import (
        MemoryFiles as MemoryFiles,
    )
    from sagellm.core.runtime import (
        Randomness as Randomness,
    )
    from sagellm.core.runtime import (
        Runtime as Runtime,
    )
    from sagellm.core.runtime import (
        SystemClock as SystemClock,
    )
    from sagellm.core.runtime import (
        SystemFiles as SystemFiles,
    )
    from sagellm.core.runtime import (
        VirtualClock as VirtualClock,
    )
    from sagellm.core.tokens import (
        TokenIds as TokenIds,
    )
    from sagellm.core.tokens import (
        TokenIdsLike as TokenIdsLike,
    )
    from sagellm.core.tokens import (
        pack as pack,
    )
    from sagellm.core.version import (
        SAGELLM_API as SAGELLM_API,
    )

__version__ = "0.1.0"

__all__ = [
    "CPU",
    "DEFAULT",
    "GPU",
    "KINDS",
    "SAGELLM_API",
    "AllocatorMetrics",
    "AttentionBackendProtocol",
    "AttentionMetrics",
    "AttentionSpec",
    "BlockAllocationRequest",
    "BlockError",
    "BlockHeader",
    "BlockId",
    "BlockInfo",
    "BlockKey",
    "BuildContext",
    "Cache",
    "CachedNode",
    "CausalLM",
    "CheckpointError",
    "Clock",
    "ConfigError",
    "DuplicateProviderError",
    "DuplicateRequestError",
    "EngineError",
    "EngineMetrics",
    "EngineProtocol",
    "EvictionCandidate",
    "EvictionMetrics",
    "EvictionPolicyProtocol",
    "Evictor",
    "Files",
    "FinishReason",
    "ForwardBackendProtocol",
    "ForwardMetrics",
    "HFConfig",
    "InputBatch",
    "InsertResult",
    "InstalledPlugin",
    "InstalledProvider",
    "InvalidInputError",
    "InvalidRequestError",
    "KVAllocatorProtocol",
    "KVBlockDescriptor",
    "KVEvent",
    "KVGroup",
    "KVLayout",
    "KVPoolMetrics",
    "KVPoolProtocol",
    "LifetimeMetrics",
    "LifetimePrediction",
    "LifetimePredictorProtocol",
    "Link",
    "MemoryFiles",
    "ModelFamilyMetrics",
    "ModelFamilyProtocol",
    "ModelGeometry",
    "Namespace",
    "NetworkInterface",
    "NodeId",
    "NullAttentionBackend",
    "NullEngine",
    "NullEvictionPolicy",
    "NullForwardBackend",
    "NullKVAllocator",
    "NullKVPool",
    "NullLifetimePredictor",
    "NullModelFamily",
    "NullPrefixCache",
    "NullQuantizer",
    "NullSchedulerIR",
    "NullSchedulerPass",
    "NullTopology",
    "NumaNode",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "PluginError",
    "PluginHookError",
    "PluginImportError",
    "PluginRegistry",
    "PluginVersionError",
    "PredictionRequest",
    "PrefixCacheMetrics",
    "PrefixCacheProtocol",
    "PrefixMatch",
    "Probe",
    "Provider",
    "QuantizationConfig",
    "QuantizationGranularity",
    "QuantizationOutput",
    "QuantizerMetrics",
    "QuantizerProtocol",
    "Randomness",
    "Request",
    "RequestId",
    "RequestRecord",
    "RequestStatus",
    "Runtime",
    "SageLLMError",
    "ScheduleIR",
    "SchedulePlan",
    "ScheduleRequest",
    "ScheduledRequest",
    "SchedulerIRProtocol",
    "SchedulerMetrics",
    "SchedulerPassProtocol",
    "SequenceId",
    "StaleMatchError",
    "StepRecord",
    "SystemClock",
    "SystemFiles",
    "TokenIds",
    "TokenIdsLike",
    "Topology",
    "TopologyMetrics",
    "TopologyProtocol",
    "UnknownKindError",
    "UnknownNameError",
    "UnknownProviderError",
    "UnknownRequestError",
    "UnsupportedModelError",
    "VirtualClock",
    "__version__",
    "get_logger",
    "hookimpl",
    "lazy",
    "nearest",
    "pack",
]

__getattr__ = lazy(
    __name__,
    {
        "AllocatorMetrics": ".protocols.kv_allocator",
        "AttentionBackendProtocol": ".protocols.attention",
        "AttentionMetrics": ".protocols.attention",
        "AttentionSpec": ".protocols.attention",
        "BlockAllocationRequest": ".protocols.kv_pool",
        "BlockError": ".errors",
        "BlockHeader": ".kv_block",
        "BlockId": ".ids",
        "BlockInfo": ".protocols.kv_pool",
        "BlockKey": ".kv_block",
        "BuildContext": ".protocols.model_family",
        "CPU": ".protocols.topology",
        "Cache": ".protocols.topology",
        "CachedNode": ".protocols.eviction",
        "CausalLM": ".protocols.model_family",
        "CheckpointError": ".errors",
        "Clock": ".runtime",
        "ConfigError": ".errors",
        "DEFAULT": ".namespace",
        "DuplicateProviderError": ".errors",
        "DuplicateRequestError": ".errors",
        "EngineError": ".errors",
        "EngineMetrics": ".protocols.engine",
        "EngineProtocol": ".protocols.engine",
        "EvictionCandidate": ".protocols.eviction",
        "EvictionMetrics": ".protocols.eviction",
        "EvictionPolicyProtocol": ".protocols.eviction",
        "Evictor": ".protocols.kv_pool",
        "Files": ".runtime",
        "FinishReason": ".request",
        "ForwardBackendProtocol": ".protocols.forward",
        "ForwardMetrics": ".protocols.forward",
        "GPU": ".protocols.topology",
        "HFConfig": ".protocols.model_family",
        "InputBatch": ".protocols.attention",
        "InsertResult": ".protocols.prefix_cache",
        "InstalledPlugin": ".plugins.registry",
        "InstalledProvider": ".plugins.registry",
        "InvalidInputError": ".errors",
        "InvalidRequestError": ".errors",
        "KINDS": ".plugins.provider",
        "KVAllocatorProtocol": ".protocols.kv_allocator",
        "KVBlockDescriptor": ".protocols.prefix_cache",
        "KVEvent": ".request",
        "KVGroup": ".kv_layout",
        "KVLayout": ".kv_layout",
        "KVPoolMetrics": ".protocols.kv_pool",
        "KVPoolProtocol": ".protocols.kv_pool",
        "LifetimeMetrics": ".protocols.lifetime",
        "LifetimePrediction": ".protocols.lifetime",
        "LifetimePredictorProtocol": ".protocols.lifetime",
        "Link": ".protocols.topology",
        "MemoryFiles": ".runtime",
        "ModelFamilyMetrics": ".protocols.model_family",
        "ModelFamilyProtocol": ".protocols.model_family",
        "ModelGeometry": ".protocols.model_family",
        "Namespace": ".namespace",
        "NetworkInterface": ".protocols.topology",
        "NodeId": ".ids",
        "NullAttentionBackend": ".protocols.attention",
        "NullEngine": ".protocols.engine",
        "NullEvictionPolicy": ".protocols.eviction",
        "NullForwardBackend": ".protocols.forward",
        "NullKVAllocator": ".protocols.kv_allocator",
        "NullKVPool": ".protocols.kv_pool",
        "NullLifetimePredictor": ".protocols.lifetime",
        "NullModelFamily": ".protocols.model_family",
        "NullPrefixCache": ".protocols.prefix_cache",
        "NullQuantizer": ".protocols.quantizer",
        "NullSchedulerIR": ".protocols.scheduler_ir",
        "NullSchedulerPass": ".protocols.scheduler_ir",
        "NullTopology": ".protocols.topology",
        "NumaNode": ".protocols.topology",
        "OutOfBlocksError": ".errors",
        "OutOfMemoryError": ".errors",
        "PluginError": ".errors",
        "PluginHookError": ".errors",
        "PluginImportError": ".errors",
        "PluginRegistry": ".plugins.registry",
        "PluginVersionError": ".errors",
        "PredictionRequest": ".protocols.lifetime",
        "PrefixCacheMetrics": ".protocols.prefix_cache",
        "PrefixCacheProtocol": ".protocols.prefix_cache",
        "PrefixMatch": ".protocols.prefix_cache",
        "Probe": ".protocols.scheduler_ir",
        "Provider": ".plugins.provider",
        "QuantizationConfig": ".protocols.quantizer",
        "QuantizationGranularity": ".protocols.quantizer",
        "QuantizationOutput": ".protocols.quantizer",
        "QuantizerMetrics": ".protocols.quantizer",
        "QuantizerProtocol": ".protocols.quantizer",
        "Randomness": ".runtime",
        "Request": ".request",
        "RequestId": ".ids",
        "RequestRecord": ".request",
        "RequestStatus": ".request",
        "Runtime": ".runtime",
        "SAGELLM_API": ".version",
        "SageLLMError": ".errors",
        "ScheduleIR": ".protocols.scheduler_ir",
        "SchedulePlan": ".protocols.scheduler_ir",
        "ScheduleRequest": ".protocols.scheduler_ir",
        "ScheduledRequest": ".protocols.scheduler_ir",
        "SchedulerIRProtocol": ".protocols.scheduler_ir",
        "SchedulerMetrics": ".protocols.scheduler_ir",
        "SchedulerPassProtocol": ".protocols.scheduler_ir",
        "SequenceId": ".ids",
        "StaleMatchError": ".errors",
        "StepRecord": ".request",
        "SystemClock": ".runtime",
        "SystemFiles": ".runtime",
        "TokenIds": ".tokens",
        "TokenIdsLike": ".tokens",
        "Topology": ".protocols.topology",
        "TopologyMetrics": ".protocols.topology",
        "TopologyProtocol": ".protocols.topology",
        "UnknownKindError": ".errors",
        "UnknownNameError": ".errors",
        "UnknownProviderError": ".errors",
        "UnknownRequestError": ".errors",
        "UnsupportedModelError": ".errors",
        "VirtualClock": ".runtime",
        "get_logger": ".logging",
        "hookimpl": ".plugins.hookspecs",
        "nearest": ".errors",
        "pack": ".tokens",
    },
)
