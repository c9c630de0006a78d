"""The null implementations, so that any module can be switched off by name."""

from sagellm.core.plugins.hookspecs import hookimpl
from sagellm.core.plugins.provider import Provider

_PROTOCOLS = "sagellm.core.protocols"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider("prefix_cache", "null", f"{_PROTOCOLS}.prefix_cache:NullPrefixCache", "remembers nothing"),
        Provider("eviction_policy", "null", f"{_PROTOCOLS}.eviction:NullEvictionPolicy", "evicts nothing"),
        Provider("kv_allocator", "null", f"{_PROTOCOLS}.kv_allocator:NullKVAllocator", "has no blocks"),
        Provider("kv_pool", "null", f"{_PROTOCOLS}.kv_pool:NullKVPool", "has no blocks"),
        Provider("kv_offload", "null", f"{_PROTOCOLS}.kv_offload:NullKVOffload", "keeps nothing"),
        Provider("kv_saves", "null", f"{_PROTOCOLS}.kv_saves:NullKVSaves", "saves nothing"),
        Provider("kv_tier", "null", f"{_PROTOCOLS}.kv_tier:NullKVTier", "has no room"),
        Provider(
            "model_family", "null", f"{_PROTOCOLS}.model_family:NullModelFamily", "accepts no checkpoint"
        ),
        Provider(
            "checkpoint_format",
            "null",
            f"{_PROTOCOLS}.checkpoint_format:NullCheckpointFormat",
            "opens nothing",
        ),
        Provider("quantizer", "null", f"{_PROTOCOLS}.quantizer:NullQuantizer", "keeps weights as they are"),
        Provider("scheduler", "null", f"{_PROTOCOLS}.scheduler_ir:NullSchedulerIR", "schedules nothing"),
        Provider("scheduler_pass", "null", f"{_PROTOCOLS}.scheduler_ir:NullSchedulerPass", "changes nothing"),
        Provider(
            "lifetime_predictor", "null", f"{_PROTOCOLS}.lifetime:NullLifetimePredictor", "predicts the limit"
        ),
        Provider(
            "logits_processor",
            "null",
            f"{_PROTOCOLS}.logits_processor:NullLogitsProcessor",
            "changes no logits",
        ),
        Provider(
            "attention_backend", "null", f"{_PROTOCOLS}.attention:NullAttentionBackend", "attends to nothing"
        ),
        Provider("executor", "null", f"{_PROTOCOLS}.executor:NullExecutor", "fails every request"),
        Provider("forward_backend", "null", f"{_PROTOCOLS}.forward:NullForwardBackend", "computes nothing"),
        Provider("topology", "null", f"{_PROTOCOLS}.topology:NullTopology", "one CPU"),
        Provider("trace_reader", "null", f"{_PROTOCOLS}.trace:NullTraceReader", "knows no format"),
        Provider("engine", "null", f"{_PROTOCOLS}.engine:NullEngine", "ends every request at once"),
    ]
