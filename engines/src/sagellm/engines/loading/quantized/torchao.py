"""The checkpoint format `torchao`, as transformers saves it: tensor subclasses flattened into safetensors.

What a weight `m.weight` holds lies in tensors `m._weight_qdata`, `m._weight_scale` and so on, and the files'
metadata has its class and attributes as JSON. Source: the library torchao (0.18), its safetensors_support and
`quantize_/workflows`; MSLK's `int4_row_quantize_zp` and `pack_int4` for what fills an Int4Tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sagellm.core import ConfigError, UnsupportedModelError, WeightSource
from sagellm.core.protocols.weight_form import ActivationForm, CodeType, WeightForm
from sagellm.engines.config.bounded_json import parse_json
from sagellm.engines.config.shown import clipped, shown
from sagellm.engines.loading.quantized.format import QuantizedFormat, refuse_parts
from sagellm.engines.loading.quantized.row_weights import RowWeight, ScaleGrid, SignedInt4Weight
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import (
    SCALE_DTYPES,
    CodedWeight,
    StoredModule,
)
from sagellm.engines.loading.safetensors_header import read_metadata

_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_NOT_READ = (
    "act_quant_scale",
    "act_quant_zero_point",
    "act_pre_scale",
    "per_tensor_scale",
    "act_per_tensor_scale",
)
_READABLE = (
    "supported are Int8Tensor, IntxUnpackedToInt8Tensor of int4 and int8, Float8Tensor in E4M3 and "
    "Int4Tensor, with activations as they are, or dynamic and symmetric in INT8 or FP8"
)
_MAX_VALUES = 1000  # of the JSON of one tensor


@dataclass(frozen=True)
class _Described:
    """A weight's tensors, and what the metadata says of them: a class and its attributes."""

    module: StoredModule
    kind: str
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, module: StoredModule, entry: Any) -> _Described:
        """Return what an entry says. Raises CheckpointError for one that makes no sense."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("_data"), Mapping):
            raise module.error(f"has metadata {shown(entry)}; it must be an object with _type and _data")
        return cls(module, str(entry.get("_type")), entry["_data"])

    def nested(self, name: str) -> _Described | None:
        """Return an attribute that has a class, None if it is null."""
        value = self.attributes.get(name)
        return None if value is None else self.of(self.module, value)

    def named(self, name: str) -> str:
        """Return an attribute that is a text, a dtype or a member of an enumeration; empty if it is null."""
        value = self.attributes.get(name)
        return str(value["_data"] if isinstance(value, Mapping) and "_data" in value else value or "")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale. Raises CheckpointError unless they divide."""
        sizes: Any = self.attributes.get("block_size")
        is_block = isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int for size in sizes)
        if not is_block or any(size < 1 or whole % size for size, whole in zip(sizes, shape, strict=True)):
            raise self.module.error(f"has block_size {shown(sizes)}, which does not divide {list(shape)}")
        return sizes[0], sizes[1]

    def refusal(self, what: str) -> UnsupportedModelError:
        """Return the error for a valid tensor that is not read."""
        return UnsupportedModelError(
            f"the torchao weight {shown(self.module.weight)} is stored as {clipped(self.kind)} with "
            f"{clipped(what)}, which is not read; {_READABLE}"
        )


class TorchAOFormat(QuantizedFormat):
    """Weights in torchao's INT8, INT4 and FP8 tensors; from safetensors, never its pickles."""

    methods = frozenset({"torchao"})
    parts: ClassVar[frozenset[str]] = frozenset(
        {_QDATA, _SCALE, _ZERO} | {f"_weight_{name}" for name in _NOT_READ}
    )

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Read each weight by its class in the metadata."""
        metadata: dict[Path, Mapping[str, str]] = {}
        coded = {}
        for module in self.modules(settings, files):
            path = next(iter(module.parts.values())).path
            if path not in metadata:
                metadata[path] = read_metadata(path)
            described = _Described.of(module, _entry(module, metadata[path]))
            coded[module.weight] = (_packed if described.kind == "Int4Tensor" else _rows)(described)
        return coded


def _entry(module: StoredModule, metadata: Mapping[str, str]) -> Any:
    text = metadata.get(module.weight, "null").encode()
    try:
        return parse_json(text, max_values=_MAX_VALUES, has_unique_names=True)
    except ConfigError as error:
        raise module.error(f"has damaged metadata: {error}") from error


def _rows(described: _Described) -> CodedWeight:
    """Read a tensor of a byte each: Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor."""
    module = described.module
    code = _CODES.get((described.kind, described.named("target_dtype")))
    if code is None:
        raise described.refusal(f"numbers of {described.named('target_dtype') or 'another layout'}")
    if inputs := described.named("activation_quantization"):
        raise described.refusal(f"activations in {inputs}")
    activations = _activations(described)
    is_float = code is CodeType.FP8_E4M3
    num_outputs, num_inputs = shape = _shape(module, "F8_E4M3" if is_float else "I8")
    per_row, size = described.block(shape)
    size = 0 if size == num_inputs else size
    grid = (num_outputs // per_row, num_inputs // size if size else 1)
    module.check(_SCALE, SCALE_DTYPES, grid)
    refuse_parts(module, frozenset({_QDATA, _SCALE} if is_float else {_QDATA, _SCALE, _ZERO}))
    if _ZERO in module.parts:
        module.check(_ZERO, ("I8",), grid)
    has_zeros = _ZERO in module.parts and bool(module.get(_ZERO).any())
    if code is CodeType.INT4 and num_inputs % 2:
        raise module.error(f"has {num_inputs} inputs; codes of 4 bits must fill bytes")
    return RowWeight(
        module=module,
        shape=shape,
        form=WeightForm(code=code, group_size=size, has_zeros=has_zeros, activations=activations),
        grid=ScaleGrid(per_row),
        column_unit=2 if code is CodeType.INT4 else 1,
        values=_QDATA,
        scale=_SCALE,
        zero_point=_ZERO if has_zeros else None,
    )


def _activations(described: _Described) -> ActivationForm | None:
    """Return what activations are rounded to, always token by token."""
    how = described.nested("act_quant_kwargs")
    if how is None:
        return None
    is_float = described.kind == "Float8Tensor"
    ranged = [name for name in ("reduce_range", "hp_value_lb", "hp_value_ub") if how.attributes.get(name)]
    number = how.named("float8_dtype" if is_float else "mapping_type")
    granularity = how.nested("granularity")
    shared = granularity.kind if granularity else "no granularity"
    if ranged or number not in ("float8_e4m3fn", "SYMMETRIC") or shared not in ("PerRow", "PerTensor"):
        raise described.refusal(f"activations of {', '.join([number, shared, *ranged])}")
    return ActivationForm(code=CodeType.FP8_E4M3 if is_float else CodeType.INT8)


def _packed(described: _Described) -> CodedWeight:
    """Read an Int4Tensor: number · scale + zero point, both (groups, out)."""
    module = described.module
    refuse_parts(module, frozenset({_QDATA, _SCALE, _ZERO}))
    number = described.named("activation_dtype")
    if number not in ("", "bfloat16", "float8_e4m3fn"):
        raise described.refusal(f"activations of {number}")
    num_outputs, num_bytes = _shape(module, "I8", "U8")
    shape = num_outputs, num_bytes * 2
    per_row, size = described.block(shape)
    if per_row != 1:
        raise described.refusal(f"a scale for {per_row} outputs")
    for part in (_SCALE, _ZERO):
        module.check(part, SCALE_DTYPES, (shape[1] // size, num_outputs))
    form = WeightForm(
        code=CodeType.INT4,
        group_size=size,
        has_offsets=bool(module.get_floats(_ZERO).any()),
        activations=ActivationForm(code=CodeType.FP8_E4M3) if number == "float8_e4m3fn" else None,
    )
    return SignedInt4Weight(
        module=module, shape=shape, form=form, column_unit=2, values=_QDATA, scale=_SCALE, zero_point=_ZERO
    )


def _shape(module: StoredModule, *dtypes: str) -> tuple[int, int]:
    shape = module.need(_QDATA, dtypes).shape
    if len(shape) != 2 or not all(shape):
        raise module.error(f"has the shape {list(shape)}; only linears with (out, in) are read")
    return shape[0], shape[1]


_CODES = {
    ("Int8Tensor", ""): CodeType.INT8,
    ("IntxUnpackedToInt8Tensor", "int4"): CodeType.INT4,
    ("IntxUnpackedToInt8Tensor", "int8"): CodeType.INT8,
    ("Float8Tensor", ""): CodeType.FP8_E4M3,
}
