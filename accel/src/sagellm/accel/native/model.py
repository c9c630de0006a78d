"""A decoder as a table of sizes and addresses that the library walks through."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import finalize

from sagellm.accel.fusion import NORM_LINEAR, ROPE_STORE
from sagellm.accel.lowering import lower
from sagellm.accel.native import structures
from sagellm.accel.native.library import NativeLibrary
from sagellm.accel.native.packed_cache import PackedCache, key_of
from sagellm.accel.native.rope import RopeTable
from sagellm.accel.native.weights import (
    Matrix,
    WeightKind,
    WeightPacker,
    aligned,
    bytes_of,
    is_used_as_stored,
    kind_of,
    matrix_of,
    plain_matrix,
)
from sagellm.accel.operations import add_up
from sagellm.core import (
    DecoderSpec,
    LayerSpec,
    ModelMetrics,
    ModelSpec,
    NormSpec,
    QuantizerProtocol,
    RopeSpec,
    TensorSpec,
    WeightSource,
)
from sagellm.core.protocols.forward import Operation
from sagellm.core.protocols.model_spec import FusedLinear, LayerLinears, LinearPart

_PRODUCTS = {WeightKind.BF16: "bfloat16", WeightKind.F32: "float32"}
"""The number format of products; those of integers, of 4 bits too, are in int8."""


@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """The matrices of a layer; query, key and value are one or several, and so are gate and up."""

    qkv: tuple[Matrix, ...]
    output: Matrix
    gate_up: tuple[Matrix, ...]
    down: Matrix

    @property
    def by_operation(self) -> Iterator[tuple[Operation, Matrix]]:
        """Yield all of them, each after the operation that multiplies by it."""
        yield from (("qkv", each) for each in self.qkv)
        yield "output", self.output
        yield from (("gate_up", each) for each in self.gate_up)
        yield "down", self.down


class NativeModel:
    """Packs the weights of a decoder and holds the library's handle of it."""

    def __init__(  # noqa: PLR0913
        self,
        library: NativeLibrary,
        spec: ModelSpec,
        weights: WeightSource,
        dtype: str,
        quantizer: QuantizerProtocol | None,
        fusions: Collection[str],
        packed_folder: str | None = None,
    ) -> None:
        decoder = spec.decoder
        assert decoder is not None, "the features lack classes of transformers"
        self._functions = library.functions
        self._kind, self._quantizer = kind_of(dtype), quantizer
        self._num_positions = spec.geometry.max_model_len
        self._weights = weights
        linears = lower(spec, weights, fusions)
        layers_of = [self._matrices(layer) for layer in linears.layers]
        # int8 with any quantizer, as the head is the largest matrix of a small model.
        head = self._head(linears.head, is_tied=linears.is_tied).with_bits(8)
        codes = None if linears.is_tied else self._coded_embedding(decoder.embedding)
        linears_of: list[tuple[Operation, Matrix]] = [("head", head)]
        linears_of += [each for layer in layers_of for each in layer.by_operation]
        every = [*(matrix for _, matrix in linears_of), *([codes] if codes else [])]
        num_bytes = sum(aligned(bytes_of(self._functions, each)) for each in every)
        has_rows = not linears.is_tied and codes is None
        if has_rows and not is_used_as_stored(weights, decoder.embedding, self._kind):
            rows, width = decoder.embedding.shape
            num_bytes += aligned(rows * width * (2 if self._kind is WeightKind.BF16 else 4))
        cache = None if packed_folder is None else self._cache(packed_folder, library, every, decoder)
        packed = None if cache is None else cache.read(num_bytes)
        self._packer = packer = WeightPacker(library, weights, num_bytes, packed)
        self._ropes: list[tuple[RopeSpec, RopeTable]] = []
        layers = (structures.Layer * len(layers_of))()
        first = decoder.layers[0].attention
        table = structures.Model(
            num_layers=len(layers_of),
            hidden=decoder.embedding.shape[1],
            vocab=head.linear.shape[0],
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            layers=ctypes.addressof(layers),
            head=packer.linear(head, quantizer),
            embedding=packer.rows(decoder.embedding, self._kind) if has_rows else None,
            embedding_kind=0 if self._kind is WeightKind.BF16 else 2,
            norm=self._norm(decoder.norm),
            has_separate_norms=NORM_LINEAR not in fusions,
            has_separate_stores=ROPE_STORE not in fusions,
        )
        if codes is not None:
            table.embedding_codes = packer.linear(codes, None)
        for index, layer in enumerate(decoder.layers):
            layers[index] = self._layer(layer, layers_of[index])
        self.handle = self._functions.sage_create(ctypes.byref(table))
        finalize(self, self._functions.sage_destroy, self.handle)
        self.metrics = ModelMetrics(
            num_parameters=self._packer.num_parameters,
            weight_bytes=self._packer.num_bytes,
            operations=add_up(
                (operation, bytes_of(self._functions, matrix), _PRODUCTS.get(matrix.kind, "int8"))
                for operation, matrix in linears_of
            ),
        )
        self._memory = self._packer.memory
        if cache is not None and packed is None:
            cache.write(self._memory[0])
        del self._packer, self._weights

    def _cache(
        self, folder: str, library: NativeLibrary, matrices: Iterable[Matrix], decoder: DecoderSpec
    ) -> PackedCache | None:
        """Return the place of this model's packed weights; None if they come from no files."""
        form = [
            (bytes(each.described()), each.form, each.stored, part.weight.name, part.bias, part.outputs)
            for each in matrices
            for part in each.linear.parts
        ]
        stored = self._weights.tensors
        tensors = {tensor.name: stored[tensor.name] for tensor in decoder.tensors if tensor.name in stored}
        key = key_of(library.file, [self._kind, *form], tensors)
        return None if key is None else PackedCache(folder, key)

    def cover(self, num_positions: int) -> None:
        """Prepare the rotation of positions below `num_positions`."""
        for _, table in self._ropes:
            table.cover(num_positions)

    def _matrices(self, layer: LayerLinears) -> LayerMatrices:
        ((gate_up, down),) = layer.feed_forward  # the features lack experts
        return LayerMatrices(
            qkv=tuple(map(self._matrix, layer.qkv)),
            output=self._matrix(layer.output),
            gate_up=tuple(self._matrix(each, is_gated=len(gate_up) == 1) for each in gate_up),
            down=self._matrix(down),
        )

    def _matrix(self, linear: FusedLinear, *, is_gated: bool = False) -> Matrix:
        return matrix_of(linear, self._kind, self._quantizer, self._weights, is_gated=is_gated)

    def _head(self, linear: FusedLinear, *, is_tied: bool) -> Matrix:
        """Describe the head. If it is the embedding too, its rows have their inputs in order."""
        has_order = linear.parts[0].order is not None
        return plain_matrix(linear, self._kind) if is_tied and has_order else self._matrix(linear)

    def _coded_embedding(self, embedding: TensorSpec) -> Matrix | None:
        """Return the matrix of an embedding whose rows stay codes until they are read, if it has codes."""
        stored = self._weights.tensors[embedding.name]
        if stored.form is None or stored.form.has_order:
            return None
        part = LinearPart(embedding, None, slice(0, embedding.shape[0]), stored)
        return self._matrix(FusedLinear((part,)))

    def _layer(self, layer: LayerSpec, matrices: LayerMatrices) -> structures.Layer:
        pack = partial(self._packer.linear, quantizer=self._quantizer)
        gate_up, *up = map(pack, matrices.gate_up)
        cos, sin = self._rope(layer.rope).addresses
        return structures.Layer(
            input_norm=self._norm(layer.input_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            forward_norm=self._norm(layer.feed_forward_norm),
            qkv=(structures.Linear * 3)(*map(pack, matrices.qkv)),
            output=pack(matrices.output),
            gate_up=gate_up,
            up=up[0] if up else structures.Linear(),
            down=pack(matrices.down),
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
