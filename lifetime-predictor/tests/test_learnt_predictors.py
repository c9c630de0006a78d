"""Networks are trained on a trace, kept in a file, and mixed with statistics."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sagellm.core import ConfigError, PredictionRequest

torch = pytest.importorskip("torch")

from safetensors.numpy import save_file  # noqa: E402

from sagellm.core.protocols.prefix_cache import PrefixAnswers  # noqa: E402
from sagellm.kvmgr.lifetime import LSTMLifetimePredictor, TransformerLifetimePredictor  # noqa: E402
from sagellm.kvmgr.lifetime.features import features_of  # noqa: E402
from sagellm.kvmgr.lifetime.lengths import NUM_BINS  # noqa: E402
from sagellm.kvmgr.lifetime.network import Network, load_network, save_network  # noqa: E402
from sagellm.kvmgr.lifetime.training import TORCH_NETWORKS, Batch  # noqa: E402
from sagellm.testing import LifetimePredictorContract  # noqa: E402

CLASSES = {"lstm": LSTMLifetimePredictor, "transformer": TransformerLifetimePredictor}


def made(num_requests, seed=0):
    """Return requests with the number that they ask for as a word, and their lengths."""
    rng, requests = random.Random(seed), []
    for index in range(num_requests):
        number = rng.randrange(1, 30)
        words = [5, 6, 7, 1000 + number, 8, 9]
        answers = [PrefixAnswers(4, 2, (3, 4), 0)] if index % 3 == 0 else []
        request = PredictionRequest(
            sequence_id=str(index), token_ids=words, max_length=1 << 17, answers=answers
        )
        requests.append((request, 10 * number))
    return requests


def untrained(kind):
    torch.manual_seed(1)
    network = TORCH_NETWORKS[kind]().eval()
    return network, Network(kind, {name: each.numpy() for name, each in network.state_dict().items()})


class UntrainedContract(LifetimePredictorContract):
    kind = ""

    @pytest.fixture(autouse=True)
    def _weights(self, tmp_path):
        self.path = tmp_path / "untrained"
        save_network(untrained(self.kind)[1], self.path)

    def make(self):
        return CLASSES[self.kind](weights=str(self.path))


class TestLSTMLifetimePredictor(UntrainedContract):
    kind = "lstm"


class TestTransformerLifetimePredictor(UntrainedContract):
    kind = "transformer"


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_learnt_beats_what_statistics_say(kind, tmp_path):
    epochs = []
    CLASSES[kind].train(made(1200), tmp_path / "weights", num_epochs=20, tell=epochs.append)
    assert epochs[-1].held_back_loss < epochs[0].held_back_loss
    with_weights = CLASSES[kind](weights=str(tmp_path / "weights"))
    without = CLASSES[kind]()
    errors = {with_weights: [], without: []}
    for predictor, found in errors.items():
        for request, length in made(300, seed=1):
            found.append(abs(predictor.predict(request).remaining_length - length))
            predictor.update(sequence_id=request.sequence_id, actual_length=length, actual_time=1.0)
    learnt, statistical = (sum(found[50:]) / 250 for found in errors.values())
    assert learnt < 0.6 * statistical


def test_equal_calls_train_equal_networks(tmp_path):
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        TransformerLifetimePredictor.train(made(120), path, num_epochs=2)
    first, second = (load_network("transformer", str(path)).weights for path in paths)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


@pytest.mark.parametrize("kind", CLASSES)
def test_numpy_computes_what_torch_computes(kind):
    by_torch, network = untrained(kind)
    requests = [request for request, _ in made(8)]
    requests.append(PredictionRequest(sequence_id="long", token_ids=range(200), max_length=50))
    requests.append(PredictionRequest(sequence_id="empty", token_ids=[], max_length=50))
    features = [features_of(request) for request in requests]
    together = torch.softmax(by_torch(Batch.of(features)).double(), 1).detach().numpy()
    for row, each in zip(together, features, strict=True):
        assert network.density(each) == pytest.approx(row, abs=1e-5)
        assert row.shape == (NUM_BINS,)


def test_too_few_requests_teach_nothing(tmp_path):
    with pytest.raises(ConfigError, match="49 requests"):
        LSTMLifetimePredictor.train(made(49), tmp_path / "weights")


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "weights"
    with pytest.raises(ConfigError, match="no file"):
        LSTMLifetimePredictor(weights=str(path))
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="no weights of a predictor"):
        LSTMLifetimePredictor(weights=str(path))
    save_file({"x": np.zeros(1)}, path, {"format": "something else"})
    with pytest.raises(ConfigError, match="not written by"):
        LSTMLifetimePredictor(weights=str(path))
    network = untrained("transformer")[1]
    save_network(network, path)
    with pytest.raises(ConfigError, match="of the predictor transformer, not of lstm"):
        LSTMLifetimePredictor(weights=str(path))
    del network.weights["blocks.1.qkv.bias"]
    save_network(network, path)
    with pytest.raises(ConfigError, match="do not fit"):
        load_network("transformer", str(path))
