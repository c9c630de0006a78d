"""The checkpoint format `mxfp4`: linears of 4-bit floats with a power of two for each 32 of them.

A weight is stored as weight_blocks (out, groups, 16) and weight_scales (out, groups), both bytes. Source:
OCP Microscaling Formats 1.0, and the quantization method mxfp4 of transformers for the names.
"""

from __future__ import annotations

from typing import ClassVar

from sagellm.core import UnsupportedModelError, WeightSource
from sagellm.engines.config.shown import first_few
from sagellm.engines.loading.quantized.format import QuantizedFormat
from sagellm.engines.loading.quantized.row_weights import MXFP4, MXFP4_GROUP, MicroscaledWeight
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import CodedWeight, StoredModule

_BLOCKS, _SCALES = "weight_blocks", "weight_scales"
_BLOCK_BYTES = MXFP4_GROUP // 2


class MXFP4Format(QuantizedFormat):
    """Linears in MXFP4, with activations as they are."""

    methods = frozenset({"mxfp4"})
    parts: ClassVar[frozenset[str]] = frozenset({_BLOCKS, _SCALES})

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Read linears. Raises UnsupportedModelError for experts that are stored as one tensor."""
        others = sorted(
            name
            for name in files.tensors
            if name.endswith(("_blocks", "_scales")) and name.rpartition(".")[2] not in self.parts
        )
        if others:
            raise UnsupportedModelError(
                f"{settings.path}: experts in mxfp4 that are stored as one tensor are not read: "
                f"{first_few(others)}; read are linears ({_BLOCKS} and {_SCALES})"
            )
        return {module.weight: _weight(module) for module in self.modules(settings, files)}


def _weight(module: StoredModule) -> MicroscaledWeight:
    blocks = module.need(_BLOCKS, ("U8",)).shape
    if len(blocks) != 3 or blocks[2] != _BLOCK_BYTES or not all(blocks):
        raise module.error(f"has {_BLOCKS} of shape {list(blocks)}; it must be (out, groups, {_BLOCK_BYTES})")
    module.check(_SCALES, ("U8",), blocks[:2])
    return MicroscaledWeight(
        module=module,
        shape=(blocks[0], blocks[1] * MXFP4_GROUP),
        form=MXFP4,
        column_unit=2,
        values=_BLOCKS,
        scale=_SCALES,
    )
