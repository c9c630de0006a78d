"""The one table of flat names: what `LLMEngine(...)` and the command line call each setting.

Names that mean what vLLM's mean are vLLM's. A flag is the flat name with dashes. Type, default,
limits and help text of a setting stand in `sections.py` and are not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

FLAT_NAMES: dict[str, str] = {
    "model": "model.name",
    "engine_kind": "engine.name",
    "engine_options": "engine.options",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "device": "model.device",
    "quantization": "model.quantization",
    "max_model_len": "model.max_model_len",
    "seed": "model.seed",
    "block_size": "kv.block_size",
    "num_blocks": "kv.num_blocks",
    "gpu_memory_utilization": "kv.memory_fraction",
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
    "prefix_cache_options": "prefix_cache.options",
    "eviction_policy": "prefix_cache.eviction_policy",
    "eviction_options": "prefix_cache.eviction_options",
    "scheduler": "scheduler.name",
    "scheduler_passes": "scheduler.passes",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "lifetime_predictor": "predictor.name",
    "forward_backend": "forward.backend",
    "attention_backend": "forward.attention",
    "logits_processors": "sampling.logits_processors",
    "trace": "trace.file",
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
    "public_namespaces": "server.public_namespaces",
    "served_model_name": "server.served_model_name",
    "max_queued_requests": "server.max_queued_requests",
    "max_connections": "server.max_connections",
    "max_connections_per_peer": "server.max_connections_per_peer",
    "body_timeout": "server.body_timeout",
    "body_stall_timeout": "server.body_stall_timeout",
    "encoding_timeout": "server.encoding_timeout",
    "shutdown_timeout": "server.shutdown_timeout",
    "frozen_after_s": "server.frozen_after_s",
    "access_log": "server.access_log",
}
"""What `serve` has beside an engine's settings."""

ALL_NAMES = FLAT_NAMES | SERVER_NAMES

PROVIDER_KINDS: dict[str, str] = {
    "engine.name": "engine",
    "model.quantization": "quantizer",
    "kv.pool": "kv_pool",
    "kv.allocator": "kv_allocator",
    "kv.tiers": "kv_tier",
    "prefix_cache.name": "prefix_cache",
    "prefix_cache.eviction_policy": "eviction_policy",
    "scheduler.name": "scheduler",
    "scheduler.passes": "scheduler_pass",
    "predictor.name": "lifetime_predictor",
    "forward.backend": "forward_backend",
    "forward.attention": "attention_backend",
    "sampling.logits_processors": "logits_processor",
    "comm.topology": "topology",
}
"""Dotted keys whose values, or the keys of a mapping, name installed providers → the kind that they name."""


class NamedProvider(NamedTuple):
    """What a setting names: its dotted key, the kind, and the provider's name."""

    key: str
    kind: str
    name: str


def named_providers(values: Mapping[str, Any]) -> Iterator[NamedProvider]:
    """Yield every provider that settings by dotted key name."""
    for key, kind in PROVIDER_KINDS.items():
        named = values[key]
        for name in named if isinstance(named, tuple | dict) else (named,):
            if name is not None:
                yield NamedProvider(key, kind, name)


def flag_of(flat_name: str) -> str:
    """Return the command-line flag of a flat name: `block_size` → `--block-size`."""
    return "--" + flat_name.replace("_", "-")
