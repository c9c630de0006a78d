"""The checkpoint format `gptq`, which AutoGPTQ and GPTQModel write, and AutoRound where it says so.

Of a weight (out, in), qweight (in ÷ codes in a word, out) has the codes of one output from word to word, the
first in the low bits, qzeros (groups, out ÷ codes in a word) the zero points of outputs likewise, and g_idx
the group of each input. Source: the QuantLinear layers of AutoGPTQ 0.7 and GPTQModel.
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
from sagellm.engines.loading.quantized.codes import Array, nibbles_of, signed, taken, transposed
from sagellm.engines.loading.quantized.format import QuantizedFormat
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import (
    SCALE_DTYPES,
    CodedWeight,
    StoredModule,
    act_order,
    check_groups,
    order_of,
)

_READABLE = "read are 4 and 8 bits in the layouts gptq and gptq_v2"
_PLAIN_BITS = 16
_AUTO_ROUND = ("auto-round", "intel/auto-round")


class GPTQFormat(QuantizedFormat):
    """Weights of 4 and 8 bits in groups, with act order or without it."""

    methods = frozenset({"gptq"})
    parts: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def takes(self, settings: QuantizationSettings) -> bool:
        """Take AutoRound's exports too, where they are in this layout."""
        packing = str(settings.get("packing_format", default="")).lower()
        return super().takes(settings) or (
            settings.method.lower() in _AUTO_ROUND and packing.endswith("auto_gptq")
        )

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Read the layout's entries, the same for all weights."""
        bits = settings.integer("bits", "w_bit")
        if bits not in (4, 8):
            raise settings.refusal(f"{bits} bits", _READABLE)
        layout = settings.text("checkpoint_format", default="gptq")
        if layout not in ("gptq", "gptq_v2") or settings.flag("is_marlin_format", default=False):
            raise settings.refusal(f"the layout {clipped(layout)}", _READABLE)
        for name in ("dynamic", "extra_config"):
            if _differs(settings.nested(name)):
                raise settings.refusal(f"settings that differ between weights ({name})", _READABLE)
        size = settings.integer("group_size", "q_group_size")
        layer = _Layout(
            bits=bits,
            group_size=0 if size == -1 else size,
            is_symmetric=settings.flag("sym", default=True),
            zero_offset=1 if layout == "gptq" else 0,
        )
        return {module.weight: layer.weight(module) for module in self.modules(settings, files)}


def _differs(overrides: QuantizationSettings | None) -> bool:
    """Say whether settings of single weights do anything but leave some as plain numbers."""
    for name in overrides.entries if overrides is not None else ():
        own = overrides.nested(name) if overrides is not None and not name.startswith("-:") else None
        if own is not None and own.integer("bits", default=0) < _PLAIN_BITS:
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How a checkpoint's weights are packed."""

    bits: int
    group_size: int
    is_symmetric: bool
    zero_offset: int  # what the first version of the layout subtracts from zero points

    def weight(self, module: StoredModule) -> GPTQWeight:
        """Check the shapes of a weight's parts. Raises CheckpointError."""
        at_once = 32 // self.bits
        words = module.need("qweight", ("I32",)).shape
        if len(words) != 2 or not all(words):
            raise module.error(f"has qweight of shape {list(words)}; only linears are read")
        num_inputs, num_outputs = words[0] * at_once, words[1]
        check_groups(module, num_inputs, self.group_size)
        num_groups = num_inputs // self.group_size if self.group_size else 1
        module.check("qzeros", ("I32",), (num_groups, math.ceil(num_outputs / at_once)))
        module.check("scales", SCALE_DTYPES, (num_groups, num_outputs))
        has_order = False
        if "g_idx" in module.parts:
            module.check("g_idx", ("I32", "I64"), (num_inputs,))
            has_order = act_order(module, "g_idx", num_inputs, self.group_size)
        form = WeightForm(
            code=CodeType.INT4 if self.bits == 4 else CodeType.INT8,
            group_size=self.group_size,
            has_zeros=not self.is_symmetric,
            has_order=has_order,
        )
        return GPTQWeight(
            module=module,
            shape=(num_outputs, num_inputs),
            form=form,
            column_unit=2 if has_order else at_once,
            zero_offset=self.zero_offset,
        )


@dataclass(frozen=True, kw_only=True)
class GPTQWeight(CodedWeight):
    """One weight. Its words, transposed, are bytes with the codes in order."""

    zero_offset: int

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return the words of some outputs as bytes."""
        bits, order = self.form.code.bits, self.order()
        at_once = 32 // bits
        words = self.module.get("qweight")
        if order is None:
            words = words[columns.start // at_once : columns.stop // at_once]
        packed = transposed(words[:, rows]).view(np.uint8)
        if order is not None:
            packed = taken(packed, bits, order[columns])
        return packed if bits == 4 else signed(packed)

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return them output by output."""
        return self.module.get_floats("scales", groups, rows).T

    def zeros(self, rows: slice, groups: slice) -> npt.NDArray[np.int8] | None:
        """Return the zero points. Those of symmetric weights are all the middle code, which the form implies.

        The first version of the layout has them less 1, where 0 becomes the largest code, as in AutoGPTQ.
        """
        bits = self.form.code.bits
        at_once = 32 // bits
        words = self.module.get("qzeros")[groups, rows.start // at_once : math.ceil(rows.stop / at_once)]
        codes = np.ascontiguousarray(words).view(np.uint8)
        if bits == 4:
            codes = nibbles_of(codes)
        begin = rows.start % at_once
        codes = codes[:, begin : begin + rows.stop - rows.start] + np.uint8(self.zero_offset)
        codes &= (1 << bits) - 1
        middle = 1 << (bits - 1)
        if self.form.has_zeros:
            return (codes - np.uint8(middle)).view(np.int8).T
        if (codes != middle).any():
            raise self.module.error(
                f"has the zero point {int(codes[codes != middle][0])}, but is symmetric according to the "
                f"config (sym), so that all must be {middle}"
            )
        return None

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the input of each column, by group."""
        return order_of(self.module, "g_idx") if self.form.has_order else None
