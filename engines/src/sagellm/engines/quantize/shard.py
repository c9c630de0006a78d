"""Writing one safetensors file of a quantized checkpoint, straight from the source's mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import CheckpointError, InvalidInputError, WeightSource
from sagellm.engines.progress import Advance
from sagellm.engines.quantize.calibration import Calibration
from sagellm.engines.quantize.equalization import Factors
from sagellm.engines.quantize.formats import PACKED
from sagellm.engines.quantize.plan import PlannedFile, PlannedTensor, PlannedWeight
from sagellm.engines.quantize.rounding import packed_rows, round_rows
from sagellm.engines.quantize.tensor_file import file_layout
from sagellm.engines.whole_file import whole_file

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class ShardWriter:
    """Writes files of a plan. A piece of one weight is in memory at a time, and its scales.

    `factors` scale outputs and inputs of tensors first; those of others are one.
    """

    def __init__(self, weights: WeightSource, factors: Calibration, advance: Advance) -> None:
        self._weights, self._factors, self._advance = weights, factors, advance

    def write(self, file: PlannedFile, path: Path) -> float:
        """Write a file, which gets its name when it is complete; return the largest error in steps.

        Raises CheckpointError for weights that are not finite, OSError if the disk is full or fails.
        """
        tensors = [tensor for weight in file.weights for tensor in weight.tensors]
        header, offsets = file_layout(tensors)
        max_error = 0.0
        with whole_file(path) as partial, open(partial, "wb") as out:
            end = len(header) + sum(tensor.num_bytes for tensor in tensors)
            os.posix_fallocate(out.fileno(), 0, end)  # a disk that is too full says so now
            out.write(header)
            for weight in file.weights:
                places = [offsets[tensor.name] for tensor in weight.tensors]
                if weight.saved is None:
                    self._copy(weight, places[0], out)
                else:
                    max_error = max(max_error, self._quantize(weight, places, out))
            out.flush()
            os.fsync(out.fileno())
        return max_error

    def _copy(self, weight: PlannedWeight, place: int, out: BinaryIO) -> None:
        out.seek(place)
        factors = self._factors.get(weight.tensors[0].name)
        for begin, rows in self._weights.pieces(weight.source):
            if factors is None:
                out.write(np.ascontiguousarray(rows).view(np.uint8).data)
            else:
                scaled = _scaled(rows, begin, factors, weight.tensors[0].dtype)
                out.write(_bytes(scaled.to(_TORCH[weight.tensors[0].dtype])))
            self._advance(rows.nbytes)
            del rows

    def _quantize(self, weight: PlannedWeight, places: list[int], out: BinaryIO) -> float:
        saved, stored = weight.saved, self._weights.tensors[weight.source.name]
        assert saved is not None
        name, factors = weight.source.name, self._factors.get(weight.source.name)
        max_error, position = 0.0, places[0]
        scales: list[torch.Tensor] = []
        zeros: list[torch.Tensor] = []
        for begin, rows in self._weights.pieces(weight.source):
            try:
                rounded = round_rows(
                    _scaled(rows, begin, factors, stored.dtype),
                    saved,
                    None if factors is None else factors.products,
                )
            except InvalidInputError as error:
                raise CheckpointError(f"{stored.path}: {name}, from row {begin}: {error}") from None
            codes = rounded.codes
            data = packed_rows(codes, saved.code.bits).data if saved.layout == PACKED else _bytes(codes)
            out.seek(position)
            position += out.write(data)
            scales.append(rounded.scales)
            if rounded.zeros is not None:
                zeros.append(rounded.zeros)
            max_error = max(max_error, rounded.max_error_steps)
            self._advance(rows.nbytes)
            del rows, data
        for tensor, place in zip(weight.tensors[1:], places[1:], strict=True):
            out.seek(place)
            out.write(_part(tensor, weight, scales, zeros))
        return max_error


def _part(
    tensor: PlannedTensor, weight: PlannedWeight, scales: list[torch.Tensor], zeros: list[torch.Tensor]
) -> Any:
    """Return the bytes of scales, of zeros, packed along the outputs, or of the shape."""
    assert weight.saved is not None
    if tensor.name.endswith("_scale"):
        return _bytes(torch.cat(scales).to(_TORCH[tensor.dtype]))
    if tensor.name.endswith("_zero_point"):
        packed = packed_rows(torch.cat(zeros).T.contiguous(), weight.saved.code.bits)
        return np.ascontiguousarray(packed.view("<i4").T).view(np.uint8).data
    return np.array(weight.source.shape, "<i8").view(np.uint8).data


def _scaled(rows: npt.NDArray[np.generic], begin: int, factors: Factors | None, dtype: str) -> torch.Tensor:
    """Return rows of a weight as torch has them, times their factors in float32."""
    values = torch.from_numpy(np.array(rows)).view(_TORCH[dtype])
    if factors is None:
        return values
    values = values.float()
    if factors.outputs is not None:
        mine = factors.outputs[begin : begin + len(values)]
        values *= mine.view(-1, *[1] * (values.dim() - 1))
    if factors.inputs is not None:
        values *= factors.inputs
    return values


def _bytes(values: torch.Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy().data
