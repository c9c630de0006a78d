"""A spec and its weights lower to the products of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sagellm.accel.lowering import lower
from sagellm.core import (
    WHOLE,
    AttentionSpec,
    CheckpointError,
    DecoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    LinearSpec,
    ModelGeometry,
    ModelSpec,
    NormSpec,
    RopeSpec,
    Shard,
    StoredTensor,
    TensorSpec,
    WeightSource,
)
from sagellm.core.protocols.model_spec import FusedLinear
from sagellm.core.protocols.weight_form import CodeType, WeightForm

HIDDEN, INNER, VOCAB = 8, 12, 9
NORM = NormSpec(TensorSpec("norm", (HIDDEN,)), 1e-6)
BIAS = TensorSpec("key.bias", (4,), 0)


def linear(name: str, outputs: int, inputs: int = HIDDEN, bias: TensorSpec | None = None) -> LinearSpec:
    return LinearSpec(TensorSpec(name, (outputs, inputs), 0), bias)


def feed_forward(prefix: str = "", *, is_gated: bool = True) -> FeedForwardSpec:
    return FeedForwardSpec(
        gate=linear(f"{prefix}gate", INNER) if is_gated else None,
        up=linear(f"{prefix}up", INNER),
        down=linear(f"{prefix}down", HIDDEN, INNER),
    )


def model(
    forward: FeedForwardSpec | ExpertsSpec, head: LinearSpec | None = None, *, is_tied: bool = False
) -> ModelSpec:
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
    layer = LayerSpec(
        attention=attention,
        input_norm=NORM,
        query=linear("query", 8),
        key=linear("key", 4, bias=BIAS),
        value=linear("value", 4),
        output=linear("output", HIDDEN),
        rope=RopeSpec(theta=1e4, rotary_dim=4),
        feed_forward_norm=NORM,
        feed_forward=forward,
    )
    decoder = DecoderSpec(
        embedding=TensorSpec("embedding", (VOCAB, HIDDEN), 0), layers=(layer,), norm=NORM, head=head
    )
    return ModelSpec(
        architecture="Plain",
        config={},
        geometry=ModelGeometry(
            num_layers=1,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            vocab_size=VOCAB,
            max_model_len=16,
            tie_word_embeddings=is_tied,
        ),
        attention=(attention,),
        tensors={tensor.name: tensor for tensor in decoder.tensors},
        decoder=decoder,
    )


class Arrays(WeightSource):
    """Weights in memory."""

    def __init__(self, spec: ModelSpec, dtypes: Mapping[str, str] = {}) -> None:
        self.arrays = {name: np.ones(tensor.shape, np.float32) for name, tensor in spec.tensors.items()}
        self.tensors = {
            name: StoredTensor(
                path=Path("weights"),
                dtype=dtypes.get(name, "F32"),
                shape=array.shape,
                num_bytes=array.nbytes,
            )
            for name, array in self.arrays.items()
        }

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> np.ndarray:
        return self.arrays[tensor.name]


def parts_of(product: FusedLinear) -> list[tuple[str, int, int]]:
    return [(part.weight.name, part.outputs.start, part.outputs.stop) for part in product.parts]


def test_query_key_and_value_are_one_product_and_so_are_gate_and_up():
    spec = model(feed_forward())
    (layer,) = lower(spec, Arrays(spec, {"key": "BF16"})).layers
    (qkv,) = layer.qkv
    assert parts_of(qkv) == [("query", 0, 8), ("key", 8, 12), ("value", 12, 16)]
    assert qkv.shape == (16, HIDDEN)
    assert [part.bias for part in qkv.parts] == [None, BIAS, None]
    assert [part.stored.dtype for part in qkv.parts] == ["F32", "BF16", "F32"]
    assert qkv.has_bias
    assert parts_of(layer.output) == [("output", 0, HIDDEN)]
    (((gate_up,), down),) = layer.feed_forward
    assert parts_of(gate_up) == [("gate", 0, INNER), ("up", INNER, 2 * INNER)]
    assert down.shape == (HIDDEN, INNER)
    assert not down.has_bias
    assert layer.router is None


def test_without_a_gate_there_is_up_alone():
    spec = model(feed_forward(is_gated=False))
    assert parts_of(lower(spec, Arrays(spec)).layers[0].feed_forward[0][0][0]) == [("up", 0, INNER)]


def test_each_pass_over_products_can_be_left_out():
    spec = model(feed_forward())
    (layer,) = lower(spec, Arrays(spec), ["gate_up"]).layers
    assert [parts_of(each) for each in layer.qkv] == [[("query", 0, 8)], [("key", 0, 4)], [("value", 0, 4)]]
    assert len(layer.feed_forward[0][0]) == 1
    (layer,) = lower(spec, Arrays(spec), ["qkv"]).layers
    assert len(layer.qkv) == 1
    assert [parts_of(each) for each in layer.feed_forward[0][0]] == [[("gate", 0, INNER)], [("up", 0, INNER)]]


def test_neighbours_in_different_forms_are_not_joined():
    spec = model(feed_forward())
    weights = Arrays(spec)
    form = WeightForm(code=CodeType.INT8)
    weights.tensors["value"] = replace(weights.tensors["value"], form=form)
    (layer,) = lower(spec, weights).layers
    assert [parts_of(each) for each in layer.qkv] == [[("query", 0, 8), ("key", 8, 12)], [("value", 0, 4)]]
    assert [each.form for each in layer.qkv] == [None, form]


def test_each_expert_has_products_of_its_own_beside_the_router():
    experts = tuple(feed_forward(f"{index}.") for index in range(3))
    spec = model(ExpertsSpec(router=linear("router", 3), experts=experts, num_active=1, is_normalised=True))
    (layer,) = lower(spec, Arrays(spec)).layers
    assert layer.router is not None
    assert parts_of(layer.router) == [("router", 0, 3)]
    assert [down.parts[0].weight.name for _, down in layer.feed_forward] == ["0.down", "1.down", "2.down"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_equals_the_embedding_is_tied_if_the_config_ties_it(is_tied):
    spec = model(feed_forward(), linear("head", VOCAB), is_tied=is_tied)
    linears = lower(spec, Arrays(spec))
    assert linears.is_tied == is_tied
    assert parts_of(linears.head) == [("embedding" if is_tied else "head", 0, VOCAB)]


def test_a_head_that_differs_from_the_embedding_is_used_and_said(caplog):
    spec = model(feed_forward(), linear("head", VOCAB), is_tied=True)
    weights = Arrays(spec)
    weights.arrays["head"][-1, -1] = 2
    linears = lower(spec, weights)
    assert not linears.is_tied
    assert parts_of(linears.head) == [("head", 0, VOCAB)]
    assert "differs from the embedding" in caplog.text


def test_a_tensor_that_is_not_of_floats_is_refused_before_any_is_read(monkeypatch):
    spec = model(feed_forward(), linear("head", VOCAB), is_tied=True)
    weights = Arrays(spec, {"up": "F8_E4M3"})
    monkeypatch.setattr(weights, "get", None)
    with pytest.raises(CheckpointError, match="tensor 'up' has the type F8_E4M3; only BF16, F16, F32, F64"):
        lower(spec, weights)


def test_pieces_are_of_a_multiple_of_rows_and_make_up_the_tensor():
    spec = model(feed_forward())
    weights = Arrays(spec)
    weights.arrays["embedding"] = large = np.arange(5_000_000, dtype=np.float32).reshape(5000, 1000)
    weights.tensors["embedding"] = StoredTensor(
        path=Path("weights"), dtype="F32", shape=large.shape, num_bytes=large.nbytes
    )
    pieces = list(weights.pieces(TensorSpec("embedding", large.shape), 32))
    assert len(pieces) > 1
    assert all(begin % 32 == 0 and rows.nbytes <= 16 << 20 for begin, rows in pieces)
    assert np.array_equal(np.concatenate([rows for _, rows in pieces]), large)
