"""KL divergence against values worked out by hand."""

import math

import pytest
import torch

from sagellm.accel import Int8Quantizer, kl_divergence
from sagellm.core import InvalidInputError


def test_equal_logits_have_no_divergence():
    logits = torch.randn(3, 7, 50)
    assert kl_divergence(logits, logits + 5) == pytest.approx(0, abs=1e-6)


def test_two_tokens_by_hand():
    reference, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(reference, other) == pytest.approx(by_hand)


def test_positions_are_averaged():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    assert kl_divergence(reference, other) == pytest.approx(kl_divergence(reference[:1], other[:1]) / 2)


def test_tokens_that_the_reference_excludes_add_nothing():
    reference = torch.tensor([[0.0, 0.0, -math.inf]])
    assert kl_divergence(reference, torch.tensor([[0.0, 0.0, -math.inf]])) == 0
    assert kl_divergence(reference, torch.zeros(1, 3)) == pytest.approx(math.log(1.5))


def test_tokens_that_only_the_other_excludes_make_it_infinite():
    assert kl_divergence(torch.zeros(1, 2), torch.tensor([[0.0, -math.inf]])) == math.inf


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.tensor(1.0), torch.tensor(1.0)),
        (torch.tensor([[0.0, math.nan]]), torch.zeros(1, 2)),
        (torch.zeros(1, 2), torch.tensor([[0.0, math.inf]])),
        (torch.full((1, 2), -math.inf), torch.zeros(1, 2)),
    ],
)
def test_what_is_no_distribution_is_refused(reference, other):
    with pytest.raises(InvalidInputError):
        kl_divergence(reference, other)


def test_eight_bits_change_the_predictions_of_a_random_head_little():
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(1000, 64, generator=generator) / 8
    hidden = torch.randn(40, 64, generator=generator)
    quantizer = Int8Quantizer()
    assert 0 < kl_divergence(hidden @ head.T, quantizer.linear(hidden, quantizer.quantize(head))) < 1e-3
