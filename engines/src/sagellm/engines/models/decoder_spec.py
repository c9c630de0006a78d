"""From transformers' configuration object to the spec of a decoder whose tensors are named as Llama's are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.core import (
    AttentionSpec,
    CheckpointError,
    DecoderSpec,
    FeedForwardSpec,
    HFConfig,
    LayerSpec,
    LinearSpec,
    ModelGeometry,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SageLLMError,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.engines.models.hf_config import context_limit

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DERIVED = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that the config already determines; transformers ignores them, too."""
_MAX_HEAD_DIM = 1 << 16
_SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"),
    "max_model_len",
)


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """What a family adds to the plain decoder: biases, norms of query and key, windows."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # one per layer, in tokens; empty means none anywhere


def decoder_spec(
    architecture: str, config: HFConfig, hf: Any, traits: DecoderTraits, tensor_names: frozenset[str]
) -> ModelSpec:
    """Describe the decoder that transformers' configuration object specifies.

    Raises UnsupportedModelError for features that it lacks, CheckpointError for contradictory sizes.
    """
    if hf.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act is {hf.hidden_act!r}; this decoder has silu alone")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rope = _read_rope(hf, head_dim)
    sizes = _geometry(hf, head_dim)
    _check(sizes, traits.sliding_windows)
    builder = _Builder(sizes, traits, rope, hf.rms_norm_eps, tensor_names)
    attention = tuple(builder.attention(index) for index in range(sizes.num_layers))
    layers = tuple(builder.layer(index, each) for index, each in enumerate(attention))
    ends = [builder.tensor(name, (sizes.vocab_size, sizes.hidden_size), 0) for name in (EMBEDDING, HEAD)]
    if sizes.tie_word_embeddings:  # a checkpoint may have either or both
        ends = [end for end in ends if end.name in tensor_names] or ends[:1]
    embedding, *head = ends
    decoder = DecoderSpec(
        embedding=embedding,
        layers=layers,
        norm=builder.norm(FINAL_NORM, sizes.hidden_size),
        head=LinearSpec(head[0]) if head else None,
    )
    return ModelSpec(
        architecture=architecture,
        config=config,
        geometry=sizes,
        attention=attention,
        tensors={tensor.name: tensor for tensor in decoder.tensors},
        ignored_tensors=frozenset(name for name in tensor_names if DERIVED.search(name)),
        decoder=decoder,
    )


@dataclass(frozen=True)
class _Builder:
    """Makes the parts of a spec, with the names that Llama's tensors have in the checkpoint."""

    sizes: ModelGeometry
    traits: DecoderTraits
    rope: RopeSpec
    rms_norm_eps: float
    tensor_names: frozenset[str]

    def tensor(self, name: str, shape: tuple[int, ...], axis: int | None = None, unit: int = 1) -> TensorSpec:
        return TensorSpec(stored_name(name, "model", self.tensor_names), shape, axis, unit)

    def attention(self, index: int) -> AttentionSpec:
        windows, sizes = self.traits.sliding_windows, self.sizes
        return AttentionSpec(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=float(sizes.head_dim**-0.5),
            sliding_window=windows[index] if windows else None,
        )

    def layer(self, index: int, attention: AttentionSpec) -> LayerSpec:
        prefix, traits, hidden = f"model.layers.{index}", self.traits, self.sizes.hidden_size
        q, kv = (heads * self.sizes.head_dim for heads in (self.sizes.num_heads, self.sizes.num_kv_heads))
        query_norm, key_norm = (
            self.norm(f"{prefix}.self_attn.{name}.weight", self.sizes.head_dim) if traits.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        return LayerSpec(
            attention=attention,
            input_norm=self.norm(f"{prefix}.input_layernorm.weight", hidden),
            query=self._heads(f"{prefix}.self_attn.q_proj", (q, hidden), 0, has_bias=traits.qkv_bias),
            key=self._heads(f"{prefix}.self_attn.k_proj", (kv, hidden), 0, has_bias=traits.qkv_bias),
            value=self._heads(f"{prefix}.self_attn.v_proj", (kv, hidden), 0, has_bias=traits.qkv_bias),
            output=self._heads(f"{prefix}.self_attn.o_proj", (hidden, q), 1, has_bias=traits.o_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            rope=self.rope,
            feed_forward_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            feed_forward=self._feed_forward(f"{prefix}.mlp"),
        )

    def _feed_forward(self, prefix: str) -> FeedForwardSpec:
        hidden, inner, has_bias = self.sizes.hidden_size, self.sizes.intermediate_size, self.traits.mlp_bias
        return FeedForwardSpec(
            gate=self._linear(f"{prefix}.gate_proj", (inner, hidden), 0, has_bias=has_bias),
            up=self._linear(f"{prefix}.up_proj", (inner, hidden), 0, has_bias=has_bias),
            down=self._linear(f"{prefix}.down_proj", (hidden, inner), 1, has_bias=has_bias),
        )

    def norm(self, name: str, size: int) -> NormSpec:
        return NormSpec(self.tensor(name, (size,)), self.rms_norm_eps)

    def _heads(self, name: str, shape: tuple[int, int], axis: int, *, has_bias: bool) -> LinearSpec:
        """Name a linear layer from or to heads, each of which is on one rank as a whole."""
        return self._linear(name, shape, axis, has_bias=has_bias, unit=self.sizes.head_dim)

    def _linear(
        self, name: str, shape: tuple[int, int], axis: int, *, has_bias: bool, unit: int = 1
    ) -> LinearSpec:
        """Name a linear layer. Ranks divide outputs (axis 0) or inputs (axis 1, each with the whole bias)."""
        bias_axis = 0 if axis == 0 else None
        bias = self.tensor(f"{name}.bias", shape[:1], bias_axis, unit) if has_bias else None
        return LinearSpec(self.tensor(f"{name}.weight", shape, axis, unit), bias)


def stored_name(name: str, prefix: str, tensor_names: frozenset[str]) -> str:
    """Return what a tensor is called in a checkpoint.

    One saved from the base model lacks its prefix, one saved from a module around the model has it twice;
    transformers loads both.
    """
    others = (name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((each for each in (name, *others) if each in tensor_names), name)


def window_per_layer(hf: Any) -> tuple[int | None, ...]:
    """Read the windows of a config that names each layer's type."""
    known = {"full_attention": None, "sliding_attention": hf.sliding_window}
    unknown = set(hf.layer_types) - set(known)
    if unknown:
        raise UnsupportedModelError(
            f"layer_types names {', '.join(sorted(unknown))}; this decoder has {' and '.join(known)}"
        )
    return tuple(known[kind] for kind in hf.layer_types)


def _geometry(hf: Any, head_dim: int) -> ModelGeometry:
    limit = context_limit(hf.max_position_embeddings, [hf.rope_parameters or {}])
    return ModelGeometry(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=hf.vocab_size,
        max_model_len=limit.max_model_len,
        max_model_len_reason=limit.reason,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
    )


def _read_rope(hf: Any, head_dim: int) -> RopeSpec:
    values: Mapping[str, Any] = hf.rope_parameters or {}
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(
            "rope_parameters differ between layer types; this decoder has one rotation"
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is set; this decoder rotates whole heads")
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise CheckpointError(
            f"config.json: head_dim is {head_dim}; rotary embeddings need an even one up to {_MAX_HEAD_DIM}"
        )
    try:
        rope = RopeSpec(
            theta=float(values.get("rope_theta", 10_000.0)),
            rotary_dim=head_dim,
            rope_type=values.get("rope_type", "default"),
            max_position_embeddings=hf.max_position_embeddings,
            scaling=dict(values),
        )
        # Unknown kinds and missing or nonsensical numbers are errors now, not at the first step.
        frequencies = rope_frequencies(rope)
        if not (frequencies.inv_freq.isfinite().all() and math.isfinite(frequencies.attention_factor)):
            raise ArithmeticError("a frequency is not finite")
    except SageLLMError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: no rotation follows from rope_parameters: {error}") from error
    return rope


def _check(sizes: ModelGeometry, windows: tuple[int | None, ...]) -> None:
    for name in _SIZES:
        if getattr(sizes, name) < 1:
            raise CheckpointError(f"config.json: {name} is {getattr(sizes, name)}; it must be at least 1")
    if sizes.num_heads % sizes.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads is {sizes.num_heads}, not a multiple of num_key_value_heads, "
            f"{sizes.num_kv_heads}"
        )
    if windows and len(windows) != sizes.num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(windows)} layers, num_hidden_layers is {sizes.num_layers}"
        )
    for window in windows:
        if window is not None and window < 1:
            raise CheckpointError(f"config.json: sliding_window is {window}; it must be at least 1 token")
