"""The table of flat names, by which `LLMEngine(...)` and the command line call each setting.

Settings that vLLM has too use vLLM's names. A flag is the flat name with dashes. Type, default, limits and
help text of a setting are in `sections.py` and not repeated here.
"""

from __future__ import annotations

FLAT_NAMES: dict[str, str] = {
    "model": "model.name",
    "engine_kind": "engine.name",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "device": "model.device",
    "quantization": "model.quantization",
    "activations": "model.activations",
    "sparsity": "model.sparsity",
    "packed_cache": "model.packed_cache",
    "max_model_len": "model.max_model_len",
    "seed": "model.seed",
    "block_size": "kv.block_size",
    "num_blocks": "kv.num_blocks",
    "gpu_memory_utilization": "kv.memory_fraction",
    "kv_cache_dtype": "kv.dtype",
    "kv_pool": "kv.pool",
    "kv_allocator": "kv.allocator",
    "kv_tiers": "kv.tiers",
    "kv_fetch": "kv.fetch",
    "kv_store_key": "kv.store_key",
    "kv_save_folder": "kv.save_folder",
    "kv_max_saved": "kv.max_saved",
    "enable_prefix_caching": "prefix_cache.enabled",
    "prefix_cache": "prefix_cache.name",
    "prefix_cache_max_blocks": "prefix_cache.max_blocks",
    "eviction_policy": "prefix_cache.eviction_policy",
    "shadow": "prefix_cache.shadow",
    "shadow_sample": "prefix_cache.shadow_sample",
    "scheduler": "scheduler.name",
    "scheduler_passes": "scheduler.passes",
    "scheduler_print": "scheduler.print",
    "step_target_ms": "scheduler.step_target_ms",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "lifetime_predictor": "predictor.name",
    "speculation": "speculation.proposer",
    "adaptive_speculation": "speculation.adaptive",
    "forward_backend": "forward.backend",
    "attention_backend": "forward.attention",
    "executor": "forward.executor",
    "deterministic": "forward.deterministic",
    "logits_processors": "sampling.logits_processors",
    "grammar_backend": "grammar.name",
    "trace": "trace.file",
    "profile": "trace.profile",
    "record": "recording.file",
    "record_text": "recording.text",
    "record_folder": "recording.folder",
    "record_max_file_size": "recording.max_file_size",
    "record_max_files": "recording.max_files",
    "topology": "comm.topology",
}
"""Flat name of an engine's setting → dotted key of the schema, in the order of `--help`."""

SERVER_NAMES: dict[str, str] = {
    "host": "server.host",
    "port": "server.port",
    "api_key": "server.api_keys",
    "api_key_file": "server.api_key_file",
    "allowed_hosts": "server.allowed_hosts",
    "allowed_origins": "server.allowed_origins",
    "metrics_allow": "server.metrics_allow",
    "public_namespaces": "server.public_namespaces",
    "served_model_name": "server.served_model_name",
    "tool_call_parser": "server.tool_parser",
    "reasoning_parser": "server.reasoning_parser",
    "lenient": "server.lenient",
    "max_queued_requests": "server.max_queued_requests",
    "max_requests_per_key": "server.max_requests_per_key",
    "max_tokens_per_key": "server.max_tokens_per_key",
    "deadline_ms": "server.deadline_ms",
    "max_connections": "server.max_connections",
    "max_connections_per_peer": "server.max_connections_per_peer",
    "body_timeout": "server.body_timeout",
    "body_stall_timeout": "server.body_stall_timeout",
    "encoding_timeout": "server.encoding_timeout",
    "shutdown_timeout": "server.shutdown_timeout",
    "frozen_after_s": "server.frozen_after_s",
    "access_log": "server.access_log",
    "log_format": "server.log_format",
    "otlp_traces_endpoint": "server.otlp_traces_endpoint",
}
"""Settings of `serve` besides an engine's."""

ALL_NAMES = FLAT_NAMES | SERVER_NAMES


def flag_of(flat_name: str) -> str:
    """Return the command-line flag of a flat name: `block_size` → `--block-size`."""
    return "--" + flat_name.replace("_", "-")
