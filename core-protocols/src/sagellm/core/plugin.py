"""The null implementations, so that any module can be switched off by name."""

from sagellm.core.plugins.hookspecs import hookimpl
from sagellm.core.plugins.provider import Provider

# kind, module and class below `sagellm.core.protocols`, summary
_NULL = [
    ("prefix_cache", "prefix_cache:NullPrefixCache", "remembers nothing"),
    ("eviction_policy", "eviction:NullEvictionPolicy", "evicts nothing"),
    ("kv_allocator", "kv_allocator:NullKVAllocator", "has no blocks"),
    ("kv_pool", "kv_pool:NullKVPool", "has no blocks"),
    ("kv_offload", "kv_offload:NullKVOffload", "keeps nothing"),
    ("kv_saves", "kv_saves:NullKVSaves", "saves nothing"),
    ("kv_tier", "kv_tier:NullKVTier", "has no room"),
    ("model_family", "model_family:NullModelFamily", "accepts no checkpoint"),
    ("checkpoint_format", "checkpoint_format:NullCheckpointFormat", "opens nothing"),
    ("quantizer", "quantizer:NullQuantizer", "keeps weights as they are"),
    ("sparsifier", "sparsifier:NullSparsifier", "keeps every weight"),
    ("scheduler", "scheduler_ir:NullSchedulerIR", "schedules nothing"),
    ("scheduler_pass", "scheduler_ir:NullSchedulerPass", "changes nothing"),
    ("lifetime_predictor", "lifetime:NullLifetimePredictor", "predicts the limit"),
    ("draft_proposer", "draft_proposer:NullDraftProposer", "has no guess"),
    ("logits_processor", "logits_processor:NullLogitsProcessor", "changes no logits"),
    ("grammar", "grammar:NullGrammar", "compiles nothing"),
    ("tool_parser", "parsers:NullToolParser", "finds no tool calls"),
    ("reasoning_parser", "parsers:NullReasoningParser", "leaves reasoning in the content"),
    ("attention_backend", "attention:NullAttentionBackend", "attends to nothing"),
    ("executor", "executor:NullExecutor", "fails every request"),
    ("forward_backend", "forward:NullForwardBackend", "computes nothing"),
    ("topology", "topology:NullTopology", "one CPU"),
    ("trace_reader", "trace:NullTraceReader", "knows no format"),
    ("engine", "engine:NullEngine", "ends every request at once"),
    ("engine_adapter", "engine_adapter:NullEngineAdapter", "knows no engine"),
]


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(kind, "null", f"sagellm.core.protocols.{target}", summary) for kind, target, summary in _NULL
    ]
