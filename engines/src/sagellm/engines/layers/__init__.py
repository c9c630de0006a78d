"""The parts of a decoder layer, for inference only."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.layers.activation import SiLUAndMul as SiLUAndMul
    from sagellm.engines.layers.attention import Attention as Attention
    from sagellm.engines.layers.linear import (
        Linear as Linear,
        PackedLinear as PackedLinear,
        QuantizedLinear as QuantizedLinear,
        make_linear as make_linear,
    )
    from sagellm.engines.layers.rms_norm import (
        HeadNorm as HeadNorm,
        Normalised as Normalised,
        RMSNorm as RMSNorm,
    )
    from sagellm.engines.layers.rope_scaling import RopeParameters as RopeParameters
    from sagellm.engines.layers.rotary import RotaryEmbedding as RotaryEmbedding, RotaryTables as RotaryTables

__all__ = [
    "Attention",
    "HeadNorm",
    "Linear",
    "Normalised",
    "PackedLinear",
    "QuantizedLinear",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "RotaryTables",
    "SiLUAndMul",
    "make_linear",
]

__getattr__ = lazy(
    __name__,
    {
        "Attention": ".attention",
        "HeadNorm": ".rms_norm",
        "Linear": ".linear",
        "Normalised": ".rms_norm",
        "PackedLinear": ".linear",
        "QuantizedLinear": ".linear",
        "RMSNorm": ".rms_norm",
        "RopeParameters": ".rope_scaling",
        "RotaryEmbedding": ".rotary",
        "RotaryTables": ".rotary",
        "SiLUAndMul": ".activation",
        "make_linear": ".linear",
    },
)
