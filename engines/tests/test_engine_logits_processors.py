"""Logits processors in an engine: alone, in a batch, after preemption, and from outside."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from sagellm.core import (
    ExtraArg,
    InvalidRequestError,
    LogitsProcessorMetrics,
    LogitsProcessorProtocol,
    PluginError,
    PluginRegistry,
    Provider,
    SageLLMError,
    hookimpl,
)
from sagellm.engines import SamplingParams

PROMPT = list(range(20, 50))


def generate(engine, prompt=PROMPT, **options):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options))
    return engine.generate([prompt], params)[0].outputs[0]


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


def test_a_bias_of_100_chooses_and_of_minus_100_bans(engine):
    plain = generate(engine).token_ids
    assert generate(engine, logit_bias={77: 100}).token_ids == [77] * 12
    banned = generate(engine, logit_bias=dict.fromkeys(plain, -100.0)).token_ids
    assert not set(banned) & set(plain)
    assert generate(engine).token_ids == plain


def test_nothing_but_allowed_tokens_is_chosen(engine):
    allowed = [5, 99, 300, 514]
    tokens = generate(engine, allowed_token_ids=allowed, temperature=1.5, max_tokens=64).token_ids
    assert set(tokens) == set(allowed)


def test_an_allowed_token_is_chosen_against_every_filter(engine):
    assert generate(engine, allowed_token_ids=[7], temperature=1.0, top_k=1, min_p=0.5).token_ids == [7] * 12


def test_a_word_that_is_bad_does_not_come(engine):
    plain = generate(engine)
    tokenizer = engine.tokenizer
    words = [tokenizer.decode(plain.token_ids[index : index + 1]).strip() for index in range(12)]
    words = [word for word in words if word.isalpha()]
    assert words
    changed = generate(engine, bad_words=words)
    banned = {
        ids[0] for ids in (tokenizer.encode(w, add_special_tokens=False) for w in words) if len(ids) == 1
    }
    assert banned & set(plain.token_ids)
    assert not banned & set(changed.token_ids)


def test_a_bad_sequence_of_tokens_may_begin_but_not_end(engine):
    plain = generate(engine).token_ids
    changed = generate(engine, bad_words_token_ids=[plain[2:5]]).token_ids
    assert changed[:4] == plain[:4]
    assert changed[4] != plain[4]


def test_log_probs_are_those_before_the_processors(engine):
    plain = generate(engine, logprobs=1, max_tokens=1)
    changed = generate(engine, logprobs=1, max_tokens=1, logit_bias={plain.token_ids[0]: -100.0})
    likeliest, before = (each.logprobs[0][plain.token_ids[0]] for each in (changed, plain))
    assert replace(likeliest, logprob=before.logprob) == before
    # Where the first prompt was not cached and the second is, some backends round otherwise.
    assert likeliest.logprob == pytest.approx(before.logprob, abs=1e-6)
    assert (likeliest.rank, changed.logprobs[0][changed.token_ids[0]].rank) == (1, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {600: 1.0}},
        {"allowed_token_ids": [600]},
        {"bad_words_token_ids": [[600]]},
        {"bad_words": "  "},
    ],
)
def test_what_the_model_does_not_know_is_refused(engine, options):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(options))} has "):
        generate(engine, **options)


def test_bad_words_need_a_tokenizer(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine.driver.input, "_tokenizer", None)
    with pytest.raises(InvalidRequestError, match="bad_words_token_ids"):
        generate(engine, bad_words=["x"])
    assert len(generate(engine, bad_words_token_ids=[[5]]).token_ids) == 12


ASKED = [
    {"logit_bias": {77: 8.0, 78: 6.0, 5: -100.0}},
    {"min_tokens": 20, "stop_token_ids": list(range(100, 300))},
    {"allowed_token_ids": list(range(40, 400, 7))},
    {
        "bad_words_token_ids": [[token, other] for token in range(3) for other in range(200)]
        + [[token] for token in range(0, 515, 2)]
    },
    {"presence_penalty": 1.0, "logit_bias": {77: 8.0}, "bad_words": ["the", "harbour"]},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_alone_in_a_batch_of_33_and_after_preemption(make_engine, temperature):
    options = {"temperature": temperature, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**options, **asked) for asked in ASKED]
    others = [params[i % 5] if i % 2 else SamplingParams(**options) for i in range(28)]
    prompts = [[3 + i] * (10 + i) for i in range(28)]

    def beside(engine, number):
        outputs = engine.generate([*prompts[:number], *[PROMPT] * 5], [*others[:number], *params])
        return [output.outputs[0].token_ids for output in outputs[number:]]

    plain, *alone = (
        make_engine().generate([PROMPT], each)[0].outputs[0].token_ids
        for each in (SamplingParams(**options), *params)
    )
    assert plain not in alone
    assert beside(make_engine(num_blocks=256), 28) == alone
    engine = make_engine(num_blocks=14, block_size=8)
    assert beside(engine, 6) == alone
    assert engine.metrics().num_preemptions > 0


def test_only_sequences_that_ask_are_counted(make_engine):
    engine = make_engine()
    asked = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={1: 1.0}, n=2)
    engine.generate([PROMPT] * 3, [asked, *[SamplingParams(temperature=0.0, max_tokens=9)] * 2])
    counts = engine.metrics().modules["logits_processor"]
    assert list(counts) == ["logit_bias", "min_tokens", "allowed_token_ids", "bad_words"]
    assert counts["logit_bias"] == LogitsProcessorMetrics(num_sequences=2, num_rows=8)
    assert counts["bad_words"] == LogitsProcessorMetrics()


class Only(LogitsProcessorProtocol[int]):
    """A processor from outside: nothing but the token that a request brings as `only`."""

    def __init__(self, vocab_size):
        assert vocab_size == 515

    def extra_args(self):
        return [ExtraArg(name="only", type="int", minimum=0, maximum=514)]

    def start(self, request):
        only = request.extra_args.get("only")
        if only == 13:
            raise ValueError("no such token")
        return only

    def apply(self, logits, rows):
        for row, only, _ in rows:
            logits[row] = torch.full_like(logits[row], -torch.inf)
            logits[row, only] = 0.0

    def metrics(self):
        return LogitsProcessorMetrics()


@pytest.fixture
def registry():
    class Plugin:
        @hookimpl
        def sagellm_providers(self):
            return [Provider("logits_processor", "only", f"{__name__}:Only", "one token")]

    made = PluginRegistry.load()
    made.register(Plugin(), distribution="somebody-elses")
    return made


def test_one_from_outside_is_switched_on_by_name(make_engine, registry):
    engine = make_engine(registry=registry, logits_processors=["only", "logit_bias"])
    assert generate(engine, extra_args={"only": 9}).token_ids == [9] * 12
    plain = generate(make_engine(), logit_bias={8: 3.0})
    assert generate(engine, logit_bias={8: 3.0}).token_ids == plain.token_ids  # not applied twice
    assert list(engine.metrics().modules["logits_processor"])[-1] == "only"


def test_what_one_raises_ends_the_request_that_caused_it(make_engine, registry, caplog):
    engine = make_engine(registry=registry, logits_processors="only")
    params = [SamplingParams(max_tokens=3, ignore_eos=True, extra_args=args) for args in (None, {"only": 13})]
    with caplog.at_level(logging.CRITICAL):
        good, bad = engine.generate([PROMPT, PROMPT], params)
    assert len(good.outputs[0].token_ids) == 3
    assert bad.outputs[0].finish_reason == "error"
    assert re.fullmatch(
        r"PluginError: logits_processor 'only' of somebody-elses 0: start\(\) failed; ValueError: "
        r"no such token \(test_engine_logits_processors.py, line \d+, in start\)",
        bad.outputs[0].error,
    )


def test_one_that_fails_in_apply_is_named_with_its_plugin_and_line(
    make_engine, registry, monkeypatch, caplog
):
    monkeypatch.setattr(Only, "apply", lambda self, logits, rows: rows[len(rows)])
    engine = make_engine(registry=registry, logits_processors="only")
    with caplog.at_level(logging.CRITICAL):
        error = generate(engine, extra_args={"only": 9}).error
    named = r"'only' of somebody-elses 0: apply\(\) failed; IndexError: .*logits_processors.py, line \d+, in"
    assert re.search(named, error)


def test_one_that_cannot_be_made_is_named_with_its_plugin_and_line(make_engine, registry, monkeypatch):
    monkeypatch.setattr(Only, "__init__", lambda self, vocab_size: vocab_size / 0)
    told = r"'only' of somebody-elses 0: its factory failed; ZeroDivisionError: .*, line \d+, in <lambda>\)"
    with pytest.raises(PluginError, match=told):
        make_engine(registry=registry, logits_processors="only")


@pytest.mark.parametrize(
    ("names", "extra_args", "told"),
    [
        (["only"], {"olny": 9}, r"extra_args has 'olny', which .* reads; there is only. Did you mean 'only'"),
        (["only"], {"only": "x"}, r"'x' for only; it must be a whole number of at least 0 and at most 514"),
        (["only"], {"only": 515}, r"515 for only"),
        (["only"], {"only": True}, r"True for only"),
        ([], {"only": 9}, r"there is none; --logits-processors"),
    ],
)
def test_arguments_that_no_processor_takes_are_refused(make_engine, registry, names, extra_args, told):
    engine = make_engine(registry=registry, logits_processors=names)
    with pytest.raises(InvalidRequestError, match=told):
        engine.generate([PROMPT], SamplingParams(extra_args=extra_args))


def fail():
    raise RuntimeError("no moon")


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (fail, "failed; RuntimeError: no moon"),
        (lambda: None, "returned None; TypeError: "),
        (lambda: [1, "x"], r"returned \[1, 'x'\]; TypeError: 1 is not an ExtraArg with a string as its name"),
        (lambda: [ExtraArg(name=2, type="int")], r"ExtraArg\(name=2, .* is not an ExtraArg with a string"),
    ],
)
def test_one_that_declares_nonsense_is_named_with_its_plugin(
    make_engine, registry, monkeypatch, declared, told
):
    monkeypatch.setattr(Only, "extra_args", lambda self: declared())
    with pytest.raises(PluginError, match=f"logits_processor 'only' of somebody-elses 0: .* {told}"):
        make_engine(registry=registry, logits_processors="only")


def test_an_unknown_one_is_told_before_the_model_is_loaded(make_engine):
    with pytest.raises(SageLLMError, match="Did you mean 'bad_words'"):
        make_engine(model="no/such/model", logits_processors=["bad_wordz"])
