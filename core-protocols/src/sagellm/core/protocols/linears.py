"""A decoder lowered to its products: which tensors form one matrix, and how each of them is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core.errors import CheckpointError
from sagellm.core.logging import get_logger
from sagellm.core.protocols.checkpoint_format import Piece, StoredTensor, WeightSource
from sagellm.core.protocols.model_spec import ExpertsSpec, LayerSpec, LinearSpec, ModelSpec, TensorSpec

logger = get_logger(__name__)

_PLAIN = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class LinearPart:
    """Some outputs of a fused linear: the tensors that hold them, and the weight's stored form."""

    weight: TensorSpec
    bias: TensorSpec | None
    outputs: slice
    stored: StoredTensor


@dataclass(frozen=True)
class FusedLinear:
    """Linears of one input whose outputs lie side by side, computed as one product."""

    parts: tuple[LinearPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of all parts together."""
        return self.parts[-1].outputs.stop, self.parts[0].weight.shape[1]

    @property
    def has_bias(self) -> bool:
        """Whether any part has a bias; the others' is then zero."""
        return any(part.bias is not None for part in self.parts)


class FeedForwardLinears(NamedTuple):
    """`down(activation(gate) * up)`; without a gate, `gate_up` has `up` alone."""

    gate_up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True, kw_only=True)
class LayerLinears:
    """The products of one layer; `feed_forward` has one entry for each expert, a single one without."""

    qkv: FusedLinear
    output: FusedLinear
    router: FusedLinear | None
    feed_forward: tuple[FeedForwardLinears, ...]


@dataclass(frozen=True)
class DecoderLinears:
    """The products of a decoder. A tied head multiplies by the embedding."""

    layers: tuple[LayerLinears, ...]
    head: FusedLinear
    is_tied: bool


def lower(spec: ModelSpec, weights: WeightSource) -> DecoderLinears:
    """Return the products of a spec that has a decoder.

    A head is tied as transformers ties it: only if none is stored that differs from the embedding. Raises
    CheckpointError for a tensor that is not of floating-point numbers of 16 to 64 bits.
    """
    decoder = spec.decoder
    assert decoder is not None, "backends refuse models without a decoder, or run them in another way"
    for tensor in decoder.tensors:
        stored = weights.tensors[tensor.name]
        if stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has the type {stored.dtype}; only "
                f"{', '.join(_PLAIN)} can be loaded"
            )
    head, is_tied = decoder.head, decoder.head is None
    if head is not None and spec.geometry.tie_word_embeddings:
        is_tied = _are_equal(weights, head.weight, decoder.embedding)
        if not is_tied:
            logger.warning(
                "tie_word_embeddings is true in config.json, but the checkpoint has a %s that differs from "
                "the embedding: it is used, as transformers does",
                head.weight.name,
            )
    return DecoderLinears(
        layers=tuple(_lower_layer(layer, weights) for layer in decoder.layers),
        head=_fuse(weights, LinearSpec(decoder.embedding) if is_tied else head),
        is_tied=is_tied,
    )


def _lower_layer(layer: LayerSpec, weights: WeightSource) -> LayerLinears:
    forward = layer.feed_forward
    return LayerLinears(
        qkv=_fuse(weights, layer.query, layer.key, layer.value),
        output=_fuse(weights, layer.output),
        router=_fuse(weights, forward.router) if isinstance(forward, ExpertsSpec) else None,
        feed_forward=tuple(
            FeedForwardLinears(_fuse(weights, each.gate, each.up), _fuse(weights, each.down))
            for each in layer.feed_forwards
        ),
    )


def _fuse(weights: WeightSource, *linears: LinearSpec | None) -> FusedLinear:
    parts: list[LinearPart] = []
    begin = 0
    for linear in linears:
        if linear is not None:
            outputs = slice(begin, begin + linear.weight.shape[0])
            parts.append(LinearPart(linear.weight, linear.bias, outputs, weights.tensors[linear.weight.name]))
            begin = outputs.stop
    return FusedLinear(tuple(parts))


def _are_equal(weights: WeightSource, one: TensorSpec, other: TensorSpec) -> bool:
    """Say whether two tensors are stored as the same values, in bounded memory."""
    a, b = (weights.tensors[tensor.name] for tensor in (one, other))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        map(_are_same, weights.pieces(one), weights.pieces(other))
    )


def _are_same(one: Piece, other: Piece) -> bool:
    return bool((one.rows == other.rows).all())
