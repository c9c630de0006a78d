"""What a model computes, as data: sizes, layers, and which tensors of the checkpoint go where."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import CheckpointError, UnsupportedModelError
from sagellm.core.kv_layout import KVGroup
from sagellm.core.protocols.attention import AttentionSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sagellm.core.protocols.checkpoint_format import StoredTensor
    from sagellm.core.protocols.weight_form import WeightForm

HFConfig = Mapping[str, Any]
"""The content of a checkpoint's `config.json`."""

TRANSFORMERS_CLASS = "transformers_class"
"""The feature of models without a `decoder`: only the class of transformers says what they compute."""


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """The sizes of a decoder that the rest of the engine needs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int  # tokens; longer requests are refused
    max_model_len_reason: str = "max_position_embeddings"
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint, and the axis on which ranks divide it; None: each rank has all of it.

    `shard_unit` rows or columns stay together; where there are fewer such units than ranks, several ranks
    hold the same one (`Shard.of`).
    """

    name: str
    shape: tuple[int, ...]
    shard_axis: int | None = None
    shard_unit: int = 1


@dataclass(frozen=True)
class LinearSpec:
    """`x @ weight.T + bias`; the weight is (out, in)."""

    weight: TensorSpec
    bias: TensorSpec | None = None


@dataclass(frozen=True)
class NormSpec:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, computed in float32."""

    weight: TensorSpec
    eps: float


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embeddings of pairs (i, i + rotary_dim / 2). `scaling` holds the fields of its type."""

    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    rope_type: str = "default"
    max_position_embeddings: int = 0
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field of the scaling. Raises CheckpointError if it is missing or not a number."""
        value = self.scaling.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"rope_parameters.{name} is {value!r}; rope_type {self.rope_type!r} needs a number"
            )
        return float(value)


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """`down(activation(gate(x)) * up(x))`; without a gate `down(activation(up(x)))`."""

    activation: str = "silu"
    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A router, softmax over all experts, and the weighted sum of the `num_active` most likely ones."""

    router: LinearSpec
    experts: tuple[FeedForwardSpec, ...]
    num_active: int
    is_normalised: bool  # whether the weights of the active ones are made to sum to 1


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """`x += output(attention(input_norm(x)))`, then `x += feed_forward(feed_forward_norm(x))`.

    Norms of query and key are over each head, before the rotation. `sinks` has one logit for each query
    head, which the softmax over scores counts without a value.
    """

    attention: AttentionSpec
    input_norm: NormSpec
    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    sinks: TensorSpec | None = None
    rope: RopeSpec
    feed_forward_norm: NormSpec
    feed_forward: FeedForwardSpec | ExpertsSpec

    @property
    def linears(self) -> Iterator[LinearSpec]:
        """Yield the linear layers."""
        yield from (self.query, self.key, self.value, self.output)
        forward = self.feed_forward
        if isinstance(forward, ExpertsSpec):
            yield forward.router
        for each in forward.experts if isinstance(forward, ExpertsSpec) else (forward,):
            yield from (linear for linear in (each.gate, each.up, each.down) if linear is not None)

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor of the layer."""
        for linear in self.linears:
            yield from (tensor for tensor in (linear.weight, linear.bias) if tensor is not None)
        norms = (self.input_norm, self.query_norm, self.key_norm, self.feed_forward_norm)
        yield from (norm.weight for norm in norms if norm is not None)
        yield from (self.sinks,) if self.sinks is not None else ()


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Embedding, layers, final norm, head. Without its own head, a model multiplies by the embedding."""

    embedding: TensorSpec  # (vocab, hidden)
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    head: LinearSpec | None

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor of the model."""
        yield from (self.embedding, self.norm.weight)
        yield from (self.head.weight,) if self.head is not None else ()
        for layer in self.layers:
            yield from layer.tensors


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its sizes, each layer's attention, and every tensor that its checkpoint must have.

    `decoder` is what it computes; None: whatever the class `architecture` of transformers does with `config`.
    """

    architecture: str
    config: HFConfig
    geometry: ModelGeometry
    attention: tuple[AttentionSpec, ...]  # one for each layer
    tensors: Mapping[str, TensorSpec]
    ignored_tensors: frozenset[str] = frozenset()  # may be present but are not needed
    decoder: DecoderSpec | None

    @property
    def features(self) -> frozenset[str]:
        """What a backend must be capable of beyond a plain decoder.

        Plain is: RMS norms, grouped heads, full causal attention, rotary embeddings without scaling, a
        feed-forward gated by SiLU, and a head that may be tied to the embedding.
        """
        found = set()
        for attention in self.attention:
            found |= {"sliding_window"} if attention.sliding_window is not None else set()
            found |= {"soft_cap"} if attention.soft_cap is not None else set()
        if self.decoder is None:
            return frozenset(found | {TRANSFORMERS_CLASS})
        layers = self.decoder.layers
        found |= {"mixed_rope"} if any(layer.rope != layers[0].rope for layer in layers) else set()
        return frozenset(found.union(*map(_features, layers)))

    def require(self, features: Collection[str]) -> None:
        """Raise UnsupportedModelError that names the features that the model has and `features` lacks."""
        if lacking := sorted(self.features - set(features)):
            raise UnsupportedModelError(f"it lacks {', '.join(lacking)}, which {self.architecture} needs")

    def kv_groups(self, dtype: str) -> tuple[KVGroup, ...]:
        """Return the layers by the geometry of their KV. Today's models have one group."""
        layers: dict[tuple[int, int], list[int]] = {}
        for index, attention in enumerate(self.attention):
            layers.setdefault((attention.num_kv_heads, attention.head_dim), []).append(index)
        return tuple(
            KVGroup(
                index=index,
                layer_ids=tuple(ids),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                window=_widest([self.attention[layer].sliding_window for layer in ids]),
            )
            for index, ((num_kv_heads, head_dim), ids) in enumerate(layers.items())
        )


@dataclass(frozen=True)
class LinearPart:
    """Tensors of one linear, the rows that it has in the fused one, and the stored form of its weight."""

    weight: TensorSpec
    bias: TensorSpec | None
    outputs: slice
    stored: StoredTensor
    order: npt.NDArray[np.int64] | None = field(default=None, compare=False)  # of quantized inputs

    def is_like(self, other: LinearPart) -> bool:
        """Say whether one kernel can multiply by both: in the same form, with inputs in the same order."""
        orders = [None if part.order is None else part.order.tobytes() for part in (self, other)]
        return self.stored.form == other.stored.form and orders[0] == orders[1]


@dataclass(frozen=True)
class FusedLinear:
    """Linears of one input whose outputs lie side by side, computed as one product."""

    parts: tuple[LinearPart, ...]

    @property
    def form(self) -> WeightForm | None:
        """The form in which the weights are stored; None: as plain numbers. For parts that are alike."""
        return self.parts[0].stored.form

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of all parts together."""
        return self.parts[-1].outputs.stop, self.parts[0].weight.shape[1]

    @property
    def has_bias(self) -> bool:
        """Whether any part has a bias; the others' are zero."""
        return any(part.bias is not None for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class LayerLinears:
    """The products of one layer. `feed_forward` is (gate and up, down) of each expert, or the only ones.

    Query, key and value, and gate and up, are products of their own, or as many as passes made of them.
    """

    qkv: tuple[FusedLinear, ...]
    output: FusedLinear
    router: FusedLinear | None
    feed_forward: tuple[tuple[tuple[FusedLinear, ...], FusedLinear], ...]


@dataclass(frozen=True, kw_only=True)
class DecoderLinears:
    """The products of a decoder. A tied head multiplies by the embedding."""

    layers: tuple[LayerLinears, ...]
    head: FusedLinear
    is_tied: bool


def _features(layer: LayerSpec) -> Iterator[str]:
    norms = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    if norms:
        yield "qk_norm" if len(norms) == 2 and norms[0].eps == norms[1].eps else "uneven_qk_norm"
    if layer.sinks is not None:
        yield "sinks"
    if any(linear.bias is not None for linear in layer.linears):
        yield "bias"
    if layer.rope.rope_type != "default":
        yield f"rope_{layer.rope.rope_type}"
    if layer.rope.rotary_dim != layer.attention.head_dim:
        yield "partial_rope"
    forward = layer.feed_forward
    if isinstance(forward, ExpertsSpec):
        yield "experts"
        return
    if forward.gate is None:
        yield "ungated"
    if forward.activation != "silu":
        yield f"activation_{forward.activation}"


def _widest(windows: list[int | None]) -> int | None:
    """Return how many tokens back the widest of these windows reaches; None: all."""
    bounded = [window for window in windows if window is not None]
    return max(bounded) if len(bounded) == len(windows) else None
