"""A decoder as a table of sizes and addresses that the library walks through."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import finalize

import torch

from sagellm.accel.int8 import IntegerQuantizer
from sagellm.accel.native import structures
from sagellm.accel.native.library import NativeLibrary
from sagellm.accel.native.rope import RopeTable
from sagellm.accel.native.weights import (
    Matrix,
    WeightKind,
    WeightPacker,
    aligned,
    bytes_of,
    kind_of,
    quantized_matrix,
)
from sagellm.core import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    ModelGeometry,
    ModelMetrics,
    NormSpec,
    RopeSpec,
    WeightSource,
    get_logger,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class LayerMatrices:
    """The products of one layer."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix


class NativeModel:
    """Packs the weights of a decoder and holds the library's handle of it."""

    def __init__(
        self,
        library: NativeLibrary,
        decoder: DecoderSpec,
        geometry: ModelGeometry,
        weights: WeightSource,
        dtype: torch.dtype,
        quantizer: IntegerQuantizer | None,
    ) -> None:
        self._functions = library.functions
        self._kind, self._quantizer = kind_of(dtype), quantizer
        self._num_positions = geometry.max_model_len
        matrices = [self._matrices(layer) for layer in decoder.layers]
        packer = WeightPacker(library, weights, 0)
        head = self._own_head(decoder, packer, is_tied=geometry.tie_word_embeddings)
        has_table = head is not None
        head_matrix = self._head_matrix(decoder, head)
        self._packer = WeightPacker(
            library, weights, self._num_bytes(matrices, head_matrix, decoder, has_table)
        )
        self._ropes: list[tuple[RopeSpec, RopeTable]] = []
        layers = (structures.Layer * len(matrices))()
        first = decoder.layers[0].attention
        table = structures.Model(
            num_layers=len(matrices),
            hidden=decoder.embedding.shape[1],
            vocab=head_matrix.num_outputs,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            layers=ctypes.addressof(layers),
            head=self._packer.linear(head_matrix, quantizer),
            embedding=self._packer.rows(decoder.embedding, self._kind) if has_table else None,
            embedding_kind=0 if self._kind is WeightKind.BF16 else 2,
            norm=self._norm(decoder.norm),
        )
        for index, layer in enumerate(decoder.layers):
            layers[index] = self._layer(layer, matrices[index])
        self.handle = self._functions.sage_create(ctypes.byref(table))
        finalize(self, self._functions.sage_destroy, self.handle)
        self.metrics = ModelMetrics(
            num_parameters=self._packer.num_parameters, weight_bytes=self._packer.num_bytes
        )
        self._memory = self._packer.memory
        del self._packer  # and with it the weight source

    def cover(self, num_positions: int) -> None:
        """Prepare the rotation of positions below `num_positions`."""
        for _, table in self._ropes:
            table.cover(num_positions)

    def _matrices(self, layer: LayerSpec) -> LayerMatrices:
        forward = layer.feed_forward
        assert not isinstance(forward, ExpertsSpec), "the features lack experts"
        assert forward.gate is not None, "the features lack ungated"
        return LayerMatrices(
            qkv=self._matrix(layer.query, layer.key, layer.value),
            output=self._matrix(layer.output),
            gate_up=quantized_matrix((forward.gate, forward.up), self._kind, self._quantizer, is_gated=True),
            down=self._matrix(forward.down),
        )

    def _matrix(self, *parts: LinearSpec) -> Matrix:
        return quantized_matrix(parts, self._kind, self._quantizer)

    def _own_head(self, decoder: DecoderSpec, packer: WeightPacker, *, is_tied: bool) -> LinearSpec | None:
        """Return the head, or None if it is the embedding; as transformers, a different one is used."""
        head = decoder.head
        if head is None or (is_tied and packer.are_equal(head.weight, decoder.embedding)):
            return None
        if is_tied:
            logger.warning(
                "tie_word_embeddings is true in config.json, but the checkpoint has a %s that differs from "
                "the embedding: it is used, as transformers does",
                head.weight.name,
            )
        return head

    def _head_matrix(self, decoder: DecoderSpec, head: LinearSpec | None) -> Matrix:
        """Return the head: int8 with any quantizer, as it is the largest matrix of a small model."""
        parts = (LinearSpec(decoder.embedding) if head is None else head,)
        return Matrix(parts=parts, kind=self._kind if self._quantizer is None else WeightKind.INT8)

    def _num_bytes(
        self,
        matrices: list[LayerMatrices],
        head: Matrix,
        decoder: DecoderSpec,
        has_table: bool,  # noqa: FBT001
    ) -> int:
        each = [head, *(one for layer in matrices for one in vars(layer).values())]
        num_bytes = sum(aligned(bytes_of(self._functions, matrix)) for matrix in each)
        rows, width = decoder.embedding.shape
        item_bytes = 2 if self._kind is WeightKind.BF16 else 4
        return num_bytes + (aligned(rows * width * item_bytes) if has_table else 0)

    def _layer(self, layer: LayerSpec, matrices: LayerMatrices) -> structures.Layer:
        packer, quantizer = self._packer, self._quantizer
        cos, sin = self._rope(layer.rope).addresses
        return structures.Layer(
            input_norm=self._norm(layer.input_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            forward_norm=self._norm(layer.feed_forward_norm),
            qkv=packer.linear(matrices.qkv, quantizer),
            output=packer.linear(matrices.output, quantizer),
            gate_up=packer.linear(matrices.gate_up, quantizer),
            down=packer.linear(matrices.down, quantizer),
            cos=cos,
            sin=sin,
            rotary_dim=layer.rope.rotary_dim,
            window=layer.attention.sliding_window or 0,
            scale=layer.attention.scale,
            soft_cap=layer.attention.soft_cap or 0.0,
        )

    def _norm(self, norm: NormSpec | None) -> structures.Norm:
        if norm is None:
            return structures.Norm()
        return structures.Norm(weight=self._packer.floats(norm.weight), eps=norm.eps)

    def _rope(self, rope: RopeSpec) -> RopeTable:
        """Return the table of a rotation; layers that rotate alike share it."""
        for known, table in self._ropes:
            if known == rope:
                return table
        table = RopeTable(rope, self._num_positions)
        self._ropes.append((rope, table))
        return table
