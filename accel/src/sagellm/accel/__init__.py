"""Quantization for LLM inference."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.int8 import Int8Quantizer as Int8Quantizer
    from sagellm.accel.quality import kl_divergence as kl_divergence
    from sagellm.core.protocols.quantizer import (
        QuantizationConfig as QuantizationConfig,
        QuantizationGranularity as QuantizationGranularity,
        QuantizationOutput as QuantizationOutput,
        QuantizerMetrics as QuantizerMetrics,
        QuantizerProtocol as QuantizerProtocol,
    )

__version__ = "0.1.0"

__all__ = [
    "Int8Quantizer",
    "QuantizationConfig",
    "QuantizationGranularity",
    "QuantizationOutput",
    "QuantizerMetrics",
    "QuantizerProtocol",
    "__version__",
    "kl_divergence",
]

__getattr__ = lazy(
    __name__,
    {
        "Int8Quantizer": ".int8",
        "QuantizationConfig": "sagellm.core.protocols.quantizer",
        "QuantizationGranularity": "sagellm.core.protocols.quantizer",
        "QuantizationOutput": "sagellm.core.protocols.quantizer",
        "QuantizerMetrics": "sagellm.core.protocols.quantizer",
        "QuantizerProtocol": "sagellm.core.protocols.quantizer",
        "kl_divergence": ".quality",
    },
)
