"""Named loads: the same for every server, with prefixes that sessions share."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from sagellm.core import ConfigError
from sagellm.lab.bench.workloads import WORKLOADS, WorkloadSettings, make_sessions, mean_turns


def sessions(number=40, **settings):
    return list(islice(make_sessions(WorkloadSettings(**settings)), number))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_makes_the_same_sessions_and_all_fit(name):
    made = sessions(name=name, max_len=900, vocab_size=300)
    assert made == sessions(name=name, max_len=900, vocab_size=300)
    assert made != sessions(name=name, max_len=900, vocab_size=300, seed=1)
    turns = [turn for session in made for turn in session.turns]
    assert all(len(turn.token_ids) + turn.num_output_tokens <= 900 for turn in turns)
    assert all(3 <= token < 300 for turn in turns for token in turn.token_ids)


def test_a_turn_begins_with_all_that_was_said_before():
    for session in sessions(name="sharegpt"):
        for earlier, later in pairwise(session.turns):
            assert later.token_ids.tolist()[: len(earlier.token_ids)] == earlier.token_ids.tolist()
            assert len(later.token_ids) > len(earlier.token_ids) + earlier.num_output_tokens


def test_chats_share_few_beginnings_and_another_seed_shares_none():
    made, other = (sessions(name="chat", seed=seed) for seed in (0, 1))
    beginnings, others = ({tuple(one.turns[0].token_ids[:256]) for one in each} for each in (made, other))
    assert 1 < len(beginnings) <= 4
    assert not beginnings & others


def test_a_mixture_has_urgent_and_patient_requests_of_every_kind():
    made = sessions(200, name="mixed")
    assert {session.kind: session.priority for session in made} == {"chat": 1, "batch": -1, "document": 0}


def test_batches_have_one_turn_and_chats_several_in_the_mean():
    assert mean_turns(WorkloadSettings(name="batch")) == 1.0
    assert mean_turns(WorkloadSettings(name="chat")) > 2


@pytest.mark.parametrize("settings", [{"name": "mixd"}, {"vocab_size": 3}, {"max_len": 1}])
def test_a_load_that_cannot_be_made_is_refused(settings):
    with pytest.raises(ConfigError, match=r"mixed|at least"):
        WorkloadSettings(**settings)
