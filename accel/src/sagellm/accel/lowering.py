"""From a model's spec and its weights to the products that a backend computes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from sagellm.accel.fusion import JOINS, fuse
from sagellm.core import (
    CheckpointError,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    StoredTensor,
    TensorSpec,
    WeightSource,
    get_logger,
)
from sagellm.core.protocols.model_spec import DecoderLinears, FusedLinear, LayerLinears, LinearPart
from sagellm.core.protocols.weight_form import WeightForm

logger = get_logger(__name__)

Piece = tuple[int, npt.NDArray[np.generic]]
_PLAIN = ("BF16", "F16", "F32", "F64")


def lower(spec: ModelSpec, weights: WeightSource, fusions: Collection[str] = tuple(JOINS)) -> DecoderLinears:
    """Return the products of a spec that has a decoder, after the passes that `fusions` names.

    A head is tied as transformers ties it: only if none is stored that differs from the embedding. Raises
    CheckpointError for a tensor that is neither quantized nor of floating-point numbers of 16 to 64 bits, or
    whose groups do not divide its inputs.
    """
    decoder = spec.decoder
    assert decoder is not None, "backends refuse models without a decoder, or run them in another way"
    for tensor in decoder.tensors:
        stored = weights.tensors[tensor.name]
        if stored.form is None and stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has the type {stored.dtype}; only "
                f"{', '.join(_PLAIN)} can be loaded"
            )
        if stored.form is not None:
            _check_groups(tensor, stored, stored.form)
    head, is_tied = decoder.head, decoder.head is None
    if head is not None and spec.geometry.tie_word_embeddings:
        is_tied = _are_equal(weights, head.weight, decoder.embedding)
        if not is_tied:
            logger.warning(
                "tie_word_embeddings is true in config.json, but the checkpoint has a %s that differs from "
                "the embedding: it is used, as transformers does",
                head.weight.name,
            )
    linears = DecoderLinears(
        layers=tuple(_lower_layer(layer, weights) for layer in decoder.layers),
        head=_product(weights, LinearSpec(decoder.embedding) if head is None or is_tied else head),
        is_tied=is_tied,
    )
    return fuse(linears, fusions)


def _check_groups(tensor: TensorSpec, stored: StoredTensor, form: WeightForm) -> None:
    num_inputs = tensor.shape[-1]
    for size in (form.group_size, form.scale_group):
        if size and num_inputs % size:
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has {num_inputs} inputs, which groups of {size} "
                "do not divide"
            )
    if form.scale_group and (not form.group_size or form.scale_group % form.group_size):
        raise CheckpointError(
            f"{stored.path}: tensor {tensor.name!r} has factors for {form.scale_group} inputs, which are not "
            f"whole groups of {form.group_size or num_inputs}"
        )


def _lower_layer(layer: LayerSpec, weights: WeightSource) -> LayerLinears:
    forward = layer.feed_forward
    router, experts = (
        (_product(weights, forward.router), forward.experts)
        if isinstance(forward, ExpertsSpec)
        else (None, (forward,))
    )

    def products(*linears: LinearSpec | None) -> tuple[FusedLinear, ...]:
        return tuple(_product(weights, linear) for linear in linears if linear is not None)

    return LayerLinears(
        qkv=products(layer.query, layer.key, layer.value),
        output=_product(weights, layer.output),
        router=router,
        feed_forward=tuple((products(each.gate, each.up), _product(weights, each.down)) for each in experts),
    )


def _product(weights: WeightSource, linear: LinearSpec) -> FusedLinear:
    stored, order = weights.tensors[linear.weight.name], weights.input_order(linear.weight)
    outputs = slice(0, linear.weight.shape[0])
    return FusedLinear((LinearPart(linear.weight, linear.bias, outputs, stored, order),))


def _are_equal(weights: WeightSource, one: TensorSpec, other: TensorSpec) -> bool:
    """Say whether two tensors are stored as the same values, in bounded memory."""
    a, b = (weights.tensors[tensor.name] for tensor in (one, other))
    if a.form is not None or b.form is not None:
        return False
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        map(_are_same, weights.pieces(one), weights.pieces(other))
    )


def _are_same(one: Piece, other: Piece) -> bool:
    return np.array_equal(one[1], other[1])
