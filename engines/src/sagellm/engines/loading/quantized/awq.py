"""The checkpoint format `awq`, which AutoAWQ writes in its version gemm.

Of a weight (out, in), qweight (in, out ÷ 8) has the codes of eight outputs in each word, in an order made for
a GPU's instructions, and qzeros (groups, out ÷ 8) the zero points likewise. Source: AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sagellm.core import WeightSource
from sagellm.core.protocols.weight_form import CodeType, WeightForm
from sagellm.engines.config.shown import clipped
from sagellm.engines.loading.quantized.codes import Array, nibbles_of
from sagellm.engines.loading.quantized.format import QuantizedFormat
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import (
    SCALE_DTYPES,
    CodedWeight,
    StoredModule,
    check_groups,
)

_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each nibble of a word, the lowest bits first."""
_IN_WORD = len(_OUTPUTS)
_READABLE = "read are 4 bits in the version gemm"


class AWQFormat(QuantizedFormat):
    """Weights of 4 bits in groups with zero points."""

    methods = frozenset({"awq"})
    parts: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    def takes(self, settings: QuantizationSettings) -> bool:
        """Take AutoRound's exports too, where they are in this layout."""
        packing = str(settings.get("packing_format", default="")).lower()
        return super().takes(settings) or (
            settings.method.lower() in ("auto-round", "intel/auto-round") and packing.endswith("auto_awq")
        )

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Read the layout's entries, the same for all weights."""
        bits = settings.integer("bits", "w_bit")
        if bits != 4:
            raise settings.refusal(f"{bits} bits", _READABLE)
        version = settings.text("version", default="gemm")
        if version != "gemm":
            raise settings.refusal(f"the version {clipped(version)}", _READABLE)
        size = settings.integer("group_size", "q_group_size")
        return {
            module.weight: _weight(module, 0 if size == -1 else size)
            for module in self.modules(settings, files)
        }


def _weight(module: StoredModule, group_size: int) -> AWQWeight:
    words = module.need("qweight", ("I32",)).shape
    if len(words) != 2 or not all(words):
        raise module.error(f"has qweight of shape {list(words)}; only linears are read")
    num_inputs, num_outputs = words[0], words[1] * _IN_WORD
    check_groups(module, num_inputs, group_size)
    if num_inputs % 2:
        raise module.error(f"has {num_inputs} inputs; codes of 4 bits must fill bytes")
    num_groups = num_inputs // group_size if group_size else 1
    module.check("qzeros", ("I32",), (num_groups, words[1]))
    module.check("scales", SCALE_DTYPES, (num_groups, num_outputs))
    form = WeightForm(code=CodeType.INT4, group_size=group_size, has_zeros=True)
    return AWQWeight(module=module, shape=(num_outputs, num_inputs), form=form, column_unit=2)


@dataclass(frozen=True, kw_only=True)
class AWQWeight(CodedWeight):
    """One weight, whose words hold codes of different outputs."""

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return the codes output by output, those of two inputs in a byte."""
        words = slice(rows.start // _IN_WORD, math.ceil(rows.stop / _IN_WORD))
        stored = np.ascontiguousarray(self.module.get("qweight")[columns, words])
        # (in, words, bytes of a word), of even and of odd inputs
        packed = stored.view(np.uint8).reshape(len(stored), -1, 4)
        even, odd = packed[::2], packed[1::2]
        codes = np.empty((_IN_WORD, even.shape[1], len(even)), np.uint8)  # (output in word, words, bytes)
        for byte in range(4):
            first, second = even[:, :, byte].T, odd[:, :, byte].T
            codes[_OUTPUTS[2 * byte]] = (first & 15) | (second << 4)
            codes[_OUTPUTS[2 * byte + 1]] = (first >> 4) | (second & 0xF0)
        by_output = codes.transpose(1, 0, 2).reshape(-1, len(even))
        begin = rows.start % _IN_WORD
        return by_output[begin : begin + rows.stop - rows.start]

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return them output by output."""
        return self.module.get_floats("scales", groups, rows).T

    def zeros(self, rows: slice, groups: slice) -> npt.NDArray[np.int8] | None:
        """Return the zero points output by output."""
        words = slice(rows.start // _IN_WORD, math.ceil(rows.stop / _IN_WORD))
        stored = np.ascontiguousarray(self.module.get("qzeros")[groups, words])
        in_order = nibbles_of(stored.view(np.uint8)).reshape(len(stored), -1, _IN_WORD)
        codes = in_order[:, :, np.argsort(_OUTPUTS)].reshape(len(stored), -1)
        begin = rows.start % _IN_WORD
        codes = codes[:, begin : begin + rows.stop - rows.start]
        return codes.view(np.int8).T - np.int8(8)
