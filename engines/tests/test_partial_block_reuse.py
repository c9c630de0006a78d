"""Reuse inside a block: the block that agrees in part is copied, and the copy is written on."""

from __future__ import annotations

import pytest

from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FIRST = list(range(10, 60))


@pytest.mark.parametrize(
    ("follow_up", "num_cached"),
    [
        (FIRST[:45], 44),  # ends inside a block that is cached whole
        ([*FIRST[:21], *range(70, 90)], 21),  # leaves an edge inside a block
        ([*FIRST[:3], *range(70, 90)], 3),  # agrees with less than the first block
        ([*FIRST, *range(70, 90)], 50),  # goes on where the first prompt's last block was not full
    ],
)
def test_output_is_the_same_when_a_block_is_reused_in_part(make_engine, follow_up, num_cached):
    cold = make_engine(block_size=8).generate(follow_up, GREEDY)[0]
    engine = make_engine(block_size=8)
    first = engine.generate(FIRST, GREEDY)[0]
    warm = engine.generate(follow_up, GREEDY)[0]
    assert warm.num_cached_tokens == num_cached
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert engine.generate(FIRST, GREEDY)[0].outputs[0].token_ids == first.outputs[0].token_ids


def test_a_source_that_is_evicted_for_its_own_copy_is_still_right(make_engine):
    prompts = [[name, *range(100, 119)] for name in range(10, 16)]
    pressed = [[*prompt[:13], *range(60, 90)] for prompt in prompts]
    cold = [make_engine(block_size=8).generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in pressed]
    engine = make_engine(block_size=8, num_blocks=8)
    for prompt, follow_up, expected in zip(prompts, pressed, cold, strict=True):
        engine.generate(prompt, GREEDY)
        warm = engine.generate(follow_up, GREEDY)[0]
        assert warm.outputs[0].token_ids == expected
        assert warm.num_cached_tokens >= 8


def test_whole_blocks_alone_are_reused_where_that_is_asked_for(make_engine):
    engine = make_engine(block_size=8, prefix_cache="radix{reuses_partial_blocks=false}")
    engine.generate(FIRST, GREEDY)
    assert engine.generate(FIRST, GREEDY)[0].num_cached_tokens == 48
