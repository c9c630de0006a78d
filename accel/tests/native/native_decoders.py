"""Small decoders with every feature that the native backend claims, and their forward pass in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.core import (
    WHOLE,
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    InputBatch,
    KVLayout,
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

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

HIDDEN, INTERMEDIATE, VOCAB = 48, 72, 97
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS = 8, 24


class MemoryWeights(WeightSource):
    """Weights in memory, stored in a format of choice."""

    def __init__(self, values: Mapping[str, NDArray[Any]], dtype: str) -> None:
        self.values = {name: stored(value, dtype) for name, value in values.items()}
        self.tensors = {
            name: StoredTensor(path=Path("memory"), dtype=dtype, shape=value.shape, num_bytes=value.nbytes)
            for name, value in self.values.items()
        }

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> NDArray[np.generic]:
        assert shard == WHOLE
        return self.values[tensor.name]


def stored(value: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return torch.from_numpy(value).to(torch.bfloat16).view(torch.uint16).numpy()
    return value.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype])


def rounded(value: Doubles, dtype: torch.dtype) -> Doubles:
    """What a value is worth in a dtype."""
    return torch.from_numpy(value).to(dtype).double().numpy()


@dataclass(frozen=True)
class Variety:
    """What a decoder has; the defaults are Qwen3's."""

    has_bias: bool = False
    query_eps: float | None = 1e-6
    key_eps: float | None = 1e-6
    window: int | None = None
    soft_cap: float | None = None
    ropes: tuple[RopeSpec, ...] = (RopeSpec(theta=1e4, rotary_dim=HEAD_DIM),)
    is_tied: bool = True


@dataclass(frozen=True)
class Decoder:
    spec: ModelSpec
    weights: dict[str, Doubles]


def make_decoder(variety: Variety, *, num_layers: int = 2, seed: int = 0) -> Decoder:
    generator = np.random.default_rng(seed)
    weights: dict[str, Doubles] = {}

    def tensor(name: str, *shape: int) -> TensorSpec:
        scale = 1.0 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.2
        weights[name] = generator.normal(0.0 if len(shape) > 1 else 1.0, scale, shape)
        return TensorSpec(name, shape)

    def linear(name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False) -> LinearSpec:
        bias = tensor(f"{name}.bias", num_outputs) if has_bias else None
        return LinearSpec(tensor(f"{name}.weight", num_outputs, num_inputs), bias)

    def norm(name: str, size: int, eps: float | None) -> NormSpec | None:
        return None if eps is None else NormSpec(tensor(name, size), eps)

    def layer(index: int) -> LayerSpec:
        name = f"layer.{index}"
        attention = AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.3,
            sliding_window=variety.window, soft_cap=variety.soft_cap,
        )  # fmt: skip
        input_norm, forward_norm = norm(f"{name}.in", HIDDEN, 1e-5), norm(f"{name}.ff", HIDDEN, 1e-5)
        assert input_norm is not None
        assert forward_norm is not None
        return LayerSpec(
            attention=attention,
            input_norm=input_norm,
            query=linear(f"{name}.q", HEADS * HEAD_DIM, HIDDEN, has_bias=variety.has_bias),
            key=linear(
                f"{name}.k", KV_HEADS * HEAD_DIM, HIDDEN
            ),  # one part without a bias beside two with one
            value=linear(f"{name}.v", KV_HEADS * HEAD_DIM, HIDDEN, has_bias=variety.has_bias),
            output=linear(f"{name}.o", HIDDEN, HEADS * HEAD_DIM, has_bias=variety.has_bias),
            query_norm=norm(f"{name}.qn", HEAD_DIM, variety.query_eps),
            key_norm=norm(f"{name}.kn", HEAD_DIM, variety.key_eps),
            rope=variety.ropes[index % len(variety.ropes)],
            feed_forward_norm=forward_norm,
            feed_forward=FeedForwardSpec(
                gate=linear(f"{name}.gate", INTERMEDIATE, HIDDEN, has_bias=variety.has_bias),
                up=linear(f"{name}.up", INTERMEDIATE, HIDDEN, has_bias=variety.has_bias),
                down=linear(f"{name}.down", HIDDEN, INTERMEDIATE, has_bias=variety.has_bias),
            ),
        )

    final = norm("norm", HIDDEN, 1e-5)
    assert final is not None
    decoder = DecoderSpec(
        embedding=tensor("embedding", VOCAB, HIDDEN),
        layers=tuple(layer(index) for index in range(num_layers)),
        norm=final,
        head=None if variety.is_tied else linear("head", VOCAB, HIDDEN),
    )
    geometry = ModelGeometry(
        num_layers=num_layers, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB, max_model_len=1024,
    )  # fmt: skip
    spec = ModelSpec(
        architecture="Test",
        config=MappingProxyType({}),
        geometry=geometry,
        attention=tuple(each.attention for each in decoder.layers),
        tensors={each.name: each for each in decoder.tensors},
        decoder=decoder,
    )
    return Decoder(spec, weights)


def reference_logits(spec: ModelSpec, weights: Mapping[str, Doubles], ids: list[int]) -> Doubles:
    """The logits of all positions of one sequence, in float64."""
    decoder = spec.decoder
    assert decoder is not None
    x = weights[decoder.embedding.name][ids]
    for layer in decoder.layers:
        normed = _norm(x, layer.input_norm, weights)
        x = x + _linear(_attend(normed, layer, weights), layer.output, weights)
        normed = _norm(x, layer.feed_forward_norm, weights)
        forward = layer.feed_forward
        assert isinstance(forward, FeedForwardSpec)
        assert forward.gate is not None
        gate = _linear(normed, forward.gate, weights)
        x = x + _linear(
            gate / (1 + np.exp(-gate)) * _linear(normed, forward.up, weights), forward.down, weights
        )
    head = decoder.head or LinearSpec(decoder.embedding)
    return _linear(_norm(x, decoder.norm, weights), head, weights)


def _norm(x: Doubles, norm: NormSpec | None, weights: Mapping[str, Doubles]) -> Doubles:
    if norm is None:
        return x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * weights[norm.weight.name]


def _linear(x: Doubles, linear: LinearSpec, weights: Mapping[str, Doubles]) -> Doubles:
    return x @ weights[linear.weight.name].T + (weights[linear.bias.name] if linear.bias else 0.0)


def _attend(x: Doubles, layer: LayerSpec, weights: Mapping[str, Doubles]) -> Doubles:
    size, spec = len(x), layer.attention

    def heads(linear: LinearSpec) -> Doubles:
        return _linear(x, linear, weights).reshape(size, -1, HEAD_DIM)

    query = _rotate(_norm(heads(layer.query), layer.query_norm, weights), layer.rope)
    key = _rotate(_norm(heads(layer.key), layer.key_norm, weights), layer.rope)
    key, value = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (key, heads(layer.value)))
    scores = np.einsum("ihd,jhd->hij", query, key) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
    distance = np.arange(size)[:, None] - np.arange(size)
    is_seen = (distance >= 0) & (distance < (spec.sliding_window or size))
    scores = np.where(is_seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", shares, value).reshape(size, -1)


def _rotate(x: Doubles, rope: RopeSpec) -> Doubles:
    frequencies = rope_frequencies(rope)
    angles = np.arange(len(x))[:, None] * frequencies.inv_freq.astype(np.float64)
    cos, sin = (each[:, None] * frequencies.attention_factor for each in (np.cos(angles), np.sin(angles)))
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), -1)


def layout_of(spec: ModelSpec, dtype: str) -> KVLayout:
    (group,) = spec.kv_groups(dtype)
    scale_bytes = 4 * BLOCK_SIZE if dtype in ("int8", "float8_e4m3fn") else 0
    return KVLayout(group=replace(group, scale_bytes_per_head=scale_bytes), block_size=BLOCK_SIZE)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a sequence whose blocks are given."""

    ids: list[int]
    blocks: list[int]
    start: int
    stop: int


def make_batch(pieces: list[Piece]) -> InputBatch:
    """Ask for the logits of all tokens."""
    width = max(len(each.blocks) for each in pieces)
    positions = [position for each in pieces for position in range(each.start, each.stop)]
    return InputBatch(
        input_ids=torch.tensor([token for each in pieces for token in each.ids[each.start : each.stop]]),
        position_ids=torch.tensor(positions),
        slot_mapping=torch.tensor(
            [
                each.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for each in pieces
                for position in range(each.start, each.stop)
            ]
        ),
        block_tables=torch.tensor([each.blocks + [0] * (width - len(each.blocks)) for each in pieces]),
        query_lens=[each.stop - each.start for each in pieces],
        seq_lens=[each.stop for each in pieces],
        logits_indices=torch.arange(len(positions)),
    )
