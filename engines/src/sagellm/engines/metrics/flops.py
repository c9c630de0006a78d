"""Floating-point operations of a decoder, counted after arXiv 2001.08361: a multiply-add is two.

h = hidden size, i = intermediate size, q = heads · head_dim, kv = kv_heads · head_dim. Attention is
causal: position c (from 1) attends to c positions. Norms, rotary embeddings, softmax and
embedding look-ups are not counted.
"""

from __future__ import annotations

from sagellm.core.errors import InvalidInputError
from sagellm.core.protocols.model_spec import ModelGeometry


def qkv_flops(geometry: ModelGeometry) -> int:
    """Projection of one token in one layer into q, k and v = 2·h·(q + 2·kv)."""
    return 2 * geometry.hidden_size * (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim


def output_flops(geometry: ModelGeometry) -> int:
    """Projection of one token's attention in one layer = 2·q·h."""
    return 2 * geometry.num_heads * geometry.head_dim * geometry.hidden_size


def projection_flops(geometry: ModelGeometry) -> int:
    """Projections of one token in one layer = 2·h·(q + 2·kv) + 2·q·h: into q, k, v and out again."""
    return qkv_flops(geometry) + output_flops(geometry)


def attention_flops(geometry: ModelGeometry, context_length: int) -> int:
    """Attention of one token in one layer = 2·2·c·q at context c: scores and weighted sum."""
    return 2 * 2 * context_length * geometry.num_heads * geometry.head_dim


def mlp_flops(geometry: ModelGeometry) -> int:
    """Gated MLP of one token in one layer = 2·3·h·i: gate, up and down."""
    return 2 * 3 * geometry.hidden_size * geometry.intermediate_size


def layer_flops(geometry: ModelGeometry, context_length: int) -> int:
    """One token in one layer = projections + attention at context c + MLP."""
    return projection_flops(geometry) + attention_flops(geometry, context_length) + mlp_flops(geometry)


def logits_flops(geometry: ModelGeometry, num_rows: int = 1) -> int:
    """Logits = 2·h·vocab for each row that is computed."""
    return num_rows * 2 * geometry.hidden_size * geometry.vocab_size


def prefill_flops(
    geometry: ModelGeometry, num_tokens: int, *, num_cached_tokens: int = 0, num_logits_rows: int = 1
) -> int:
    """Prefill of s tokens after t cached ones = layers · Σ (c = t + 1 … t + s) layer(c) + logits.

    The causal sum of contexts is s·t + s·(s + 1) ÷ 2.
    """
    if min(num_tokens, num_cached_tokens, num_logits_rows) < 0:
        raise InvalidInputError(
            f"{num_tokens} tokens after {num_cached_tokens} with {num_logits_rows} rows of logits; "
            "none of them can be negative"
        )
    sum_of_contexts = num_tokens * num_cached_tokens + num_tokens * (num_tokens + 1) // 2
    per_layer = num_tokens * layer_flops(geometry, 0) + attention_flops(geometry, sum_of_contexts)
    return geometry.num_layers * per_layer + logits_flops(geometry, num_logits_rows)


def decode_flops(geometry: ModelGeometry, context_length: int) -> int:
    """One decoded token = layers · layer(c) + logits; c counts the token itself."""
    return geometry.num_layers * layer_flops(geometry, context_length) + logits_flops(geometry)
