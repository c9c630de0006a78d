"""Greedy tokens are the same whatever manages the KV, with a pool so small that prompts evict each other."""

from __future__ import annotations

import random

import pytest

from sagellm.core import PluginRegistry
from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
REGISTRY = PluginRegistry.load()


def names(kind):
    return sorted(
        {entry.provider.name for entry in REGISTRY.providers(kind)}
        - {"null", "belady"}  # keep nothing, know all
    )


def make_conversations():
    """Prompts of three turns in which later ones go on earlier ones or leave them inside a block."""
    rng = random.Random(11)
    system = [rng.randrange(5, 200) for _ in range(21)]
    prompts = []
    for _ in range(4):
        prompt = [*system, *(rng.randrange(5, 200) for _ in range(rng.randrange(5, 30)))]
        for _ in range(3):
            prompts.append(list(prompt))
            prompt = prompt[: len(prompt) - rng.randrange(3)]
            prompt += [rng.randrange(5, 200) for _ in range(rng.randrange(3, 20))]
    order = [prompts[index] for index in (0, 3, 6, 1, 9, 4, 2, 7, 10, 5, 8, 11)]
    return order + order[:6]


PROMPTS = make_conversations()


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def run(engine, batch_size):
    found = []
    for begin in range(0, len(PROMPTS), batch_size):
        found += engine.generate(PROMPTS[begin : begin + batch_size], GREEDY)
    return found


@pytest.mark.parametrize("allocator", names("kv_allocator"))
@pytest.mark.parametrize("policy", names("eviction_policy"))
def test_tokens_are_the_same_under_every_policy_and_allocator(
    make_engine, expected, all_blocks_are_back, policy, allocator
):
    engine = make_engine(
        block_size=8, num_blocks=30, max_num_seqs=2, eviction_policy=policy, kv_allocator=allocator
    )
    found = run(engine, 2)
    assert [output.outputs[0].token_ids for output in found] == expected
    cache = engine.metrics().modules["prefix_cache"]
    assert cache.num_evicted_blocks > 30, "the pool was to be too small"
    assert cache.num_hit_tokens > 0
    assert all_blocks_are_back(engine)


def test_the_cache_hits_inside_blocks_too_in_this_load(make_engine, expected):
    engine = make_engine(block_size=8)
    assert [output.outputs[0].token_ids for output in run(engine, 1)] == expected
    warm = run(engine, 3)
    assert [output.outputs[0].token_ids for output in warm] == expected
    assert [output.num_cached_tokens for output in warm] == [len(prompt) - 1 for prompt in PROMPTS]
    assert engine.metrics().modules["prefix_cache"].num_partial_hit_tokens > 50
