"""The parts of a decoder layer, for inference only."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.linear import (
        LinearMethod as LinearMethod,
        PackedLinear as PackedLinear,
        PlainLinear as PlainLinear,
        QuantizedLinear as QuantizedLinear,
    )
    from sagellm.engines.layers.activation import SiLUAndMul as SiLUAndMul
    from sagellm.engines.layers.attention import Attention as Attention
    from sagellm.engines.layers.rms_norm import RMSNorm as RMSNorm
    from sagellm.engines.layers.rotary import RotaryEmbedding as RotaryEmbedding

_MODULE_OF = {
    "Attention": ".attention",
    "LinearMethod": "sagellm.accel.linear",
    "PackedLinear": "sagellm.accel.linear",
    "PlainLinear": "sagellm.accel.linear",
    "QuantizedLinear": "sagellm.accel.linear",
    "RMSNorm": ".rms_norm",
    "RotaryEmbedding": ".rotary",
    "SiLUAndMul": ".activation",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
