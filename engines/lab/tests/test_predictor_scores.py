"""Predictors are asked about a trace with what was known when each request arrived, and scored."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sagellm.core import ConfigError, PluginRegistry, TraceRequest, pack
from sagellm.lab.simulation.predictions import Ending, Question, predictions, questions
from sagellm.lab.simulation.predictor_scores import (
    Answer,
    controls,
    examples_of,
    figures_of,
    score_predictor,
)


def make(name, **options):
    return PluginRegistry.load().make("lifetime_predictor", {"name": name, "options": options})


def traffic(num_requests=300, seed=0):
    """Make requests of three kinds, whose first block tells how long the answer is."""
    rng, requests = random.Random(seed), []
    for index in range(num_requests):
        kind = rng.randrange(3)
        tokens = [kind + 5] * 16 + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        length = max(1, round((20, 80, 300)[kind] * rng.uniform(0.9, 1.1)))
        requests.append(TraceRequest(0.5 * index, len(tokens), length, token_ids=pack(tokens), tenant="a"))
    return requests


@pytest.mark.parametrize("name", ["statistical", "ranker", "online"])
def test_what_is_predicted_knows_nothing_of_the_future(name):
    requests, cut = traffic(), 200
    rng = random.Random(1)
    altered = [
        replace(one, num_output_tokens=rng.randrange(1, 3000))
        if one.arrival_s + 0.02 * one.num_output_tokens >= requests[cut].arrival_s
        else one
        for one in requests[:cut]
    ] + [
        replace(
            one, num_output_tokens=rng.randrange(1, 3000), token_ids=pack(range(40)), num_prompt_tokens=40
        )
        for one in requests[cut + 1 :]
    ]
    altered.insert(cut, replace(requests[cut], num_output_tokens=2999))
    first, second = (
        [found for _, found in predictions(make(name), each)][: cut + 1] for each in (requests, altered)
    )
    assert first == second
    assert any(one.confidence > 0.6 for one in first)


def test_a_request_ends_before_a_later_one_arrives_and_its_answer_is_known():
    tokens = pack([7] * 32)
    requests = [
        TraceRequest(at_s, 32, length, token_ids=tokens) for at_s, length in ((0, 50), (0.5, 10), (2, 9))
    ]
    events = list(questions(requests))
    assert [type(each) for each in events] == [Question, Question, Ending, Ending, Question, Ending]
    assert [each.sequence_id for each in events if isinstance(each, Ending)] == ["1", "0", "2"]
    asked = [each.request for each in events if isinstance(each, Question)]
    assert asked[0].answers == asked[1].answers == ()
    (found,) = asked[2].answers
    assert (found.num_answers, found.lengths) == (2, (10, 50))
    assert asked[2].arrival_ns - found.last_ns == 10**9


def test_outputs_that_were_cut_are_not_remembered_as_answers():
    tokens = pack([7] * 32)
    cut = TraceRequest(0, 32, 50, token_ids=tokens, max_tokens=50, finish_reason="length")
    events = list(questions([cut, TraceRequest(10, 32, 5, token_ids=tokens)]))
    last = [each for each in events if isinstance(each, Question)][-1]
    assert last.request.answers == ()
    assert events[0].request.max_length == 50


def test_lengths_alone_are_enough():
    requests = [TraceRequest(one, 100 if one % 2 else 900, 20 if one % 2 else 400) for one in range(300)]
    found = score_predictor("statistical", make("statistical"), requests)
    assert found.mae_tokens < 30
    assert found.rank_correlation > 0.8
    assert found.num_scored == 90


def test_scores_stand_beside_what_needs_no_predictor():
    requests = traffic()
    constant, by_prompt, best = controls(requests)
    found = score_predictor("statistical", make("statistical"), requests)
    assert found.mae_tokens < 0.3 * min(constant.mae_tokens, by_prompt.mae_tokens)
    assert best.mae_tokens <= constant.mae_tokens
    assert constant.rank_correlation is None
    assert 0.7 < found.coverage < 0.95
    assert sum(row[2] for row in found.calibration) == found.num_scored == 90


def test_the_figures_are_those_that_are_defined():
    answers = [
        Answer(length=length, actual_length=true, low=length - 5, high=length + 5, confidence=0.9)
        for length, true in ((100, 110), (10, 14), (50, 40), (7, 7))
    ]
    found = figures_of("x", answers)
    assert found.mae_tokens == (10 + 4 + 10 + 0) / 4
    assert (found.within_10_percent, found.within_10_percent_or_5_tokens) == (0.5, 0.75)
    assert (found.coverage, found.rank_correlation, found.trusted_share) == (0.5, 1.0, 1.0)
    assert found.calibration == [(pytest.approx(0.9), 1.0, 4)]


def test_too_short_traces_are_refused():
    with pytest.raises(ConfigError, match="has 19 requests; at least 20"):
        controls(traffic(19))
    with pytest.raises(ConfigError, match="no request"):
        figures_of("x", [])


def test_a_trace_in_which_nothing_that_is_scored_ended_is_refused():
    requests = traffic(60)
    cut = [replace(one, max_tokens=one.num_output_tokens) for one in requests[42:]]
    with pytest.raises(ConfigError, match="ended before its limit"):
        controls([*requests[:42], *cut])
    endless = [replace(one, num_output_tokens=1 << 17) for one in requests]
    with pytest.raises(ConfigError, match="ended before its limit"):
        controls(endless)


def test_a_single_answer_is_scored():
    requests = traffic(60)
    cut = [replace(one, max_tokens=one.num_output_tokens) for one in requests[42:-1]]
    found = score_predictor("statistical", make("statistical"), [*requests[:42], *cut, requests[-1]])
    assert (found.num_scored, found.calibration) == (1, [])
    assert found.mean_confidence is not None


def test_examples_are_of_the_first_part():
    assert len(examples_of(traffic())) == 210
    assert len(examples_of(traffic(), whole=True)) == 300
