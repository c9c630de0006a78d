"""The life of requests in LLMEngine: batches, streams, aborts, namespaces, continuations."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from sagellm.core import DuplicateRequestError, InvalidRequestError, Namespace, UnknownRequestError, pack
from sagellm.engines import SamplingParams
from sagellm.testing.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_outputs_come_back_in_the_order_of_the_prompts(make_engine):
    engine = make_engine()
    prompts = [[5, 6, 7, 8], "hello there", [9] * 40]
    outputs = engine.generate(prompts, GREEDY)
    assert [output.prompt_token_ids[:1] for output in outputs] == [[5], outputs[1].prompt_token_ids[:1], [9]]
    assert outputs[1].prompt == "hello there"
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_one_list_of_ids_is_one_prompt(make_engine):
    assert len(make_engine().generate([5, 6, 7], GREEDY)) == 1


@pytest.mark.parametrize("make", [tuple, pack, np.array, torch.tensor, lambda ids: list(np.array(ids))])
def test_ids_come_in_any_container(make_engine, make):
    engine = make_engine()
    [expected] = engine.generate([5, 6, 7], GREEDY)
    [output] = engine.generate(make([5, 6, 7]), GREEDY)
    assert output.prompt_token_ids == [5, 6, 7]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_request_alone_and_in_a_batch_gives_the_same_tokens(make_engine):
    prompts = [[3 + i] * (1 + 7 * i) for i in range(9)]
    together = make_engine().generate(prompts, GREEDY)
    engine = make_engine(enable_prefix_caching=False)
    for prompt, output in zip(prompts, together, strict=True):
        assert engine.generate([prompt], GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_streamed_outputs_grow_to_the_whole(make_engine):
    engine = make_engine()
    request_id = engine.add_request("once upon a time", GREEDY)
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step() if output.request_id == request_id]
    whole = make_engine().generate("once upon a time", GREEDY)[0].outputs[0].text
    assert texts[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_a_second_request_reuses_the_prefix_of_the_first(make_engine):
    engine = make_engine(block_size=8)
    prompt = list(range(10, 60))
    first = engine.generate(prompt, GREEDY)[0]
    second = engine.generate(prompt, GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 49)  # all but the last token
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_generated_tokens_are_reused_too(make_engine):
    engine = make_engine(block_size=8)
    prompt = list(range(10, 30))
    first = engine.generate(prompt, GREEDY)[0]
    follow_up = prompt + first.outputs[0].token_ids + [5, 6, 7]
    assert engine.generate(follow_up, GREEDY)[0].num_cached_tokens == 31  # 20 + 11 computed


def test_namespaces_share_nothing(make_engine):
    engine = make_engine()
    prompt = list(range(10, 90))
    engine.generate(prompt, GREEDY, namespace=Namespace("a"))
    assert engine.generate(prompt, GREEDY, namespace=Namespace("b"))[0].num_cached_tokens == 0
    assert engine.generate(prompt, GREEDY, namespace=Namespace("a", salt="x"))[0].num_cached_tokens == 0
    assert engine.generate(prompt, GREEDY, namespace=Namespace("a"))[0].num_cached_tokens > 0


def test_requests_of_one_batch_share_a_prefix_computed_meanwhile(make_engine):
    engine = make_engine(max_num_seqs=1)
    prompt = list(range(10, 90))
    outputs = engine.generate([prompt, prompt], GREEDY)
    assert outputs[1].num_cached_tokens == 79


def test_several_continuations_of_one_prompt(make_engine, all_blocks_are_back):
    engine = make_engine()
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    output = engine.generate([4, 5, 6, 7], params)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    assert all_blocks_are_back(engine)


def test_a_seed_gives_the_same_continuations_alone_in_a_batch_and_after_preemption(make_engine):
    params = SamplingParams(n=4, temperature=1.0, seed=42, max_tokens=16, ignore_eos=True)
    prompt, others = list(range(20, 50)), [[3 + i] * (10 + i) for i in range(6)]

    def continuations(engine, *prompts, **changes):
        output = engine.generate([*prompts, prompt], replace(params, **changes))[-1]
        return [completion.token_ids for completion in output.outputs]

    engine = make_engine()
    alone = continuations(engine)
    assert len(set(map(tuple, alone))) == 4
    assert continuations(engine) == continuations(engine, *others) == alone
    assert continuations(engine, n=2) == alone[:2]
    squeezed = make_engine(num_blocks=14, block_size=8)
    assert continuations(squeezed, *others[:2]) == alone
    assert squeezed.metrics().num_preemptions > 0


def test_an_abort_ends_all_continuations(make_engine, all_blocks_are_back):
    engine = make_engine()
    request_id = engine.add_request([4, 5, 6, 7], replace(GREEDY, n=3))
    engine.step()
    engine.abort_request(request_id)
    assert not engine.has_unfinished_requests()
    assert engine.metrics().num_running == engine.metrics().num_waiting == 0
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize("with_cache", [True, False])
def test_an_abort_frees_the_blocks(make_engine, all_blocks_are_back, with_cache):
    engine = make_engine(enable_prefix_caching=with_cache)
    request_id = engine.add_request([5] * 100, GREEDY)
    engine.step()
    assert not all_blocks_are_back(engine)
    engine.abort_request(request_id)
    assert all_blocks_are_back(engine)
    assert not engine.has_unfinished_requests()
    with pytest.raises(UnknownRequestError):
        engine.abort_request(request_id)


def test_a_waiting_request_can_be_aborted(make_engine, all_blocks_are_back):
    engine = make_engine()
    engine.abort_request(engine.add_request([5, 6], GREEDY))
    assert all_blocks_are_back(engine)


def test_a_duplicate_id_is_refused_and_the_first_goes_on(make_engine):
    engine = make_engine()
    engine.add_request([5, 6], GREEDY, request_id="mine")
    with pytest.raises(DuplicateRequestError, match="mine"):
        engine.add_request([7, 8], GREEDY, request_id="mine")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    engine.add_request([7, 8], GREEDY, request_id="mine")


def test_a_wrong_prompt_among_good_ones_runs_nothing(make_engine, all_blocks_are_back):
    engine = make_engine()
    with pytest.raises(InvalidRequestError):
        engine.generate([[5, 6], []], GREEDY)
    assert not engine.has_unfinished_requests()
    assert all_blocks_are_back(engine)


def test_more_urgent_requests_run_first(make_engine):
    engine = make_engine(max_num_seqs=1)
    late = engine.add_request([5, 6], GREEDY, priority=0)
    urgent = engine.add_request([7, 8], GREEDY, priority=5)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == [urgent, late]


def test_preempted_requests_end_as_if_alone(make_engine, all_blocks_are_back):
    prompts = [[3 + i] * 30 for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    roomy = make_engine(num_blocks=256).generate(prompts, params)
    engine = make_engine(num_blocks=12, block_size=8)
    tight = engine.generate(prompts, params)
    assert engine.metrics().num_preemptions > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in roomy]
    assert all_blocks_are_back(engine)


def test_two_engines_in_one_process_do_not_mix(make_engine):
    one, two = make_engine(), make_engine(attention_backend="naive")
    expected = one.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    ids = {one.add_request([5, 6, 7], GREEDY), two.add_request([5, 6, 7], GREEDY)}
    assert len(ids) == 2
    results = []
    while one.has_unfinished_requests() or two.has_unfinished_requests():
        results += [o for engine in (one, two) for o in engine.step() if o.finished]
    assert [output.outputs[0].token_ids for output in results] == [expected, expected]


def test_two_engines_run_on_two_threads(make_engine):
    engines = [make_engine(), make_engine()]
    results: list[list[int]] = [[], []]

    def run(index: int) -> None:
        results[index] = engines[index].generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] != []


def test_threads_that_share_an_engine_take_turns(make_engine, all_blocks_are_back):
    prompts = [[number + 3] * (4 + number) for number in range(8)]
    expected = [output.outputs[0].token_ids for output in make_engine().generate(prompts, GREEDY)]
    engine = make_engine()
    found = {}

    def generate(number):
        (output,) = engine.generate([prompts[number]], GREEDY)
        found[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=generate, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [found.get(number) for number in range(8)] == expected
    all_blocks_are_back(engine)


def test_metrics_measure_the_request(make_engine):
    output = make_engine().generate([5, 6, 7], GREEDY)[0]
    metrics = output.metrics
    assert 0 < metrics.ttft <= metrics.total_time
    assert metrics.tpot > 0
    assert metrics.throughput == pytest.approx(12 / metrics.total_time)


def test_logprobs_hold_the_sampled_token_and_the_likeliest(make_engine):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    completion = make_engine().generate([5, 6, 7], params)[0].outputs[0]
    assert len(completion.logprobs) == 3
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 2
        assert entry[token_id].logprob == max(value.logprob for value in entry.values())
    total = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(make_engine):
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True)
    prompt = list(range(20, 50))
    alone = make_engine().generate(prompt, params)[0].outputs[0].token_ids
    others = [[3 + i] * (10 + i) for i in range(32)]
    mixed = make_engine(num_blocks=256).generate([*others, prompt], params)[-1].outputs[0].token_ids
    engine = make_engine(num_blocks=14, block_size=8)
    squeezed = engine.generate([*others[:6], prompt], params)[-1].outputs[0].token_ids
    assert engine.metrics().num_preemptions > 0
    assert alone == mixed == squeezed


def test_the_prefix_cache_keeps_no_more_blocks_than_it_may(make_engine):
    engine = make_engine(block_size=8, prefix_cache_max_blocks=2)
    prompt = list(range(10, 50))
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
    (again,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
    assert again.num_cached_tokens <= 16
    assert engine.metrics().modules["prefix_cache"].num_blocks <= 2
