"""Log-probabilities of prompts: exact in chunks, beside cached prefixes and after preemption."""

from __future__ import annotations

import pytest
import torch

from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.scheduler import MAX_SCORED_POSITIONS

PROMPT = [(37 * i + 11) % 500 for i in range(150)]


def asked(num_top=2, **options):
    defaults = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": num_top}
    return SamplingParams(**(defaults | options))


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Log-probabilities (tokens, vocab) of what comes after each token, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def log_probs(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return log_probs


def check(output, expected, num_top):
    """Compare with the reference: values within 1e-5, and ranks where no rounding could change them."""
    token_ids, entries = output.prompt_token_ids, output.prompt_logprobs
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    for token_id, row, entry in zip(token_ids[1:], expected[:-1], entries[1:], strict=True):
        assert next(iter(entry)) == token_id
        for each, value in entry.items():
            assert value.logprob == pytest.approx(row[each].item(), abs=1e-5)
        certain = int((row > row[token_id] + 1e-5).sum()) + 1, int((row > row[token_id] - 1e-5).sum())
        assert certain[0] <= entry[token_id].rank <= max(certain)
        ranked = sorted((value.rank, value.logprob) for value in entry.values())
        assert [rank for rank, _ in ranked[:num_top]] == list(range(1, num_top + 1))
        assert len(entry) in (max(num_top, 1), num_top + 1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 17, "block_size": 8},
        {"max_num_batched_tokens": 1, "block_size": 4},
        {"enable_prefix_caching": False, "attention_backend": "naive"},
    ],
)
@pytest.mark.parametrize("num_top", [0, 3])
def test_a_prompt_is_scored_as_transformers_scores_it(make_engine, reference, settings, num_top):
    engine = make_engine(**settings)
    output = engine.generate([PROMPT], asked(num_top, logprobs=1))[0]
    expected = reference(PROMPT + output.outputs[0].token_ids)
    check(output, expected[: len(PROMPT)], num_top)
    token_id = output.outputs[0].token_ids[0]
    assert output.outputs[0].logprobs[0][token_id].logprob == pytest.approx(
        expected[len(PROMPT) - 1, token_id].item(), abs=1e-5
    )
    assert engine.client.core.scheduler.num_running == 0


def test_tokens_have_their_part_of_the_text(make_engine):
    engine = make_engine()
    prompt = "The clock in the 🌊 station"
    output = engine.generate(prompt, asked(1))[0]
    ids, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    texts = [entry[token_id].decoded_token for token_id, entry in zip(ids, entries, strict=True)]
    assert prompt.endswith("".join(texts))
    assert len(prompt) - len("".join(texts)) == len(engine.tokenizer.decode(output.prompt_token_ids[:1]))
    raw = b"".join(entry[token_id].token_bytes for token_id, entry in zip(ids, entries, strict=True))
    assert raw.decode() == "".join(texts)


def test_without_text_tokens_have_none(make_engine):
    output = make_engine().generate([PROMPT], asked(1, detokenize=False, logprobs=1))[0]
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert {one.decoded_token for entry in entries for one in entry.values()} == {""}


def test_who_does_not_ask_gets_none_and_one_token_follows_nothing(make_engine):
    outputs = make_engine().generate([PROMPT, [5]], [asked(None), asked(1)])
    assert [output.prompt_logprobs for output in outputs] == [None, [None]]


def test_a_cached_prefix_is_computed_again_for_who_asks_and_reused_by_who_does_not(make_engine, reference):
    engine = make_engine(block_size=8)
    plain = engine.generate([PROMPT], asked(None))[0]
    scored = engine.generate([PROMPT], asked(1))[0]
    again = engine.generate([PROMPT], asked(None))[0]
    assert [output.num_cached_tokens for output in (plain, scored, again)] == [0, 0, 149]
    check(scored, reference(PROMPT), 1)
    assert plain.outputs[0].token_ids == scored.outputs[0].token_ids == again.outputs[0].token_ids


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 40}, {}])
def test_a_batch_that_is_preempted_is_scored_all_the_same(
    make_engine, reference, all_blocks_are_back, settings
):
    engine = make_engine(num_blocks=24, block_size=8, **settings)
    prompts = [PROMPT[i : i + 30 + 7 * i] for i in range(9)]
    params = [asked(2, max_tokens=30) if i % 3 else asked(None, max_tokens=30) for i in range(9)]
    for output, one in zip(engine.generate(prompts, params), params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, reference(output.prompt_token_ids), 2)
    assert engine.metrics().num_preemptions > 0
    assert all_blocks_are_back(engine)


def test_a_sequence_preempted_in_its_prompt_goes_on_where_its_scores_end(make_engine, reference):
    engine = make_engine(max_num_batched_tokens=40, block_size=8)
    engine.add_request(PROMPT, asked(1))
    engine.step()
    engine.step()
    scheduler = engine.client.core.scheduler
    [sequence] = scheduler._sequences.values()
    assert sequence.num_scored == 80
    scheduler._preempt(sequence, is_swapped=False)
    outputs = []
    outputs += engine.step()
    assert sequence.match.match_length == 80
    assert sequence.num_scored == 120
    while engine.has_unfinished_requests():
        outputs += engine.step()
    check(outputs[-1], reference(PROMPT), 1)


def test_no_step_holds_logits_of_more_than_a_few_hundred_positions(make_engine, reference, monkeypatch):
    engine = make_engine(max_num_batched_tokens=2048, num_blocks=256)
    runner, rows = engine.client.core.runner, []
    execute = runner.execute_model

    def record(batch):
        logits = execute(batch)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(runner, "execute_model", record)
    long = (PROMPT * 5)[:700]
    prompts = [long, PROMPT, [7] * 20, long[3:500]]
    params = [asked(0), asked(5), asked(None), asked(1)]
    outputs = engine.generate(prompts, params)
    for output, one in zip(outputs, params, strict=True):
        if one.prompt_logprobs is not None:
            check(output, reference(output.prompt_token_ids), one.prompt_logprobs)
    assert max(rows) <= MAX_SCORED_POSITIONS + len(prompts)
    assert sum(rows) >= 699 + 149 + 496


def test_one_continuation_scores_the_prompt_for_all(make_engine, reference, monkeypatch):
    engine = make_engine()
    sampler, scored = engine.client.core.parts.worker.sampler, []
    score = sampler.score
    monkeypatch.setattr(
        sampler, "score", lambda logits, ids, num_top: scored.append(len(ids)) or score(logits, ids, num_top)
    )
    output = engine.generate([PROMPT], asked(1, n=3, temperature=1.0))[0]
    check(output, reference(PROMPT), 1)
    assert len(output.outputs) == 3
    assert sum(scored) == len(PROMPT) - 1


def test_scores_come_with_the_first_token_and_stay(make_engine):
    engine = make_engine(max_num_batched_tokens=64)
    engine.add_request(PROMPT, asked(0))
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.snapshot() for output in engine.step()]
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4]
    assert all(output.prompt_logprobs == seen[0].prompt_logprobs for output in seen)
    assert len(seen[0].prompt_logprobs) == len(PROMPT)


def test_a_prompt_that_cannot_be_scored_ends_alone(make_engine, monkeypatch, all_blocks_are_back):
    engine = make_engine()
    runner = engine.client.core.runner
    execute = runner.execute_model

    def spoil(batch):
        logits = execute(batch).clone()
        rows = (batch.input_ids[batch.logits_indices] == 13).nonzero()[:, 0]
        logits[rows] = torch.nan
        return logits

    monkeypatch.setattr(runner, "execute_model", spoil)
    good, bad = engine.generate([[5, 6, 7], [8, 13, 9]], asked(1))
    assert good.prompt_logprobs is not None
    assert bad.outputs[0].finish_reason == "error"
    assert "BadLogitsError" in bad.outputs[0].error
    assert all_blocks_are_back(engine)
