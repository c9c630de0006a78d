"""Protocols, types and the plugin manager that every sageLLM package builds on."""

from typing import TYPE_CHECKING

from sagellm.core._lazy import lazy as lazy
from sagellm.core._moved import find_moved_modules

if TYPE_CHECKING:
    from sagellm.core.checks import *
    from sagellm.core.errors import *
    from sagellm.core.execution_graph import *
    from sagellm.core.graph_text import *
    from sagellm.core.ids import *
    from sagellm.core.kv_block import *
    from sagellm.core.kv_layout import *
    from sagellm.core.lifetime_scores import *
    from sagellm.core.logging import *
    from sagellm.core.metrics.cache import *
    from sagellm.core.metrics.fairness import *
    from sagellm.core.metrics.flops import *
    from sagellm.core.metrics.latency import *
    from sagellm.core.metrics.lifetime import *
    from sagellm.core.metrics.roofline import *
    from sagellm.core.namespace import *
    from sagellm.core.node_ranking import *
    from sagellm.core.plugins.failure import *
    from sagellm.core.plugins.hookspecs import *
    from sagellm.core.plugins.options import *
    from sagellm.core.plugins.provider import *
    from sagellm.core.plugins.registry import *
    from sagellm.core.protocols.attention import *
    from sagellm.core.protocols.checkpoint_format import *
    from sagellm.core.protocols.engine import *
    from sagellm.core.protocols.eviction import *
    from sagellm.core.protocols.executor import *
    from sagellm.core.protocols.forward import *
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
    from sagellm.core.protocols.prefix_cache import *
    from sagellm.core.protocols.quantizer import *
    from sagellm.core.protocols.request_rows import *
    from sagellm.core.protocols.scheduler_ir import *
    from sagellm.core.protocols.step import *
    from sagellm.core.protocols.topology import *
    from sagellm.core.protocols.trace import *
    from sagellm.core.random_access import *
    from sagellm.core.request import *
    from sagellm.core.runtime import *
    from sagellm.core.schedule_text import *
    from sagellm.core.schedule_verifier import *
    from sagellm.core.schedule_watchers import *
    from sagellm.core.step_cost import *
    from sagellm.core.store_key import *
    from sagellm.core.tenant import *
    from sagellm.core.tokens import *
    from sagellm.core.tracing import *
    from sagellm.core.version import *

__version__ = "0.1.0"

# module → the public names that it defines
_NAMES = {
    "checks": "require_object",
    "errors": """
        AuditError BlockError CheckpointError ConfigError DeadlyRequestError DuplicateProviderError
        DuplicateRequestError EngineDeadError EngineError InvalidInputError InvalidRequestError
        OutOfBlocksError OutOfMemoryError PassError PluginError PluginHookError PluginImportError PluginMethodError
        PluginVersionError SageLLMError StaleMatchError UnknownKindError UnknownNameError UnknownProviderError
        UnknownRequestError UnsupportedModelError nearest
    """,
    "execution_graph": "ExecutionGraph FORWARD_KINDS GraphNode NodeKind lower_step",
    "graph_text": "GraphShapes",
    "ids": "BlockId NodeId RequestId SequenceId",
    "kv_block": "BlockHeader BlockKey KVIdentity UNNAMED headers_of",
    "kv_layout": "KVGroup KVLayout",
    "lifetime_scores": "LifetimeScores predicted_length",
    "logging": "get_logger",
    "metrics.cache": """
        PromptBlocks block_sharing_fraction external_fragmentation gap_closed internal_fragmentation
        mean_block_sharing_fraction memory_use_gain re_prefill_rate sharing_fraction_source token_hit_rate
        token_saving token_utilisation utilisation
    """,
    "metrics.fairness": "BatchStep batching_efficiency jains_index",
    "metrics.flops": """
        attention_flops decode_flops layer_flops logits_flops mlp_flops prefill_flops projection_flops
    """,
    "metrics.latency": """
        LatencySummary RequestTimes goodput itl_s percentile summarise throughput total_throughput tpot_s
        ttft_s
    """,
    "metrics.lifetime": "lifetime_mae median_mae within_10_percent within_10_percent_or_5_tokens",
    "metrics.roofline": "MFUResult bandwidth_use roofline_ratio",
    "namespace": "DEFAULT PUBLIC Namespace",
    "node_ranking": "NodeRanking RankingKey",
    "plugins.hookspecs": "hookimpl",
    "plugins.failure": "call_plugin plugin_failure",
    "plugins.options": "ChosenProvider ProviderOption ProviderSpec",
    "plugins.provider": "Command KINDS Kind Provider",
    "plugins.registry": "InstalledCommand InstalledPlugin InstalledProvider PluginRegistry",
    "protocols.attention": """
        AttentionBackendProtocol AttentionMetrics AttentionSpec InputBatch NullAttentionBackend
    """,
    "protocols.checkpoint_format": """
        Checkpoint CheckpointFormatProtocol NullCheckpointFormat Shard StoredTensor WHOLE WeightSource
    """,
    "protocols.engine": """
        EngineInfo EngineMetrics EngineProtocol EngineSequence NullEngine PromptScore PromptScores
        RequestLimits STEP_TOKEN_BOUNDS SampledToken TokenOutput
    """,
    "protocols.eviction": """
        CachedNode EvictionCandidate EvictionMetrics EvictionPolicyProtocol NullEvictionPolicy
    """,
    "protocols.executor": "ExecutorProtocol NullExecutor StepWorker",
    "protocols.forward": "ForwardBackendProtocol ForwardMetrics ModelMetrics NullForwardBackend",
    "protocols.kv_allocator": "AllocatorMetrics KVAllocatorProtocol NullKVAllocator",
    "protocols.kv_offload": """
        Fetch FetchRule KVAccess KVMemory KVOffloadProtocol NullKVOffload OffloadMetrics
    """,
    "protocols.kv_saves": "KVSavesProtocol KVSpace NullKVSaves SavePhase SaveProgress SaveStore",
    "protocols.kv_pool": """
        BlockAllocationRequest BlockInfo Evictor KVPoolMetrics KVPoolProtocol NullKVPool
    """,
    "protocols.kv_tier": """
        KVTierMetrics KVTierProtocol NullKVTier Ticket TierAction TierOutcome TierRequest TierResult
        run_to_end
    """,
    "protocols.lifetime": """
        LifetimeMetrics LifetimePrediction LifetimePredictorProtocol NullLifetimePredictor PredictionRequest
        check_observation
    """,
    "protocols.logits_processor": """
        ExtraArg LogitsProcessorMetrics LogitsProcessorProtocol LogitsRequest LogitsRow NullLogitsProcessor
    """,
    "protocols.model_family": "ModelFamilyProtocol NullModelFamily",
    "protocols.model_spec": """
        DecoderSpec ExpertsSpec FeedForwardSpec HFConfig LayerSpec LinearSpec ModelGeometry ModelSpec NormSpec
        RopeSpec TRANSFORMERS_CLASS TensorSpec
    """,
    "protocols.kv_events": "AllBlocksCleared BlockRemoved BlockStored KVCacheEvent KVEventSink RemovalReason",
    "protocols.prefix_cache": """
        CachedRun EvictedBlocks InsertResult KVBlockDescriptor MissCause MissExplanation NullPrefixCache
        PartialMatch PinResult PinnedPrefix PrefixCacheMetrics PrefixCacheProtocol PrefixMatch TenantUsage
    """,
    "protocols.quantizer": """
        NullQuantizer QuantizationConfig QuantizationGranularity QuantizationOutput QuantizerMetrics
        QuantizerProtocol check_weight_shape
    """,
    "protocols.request_rows": "PrefixHit Probe RequestRows ScheduleRequest",
    "protocols.scheduler_ir": """
        Admission Decision NullSchedulerIR NullSchedulerPass ScheduleIR PassMetrics PassWatcher SchedulePlan
        ScheduledRequest SchedulerIRProtocol SchedulerMetrics SchedulerPassProtocol
    """,
    "protocols.step": """
        BlockUpdates CopyBlocks KVOp ReadBlocks Runs Scored Seat SeatArrival StepInput StepOutput WriteBlocks
        verify_output
    """,
    "protocols.topology": """
        CPU Cache GPU Link NetworkInterface NullTopology NumaNode Topology TopologyMetrics TopologyProtocol
    """,
    "protocols.trace": "NullTraceReader Tokenize TraceReaderProtocol TraceRequest",
    "random_access": "MemoryRandomAccessFile RandomAccessFile SystemRandomAccessFile",
    "request": "FinishReason Request RequestRecord RequestStatus StepRecord",
    "runtime": "Clock Files MemoryFiles Randomness Runtime SystemClock SystemFiles VirtualClock",
    "schedule_text": "schedule_from_text schedule_to_text",
    "schedule_verifier": "verify_rewrite",
    "schedule_watchers": "PASS_WATCHERS emit_ir print_changed",
    "step_cost": "StepCost StepCostMetrics StepWork",
    "store_key": "StoreKey",
    "tenant": "DEFAULT_TENANT Tenant hash_of",
    "tokens": "EMPTY TokenIds TokenIdsLike pack",
    "tracing": "ChromeTraceWriter NullTrace TraceValue TraceWriter",
    "version": "SAGELLM_API",
}
_MODULE_OF = {name: f".{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", "lazy", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)

find_moved_modules()
