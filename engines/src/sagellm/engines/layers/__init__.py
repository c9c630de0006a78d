"""The parts of a decoder layer, for inference only."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.layers.activation import SiLUAndMul as SiLUAndMul
    from sagellm.engines.layers.attention import Attention as Attention
    from sagellm.engines.layers.linear import (
        LinearMethod as LinearMethod,
        PackedLinear as PackedLinear,
        PlainLinear as PlainLinear,
        QuantizedLinear as QuantizedLinear,
    )
    from sagellm.engines.layers.rms_norm import (
        HeadNorm as HeadNorm,
        Normalised as Normalised,
        RMSNorm as RMSNorm,
    )
    from sagellm.engines.layers.rotary import RotaryEmbedding as RotaryEmbedding, RotaryTables as RotaryTables

__all__ = [
    "Attention",
    "HeadNorm",
    "LinearMethod",
    "Normalised",
    "PackedLinear",
    "PlainLinear",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTables",
    "SiLUAndMul",
]

__getattr__ = lazy(
    __name__,
    {
        "Attention": ".attention",
        "HeadNorm": ".rms_norm",
        "LinearMethod": ".linear",
        "Normalised": ".rms_norm",
        "PackedLinear": ".linear",
        "PlainLinear": ".linear",
        "QuantizedLinear": ".linear",
        "RMSNorm": ".rms_norm",
        "RotaryEmbedding": ".rotary",
        "RotaryTables": ".rotary",
        "SiLUAndMul": ".activation",
    },
)
