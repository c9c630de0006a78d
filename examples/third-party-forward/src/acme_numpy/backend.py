"""The forward pass of a decoder over paged KV in numpy, from its spec and its weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import (
    WHOLE,
    BlockId,
    FeedForwardSpec,
    ForwardBackendProtocol,
    ForwardMetrics,
    InputBatch,
    KVLayout,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
    Shard,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)

Floats = npt.NDArray[np.float32]


class NumpyForwardBackend(ForwardBackendProtocol):
    """Computes in float32. Weights that are stored so stay in the file's pages; others are widened once."""

    features = frozenset({"bias", "qk_norm"})

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantizer: object = None,
        shard: Shard = WHOLE,
        **_: Any,  # the attention backend, which works on torch's tensors
    ) -> None:
        if spec.decoder is None or quantizer is not None or shard != WHOLE:
            raise UnsupportedModelError("numpy runs whole decoders without a quantizer")
        if device.type != "cpu" or dtype != torch.float32:
            raise UnsupportedModelError(f"numpy runs float32 on a cpu, not {dtype} on {device}")
        self._decoder = spec.decoder
        self._weights = {name: _read(weights, tensor) for name, tensor in spec.tensors.items()}
        self._metrics = ForwardMetrics()

    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Allocate (block, layer, 2, kv_head, token, dim)."""
        (layout,), (number,) = layouts, num_blocks
        group = layout.group
        self._block_size = layout.block_size
        shape = (number, group.num_layers, 2, group.num_kv_heads, layout.block_size, group.head_dim)
        self._kv = np.zeros(shape, np.float32)

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks one after another."""
        for source, target in pairs:
            self._kv[target] = self._kv[source]

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return float32 logits (rows, vocab) of the wanted tokens."""
        decoder = self._decoder
        embedding = self._weights[decoder.embedding.name]
        hidden = embedding[batch.input_ids.numpy()]  # (tokens, hidden)
        for index, layer in enumerate(decoder.layers):
            hidden = hidden + self._attend(index, layer, self._norm(hidden, layer.input_norm), batch)
            hidden = hidden + self._feed(layer, self._norm(hidden, layer.feed_forward_norm))
        rows = self._norm(hidden[batch.logits_indices.numpy()], decoder.norm)
        self._metrics.num_steps += 1
        self._metrics.num_tokens += len(hidden)
        head = embedding if decoder.head is None else self._weights[decoder.head.weight.name]
        return torch.from_numpy(rows @ head.T)

    def metrics(self) -> ForwardMetrics:
        """Return the counts so far."""
        return self._metrics

    def _attend(self, index: int, layer: LayerSpec, x: Floats, batch: InputBatch) -> Floats:
        sizes, positions = layer.attention, batch.position_ids.numpy()
        query, key, value = (
            self._linear(x, linear).reshape(len(x), -1, sizes.head_dim)  # (tokens, heads, dim)
            for linear in (layer.query, layer.key, layer.value)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        query, key = (_rotate(heads, positions, layer.rope.theta) for heads in (query, key))
        blocks, offsets = np.divmod(batch.slot_mapping.numpy(), self._block_size)
        self._kv[blocks, index, 0, :, offsets] = key
        self._kv[blocks, index, 1, :, offsets] = value
        out = np.empty_like(query)
        begin = 0
        for table, num_new, length in zip(
            batch.block_tables.numpy(), batch.query_lens, batch.seq_lens, strict=True
        ):
            used = self._kv[table[: -(-length // self._block_size)], index]  # (blocks, 2, heads, block, dim)
            keys, values = np.moveaxis(used, 0, 2).reshape(2, sizes.num_kv_heads, -1, sizes.head_dim)
            end = begin + num_new
            seen = np.arange(length) <= positions[begin:end, None]
            for head in range(sizes.num_heads):
                kv_head = head * sizes.num_kv_heads // sizes.num_heads
                scores = query[begin:end, head] @ keys[kv_head, :length].T * np.float32(sizes.scale)
                scores = np.where(seen, scores, np.float32(-np.inf))
                scores = np.exp(scores - scores.max(-1, keepdims=True))
                out[begin:end, head] = scores / scores.sum(-1, keepdims=True) @ values[kv_head, :length]
            begin = end
        return self._linear(out.reshape(len(x), -1), layer.output)

    def _feed(self, layer: LayerSpec, x: Floats) -> Floats:
        forward = layer.feed_forward
        assert isinstance(forward, FeedForwardSpec), "`features` has no experts"
        assert forward.gate is not None, "`features` has no ungated layers"
        gate = self._linear(x, forward.gate)
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, forward.up), forward.down)

    def _linear(self, x: Floats, linear: LinearSpec) -> Floats:
        product = x @ self._weights[linear.weight.name].T
        return product if linear.bias is None else product + self._weights[linear.bias.name]

    def _norm(self, x: Floats, norm: NormSpec) -> Floats:
        mean = np.square(x).mean(-1, keepdims=True)
        scaled: Floats = x / np.sqrt(mean + np.float32(norm.eps)) * self._weights[norm.weight.name]
        return scaled


def _read(weights: WeightSource, tensor: TensorSpec) -> Floats:
    stored = weights.get(tensor)
    if weights.tensors[tensor.name].dtype == "BF16":  # the upper half of a float32
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _rotate(heads: Floats, positions: npt.NDArray[np.int64], theta: float) -> Floats:
    """Rotate the pairs (i, i + dim / 2) of (tokens, heads, dim)."""
    half = heads.shape[-1] // 2
    frequencies = (theta ** (-np.arange(half) / half)).astype(np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float32)[:, None]  # (tokens, 1, dim / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
