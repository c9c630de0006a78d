"""The checkpoint format `compressed-tensors`, which llm-compressor writes.

Source: the library compressed-tensors (0.20), its `CompressionFormat` and compressors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from sagellm.core import CheckpointError, WeightSource
from sagellm.core.protocols.weight_form import ActivationForm, CodeType, WeightForm
from sagellm.engines.config.shown import clipped, shown
from sagellm.engines.loading.quantized.format import QuantizedFormat, refuse_parts
from sagellm.engines.loading.quantized.row_weights import (
    MXFP4,
    MXFP4_GROUP,
    MicroscaledWeight,
    PackedWeight,
    RowWeight,
    grid_of,
    static_scale,
)
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import (
    SCALE_DTYPES,
    CodedWeight,
    StoredModule,
    act_order,
    check_groups,
)

_READABLE = (
    "read are pack-quantized and int-quantized integers of 4 and 8 bits, float-quantized FP8 and "
    "mxfp4-pack-quantized, with INT8 or FP8 activations or without"
)
_MAX_PATTERN = 500
_CLASS = "Linear"
_LINEAR_TARGETS = (_CLASS, "LinearBase")


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """What a scheme says about weights or activations."""

    settings: QuantizationSettings
    bits: int
    type: str  # int or float
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    is_dynamic: bool

    @classmethod
    def read(cls, settings: QuantizationSettings) -> _Numbers:
        """Read the entries of a scheme. Raises CheckpointError."""
        group_size = settings.integer("group_size", default=0)
        default = "group" if group_size > 0 else "channel" if group_size else "tensor"
        block = settings.get("block_structure")
        if isinstance(block, str):
            block = [int(each) if each.isdecimal() else 0 for each in block.split("x")]
        if block is not None and not _is_block(block):
            raise settings.error("block_structure", block, "two sizes")
        dynamic = settings.get("dynamic", default=False)
        if dynamic not in (True, False):
            raise settings.refusal(f"dynamic={clipped(str(dynamic))}", _READABLE)
        return cls(
            settings=settings,
            bits=settings.integer("num_bits", default=8),
            type=settings.text("type", default="int"),
            is_symmetric=settings.flag("symmetric", default=True),
            strategy=settings.text("strategy", default=default),
            group_size=max(0, group_size),
            block=tuple(block) if block else None,
            is_dynamic=dynamic,
        )

    def refusal(self) -> Exception:
        """Return the error for a combination that is not read."""
        symmetry = "symmetric" if self.is_symmetric else "asymmetric"
        return self.settings.refusal(
            f"{symmetry} {clipped(self.type)} of {self.bits} bits by {clipped(self.strategy)} "
            f"({self.settings.where})",
            _READABLE,
        )


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """One of the config's groups: which linears it is for, and how they are stored."""

    targets: tuple[str, ...]
    format: str
    weights: _Numbers
    activations: _Numbers | None


class CompressedTensorsFormat(QuantizedFormat):
    """Weights in the formats pack-quantized, int-quantized, float-quantized and mxfp4-pack-quantized."""

    methods = frozenset({"compressed-tensors"})
    parts: ClassVar[frozenset[str]] = frozenset(
        {
            *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
            *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
            *("output_scale", "output_zero_point", "compressed", "bitmask"),
        }
    )

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Give each module that has parts the scheme whose targets fit it best."""
        _refuse_extras(settings)
        settings = settings.nested("quantization_config") or settings  # as older versions wrote it
        schemes = list(_schemes(settings))
        ignored = settings.names("ignore")
        coded = {}
        for module in self.modules(settings, files):
            scheme = _scheme_of(module, schemes, settings)
            if any(_matches(module.name, each) for each in ignored):
                raise module.error(f"has scales, but {settings.path} ignores it when quantizing")
            coded[module.weight] = _READERS[scheme.format](module, scheme)
        return coded


def _refuse_extras(settings: QuantizationSettings) -> None:
    if settings.get("kv_cache_scheme") is not None:
        raise settings.refusal(
            "a kv_cache_scheme", "export the checkpoint without one; --kv-dtype chooses the format of KV here"
        )
    sparsity = settings.nested("sparsity_config")
    if sparsity is not None and (form := sparsity.text("format", default="dense")) != "dense":
        raise settings.refusal(f"sparsity ({clipped(form)})", _READABLE)
    transforms = settings.nested("transform_config")
    if transforms is not None and transforms.get("config_groups"):
        raise settings.refusal("transforms of weights (transform_config)", _READABLE)


def _schemes(settings: QuantizationSettings) -> Iterator[_Scheme]:
    groups = settings.nested("config_groups")
    if groups is None or not groups.entries:
        raise CheckpointError(f"{settings.path}: quantization_config has no config_groups")
    common = settings.text("format", default="unnamed")
    for name in groups.entries:
        group = groups.nested(name)
        weights = group and group.nested("weights")
        if group is None or weights is None:
            raise settings.refusal(f"{clipped(name)}, which does not quantize weights", _READABLE)
        if group.get("output_activations") is not None:
            raise settings.refusal("output_activations", _READABLE)
        form = group.text("format", default=common)
        numbers = _Numbers.read(weights)
        if form == "naive-quantized":
            form = "int-quantized" if numbers.type == "int" else "float-quantized"
        if form not in _READERS:
            raise settings.refusal(f"the format {clipped(form)}", _READABLE)
        inputs = group.nested("input_activations")
        yield _Scheme(
            targets=group.names("targets"),
            format=form,
            weights=numbers,
            activations=None if inputs is None else _Numbers.read(inputs),
        )


def _scheme_of(module: StoredModule, schemes: list[_Scheme], settings: QuantizationSettings) -> _Scheme:
    """Return the scheme by the library's order: by the name itself, by a pattern, by the class."""
    targets = [(target, scheme) for scheme in schemes for target in scheme.targets]
    targets.sort(key=lambda each: (each[0] in _LINEAR_TARGETS, "re:" in each[0], each[0]))
    for target, scheme in targets:
        if target in _LINEAR_TARGETS or _matches(module.name, target):
            return scheme
    names = ", ".join(clipped(target) for target, _ in targets)
    raise module.error(f"has scales, but no target in {settings.path} names it: {clipped(names)}")


def _matches(name: str, target: str) -> bool:
    """Say whether a target, a name or a pattern after `re:`, is for a module."""
    if not target.startswith("re:"):
        return target == name
    pattern = target.removeprefix("re:")
    try:
        if len(pattern) > _MAX_PATTERN:
            raise re.error("it is too long")
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"config.json: the target {shown(target)} is not a pattern: {error}") from error


def _packed(module: StoredModule, scheme: _Scheme) -> CodedWeight:
    numbers = scheme.weights
    codes = {4: CodeType.INT4, 8: CodeType.INT8}.get(numbers.bits)
    if numbers.type != "int" or codes is None or numbers.strategy not in ("group", "channel", "tensor"):
        raise numbers.refusal()
    refuse_parts(
        module,
        frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})
        | _input_parts(scheme),
    )
    num_outputs, num_inputs = shape = _packed_shape(module, numbers.bits)
    size = numbers.group_size if numbers.strategy == "group" else 0
    check_groups(module, num_inputs, size)
    num_groups = num_inputs // size if size else 1
    has_one_scale = math.prod(module.need("weight_scale", SCALE_DTYPES).shape) == 1
    if not (has_one_scale and numbers.strategy == "tensor"):
        has_one_scale = False
        module.check("weight_scale", SCALE_DTYPES, (num_outputs, num_groups))
    if not numbers.is_symmetric:
        words = math.ceil(num_outputs * numbers.bits / 32)
        module.check("weight_zero_point", ("I32",), (words, num_groups))
    has_order = False
    if "weight_g_idx" in module.parts:
        module.check("weight_g_idx", ("I32", "I64"), (num_inputs,))
        is_unset = bool((module.get("weight_g_idx") == -1).all())
        has_order = not is_unset and act_order(module, "weight_g_idx", num_inputs, size)
    form = WeightForm(
        code=codes,
        group_size=size,
        has_zeros=not numbers.is_symmetric,
        has_order=has_order,
        activations=_activations(module, scheme, num_inputs),
    )
    return PackedWeight(
        module=module,
        shape=shape,
        form=form,
        column_unit=2 if codes is CodeType.INT4 else 1,
        group_index="weight_g_idx" if has_order else None,
        has_one_scale=has_one_scale,
    )


def _packed_shape(module: StoredModule, bits: int) -> tuple[int, int]:
    """Return the shape that is stored beside a packed weight, if it is one of this many codes."""
    packed = module.need("weight_packed", ("I32",)).shape
    module.check("weight_shape", ("I64", "I32"), (2,))
    num_outputs, num_inputs = (int(size) for size in module.get("weight_shape"))
    if len(packed) != 2 or packed != (num_outputs, math.ceil(num_inputs * bits / 32)) or num_inputs < 1:
        raise module.error(
            f"has weight_packed of shape {list(packed)}, which does not hold {bits} bits of "
            f"[{num_outputs}, {num_inputs}] (weight_shape)"
        )
    if num_inputs * bits % 8:
        raise module.error(f"has {num_inputs} inputs; they must fill bytes")
    return num_outputs, num_inputs


def _rows(module: StoredModule, scheme: _Scheme) -> CodedWeight:
    numbers = scheme.weights
    is_int = scheme.format == "int-quantized"
    codes = {(4, True): CodeType.INT4, (8, True): CodeType.INT8, (8, False): CodeType.FP8_E4M3}.get(
        (numbers.bits, is_int)
    )
    is_known = numbers.strategy in ("tensor", "channel", "group", "block")
    if codes is None or not is_known or is_int != (numbers.type == "int"):
        raise numbers.refusal()
    if not is_int and not numbers.is_symmetric:
        raise numbers.refusal()
    refuse_parts(module, frozenset({"weight", "weight_scale", "weight_zero_point"}) | _input_parts(scheme))
    shape = module.need("weight", ("I8",) if is_int else ("F8_E4M3",)).shape
    if len(shape) != 2:
        raise module.error(f"has the shape {list(shape)}; only linears with (out, in) are read")
    num_outputs, num_inputs = shape
    block = numbers.block if numbers.strategy == "block" else None
    size = numbers.group_size if numbers.strategy == "group" else 0
    size = math.gcd(block[1], num_inputs) if block else size
    check_groups(module, num_inputs, size)
    if codes is CodeType.INT4 and num_inputs % 2:
        raise module.error(f"has {num_inputs} inputs; codes of 4 bits must fill bytes")
    form = WeightForm(
        code=codes,
        group_size=size,
        has_zeros=not numbers.is_symmetric,
        activations=_activations(module, scheme, num_inputs),
    )
    grid = grid_of(module, "weight_scale", (num_outputs, num_inputs), form, block)
    has_zeros = form.has_zeros or "weight_zero_point" in module.parts
    if has_zeros:
        # Older versions of the library store zeros of symmetric weights too.
        dtypes = ("I8",) if is_int else ("F8_E4M3", "I8")
        module.check("weight_zero_point", dtypes, module.parts["weight_scale"].shape)
    return RowWeight(
        module=module,
        shape=(num_outputs, num_inputs),
        form=form,
        grid=grid,
        column_unit=2 if codes is CodeType.INT4 else 1,
        zero_point="weight_zero_point" if has_zeros else None,
    )


def _microscaled(module: StoredModule, scheme: _Scheme) -> CodedWeight:
    numbers = scheme.weights
    is_known = (numbers.type, numbers.bits, numbers.strategy) == ("float", 4, "group")
    if not is_known or numbers.group_size != MXFP4_GROUP or not numbers.is_symmetric:
        raise numbers.refusal()
    refuse_parts(module, frozenset({"weight_packed", "weight_scale"}) | _input_parts(scheme))
    packed = module.need("weight_packed", ("U8",)).shape
    if len(packed) != 2:
        raise module.error(f"has weight_packed of shape {list(packed)}; only linears are read")
    num_outputs, num_inputs = packed[0], packed[1] * 2
    check_groups(module, num_inputs, MXFP4_GROUP)
    module.check("weight_scale", ("U8",), (num_outputs, num_inputs // MXFP4_GROUP))
    activations = _activations(module, scheme, num_inputs)
    form = WeightForm(code=MXFP4.code, group_size=MXFP4_GROUP, activations=activations)
    return MicroscaledWeight(
        module=module,
        shape=(num_outputs, num_inputs),
        form=form,
        column_unit=2,
        values="weight_packed",
        scale="weight_scale",
    )


_READERS: dict[str, Callable[[StoredModule, _Scheme], CodedWeight]] = {
    "pack-quantized": _packed,
    "int-quantized": _rows,
    "float-quantized": _rows,
    "mxfp4-pack-quantized": _microscaled,
}


def _input_parts(scheme: _Scheme) -> frozenset[str]:
    """Return the parts that static activations have."""
    is_static = scheme.activations is not None and not scheme.activations.is_dynamic
    return frozenset({"input_scale", "input_zero_point"} if is_static else ())


def _activations(module: StoredModule, scheme: _Scheme, num_inputs: int) -> ActivationForm | None:
    """Return what activations are rounded to, None if they stay as they are.

    Dynamic ones by tensor are rounded token by token, as engines do: a request's output must not depend on
    the others beside it.
    """
    numbers = scheme.activations
    if numbers is None:
        return None
    code = {("int", 8): CodeType.INT8, ("float", 8): CodeType.FP8_E4M3}.get((numbers.type, numbers.bits))
    if code is None or not numbers.is_symmetric:
        raise numbers.refusal()
    if not numbers.is_dynamic:
        if numbers.strategy != "tensor":
            raise numbers.refusal()
        if "input_zero_point" in module.parts and module.get("input_zero_point").any():
            raise module.error("has an input_zero_point, but symmetric activations according to the config")
        return ActivationForm(code=code, scale=static_scale(module, "input_scale"))
    if numbers.strategy not in ("token", "tensor", "group"):
        raise numbers.refusal()
    size = numbers.group_size if numbers.strategy == "group" else 0
    if size and num_inputs % size:
        raise module.error(f"has {num_inputs} inputs, which groups of {size} activations do not divide")
    return ActivationForm(code=code, group_size=size)


def _is_block(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    )
