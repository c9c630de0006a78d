"""A whole decoder on the device: kernels between products, no loop over sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from sagellm.accel.cuda.layer_ops import (
    Norm,
    RotateAndStore,
    Rotation,
    add_and_normalise,
    silu_and_mul,
)
from sagellm.accel.cuda.library_attention import StepAttention
from sagellm.accel.cuda.linear import FP8Linear
from sagellm.accel.cuda.paged_attention import layer_kv
from sagellm.accel.cuda.paged_kv import LayerKV, PagedKV
from sagellm.accel.linear import LinearContext, PlainLinear, Product, WideRows
from sagellm.accel.lowering import lower
from sagellm.accel.model_loader import ModelLoader
from sagellm.accel.operation_timer import EndOf, not_timed
from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.accel.weights import WeightReader
from sagellm.core import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    QuantizerProtocol,
    RopeSpec,
    WeightSource,
)
from sagellm.core.protocols.attention import HiddenStates
from sagellm.core.protocols.model_spec import LayerLinears


@dataclass(frozen=True)
class StepTensors:
    """What the layers read of a step, on the device. The sequences' rows lie one after another."""

    input_ids: torch.Tensor  # (rows,)
    positions: torch.Tensor  # (rows,)
    slots: torch.Tensor  # (rows,) block * block_size + offset; below 0: padding, whose KV is not stored
    attention: StepAttention


@dataclass(frozen=True)
class Layer:
    """The weights of a layer."""

    attention: AttentionSpec
    input_norm: Norm
    qkv: Product
    head_norms: tuple[Norm, Norm] | None  # of queries, of keys
    output: Product
    feed_forward_norm: Norm
    gate_up: Product
    down: Product


class CudaDecoder:
    """Embedding, layers, norm and head of a ModelSpec."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantizer: QuantizerProtocol | None,
    ) -> None:
        decoder = spec.decoder
        assert decoder is not None, "FEATURES lacks what has no decoder"
        linears = lower(spec, weights)
        loader = ModelLoader(
            WeightReader(weights, dtype),
            dtype,
            device,
            partial(PlainLinear, device) if quantizer is None else partial(FP8Linear, device, quantizer),
        )
        self._dtype = dtype
        self.beat: Callable[[], None] = lambda: None
        """Called in each layer, as kernels may be compiled in between."""
        self._linears = LinearContext(WideRows(dtype, device))
        self._embedding = loader.tensor(decoder.embedding)
        self._rotation = _rotation(decoder.layers[0].rope, spec.geometry.max_model_len, device)
        self._layers = [
            _layer(loader, layer, products)
            for layer, products in zip(decoder.layers, linears.layers, strict=True)
        ]
        self._norm = _norm(loader, decoder.norm)
        head = PlainLinear(device)
        self._head = head.adopt(self._embedding) if linears.is_tied else loader.linear(linears.head, head)
        self.metrics = loader.metrics(linears)

    def use(self, kv: PagedKV) -> None:
        """Have all steps store and read this KV."""
        self._on_kv: list[tuple[RotateAndStore, LayerKV]] = []
        for index, layer in enumerate(self._layers):
            spec = layer.attention
            rotate_and_store = RotateAndStore(kv, index, spec, self._rotation, layer.head_norms)
            self._on_kv.append((rotate_and_store, layer_kv(kv, index, spec, self._dtype)))

    def forward(
        self, step: StepTensors, wanted: torch.Tensor, hidden: HiddenStates | None, end_of: EndOf = not_timed
    ) -> torch.Tensor:
        """Return float32 logits (wanted rows, vocab) of a step, and store the KV of all its rows."""
        last = self.run_layers(step, hidden=hidden, end_of=end_of)
        return self.logits(last, wanted, hidden, end_of)

    def run_layers(
        self,
        step: StepTensors,
        out: torch.Tensor | None = None,
        hidden: HiddenStates | None = None,
        end_of: EndOf = not_timed,
    ) -> torch.Tensor:
        """Return the residual stream (rows, hidden) behind the layers, in `out` if there is one.

        Stores the KV of all rows, and writes the hidden states that are wanted before the last.
        """
        residual = functional.embedding(step.input_ids, self._embedding)
        end_of("embed")
        x: torch.Tensor | None = None
        for index, (layer, (rotate_and_store, kv)) in enumerate(zip(self._layers, self._on_kv, strict=True)):
            self.beat()
            if hidden is not None:
                hidden.take(index, residual, x)
            normalised = add_and_normalise(x, residual, layer.input_norm)
            end_of("norm")
            qkv = layer.qkv.apply(normalised, self._linears)
            end_of("qkv")
            heads = qkv.view(len(qkv), -1, layer.attention.head_dim)
            query = rotate_and_store(heads, step.positions, step.slots)
            end_of("rope")
            self.beat()
            attended = step.attention.run(query, kv)
            end_of("attend")
            x = layer.output.apply(attended.view(len(attended), -1), self._linears)
            end_of("output")
            normalised = add_and_normalise(x, residual, layer.feed_forward_norm)
            end_of("norm")
            gate_up = layer.gate_up.apply(normalised, self._linears)
            gated = silu_and_mul(gate_up)
            end_of("gate_up")
            x = layer.down.apply(gated, self._linears)
            end_of("down")
        assert x is not None, "a decoder has layers"
        return torch.add(residual, x, out=out)

    def logits(
        self,
        last: torch.Tensor,
        wanted: torch.Tensor,
        hidden: HiddenStates | None,
        end_of: EndOf = not_timed,
    ) -> torch.Tensor:
        """Return float32 logits (wanted rows, vocab) of what the layers returned.

        Writes the last hidden states if they are wanted.
        """
        num_layers = len(self._layers)
        if hidden is not None and num_layers in hidden.layers:
            hidden.values[hidden.layers.index(num_layers)].copy_(self._normalised(last, hidden.indices))
        normalised = self._normalised(last, wanted)
        end_of("norm")
        logits = self._head.apply(normalised, self._linears).float()
        end_of("head")
        return logits

    def _normalised(self, last: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return add_and_normalise(None, last.index_select(0, rows), self._norm)


def _layer(loader: ModelLoader, layer: LayerSpec, linears: LayerLinears) -> Layer:
    ((gate_up, down),) = linears.feed_forward  # FEATURES lacks experts
    query, key = layer.query_norm, layer.key_norm
    return Layer(
        attention=layer.attention,
        input_norm=_norm(loader, layer.input_norm),
        qkv=loader.side_by_side(linears.qkv),
        head_norms=None if query is None or key is None else (_norm(loader, query), _norm(loader, key)),
        output=loader.linear(linears.output),
        feed_forward_norm=_norm(loader, layer.feed_forward_norm),
        gate_up=loader.side_by_side(gate_up),
        down=loader.linear(down),
    )


def _norm(loader: ModelLoader, norm: NormSpec) -> Norm:
    return Norm(loader.tensor(norm.weight), norm.eps)


def _rotation(rope: RopeSpec, num_positions: int, device: torch.device) -> Rotation:
    frequencies = rope_frequencies(rope)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * torch.from_numpy(frequencies.inv_freq).to(device)
    factor = frequencies.attention_factor
    return Rotation(angles.cos() * factor, angles.sin() * factor)
