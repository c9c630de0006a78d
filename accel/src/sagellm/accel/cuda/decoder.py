"""A whole decoder on the device: kernels between products, no loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from sagellm.accel.cuda.layer_ops import (
    Norm,
    Rotation,
    add_and_normalise,
    rotate_and_store,
    silu_and_mul,
)
from sagellm.accel.cuda.library_attention import StepAttention
from sagellm.accel.cuda.linear import FP8_ALIGNMENT, FP8Linear, Linear, PlainLinear
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.accel.cuda.weights import DeviceWeights
from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.core import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    ModelMetrics,
    ModelSpec,
    NormSpec,
    RopeSpec,
    TensorSpec,
    UnsupportedModelError,
)


@dataclass(frozen=True)
class StepTensors:
    """A step on the device. The sequences' rows lie one after another."""

    input_ids: torch.Tensor  # (rows,)
    positions: torch.Tensor  # (rows,)
    slots: torch.Tensor  # (rows,) block * block_size + offset; below 0: padding, whose KV is not stored
    wanted: torch.Tensor  # (logits rows,) rows whose logits are wanted
    attention: StepAttention


@dataclass(frozen=True)
class Layer:
    """The weights of a layer."""

    attention: AttentionSpec
    input_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None  # of queries, of keys
    output: Linear
    feed_forward_norm: Norm
    gate_up: Linear
    down: Linear


class CudaDecoder:
    """Embedding, layers, norm and head of a ModelSpec."""

    def __init__(self, spec: ModelSpec, weights: DeviceWeights, *, has_fp8_linears: bool) -> None:
        assert spec.decoder is not None, "FEATURES lacks what has no decoder"
        self._weights, self._has_fp8_linears = weights, has_fp8_linears
        self._linears: list[Linear] = []
        self._others: list[torch.Tensor] = []
        decoder = spec.decoder
        self._embedding = self._tensor(decoder.embedding)
        self._rotation = _rotation(
            decoder.layers[0].rope, spec.geometry.max_model_len, self._embedding.device
        )
        self._layers = [self._layer(each) for each in decoder.layers]
        self._norm = self._norm_of(decoder.norm)
        self._head = self._head_of(decoder, is_tied=spec.geometry.tie_word_embeddings)
        del self._weights  # and its staging memory

    @torch.inference_mode()
    def forward(self, step: StepTensors, kv: PagedKV) -> torch.Tensor:
        """Return float32 logits (logits rows, vocab), and store the KV of all rows."""
        residual = functional.embedding(step.input_ids, self._embedding)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            spec = layer.attention
            qkv = layer.qkv(add_and_normalise(x, residual, layer.input_norm))
            query = rotate_and_store(
                qkv.view(len(qkv), -1, spec.head_dim),
                step.positions,
                step.slots,
                kv,
                index,
                spec,
                self._rotation,
                layer.head_norms,
            )
            attended = step.attention.run(query, kv, index, spec)
            x = layer.output(attended.view(len(attended), -1))
            gate_up = layer.gate_up(add_and_normalise(x, residual, layer.feed_forward_norm))
            x = layer.down(silu_and_mul(gate_up))
        if x is not None:
            x = x.index_select(0, step.wanted)
        last = add_and_normalise(x, residual.index_select(0, step.wanted), self._norm)
        return self._head(last).float()

    def metrics(self) -> ModelMetrics:
        """Return the size of the weights."""
        sizes = [each.weigh() for each in self._linears]
        return ModelMetrics(
            num_parameters=sum(number for number, _ in sizes) + sum(each.numel() for each in self._others),
            weight_bytes=sum(num_bytes for _, num_bytes in sizes) + sum(each.nbytes for each in self._others),
        )

    def _layer(self, layer: LayerSpec) -> Layer:
        forward = layer.feed_forward
        assert not isinstance(forward, ExpertsSpec), "FEATURES lacks experts"
        assert forward.gate is not None, "FEATURES lacks ungated"
        norms = layer.query_norm, layer.key_norm
        return Layer(
            attention=layer.attention,
            input_norm=self._norm_of(layer.input_norm),
            qkv=self._linear(layer.query, layer.key, layer.value),
            head_norms=None
            if norms[0] is None or norms[1] is None
            else (self._norm_of(norms[0]), self._norm_of(norms[1])),
            output=self._linear(layer.output),
            feed_forward_norm=self._norm_of(layer.feed_forward_norm),
            gate_up=self._linear(forward.gate, forward.up),
            down=self._linear(forward.down),
        )

    def _head_of(self, decoder: DecoderSpec, *, is_tied: bool) -> Linear:
        """Tie the head as transformers does: only if no different head is stored besides the embedding."""
        if decoder.head is None:
            return PlainLinear(self._embedding)
        head = self._weights.load(decoder.head.weight)
        if is_tied and torch.equal(head, self._embedding):
            return PlainLinear(self._embedding)
        linear = PlainLinear(head)
        self._linears.append(linear)
        return linear

    def _linear(self, *parts: LinearSpec) -> Linear:
        weight = self._weights.load(*(part.weight for part in parts))
        biases = [part.bias for part in parts]
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat(
                [
                    weight.new_zeros(part.weight.shape[0])
                    if part.bias is None
                    else self._weights.load(part.bias)
                    for part in parts
                ]
            )
        linear: Linear
        if self._has_fp8_linears:
            if any(size % FP8_ALIGNMENT for size in weight.shape):
                raise UnsupportedModelError(
                    f"linears in FP8 need multiples of {FP8_ALIGNMENT} inputs and outputs; "
                    f"{parts[0].weight.name} and what is beside it are {tuple(weight.shape)}"
                )
            linear = FP8Linear(weight, bias)
        else:
            linear = PlainLinear(weight, bias)
        self._linears.append(linear)
        return linear

    def _norm_of(self, norm: NormSpec) -> Norm:
        return Norm(self._tensor(norm.weight), norm.eps)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self._weights.load(spec)
        self._others.append(tensor)
        return tensor


def _rotation(rope: RopeSpec, num_positions: int, device: torch.device) -> Rotation:
    frequencies = rope_frequencies(rope)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies.inv_freq.to(device)
    factor = frequencies.attention_factor
    return Rotation(angles.cos() * factor, angles.sin() * factor)
