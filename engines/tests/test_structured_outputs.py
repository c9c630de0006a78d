"""Outputs that must match: with a grammar that needs no compiler, in every kind of step."""

from __future__ import annotations

import json
import threading
from typing import ClassVar

import pytest

from sagellm.core import EngineError, InvalidRequestError, PluginRegistry, Provider, Tenant, hookimpl
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core import preparing
from sagellm.engines.testing.choice_grammar import ChoiceGrammar
from sagellm.engines.testing.drafts import DRAFTING, propose_with
from sagellm.testing.patience import wait_until

PROMPT = list(range(20, 50))
CHOICES = ["yes, of course it is", "no", "nobody knows", "not yet"]


class Held(ChoiceGrammar):
    """Compiles when it may."""

    gate = threading.Event()
    compiled: ClassVar[list[str]] = []

    def prepare(self, kind, text):
        self.compiled.append(text)
        self.gate.wait(30)
        return super().prepare(kind, text)


class Failing(ChoiceGrammar):
    def mask(self, state, words):
        if len(state.before) == 1:
            raise RuntimeError("no mask today")
        return super().mask(state, words)


class Unstartable(ChoiceGrammar):
    def start(self, compiled):
        raise RuntimeError("no start today")


class Slow(ChoiceGrammar):
    """Is made when its engine closes."""

    begun, closing, closed = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, vocabulary):
        super().__init__(vocabulary)
        self.begun.set()
        self.closing.wait(30)

    def close(self):
        self.closed.set()


class Lying(ChoiceGrammar):
    """Allows what it does not accept."""

    def mask(self, state, words):
        return False


class Plugin:
    SAGELLM_API = 0

    @hookimpl
    def sagellm_providers(self):
        return [
            Provider("grammar", each.__name__.lower(), f"{__name__}:{each.__name__}", "for tests")
            for each in (ChoiceGrammar, Held, Failing, Lying, Slow, Unstartable)
        ]


@pytest.fixture(scope="module")
def with_grammar(make_engine):
    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="for-tests", version="1")

    def make(name="choicegrammar", **settings):
        return make_engine(registry=registry, grammar_backend=name, **settings)

    return make


@pytest.fixture(scope="module", params=["inline", "overlapped"])
def engine(with_grammar, request):
    return with_grammar(executor=request.param)


def ask(engine, choices=CHOICES, **options):
    params = {"max_tokens": 40, "seed": 3, "structured_outputs": {"choice": choices}} | options
    return engine.generate([PROMPT], SamplingParams(**params))[0].outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_an_output_is_one_of_the_choices(engine, temperature):
    for output in ask(engine, n=4, temperature=temperature):
        assert output.text in CHOICES
        assert output.finish_reason == "stop"


def test_both_depths_give_the_same_outputs(with_grammar):
    found = [
        [output.token_ids for output in ask(with_grammar(executor=executor), n=8, temperature=2.0)]
        for executor in ("inline", "overlapped")
    ]
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 1


def test_others_are_as_without_it(engine):
    plain = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    masked = SamplingParams(max_tokens=20, seed=5, structured_outputs={"choice": CHOICES})
    alone = engine.generate([PROMPT], plain)[0].outputs[0].token_ids
    both = engine.generate([PROMPT, PROMPT, PROMPT], [masked, plain, masked])
    assert both[1].outputs[0].token_ids == alone
    assert both[0].outputs[0].text == both[2].outputs[0].text in CHOICES


def test_max_tokens_and_stop_strings_still_end_it(engine):
    (cut,) = ask(engine, ["abcdefghijklmnopqrstuvwxyz"], max_tokens=3)
    assert cut.finish_reason == "length"
    assert "abcdefghijklmnopqrstuvwxyz".startswith(cut.text)
    (stopped,) = ask(engine, ["one two three"], stop=" tw")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("one", "stop", " tw")


def test_min_tokens_puts_off_an_end_that_is_not_the_only_way(engine):
    longer = "no way, never, not in a thousand years"
    assert {output.text for output in ask(engine, ["no", longer], min_tokens=6, n=4)} == {longer}
    assert {output.text for output in ask(engine, ["no"], min_tokens=30, n=2)} == {"no"}


def test_a_stop_token_comes_only_at_the_end(engine):
    eos = next(iter(engine.driver.input.limits.eos_token_ids))
    for output in ask(engine, ["the end"], logit_bias={eos: 100}):
        assert output.text == "the end"


def test_what_cannot_be_compiled_is_refused_before_the_first_token(engine):
    for given in ({"regex": "a+"}, {"json": {"type": "object"}}):
        with pytest.raises(InvalidRequestError, match="is not supported; give a choice"):
            engine.generate([PROMPT], SamplingParams(structured_outputs=given))
    assert not engine.has_unfinished_requests()
    assert ask(engine)[0].text in CHOICES


def test_log_probabilities_are_reported(engine):
    (output,) = ask(engine, logprobs=2)
    assert len(output.logprobs) == len(output.token_ids)


def test_the_wait_for_a_grammar_is_explained(with_grammar):
    engine = with_grammar("held")
    Held.gate.clear()
    try:
        params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["a", "b"]})
        request_id = engine.add_request(PROMPT, params)
        engine.step()
        (waiting,) = engine.explain(request_id).sequences
        assert (waiting.state, [event.kind for event in waiting.events]) == ("waiting", ["waited"])
        assert waiting.waited_ns["grammar"] > 0
    finally:
        Held.gate.set()
    while engine.has_unfinished_requests():
        engine.step()
    (told,) = engine.explain(request_id).sequences
    kinds = [(event.kind, getattr(event, "reason", None)) for event in told.events]
    assert kinds[:2] == [("waited", "grammar"), ("queued", None)]
    assert told.events[0].at_ns + told.events[0].duration_ns == told.events[1].at_ns
    assert kinds[-1] == ("finished", "stop")
    again = engine.generate([PROMPT], params)[0].request_id
    assert "grammar" not in engine.explain(again).sequences[0].waited_ns


@pytest.mark.parametrize("executor", ["inline", "overlapped"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("wrong_at", [None, 0, 2], ids=["right", "wrong", "right, then wrong"])
def test_drafts_are_walked_and_undone(with_grammar, executor, temperature, wrong_at):
    expected = [output.token_ids for output in ask(with_grammar(), n=4, temperature=temperature)]

    def propose(texts):
        """Follow the first output that begins like the text."""
        drafts = []
        for text in texts:
            answer = list(text[len(PROMPT) :])
            follows = [each for each in expected if list(each[: len(answer)]) == answer]
            draft = list(follows[0][len(answer) :][:5]) if follows else [7, 7]
            if wrong_at is not None:
                draft[wrong_at : wrong_at + 1] = [7]
            drafts.append(draft)
        return drafts

    drafted = with_grammar(executor=executor, **DRAFTING)
    propose_with(drafted, propose)
    assert [output.token_ids for output in ask(drafted, n=4, temperature=temperature)] == expected
    found = drafted.metrics().modules["speculation"]
    assert found.failure == ""
    assert found.num_draft_tokens > 4
    if wrong_at is None:
        assert found.num_accepted_tokens > 0
    elif wrong_at or executor == "inline":  # else the first of a draft may be the token in flight
        assert found.num_accepted_tokens < found.num_draft_tokens


def test_a_preempted_sequence_goes_on_where_it_was(with_grammar):
    text = "a rather long text that needs several blocks of tokens, so that others must make room for it"
    roomy, narrow = with_grammar(), with_grammar(num_blocks=9, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=100, structured_outputs={"choice": [text, text.upper()]}, seed=1)
    asked = [PROMPT, PROMPT[5:], PROMPT[3:]]
    expected = [each.outputs[0].text for each in roomy.generate(asked, params)]
    found = narrow.generate(asked, params)
    assert [each.outputs[0].text for each in found] == expected
    assert narrow.metrics().num_preemptions > 0


def test_a_row_that_fails_does_not_move_the_grammars_of_others(with_grammar):
    engine = with_grammar()
    executed = engine.client.core.runner
    execute, num_calls = executed.execute_model, 0

    def fail_at_times(batch):
        nonlocal num_calls
        num_calls += 1
        if len(batch.query_lens) > 1 and num_calls % 3 == 0:
            raise EngineError("this batch is unlucky")
        return execute(batch)

    expected = [output.token_ids for output in ask(engine, n=4, temperature=2.0)]
    executed.execute_model = fail_at_times
    assert [output.token_ids for output in ask(engine, n=4, temperature=2.0)] == expected
    assert num_calls > 3


@pytest.mark.parametrize(
    ("name", "told"),
    [("failing", "no mask today"), ("lying", "does not allow there"), ("unstartable", "no start today")],
)
def test_a_grammar_that_fails_ends_its_sequence_alone(with_grammar, name, told):
    engine = with_grammar(name)
    plain = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    masked = SamplingParams(max_tokens=12, seed=5, structured_outputs={"choice": CHOICES})
    expected = engine.generate([PROMPT], plain)[0].outputs[0].token_ids
    for _ in range(2):  # then the text is compiled already
        failed, sound = engine.generate([PROMPT, PROMPT], [masked, plain])
        assert failed.outputs[0].finish_reason == "error"
        assert told in failed.outputs[0].error
        assert sound.outputs[0].token_ids == expected


def test_while_a_grammar_compiles_its_sequence_is_not_scheduled_and_others_run(with_grammar):
    engine = with_grammar("held")
    Held.gate.clear()
    held = engine.add_request(PROMPT, SamplingParams(structured_outputs={"choice": CHOICES}, n=2))
    assert (engine.metrics().num_preparing, engine.metrics().num_waiting) == (2, 0)
    other = engine.add_request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    ended = set()
    while other not in ended:
        ended |= {each.request_id for each in engine.step() if each.finished}
    assert ended == {other}
    Held.gate.set()
    while engine.has_unfinished_requests():
        ended |= {each.request_id for each in engine.step() if each.finished}
    assert ended == {other, held}
    assert engine.metrics().num_preparing == 0


def test_a_sequence_whose_grammar_compiles_can_be_aborted_and_be_late(with_grammar):
    engine = with_grammar("held")
    Held.gate.clear()
    params = SamplingParams(structured_outputs={"choice": CHOICES})
    engine.abort_request(engine.add_request(PROMPT, params))
    assert not engine.has_unfinished_requests()
    late = engine.add_request(PROMPT, params, deadline_ms=20)
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    assert [(each.request_id, each.outputs[0].finish_reason) for each in found] == [(late, "deadline")]
    Held.gate.set()
    assert ask(engine)[0].text in CHOICES
    engine.close()


def test_a_provider_that_is_made_while_the_engine_closes_is_closed(with_grammar, monkeypatch):
    engine = with_grammar("slow")
    engine.add_request(PROMPT, SamplingParams(structured_outputs={"choice": CHOICES}))
    assert Slow.begun.wait(30)
    thread = engine.client.core._preparing._thread
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda timeout: (Slow.closing.set(), join(timeout)))
    engine.close()
    assert Slow.closed.is_set()


def test_tenants_take_turns_and_what_nobody_waits_for_is_not_compiled(with_grammar):
    engine = with_grammar("held")
    Held.gate.clear()
    Held.compiled.clear()

    def add(text, tenant):
        params = SamplingParams(structured_outputs={"choice": [text]}, max_tokens=20)
        return engine.add_request(PROMPT, params, tenant=Tenant(tenant))

    first = add("first", "flood")
    wait_until(lambda: Held.compiled)  # it has begun
    flood = [add(f"flood {number}", "flood") for number in range(20)]
    other = [add("other", "other"), add("last", "other"), add("flood 1", "other")]
    for request_id in (first, *flood[2:]):
        engine.abort_request(request_id)
    Held.gate.set()
    ended = set()
    while engine.has_unfinished_requests():
        ended |= {each.request_id for each in engine.step() if each.finished}
    assert ended == {*flood[:2], *other}
    names = [json.loads(text)[0] for text in Held.compiled]
    assert names == ["first", "flood 0", "other", "flood 1", "last"]


def test_what_waits_is_not_compiled_after_the_end(with_grammar):
    engine = with_grammar("held")
    Held.gate.clear()
    Held.compiled.clear()
    for number in range(3):
        engine.add_request(PROMPT, SamplingParams(structured_outputs={"choice": [f"{number}"]}))
    thread = engine.client.core._preparing._thread
    threading.Timer(0.2, Held.gate.set).start()
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(Held.compiled) <= 1


def test_large_texts_are_kept_within_a_limit(with_grammar, monkeypatch):
    engine = with_grammar()
    monkeypatch.setattr(ChoiceGrammar, "size_bytes", lambda self, compiled: preparing.MAX_CACHED_BYTES // 3)
    for number in range(5):
        ask(engine, [f"{number}"])
    assert len(engine.client.core._preparing._compiled) == 3


def test_equal_texts_are_compiled_once_and_few_are_kept(with_grammar, monkeypatch):
    monkeypatch.setattr(preparing, "MAX_CACHED", 4)
    engine = with_grammar()
    ask(engine, n=3)
    ask(engine)
    metrics = engine.metrics().modules["grammar"]
    assert (metrics.num_compiled, metrics.num_cached, metrics.num_requested) == (1, 1, {"choice": 4})
    for number in range(9):
        ask(engine, [f"{number}"])
    assert len(engine.client.core._preparing._compiled) == 4
    metrics = engine.metrics().modules["grammar"]
    assert metrics.num_masks == metrics.provider.num_masks > 0


def test_without_xgrammar_the_error_names_the_extra(make_engine, monkeypatch):
    monkeypatch.setattr("sagellm.engines.grammar.provider.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'sagellm-engines\[grammar\]'"):
        ask(make_engine())
