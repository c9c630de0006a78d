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
    from sagellm.core.metrics.cache import (
        PromptBlocks as PromptBlocks,
    )
    from sagellm.core.metrics.cache import (
        block_sharing_fraction as block_sharing_fraction,
    )
    from sagellm.core.metrics.cache import (
        external_fragmentation as external_fragmentation,
    )
    from sagellm.core.metrics.cache import (
        gap_closed as gap_closed,
    )
    from sagellm.core.metrics.cache import (
        internal_fragmentation as internal_fragmentation,
    )
    from sagellm.core.metrics.cache import (
        mean_block_sharing_fraction as mean_block_sharing_fraction,
    )
    from sagellm.core.metrics.cache import (
        memory_use_gain as memory_use_gain,
    )
    from sagellm.core.metrics.cache import (
        re_prefill_rate as re_prefill_rate,
    )
    from sagellm.core.metrics.cache import (
        sharing_fraction_source as sharing_fraction_source,
    )
    from sagellm.core.metrics.cache import (
        token_hit_rate as token_hit_rate,
    )
    from sagellm.core.metrics.cache import (
        token_saving as token_saving,
    )
    from sagellm.core.metrics.cache import (
        token_utilisation as token_utilisation,
    )
    from sagellm.core.metrics.cache import (
        utilisation as utilisation,
    )
    from sagellm.core.metrics.fairness import (
        BatchStep as BatchStep,
    )
    from sagellm.core.metrics.fairness import (
        batching_efficiency as batching_efficiency,
    )
    from sagellm.core.metrics.fairness import (
        jains_index as jains_index,
    )
    from sagellm.core.metrics.flops import (
        attention_flops as attention_flops,
    )
    from sagellm.core.metrics.flops import (
        decode_flops as decode_flops,
    )
    from sagellm.core.metrics.flops import (
        layer_flops as layer_flops,
    )
    from sagellm.core.metrics.flops import (
        logits_flops as logits_flops,
    )
    from sagellm.core.metrics.flops import (
        mlp_flops as mlp_flops,
    )
    from sagellm.core.metrics.flops import (
        prefill_flops as prefill_flops,
    )
    from sagellm.core.metrics.flops import (
        projection_flops as projection_flops,
    )
    from sagellm.core.metrics.latency import (
        LatencySummary as LatencySummary,
    )
    from sagellm.core.metrics.latency import (
        RequestTimes as RequestTimes,
    )
    from sagellm.core.metrics.latency import (
        goodput as goodput,
    )
    from sagellm.core.metrics.latency import (
        itl_s as itl_s,
    )
    from sagellm.core.metrics.latency import (
        percentile as percentile,
    )
    from sagellm.core.metrics.latency import (
        summarise as summarise,
    )
    from sagellm.core.metrics.latency import (
        throughput as throughput,
    )
    from sagellm.core.metrics.latency import (
        total_throughput as total_throughput,
    )
    from sagellm.core.metrics.latency import (
        tpot_s as tpot_s,
    )
    from sagellm.core.metrics.latency import (
        ttft_s as ttft_s,
    )
    from sagellm.core.metrics.lifetime import (
        lifetime_mae as lifetime_mae,
    )
    from sagellm.core.metrics.lifetime import (
        median_mae as median_mae,
    )
    from sagellm.core.metrics.lifetime import (
        within_10_percent as within_10_percent,
    )
    from sagellm.core.metrics.lifetime import (
        within_10_percent_or_5_tokens as within_10_percent_or_5_tokens,
    )
    from sagellm.core.metrics.roofline import (
        MFUResult as MFUResult,
    )
    from sagellm.core.metrics.roofline import (
        bandwidth_use as bandwidth_use,
    )
    from sagellm.core.metrics.roofline import (
        roofline_ratio as roofline_ratio,
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
    from sagellm.core.protocols.lifetime import (
        check_observation as check_observation,
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
    from sagellm.core.protocols.quantizer import (
        check_weight_shape as check_weight_shape,
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
    from sagellm.core.tracing import (
        ChromeTraceWriter as ChromeTraceWriter,
    )
    from sagellm.core.tracing import (
        NullTrace as NullTrace,
    )
    from sagellm.core.tracing import (
        TraceValue as TraceValue,
    )
    from sagellm.core.tracing import (
        TraceWriter as TraceWriter,
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
    "BatchStep",
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
    "ChromeTraceWriter",
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
    "LatencySummary",
    "LifetimeMetrics",
    "LifetimePrediction",
    "LifetimePredictorProtocol",
    "Link",
    "MFUResult",
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
    "NullTrace",
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
    "PromptBlocks",
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
    "RequestTimes",
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
    "TraceValue",
    "TraceWriter",
    "UnknownKindError",
    "UnknownNameError",
    "UnknownProviderError",
    "UnknownRequestError",
    "UnsupportedModelError",
    "VirtualClock",
    "__version__",
    "attention_flops",
    "bandwidth_use",
    "batching_efficiency",
    "block_sharing_fraction",
    "check_observation",
    "check_weight_shape",
    "decode_flops",
    "external_fragmentation",
    "gap_closed",
    "get_logger",
    "goodput",
    "hookimpl",
    "internal_fragmentation",
    "itl_s",
    "jains_index",
    "layer_flops",
    "lazy",
    "lifetime_mae",
    "logits_flops",
    "mean_block_sharing_fraction",
    "median_mae",
    "memory_use_gain",
    "mlp_flops",
    "nearest",
    "pack",
    "percentile",
    "prefill_flops",
    "projection_flops",
    "re_prefill_rate",
    "roofline_ratio",
    "sharing_fraction_source",
    "summarise",
    "throughput",
    "token_hit_rate",
    "token_saving",
    "token_utilisation",
    "total_throughput",
    "tpot_s",
    "ttft_s",
    "utilisation",
    "within_10_percent",
    "within_10_percent_or_5_tokens",
]

__getattr__ = lazy(
    __name__,
    {
        "AllocatorMetrics": ".protocols.kv_allocator",
        "AttentionBackendProtocol": ".protocols.attention",
        "AttentionMetrics": ".protocols.attention",
        "AttentionSpec": ".protocols.attention",
        "BatchStep": ".metrics.fairness",
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
        "ChromeTraceWriter": ".tracing",
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
        "LatencySummary": ".metrics.latency",
        "LifetimeMetrics": ".protocols.lifetime",
        "LifetimePrediction": ".protocols.lifetime",
        "LifetimePredictorProtocol": ".protocols.lifetime",
        "Link": ".protocols.topology",
        "MFUResult": ".metrics.roofline",
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
        "NullTrace": ".tracing",
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
        "PromptBlocks": ".metrics.cache",
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
        "RequestTimes": ".metrics.latency",
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
        "TraceValue": ".tracing",
        "TraceWriter": ".tracing",
        "UnknownKindError": ".errors",
        "UnknownNameError": ".errors",
        "UnknownProviderError": ".errors",
        "UnknownRequestError": ".errors",
        "UnsupportedModelError": ".errors",
        "VirtualClock": ".runtime",
        "attention_flops": ".metrics.flops",
        "bandwidth_use": ".metrics.roofline",
        "batching_efficiency": ".metrics.fairness",
        "block_sharing_fraction": ".metrics.cache",
        "check_observation": ".protocols.lifetime",
        "check_weight_shape": ".protocols.quantizer",
        "decode_flops": ".metrics.flops",
        "external_fragmentation": ".metrics.cache",
        "gap_closed": ".metrics.cache",
        "get_logger": ".logging",
        "goodput": ".metrics.latency",
        "hookimpl": ".plugins.hookspecs",
        "internal_fragmentation": ".metrics.cache",
        "itl_s": ".metrics.latency",
        "jains_index": ".metrics.fairness",
        "layer_flops": ".metrics.flops",
        "lifetime_mae": ".metrics.lifetime",
        "logits_flops": ".metrics.flops",
        "mean_block_sharing_fraction": ".metrics.cache",
        "median_mae": ".metrics.lifetime",
        "memory_use_gain": ".metrics.cache",
        "mlp_flops": ".metrics.flops",
        "nearest": ".errors",
        "pack": ".tokens",
        "percentile": ".metrics.latency",
        "prefill_flops": ".metrics.flops",
        "projection_flops": ".metrics.flops",
        "re_prefill_rate": ".metrics.cache",
        "roofline_ratio": ".metrics.roofline",
        "sharing_fraction_source": ".metrics.cache",
        "summarise": ".metrics.latency",
        "throughput": ".metrics.latency",
        "token_hit_rate": ".metrics.cache",
        "token_saving": ".metrics.cache",
        "token_utilisation": ".metrics.cache",
        "total_throughput": ".metrics.latency",
        "tpot_s": ".metrics.latency",
        "ttft_s": ".metrics.latency",
        "utilisation": ".metrics.cache",
        "within_10_percent": ".metrics.lifetime",
        "within_10_percent_or_5_tokens": ".metrics.lifetime",
    },
)
