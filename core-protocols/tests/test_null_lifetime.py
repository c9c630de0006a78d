"""The predictor that knows nothing keeps the contract."""

from sagellm.core import LifetimePredictorProtocol, NullLifetimePredictor, PredictionRequest, SequenceId
from sagellm.core.testing import LifetimePredictorContract


class TestNullLifetimePredictor(LifetimePredictorContract):
    def make(self) -> LifetimePredictorProtocol:
        return NullLifetimePredictor()


def test_it_predicts_the_limit_without_confidence() -> None:
    request = PredictionRequest(
        sequence_id=SequenceId("a"), token_ids=[1, 2], current_length=30, max_length=100
    )
    prediction = NullLifetimePredictor().predict(request)
    assert (prediction.remaining_length, prediction.confidence) == (70, 0)
