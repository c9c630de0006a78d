"""Predictors with a network that was trained on a trace, beside what statistics say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sagellm.core import ConfigError, PredictionRequest, get_logger
from sagellm.core.protocols.lifetime import TrainingEpoch
from sagellm.kvmgr.lifetime.features import features_of
from sagellm.kvmgr.lifetime.lengths import Floats
from sagellm.kvmgr.lifetime.mixture import MixturePredictor
from sagellm.kvmgr.lifetime.network import Network, load_network, save_network
from sagellm.kvmgr.lifetime.sources import Asked, Everything, Source, statistical_sources

_logger = get_logger(__name__)

_DOUBT = 0.02  # share of the density of all outputs, so that nothing is impossible


class NetworkSource(Source):
    """What a network says of a request's features. It learns nothing any more."""

    def __init__(self, network: Network) -> None:
        self.name, self._network = network.kind, network

    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Run the network."""
        found = self._network.density(features_of(asked.request))
        return self.name, (1 - _DOUBT) * found + _DOUBT * asked.overall

    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Leave the network as it was trained."""


class LearntPredictor(MixturePredictor):
    """Mixes what a trained network says into what statistics say, by how right each has been.

    `weights` is a file that `sage llm predictor train` wrote; without it, predictions are those of
    `statistical`. The network runs once, when a request arrives.
    """

    kind = ""

    def __init__(self, *, weights: str | None = None, max_sequences: int = 16_384) -> None:
        own = [] if weights is None else [NetworkSource(load_network(self.kind, weights))]
        super().__init__(Everything(0.9995), [*statistical_sources(), *own], max_sequences=max_sequences)
        if weights is None:
            _logger.warning(
                "the predictor %s has no weights and predicts as `statistical` does: train some with "
                "`sage llm predictor train TRACE` and name them in its option weights",
                self.kind,
            )

    @classmethod
    def train(
        cls,
        examples: Sequence[tuple[PredictionRequest, int]],
        path: Path,
        *,
        num_epochs: int = 30,
        seed: int = 0,
        tell: Callable[[TrainingEpoch], None] = lambda epoch: None,
    ) -> None:
        """Train the network. Raises ConfigError for fewer than 50 examples, and without torch."""
        try:
            from sagellm.kvmgr.lifetime.training import train
        except ImportError as error:
            raise ConfigError(
                "training needs torch: pip install 'sagellm-lifetime-predictor[torch]'"
            ) from error
        known = [(features_of(request), length) for request, length in examples]
        save_network(train(cls.kind, known, num_epochs=num_epochs, seed=seed, tell=tell), path)


class LSTMLifetimePredictor(LearntPredictor):
    """A learnt predictor that reads a request with an LSTM."""

    kind = "lstm"


class TransformerLifetimePredictor(LearntPredictor):
    """A learnt predictor that reads a request with a transformer."""

    kind = "transformer"
