"""The checkpoint format `fp8`: E4M3 weights with scales of blocks, as DeepSeek's and Qwen's, rows or tensors.

Source: the quantization method fp8 of transformers (`FineGrainedFP8Config`) and of vLLM.
"""

from __future__ import annotations

import math
from typing import ClassVar

from sagellm.core import WeightSource
from sagellm.core.protocols.weight_form import ActivationForm, CodeType, WeightForm
from sagellm.engines.config.shown import clipped
from sagellm.engines.loading.quantized.format import QuantizedFormat, refuse_parts
from sagellm.engines.loading.quantized.row_weights import RowWeight, grid_of, static_scale
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import CodedWeight, StoredModule

_BLOCK_SCALE, _SCALE = "weight_scale_inv", "weight_scale"
_STATIC = ("input_scale", "activation_scale")
_READABLE = "read is E4M3 with activations that are static, or dynamic by token or by the block's inputs"


class FP8Format(QuantizedFormat):
    """FP8 weights and FP8 activations."""

    methods = frozenset({"fp8"})
    parts: ClassVar[frozenset[str]] = frozenset({_BLOCK_SCALE, _SCALE, *_STATIC})

    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Read the method's entries, the same for all weights."""
        number = settings.text("fmt", "weight_format", default="e4m3")
        if number not in ("e4m3", "float8_e4m3fn"):
            raise settings.refusal(f"numbers of {clipped(number)}", _READABLE)
        scheme = settings.text("activation_scheme", default="dynamic")
        if scheme not in ("dynamic", "static"):
            raise settings.refusal(f"the activation_scheme {clipped(scheme)}", _READABLE)
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        ):
            raise settings.error("weight_block_size", block, "two sizes")
        ignored = settings.names("modules_to_not_convert", "ignored_layers")
        coded: dict[str, CodedWeight] = {}
        for module in self.modules(settings, files):
            if module.name in ignored:
                raise module.error(f"is quantized, but {settings.path} says that it is not")
            coded[module.weight] = _weight(module, tuple(block) if block else None, scheme == "static")
        return coded


def _weight(module: StoredModule, block: tuple[int, int] | None, is_static: bool) -> RowWeight:  # noqa: FBT001
    shape = module.need("weight", ("F8_E4M3",)).shape
    if len(shape) != 2:
        raise module.error(f"has the shape {list(shape)}; only linears with (out, in) are read")
    num_outputs, num_inputs = shape
    scale = _BLOCK_SCALE if _BLOCK_SCALE in module.parts else _SCALE
    static = next((name for name in _STATIC if name in module.parts), _STATIC[0])
    refuse_parts(module, frozenset({"weight", scale, *((static,) if is_static else ())}))
    if scale == _SCALE:
        block = None
    elif block is None:
        raise module.error(f"has {scale}, but the config has no weight_block_size")
    size = math.gcd(block[1], num_inputs) if block else 0
    activations = ActivationForm(
        code=CodeType.FP8_E4M3,
        group_size=block[1] if block and not is_static else 0,
        scale=static_scale(module, static) if is_static else None,
    )
    if activations.group_size and num_inputs % activations.group_size:
        raise module.error(
            f"has {num_inputs} inputs, which groups of {activations.group_size} activations do not divide"
        )
    form = WeightForm(code=CodeType.FP8_E4M3, group_size=size, activations=activations)
    grid = grid_of(module, scale, (num_outputs, num_inputs), form, block)
    return RowWeight(module=module, shape=(num_outputs, num_inputs), form=form, grid=grid, scale=scale)
