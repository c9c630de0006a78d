"""Predictors of how much longer a sequence will generate."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.lifetime import (
        LifetimeMetrics as LifetimeMetrics,
        LifetimePrediction as LifetimePrediction,
        LifetimePredictorProtocol as LifetimePredictorProtocol,
        PredictionRequest as PredictionRequest,
    )
    from sagellm.kvmgr.lifetime.statistical import (
        StatisticalLifetimePredictor as StatisticalLifetimePredictor,
    )

__version__ = "0.1.0"

__all__ = [
    "LifetimeMetrics",
    "LifetimePrediction",
    "LifetimePredictorProtocol",
    "PredictionRequest",
    "StatisticalLifetimePredictor",
    "__version__",
]

__getattr__ = lazy(
    __name__,
    {
        "LifetimeMetrics": "sagellm.core.protocols.lifetime",
        "LifetimePrediction": "sagellm.core.protocols.lifetime",
        "LifetimePredictorProtocol": "sagellm.core.protocols.lifetime",
        "PredictionRequest": "sagellm.core.protocols.lifetime",
        "StatisticalLifetimePredictor": ".statistical",
    },
)
