"""Quantization for LLM inference."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.activations import (
        RoundedActivations as RoundedActivations,
        quantized_linear as quantized_linear,
        round_activations as round_activations,
    )
    from sagellm.accel.awq_scales import (
        InputScales as InputScales,
        search_input_scales as search_input_scales,
    )
    from sagellm.accel.fp8 import FP8E5M2Quantizer as FP8E5M2Quantizer, FP8Quantizer as FP8Quantizer
    from sagellm.accel.int4 import Int4Quantizer as Int4Quantizer
    from sagellm.accel.int8 import Int8Quantizer as Int8Quantizer
    from sagellm.accel.quality import kl_divergence as kl_divergence
    from sagellm.core.protocols.quantizer import (
        QuantizationConfig as QuantizationConfig,
        QuantizationGranularity as QuantizationGranularity,
        QuantizationOutput as QuantizationOutput,
        QuantizerMetrics as QuantizerMetrics,
        QuantizerProtocol as QuantizerProtocol,
    )

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.quantizer": """
        QuantizationConfig QuantizationGranularity QuantizationOutput QuantizerMetrics
        QuantizerProtocol
    """,
    ".activations": "RoundedActivations quantized_linear round_activations",
    ".awq_scales": "InputScales search_input_scales",
    ".fp8": "FP8E5M2Quantizer FP8Quantizer",
    ".int4": "Int4Quantizer",
    ".int8": "Int8Quantizer",
    ".quality": "kl_divergence",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
