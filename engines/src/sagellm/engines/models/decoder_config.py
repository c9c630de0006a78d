"""Everything that differs between the decoders that `Decoder` can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sagellm.core import CheckpointError, ModelGeometry, SageLLMError, UnsupportedModelError
from sagellm.engines.layers.rope_scaling import RopeParameters, rope_frequencies
from sagellm.engines.models.hf_config import context_limit

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
    sliding_windows: tuple[int | None, ...] = ()  # one a layer, in tokens; empty means none anywhere


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder's sizes, its traits and its rotary embedding."""

    geometry: ModelGeometry
    traits: DecoderTraits
    rope: RopeParameters
    rms_norm_eps: float

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.geometry.num_heads * self.geometry.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.geometry.num_kv_heads * self.geometry.head_dim

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return float(self.geometry.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None for full attention."""
        windows = self.traits.sliding_windows
        return windows[layer] if windows else None

    @classmethod
    def from_hf(cls, hf: Any, traits: DecoderTraits) -> DecoderConfig:
        """Read transformers' configuration object.

        Raises UnsupportedModelError for features that this decoder lacks, CheckpointError for
        sizes that contradict each other.
        """
        if hf.hidden_act != "silu":
            raise UnsupportedModelError(f"hidden_act is {hf.hidden_act!r}; this decoder has silu alone")
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        rope = _read_rope(hf, head_dim)
        config = cls(geometry=_geometry(hf, head_dim), traits=traits, rope=rope, rms_norm_eps=hf.rms_norm_eps)
        _check(config)
        return config


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


def _read_rope(hf: Any, head_dim: int) -> RopeParameters:
    values: Mapping[str, Any] = hf.rope_parameters or {}
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(
            "rope_parameters differ between layer types; this decoder has one rotation"
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is set; this decoder turns whole heads")
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise CheckpointError(
            f"config.json: head_dim is {head_dim}; rotary embeddings need an even one up to {_MAX_HEAD_DIM}"
        )
    try:
        rope = RopeParameters(
            theta=float(values.get("rope_theta", 10_000.0)),
            rotary_dim=head_dim,
            rope_type=values.get("rope_type", "default"),
            max_position_embeddings=hf.max_position_embeddings,
            scaling=dict(values),
        )
        # An unknown kind and a number that is missing or senseless are errors now, not at the first step.
        frequencies = rope_frequencies(rope)
        if not (frequencies.inv_freq.isfinite().all() and math.isfinite(frequencies.attention_factor)):
            raise ArithmeticError("a frequency is not finite")
    except SageLLMError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: no rotation follows from rope_parameters: {error}") from error
    return rope


def _check(config: DecoderConfig) -> None:
    sizes = config.geometry
    for name in _SIZES:
        if getattr(sizes, name) < 1:
            raise CheckpointError(f"config.json: {name} is {getattr(sizes, name)}; it must be at least 1")
    if sizes.num_heads % sizes.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads is {sizes.num_heads}, no multiple of num_key_value_heads, "
            f"{sizes.num_kv_heads}"
        )
    windows = config.traits.sliding_windows
    if windows and len(windows) != sizes.num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(windows)} layers, num_hidden_layers is {sizes.num_layers}"
        )
    for window in windows:
        if window is not None and window < 1:
            raise CheckpointError(f"config.json: sliding_window is {window}; it must be at least 1 token")
