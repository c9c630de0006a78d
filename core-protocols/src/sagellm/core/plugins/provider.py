"""What a plugin offers: an implementation that can be imported, not yet imported."""

from __future__ import annotations

from typing import NamedTuple

KINDS = (
    "attention_backend",
    "engine",
    "eviction_policy",
    "forward_backend",
    "kv_allocator",
    "kv_pool",
    "kv_tier",
    "lifetime_predictor",
    "logits_processor",
    "model_family",
    "prefix_cache",
    "quantizer",
    "scheduler",
    "scheduler_pass",
    "topology",
    "trace_reader",
)
"""The kinds of implementation. A kind is added together with its protocol and first user."""


class Provider(NamedTuple):
    """One implementation of one kind, under the name that configurations use.

    `target` is `module:attribute` and is imported only when the provider is chosen. How it is
    called is part of the kind's protocol.
    """

    kind: str
    name: str
    target: str
    summary: str
