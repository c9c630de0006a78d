"""Drafts give the tokens that there are without, and a proposer costs its own time and nothing else."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sagellm.core import ConfigError, DraftProposerMetrics
from sagellm.core.protocols.step import Runs
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.engine_core import speculation
from sagellm.engines.engine_core.speculation_metrics import SpeculationMetrics
from sagellm.engines.testing.drafts import DRAFTING, FunctionProposer, propose_with

CHANCE = random.Random(5)
PROMPTS = [
    [5, 6, 7, 8] * 8,
    [CHANCE.randrange(90) for _ in range(30)],
    [CHANCE.randrange(90) for _ in range(9)] * 3,
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=list(range(0, 90, 9))),
    SamplingParams(temperature=0.6, seed=3, max_tokens=20, ignore_eos=True, n=2),
    SamplingParams(temperature=0.9, seed=4, max_tokens=30, stop=["a", "the"], min_tokens=3),
    SamplingParams(temperature=0.5, seed=5, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, allowed_token_ids=[11, 12, 13]),
    SamplingParams(temperature=1.0, seed=6, max_tokens=32, ignore_eos=True, allowed_token_ids=[11, 12], n=2),
]
OVERLAPPED = {"executor": "overlapped"}
TIGHT = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6}
JOBS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


def told(outputs: list[Any]) -> list[Any]:
    return [
        [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


def generate(engine: LLMEngine, most: int | None = None) -> list[Any]:
    prompts, params = zip(*JOBS[:most], strict=True)
    return told(engine.generate(list(prompts), list(params)))


def of(engine: LLMEngine) -> SpeculationMetrics:
    metrics: SpeculationMetrics = engine.metrics().modules["speculation"]
    return metrics


@pytest.fixture(scope="module")
def expected(make_engine: Callable[..., LLMEngine]) -> list[Any]:
    return generate(make_engine())


@pytest.mark.parametrize(
    "length", [*range(1, 9), *(pytest.param(each, marks=pytest.mark.full) for each in range(9, 16)), 16]
)
def test_drafts_of_any_length_change_no_token(make_engine, all_blocks_are_back, expected, length):
    name = ("ngram", "suffix")[length % 2]
    depth, room = (OVERLAPPED, {})[length // 2 % 2], (TIGHT, {})[length // 4 % 2]
    engine = make_engine(
        speculation=f"{name}{{max_tokens={length},min_match=1}}", adaptive_speculation=False, **depth, **room
    )
    assert generate(engine) == expected
    assert all_blocks_are_back(engine)
    found = of(engine)
    assert found.failure == ""
    assert 0 < found.num_accepted_tokens < found.num_draft_tokens
    by_place = found.num_accepted_by_place
    assert sum(by_place) == found.num_accepted_tokens
    assert by_place == sorted(by_place, reverse=True)
    assert not any(by_place[length:])
    if room:
        assert engine.metrics().num_preemptions > 0


@pytest.mark.parametrize("name", ["ngram", "suffix", "null"])
@pytest.mark.parametrize("settings", [{}, OVERLAPPED, TIGHT], ids=["inline", "overlapped", "tight"])
def test_adaptive_drafts_change_no_token(make_engine, all_blocks_are_back, expected, name, settings):
    engine = make_engine(speculation=name, **settings)
    assert generate(engine) == expected
    assert all_blocks_are_back(engine)
    assert of(engine).failure == ""


@pytest.mark.parametrize("depth", [{}, OVERLAPPED], ids=["inline", "overlapped"])
def test_a_sequence_is_asked_about_again_after_no_draft(make_engine, depth):
    """With a step in flight too: the token that is not known yet is the first of the draft."""
    engine = make_engine(**DRAFTING)
    prompt, params = PROMPTS[0], PARAMS[0]
    (whole,) = engine.generate([prompt], params)
    truth = [*prompt, *whole.outputs[0].token_ids]
    engine = make_engine(**DRAFTING, **depth)
    num_asked = 0

    def propose(tokens: Any) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        size = len(tokens[0])
        return [truth[size : size + 4] if num_asked % 3 == 0 else []]

    propose_with(engine, propose)
    (output,) = engine.generate([prompt], params)
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    found = of(engine)
    assert found.num_drafts >= 3
    assert found.num_accepted_tokens == found.num_draft_tokens
    num_each = 3 if depth else 4  # one of four is in flight
    assert found.num_accepted_by_place[num_each - 1] >= 3 > found.num_accepted_by_place[num_each]


def runs(ids: Any, counts: Any) -> Runs:
    return Runs(np.array(ids or np.zeros(0, np.int32)), np.array(counts))


BAD_DRAFTS: dict[str, Callable[[Any, Any], Any]] = {
    "an exception": lambda seats, most: 1 // 0,
    "an exit": lambda seats, most: sys.exit(3),
    "nothing": lambda seats, most: None,
    "lists": lambda seats, most: [[1] for _ in seats],
    "lists within runs": lambda seats, most: Runs([1] * len(seats), [1] * len(seats)),
    "negative tokens": lambda seats, most: runs([-1] * len(seats), [1] * len(seats)),
    "tokens beyond the vocabulary": lambda seats, most: runs([10**6] * len(seats), [1] * len(seats)),
    "huge numbers": lambda seats, most: runs([10**30] * len(seats), [1] * len(seats)),
    "fractions": lambda seats, most: runs([0.5] * len(seats), [1] * len(seats)),
    "drafts that are too long": lambda seats, most: runs([1] * int(most.sum() + len(seats)), most + 1),
    "negative lengths": lambda seats, most: runs([], [-1] * len(seats)),
    "too few drafts": lambda seats, most: runs([], [0] * (len(seats) - 1)),
    "too many drafts": lambda seats, most: runs([], [0] * (len(seats) + 1)),
    "fewer tokens than counted": lambda seats, most: runs([], [1] * len(seats)),
    "tables": lambda seats, most: runs([[1]] * len(seats), [1] * len(seats)),
}


def replace(made: FunctionProposer, method: str, act: Callable[..., Any]) -> list[None]:
    """Have a proposer do something else in a method; return a list that grows with each call."""
    calls: list[None] = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return act(*arguments, **options)

    setattr(made, method, call)
    return calls


@pytest.mark.parametrize("what", BAD_DRAFTS)
def test_a_proposer_that_lies_is_not_asked_again(make_engine, all_blocks_are_back, expected, caplog, what):
    engine = make_engine(**TIGHT, **DRAFTING)
    calls = replace(propose_with(engine, lambda tokens: []), "propose", BAD_DRAFTS[what])
    assert generate(engine, 4) == expected[:4]
    assert len(calls) == 1
    assert of(engine).failure
    assert of(engine).num_drafts == 0
    assert all_blocks_are_back(engine)
    (record,) = [each for each in caplog.records if "draft_proposer" in each.getMessage()]
    assert "is not asked any more" in record.getMessage()


@pytest.mark.parametrize("method", ["arrived", "extended", "departed", "metrics"])
def test_a_method_that_raises_changes_no_token(make_engine, all_blocks_are_back, expected, method):
    engine = make_engine(**DRAFTING)
    made = propose_with(engine, lambda tokens: [[1, 2] for _ in tokens])
    calls = replace(made, method, lambda *_, **__: 1 // 0)
    assert generate(engine) == expected
    assert all_blocks_are_back(engine)
    is_ended = method != "metrics"
    assert ("ZeroDivisionError" in of(engine).failure) == is_ended
    assert len(calls) == 1 or not is_ended
    assert engine.metrics().modules["draft_proposer"] is not None


def test_a_proposer_that_writes_into_what_it_is_given_changes_nothing(make_engine, expected):
    engine = make_engine(**DRAFTING)

    class Scribbler(FunctionProposer):
        def arrived(self, seat: Any, token_ids: Any, num_prompt: Any, namespace: Any) -> None:
            super().arrived(seat, token_ids, num_prompt, namespace)
            token_ids[:] = 0

        def extended(self, seats: Any, tokens: Runs) -> None:
            super().extended(seats, tokens)
            seats[:] = tokens.ids[:] = tokens.counts[:] = 0

        def propose(self, seats: Any, most: Any) -> Runs:
            draft = super().propose(seats, most)
            seats[:] = most[:] = 0
            return draft

    engine.client.core.scheduler.speculation.proposer = Scribbler(lambda tokens: [[3, 4] for _ in tokens])
    assert generate(engine, 8) == expected[:8]
    assert of(engine).failure == ""


SLOW, TOO_SLOW = 2 * speculation.SLOW_NS, 2 * speculation.TOO_SLOW_NS


@pytest.mark.parametrize(
    ("method", "took_ns", "num_calls"),
    [("propose", SLOW, 3), ("propose", TOO_SLOW, 1), ("departed", TOO_SLOW, 1)],
)
def test_a_slow_proposer_is_not_asked_again(make_engine, expected, monkeypatch, method, took_ns, num_calls):
    engine = make_engine(**DRAFTING)
    made, now_ns = propose_with(engine, lambda tokens: [[] for _ in tokens]), 0
    monkeypatch.setattr(engine.client.core.scheduler.speculation, "_now_ns", lambda: now_ns)
    act = getattr(made, method)

    def slowly(*arguments: Any, **options: Any) -> Any:
        nonlocal now_ns
        now_ns += took_ns
        return act(*arguments, **options)

    calls = replace(made, method, slowly)
    assert generate(engine, 4) == expected[:4]
    assert len(calls) == num_calls
    assert "for a step" in of(engine).failure


def test_a_slow_step_now_and_then_is_forgiven(make_engine):
    made = make_engine(**DRAFTING).client.core.scheduler.speculation
    for _ in range(5):
        for took_ns in (SLOW, SLOW, *[1] * 512):
            made._note_call(took_ns, None)
    assert made.metrics().failure == ""
    for _ in range(3):
        made._note_call(SLOW, None)
    assert "for a step" in made.metrics().failure


def test_long_prompts_are_told_one_at_a_time_and_may_take_longer(make_engine, expected, monkeypatch):
    monkeypatch.setattr(speculation, "MAX_TOLD", 20)
    engine = make_engine(**DRAFTING)
    made, now_ns = propose_with(engine, lambda tokens: [[3] for _ in tokens]), 0
    monkeypatch.setattr(engine.client.core.scheduler.speculation, "_now_ns", lambda: now_ns)
    arrived, calls = made.arrived, []

    def slowly(seat: Any, token_ids: Any, num_prompt: Any, namespace: Any) -> None:
        nonlocal now_ns
        now_ns += 2_000 * len(token_ids)
        calls.append(made.num_calls)
        arrived(seat, token_ids, num_prompt, namespace)

    propose = made.propose
    made.num_calls = 0

    def counted(seats: Any, most: Any) -> Any:
        nonlocal now_ns
        made.num_calls += 1
        now_ns += speculation.SLOW_NS
        return propose(seats, most)

    made.arrived, made.propose = slowly, counted
    assert generate(engine, 8) == expected[:8]
    assert of(engine).failure == ""
    assert len(calls) == len(set(calls)) > 2  # one in each step


def test_a_step_keeps_its_token_budget(make_engine, monkeypatch):
    engine = make_engine(max_num_batched_tokens=20, **DRAFTING)
    propose_with(engine, lambda tokens: [[1] * 16 for _ in tokens])
    core = engine.client.core
    sizes: list[int] = []
    submit = core.steps.submit
    monkeypatch.setattr(
        core.steps, "submit", lambda planned, ops: (sizes.append(planned.num_tokens), submit(planned, ops))[1]
    )
    generate(engine)
    assert max(sizes) == 20
    assert of(engine).num_draft_tokens > 0


def test_no_draft_goes_beyond_the_longest_output(make_engine):
    engine = make_engine(**DRAFTING)
    made = propose_with(engine, lambda tokens: [[1] * 16 for _ in tokens])
    wanted: list[int] = []
    propose = made.propose
    made.propose = lambda seats, most: (wanted.extend(most.tolist()), propose(seats, most))[1]
    engine.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert wanted == list(range(7, 0, -1))  # after the first token; the last one is drawn, not drafted


def test_what_departs_is_told_and_whether_it_is_complete(make_engine):
    engine = make_engine(**DRAFTING)
    made = propose_with(engine, lambda tokens: [[] for _ in tokens])
    departed: list[tuple[list[int], bool]] = []
    forget = made.departed

    def note(seat: int, *, is_over: bool) -> None:
        departed.append((made.texts[seat].copy(), is_over))
        forget(seat, is_over=is_over)

    made.departed = note
    (output,) = engine.generate([PROMPTS[0]], PARAMS[0])
    name = engine.add_request(PROMPTS[1], PARAMS[0])
    for _ in range(4):
        engine.step()
    engine.abort_request(name)
    whole, cut = departed
    assert whole == ([*PROMPTS[0], *output.outputs[0].token_ids], True)
    assert cut[0][: len(PROMPTS[1])] == PROMPTS[1]
    assert not cut[1]
    assert made.texts == {}


def test_preempted_sequences_arrive_again(make_engine, expected):
    engine = make_engine(**TIGHT, **DRAFTING)
    made = propose_with(engine, lambda tokens: [[] for _ in tokens])
    assert generate(engine) == expected
    assert engine.metrics().num_preemptions > 0
    assert made.texts == {}


@pytest.mark.parametrize(
    ("speculation_text", "message"),
    [
        ("ngrams", "ngram"),
        ("ngram{max_token=3}", "max_tokens"),
        ("ngram{max_tokens=0}", "max_tokens is 0"),
        ("ngram{min_match=4,max_match=2}", "max_match must be at least min_match"),
        ("suffix{factor=0}", "factor is 0"),
        ("suffix{min_probability=2}", "min_probability is 2"),
    ],
)
def test_a_mistake_in_the_setting_is_named(make_engine, speculation_text, message):
    with pytest.raises((ConfigError, LookupError), match=message):
        make_engine(speculation=speculation_text)


def test_settings_of_vllm_are_answered_with_ours(make_engine):
    with pytest.raises(ConfigError, match=r"speculation='ngram\{max_tokens=8,min_match=2\}'"):
        make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 8})


def test_without_speculation_nothing_is_counted(make_engine):
    assert {"speculation", "draft_proposer"}.isdisjoint(make_engine().metrics().modules)


def test_metrics_are_of_the_proposer_and_of_the_engine(make_engine):
    engine = make_engine(speculation="ngram", adaptive_speculation=False)
    generate(engine)
    own: DraftProposerMetrics = engine.metrics().modules["draft_proposer"]
    found = of(engine)
    assert own.num_sequences > 0
    assert own.num_drafts >= found.num_drafts > 0
    assert own.num_proposed >= found.num_draft_tokens
    assert own.num_kept_tokens == 0  # all have departed
    assert found.propose_ns > 0
    assert "ngram" in found.proposer
    mean = 1 + found.num_accepted_tokens / found.num_drafts
    assert found.mean_accepted_length == pytest.approx(mean)
