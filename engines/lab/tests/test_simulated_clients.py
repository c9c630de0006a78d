"""Simulated clients: conversations that grow, arrivals that are Poisson or recorded, and a seed."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from sagellm.core import ConfigError
from sagellm.lab.simulation.conversations import ConversationSettings, simulate_clients
from sagellm.lab.traces.lengths import Lengths


def test_a_conversation_goes_on_from_all_that_was_said():
    requests = simulate_clients(ConversationSettings(num_requests=60, system_len=10, rate=0.1))
    by_conversation: dict[str, list] = {}
    for one in requests:
        by_conversation.setdefault(one.conversation, []).append(one)
    assert {len(turns) for turns in by_conversation.values()} == {5}
    for turns in by_conversation.values():
        for earlier, later in pairwise(turns):
            assert later.token_ids[: earlier.num_prompt_tokens] == earlier.token_ids
            assert later.num_prompt_tokens > earlier.num_prompt_tokens + earlier.num_output_tokens
            assert later.arrival_s > earlier.arrival_s + earlier.num_output_tokens / 50
    firsts = [turns[0].token_ids for turns in by_conversation.values()]
    assert len({tuple(ids[:10].tolist()) for ids in firsts}) == 1
    assert len({tuple(ids[:12].tolist()) for ids in firsts}) == len(firsts)


def test_requests_come_in_order_and_the_seed_decides():
    settings = ConversationSettings(num_requests=50, rate=2.0)
    requests = simulate_clients(settings)
    arrivals = [one.arrival_s for one in requests]
    assert (len(requests), arrivals) == (50, sorted(arrivals))
    assert simulate_clients(settings) == requests
    assert simulate_clients(ConversationSettings(num_requests=50, rate=2.0, seed=1)) != requests


def test_conversations_begin_as_a_poisson_process():
    one_turn = Lengths("fixed", (1.0,))
    short = Lengths("fixed", (2.0,))
    settings = ConversationSettings(
        num_requests=5000, turns=one_turn, user_len=short, output_len=short, rate=4
    )
    arrivals = [one.arrival_s for one in simulate_clients(settings)]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert fmean(gap > 1 / 4 for gap in gaps) == pytest.approx(0.368, abs=0.03), "exponential: e^-1"


def test_recorded_arrivals_take_the_place_of_simulated_ones():
    settings = ConversationSettings(num_requests=4, rate=1.0)
    simulated, recorded = simulate_clients(settings), simulate_clients(settings, [9.0, 1.0, 2.0, 3.0, 50.0])
    assert [one.arrival_s for one in recorded] == [1.0, 2.0, 3.0, 9.0]
    assert [one.token_ids for one in recorded] == [one.token_ids for one in simulated]
    with pytest.raises(ConfigError, match="2 arrivals are recorded, fewer than 4"):
        simulate_clients(settings, [1.0, 2.0])


def test_tenants_take_turns():
    requests = simulate_clients(ConversationSettings(num_requests=40, num_tenants=4))
    tenants = {one.conversation: one.tenant for one in requests}
    assert set(tenants.values()) == {f"tenant-{number}" for number in range(4)}


@pytest.mark.parametrize(
    "settings", [{"num_requests": 0}, {"num_tenants": 0}, {"vocab_size": 3}, {"tokens_per_s": 0.0}]
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        ConversationSettings(**settings)
