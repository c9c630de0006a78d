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
    from sagellm.kvmgr.lifetime.learnt import (
        LSTMLifetimePredictor as LSTMLifetimePredictor,
        TransformerLifetimePredictor as TransformerLifetimePredictor,
    )
    from sagellm.kvmgr.lifetime.mixture import (
        StatisticalLifetimePredictor as StatisticalLifetimePredictor,
    )
    from sagellm.kvmgr.lifetime.online import OnlineLifetimePredictor as OnlineLifetimePredictor
    from sagellm.kvmgr.lifetime.ranker import RankingLifetimePredictor as RankingLifetimePredictor

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.lifetime": """
        LifetimeMetrics LifetimePrediction LifetimePredictorProtocol PredictionRequest
    """,
    ".mixture": "StatisticalLifetimePredictor",
    ".learnt": "LSTMLifetimePredictor TransformerLifetimePredictor",
    ".online": "OnlineLifetimePredictor",
    ".ranker": "RankingLifetimePredictor",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
