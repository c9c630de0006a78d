"""A model as data: what it needs of a backend, its groups of KV, its shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sagellm.core import (
    AttentionSpec,
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
    TensorSpec,
    UnsupportedModelError,
)

NORM = NormSpec(TensorSpec("norm", (8,)), 1e-6)
LINEAR = LinearSpec(TensorSpec("linear", (8, 8), 0))
ATTENTION = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
FEED = FeedForwardSpec(gate=LINEAR, up=LINEAR, down=LINEAR)
LAYER = LayerSpec(
    attention=ATTENTION,
    input_norm=NORM,
    query=LINEAR,
    key=LINEAR,
    value=LINEAR,
    output=LINEAR,
    rope=RopeSpec(theta=1e4, rotary_dim=4),
    feed_forward_norm=NORM,
    feed_forward=FEED,
)
GEOMETRY = ModelGeometry(
    num_layers=2,
    hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=9,
    max_model_len=16,
)
EXPERTS = ExpertsSpec(router=LINEAR, experts=(FEED, FEED), num_active=1, is_normalised=True)


def model(*layers: LayerSpec) -> ModelSpec:
    decoder = DecoderSpec(embedding=TensorSpec("embedding", (9, 8), 0), layers=layers, norm=NORM, head=None)
    return ModelSpec(
        architecture="Plain",
        config={},
        geometry=GEOMETRY,
        attention=tuple(layer.attention for layer in layers),
        tensors={tensor.name: tensor for tensor in decoder.tensors},
        decoder=decoder,
    )


def test_a_plain_decoder_needs_nothing_special():
    assert model(LAYER, LAYER).features == frozenset()
    model(LAYER).require(())


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"attention": replace(ATTENTION, sliding_window=4)}, "sliding_window"),
        ({"attention": replace(ATTENTION, soft_cap=30.0)}, "soft_cap"),
        ({"sinks": TensorSpec("sinks", (2,))}, "sinks"),
        ({"query_norm": NORM, "key_norm": NORM}, "qk_norm"),
        ({"query_norm": NORM}, "uneven_qk_norm"),
        ({"value": replace(LINEAR, bias=TensorSpec("bias", (8,)))}, "bias"),
        ({"rope": RopeSpec(theta=1e4, rotary_dim=4, rope_type="yarn")}, "rope_yarn"),
        ({"rope": RopeSpec(theta=1e4, rotary_dim=2)}, "partial_rope"),
        ({"rope": RopeSpec(theta=1e6, rotary_dim=4)}, "mixed_rope"),
        ({"feed_forward": EXPERTS}, "experts"),
        ({"feed_forward": replace(FEED, gate=None)}, "ungated"),
        ({"feed_forward": replace(FEED, activation="gelu")}, "activation_gelu"),
    ],
)
def test_one_unusual_layer_makes_the_model_need_its_feature(changes, feature):
    spec = model(LAYER, replace(LAYER, **changes))
    assert feature in spec.features
    with pytest.raises(UnsupportedModelError, match=f"^it lacks .*{feature}.*, which Plain needs$"):
        spec.require(())
    spec.require(spec.features)


def test_a_model_without_a_decoder_needs_transformers():
    assert replace(model(LAYER), decoder=None).features == {"transformers_class"}


def test_every_tensor_is_named_once():
    tensors = [tensor.name for tensor in model(replace(LAYER, feed_forward=EXPERTS)).tensors.values()]
    assert sorted(tensors) == ["embedding", "linear", "norm"]


def test_layers_with_kv_of_one_shape_are_one_group_with_the_widest_window():
    narrow, wide = (replace(LAYER, attention=replace(ATTENTION, sliding_window=size)) for size in (4, 8))
    (group,) = model(narrow, wide).kv_groups("float32")
    assert (group.layer_ids, group.num_kv_heads, group.head_dim, group.window) == ((0, 1), 1, 4, 8)
    (group,) = model(narrow, LAYER).kv_groups("float32")
    assert group.window is None


def test_layers_with_kv_of_another_shape_are_another_group():
    other = replace(LAYER, attention=replace(ATTENTION, num_kv_heads=2))
    groups = model(LAYER, other, LAYER).kv_groups("bfloat16")
    assert [(group.index, group.layer_ids, group.num_kv_heads) for group in groups] == [
        (0, (0, 2), 1),
        (1, (1,), 2),
    ]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100])
def test_shards_are_even_and_cover_everything(length):
    parts = [list(range(length))[Shard(rank, 3).of(length)] for rank in range(3)]
    assert [index for part in parts for index in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
