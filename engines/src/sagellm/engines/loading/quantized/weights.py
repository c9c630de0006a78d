"""Quantized weights of safetensors files: which tensors are the parts of which weight, and their codes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    WHOLE,
    CheckpointError,
    Shard,
    StoredTensor,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.core.protocols.weight_form import CodedRows, CodeType, WeightForm
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.quantized.codes import Array, floats

SCALE_DTYPES = ("F16", "BF16", "F32")
_MANY_ROWS = 16


@dataclass(frozen=True)
class StoredModule:
    """The tensors of one linear layer, by the last part of their name, and how to read them."""

    name: str
    parts: Mapping[str, StoredTensor]
    files: WeightSource
    method: str

    @property
    def weight(self) -> str:
        """The name of the weight that they stand for."""
        return f"{self.name}.weight"

    def need(self, part: str, dtypes: Collection[str]) -> StoredTensor:
        """Return a part. Raises CheckpointError if it is missing, or of another type."""
        if part not in self.parts:
            raise self.error(f"lacks {self.name}.{part}; it has {', '.join(sorted(self.parts))}")
        stored = self.parts[part]
        if stored.dtype not in dtypes:
            raise self.error(f"has {part} in {stored.dtype}; it must be {' or '.join(dtypes)}")
        return stored

    def check(self, part: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError if a part is missing, of another type or of none of these shapes."""
        stored = self.need(part, dtypes)
        if stored.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(f"has {part} of shape {list(stored.shape)}; it must be {expected}")

    def get(self, part: str) -> Array:
        """Return a part as it lies in its file."""
        return self.files.get(TensorSpec(f"{self.name}.{part}", self.parts[part].shape))

    def get_floats(self, part: str, *place: slice) -> Array:
        """Return numbers of a part in float16 or float32."""
        return floats(self.get(part)[place], self.parts[part].dtype)

    def error(self, problem: str) -> CheckpointError:
        """Return an error that names the file, the weight and the method."""
        path = next(iter(self.parts.values())).path
        return CheckpointError(f"{path}: the {self.method} weight {shown(self.weight)} {problem}")


@dataclass(frozen=True, kw_only=True)
class CodedWeight(ABC):
    """One quantized weight. Subclasses say how what is stored becomes codes, scales and zeros.

    `column_unit` inputs are stored together, so that a shard of inputs must not cut them.
    """

    module: StoredModule
    shape: tuple[int, int]
    form: WeightForm
    column_unit: int = 1

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> Array:
        """Return the codes of some outputs and inputs, as `CodedRows` has them."""

    @abstractmethod
    def scales(self, rows: slice, groups: slice) -> Array:
        """Return the scales of some outputs and groups."""

    def zeros(self, rows: slice, groups: slice) -> npt.NDArray[np.int8] | None:
        """Return their zeros, if the form has any. Raises CheckpointError for those that cannot be."""
        return None

    def offsets(self, rows: slice, groups: slice) -> Array | None:
        """Return their offsets, if the form has any."""
        return None

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the input of each column, if the form has an order."""
        return None

    @property
    def stored(self) -> StoredTensor:
        """What a `WeightSource` says about it."""
        parts = self.module.parts
        largest = max(parts.values(), key=lambda part: part.num_bytes)
        return StoredTensor(
            path=largest.path,
            dtype=self.form.code.upper(),
            shape=self.shape,
            num_bytes=sum(part.num_bytes for part in parts.values()),
            form=self.form,
            parts=parts,
        )

    def read(self, rows: slice, columns: slice) -> CodedRows:
        """Return some outputs and inputs. Raises CheckpointError for values that are no numbers."""
        size = self.form.group_size
        if unit := next((each for each in (size, self.column_unit) if each and _cuts(columns, each)), 0):
            raise self.module.error(
                f"cannot be divided at inputs {columns.start} to {columns.stop}, as {unit} inputs are stored "
                "together; use fewer parts"
            )
        groups = slice(columns.start // size, columns.stop // size) if size else slice(0, 1)
        codes, scales = self.codes(rows, columns), self.scales(rows, groups)
        zeros, offsets = self.zeros(rows, groups), self.offsets(rows, groups)
        self._check_values(codes, scales)
        if offsets is not None and not np.isfinite(offsets).all():
            raise self.module.error("has an offset that is NaN or infinite; the file is damaged")
        return CodedRows(
            codes=np.ascontiguousarray(codes),
            scales=np.ascontiguousarray(scales),
            zeros=None if zeros is None else np.ascontiguousarray(zeros),
            offsets=None if offsets is None else np.ascontiguousarray(offsets),
        )

    def _check_values(self, codes: Array, scales: Array) -> None:
        if not np.isfinite(scales).all():
            raise self.module.error(
                "has a scale that is NaN or infinite; the file is damaged, fetch it again"
            )
        if len(scales) >= _MANY_ROWS and not scales.any():  # a few may well be, of outputs that are zero
            raise self.module.error("has rows whose scales are all zero; the file is damaged, fetch it again")
        # The codes of NaN are the largest signed byte and the largest unsigned one.
        if (
            self.form.code is CodeType.FP8_E4M3
            and codes.size
            and (codes.view(np.int8).max() == 0x7F or codes.max() == 0xFF)
        ):
            raise self.module.error("has a value that is NaN; the file is damaged, fetch it again")


class QuantizedWeights(WeightSource):
    """The tensors of safetensors files, those of each quantized weight as one."""

    def __init__(self, files: WeightSource, coded: Mapping[str, CodedWeight]) -> None:
        self._files, self._coded = files, coded
        parts = {f"{each.module.name}.{part}" for each in coded.values() for part in each.module.parts}
        plain = {name: stored for name, stored in files.tensors.items() if name not in parts}
        self.tensors = plain | {name: each.stored for name, each in coded.items()}

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> Array:
        """Return a view of a tensor. Raises UnsupportedModelError for a quantized one."""
        if tensor.name in self._coded:
            raise UnsupportedModelError(
                f"{tensor.name!r} is stored quantized, as {self.tensors[tensor.name].dtype}, and was asked "
                "for as plain numbers; choose another forward backend"
            )
        return self._files.get(tensor, shard)

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        """Return some rows of a shard of a quantized weight."""
        if tensor.name not in self._coded:
            raise CheckpointError(f"{tensor.name!r} has no codes: it is stored as plain numbers")
        weight = self._coded[tensor.name]
        num_outputs, num_inputs = weight.shape
        columns = slice(0, num_inputs)
        if tensor.shard_axis == 0:
            part = shard.of(num_outputs, tensor.shard_unit)
            rows = slice(part.start + rows.start, min(part.start + rows.stop, part.stop))
        elif tensor.shard_axis == 1:
            columns = shard.of(num_inputs, tensor.shard_unit)
        return weight.read(rows, columns)

    def input_order(self, tensor: TensorSpec) -> npt.NDArray[np.int64] | None:
        """Return the input of each column, if the weight has act order."""
        weight = self._coded.get(tensor.name)
        return None if weight is None else weight.order()


def act_order(module: StoredModule, part: str, num_inputs: int, group_size: int) -> bool:
    """Say whether a group index orders inputs by anything but their place.

    Raises CheckpointError if it is not one of as many inputs for each group.
    """
    index = module.get(part)
    num_groups = num_inputs // group_size if group_size else 1
    outside = index[(index < 0) | (index >= num_groups)]
    if outside.size:
        raise module.error(f"has {int(outside[0])} in {part}; there are {num_groups} groups")
    counts = np.bincount(index, minlength=num_groups)
    uneven = np.flatnonzero(counts != num_inputs // num_groups)
    if uneven.size:
        group = int(uneven[0])
        raise module.error(
            f"has {int(counts[group])} inputs of group {group} in {part}; each group must have "
            f"{num_inputs // num_groups}"
        )
    return bool((np.diff(index) < 0).any())


def order_of(module: StoredModule, part: str) -> npt.NDArray[np.int64]:
    """Return the inputs in the order of their groups, those of one group as they are."""
    return np.argsort(module.get(part), kind="stable")


def check_groups(module: StoredModule, num_inputs: int, group_size: int) -> None:
    """Raise CheckpointError if groups of this size do not divide the inputs; 0: one group."""
    if group_size < 0 or (group_size and num_inputs % group_size):
        raise module.error(f"has {num_inputs} inputs, which groups of {group_size} do not divide")


def spread(values: Array, outputs: slice, groups: slice, per_row: int, per_column: int) -> Array:
    """Return values (rows, columns) each for `per_row` outputs and `per_column` groups, for some of those."""
    rows = slice(outputs.start // per_row, math.ceil(outputs.stop / per_row))
    columns = slice(groups.start // per_column, math.ceil(groups.stop / per_column))
    part = values[rows, columns]
    if per_row > 1:
        begin = outputs.start - rows.start * per_row
        part = np.repeat(part, per_row, axis=0)[begin : begin + outputs.stop - outputs.start]
    if per_column > 1:
        begin = groups.start - columns.start * per_column
        part = np.repeat(part, per_column, axis=1)[:, begin : begin + groups.stop - groups.start]
    return part


def _cuts(columns: slice, unit: int) -> bool:
    return bool(columns.start % unit or columns.stop % unit)
