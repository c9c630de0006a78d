"""Steps in flight and steps of many tokens give the tokens that one step at a time gives, one token each."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from step_executors import LateExecutor, ReplicatingExecutor, with_executor

from sagellm.core import StepInput, TokenIds
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing.drafts import DRAFTING, propose_with

PROMPTS = [list(range(5 + i, 5 + i + length)) for i, length in enumerate((3, 40, 17, 16, 90, 33, 5, 64))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=25, n=3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, stop=["a", "the"], min_tokens=4),
    SamplingParams(temperature=1.0, seed=7, max_tokens=20, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=9, max_tokens=33, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=21, stop_token_ids=list(range(0, 90, 7))),
]

Draft = Callable[[Sequence[TokenIds]], list[list[int]]]


def play(engine: LLMEngine, *, seed: int = 0, aborts: bool = True, **_: Any) -> list[Any]:
    """Run a mix of requests that arrive and are aborted between steps; return what each ended with."""
    chance = random.Random(seed)
    jobs = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    chance.shuffle(jobs)
    finished: dict[str, Any] = {}
    names: list[str] = []
    doomed: dict[str, int] = {}
    while jobs or engine.has_unfinished_requests():
        for _ in range(chance.randrange(3)):
            if jobs:
                prompt, params = jobs.pop()
                names.append(engine.add_request(prompt, params, request_id=f"r{len(names)}"))
                if aborts and chance.random() < 0.15:
                    doomed[names[-1]] = chance.randrange(1, 8)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
            elif len(output.outputs[0].token_ids) >= doomed.get(output.request_id, 1 << 30):
                del doomed[output.request_id]
                engine.abort_request(output.request_id)
                finished[output.request_id] = None
    engine.client.core.kv.check_integrity()
    assert engine.client.core.kv.available_blocks == engine.client.core.kv.total_blocks
    return [told(finished[name]) for name in names]


def told(output: Any) -> Any:
    if output is None:
        return "aborted"
    return scores(output.prompt_logprobs), [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, scores(one.logprobs))
        for one in output.outputs
    ]


def scores(logprobs: Any) -> Any:
    """Return the log-probability of each token itself, to 3 digits: other batches round otherwise."""
    return logprobs and [entry and round(next(iter(entry.values())).logprob, 3) for entry in logprobs]


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempting": {"num_blocks": 24, "block_size": 8, "max_num_seqs": 12},
    "chunked": {"max_num_batched_tokens": 20, "block_size": 4, "num_blocks": 160},
}


def with_settings(*drafts: Any) -> list[Any]:
    """Return all cases of draft, settings and depth; every other one is run only with `-m full`."""
    cases = product(enumerate(drafts), enumerate(SETTINGS), (0, 1))
    return [
        pytest.param(
            draft,
            SETTINGS[name],
            depth,
            id="-".join((getattr(draft, "__name__", draft), name, str(depth))),
            marks=[pytest.mark.full] * ((number + place + depth + 1) % 2),
        )
        for (number, draft), (place, name), depth in cases
    ]


@pytest.fixture(scope="module")
def expected(make_small_engine) -> Callable[..., list[Any]]:
    """Return what gives the outcome of one step at a time, a token each, with some settings; it runs once."""
    known: dict[str, list[Any]] = {}

    def outcome(**settings: Any) -> list[Any]:
        name = repr(settings)
        if name not in known:
            known[name] = play(make_small_engine(**settings), aborts=False)
        return known[name]

    return outcome


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_the_same_with_a_step_in_flight(make_small_engine, expected, monkeypatch, settings):
    alone = expected(**settings)
    with_executor(monkeypatch, LateExecutor)
    engine = make_small_engine(**settings)
    assert play(engine, aborts=False) == alone
    assert engine.client.core.parts.executor.most_in_flight == 2
    if "num_blocks" in settings and settings["num_blocks"] < 100:
        assert engine.metrics().num_preemptions > 0


def test_tables_widen_with_the_longest_sequence(make_small_engine, expected, monkeypatch):
    usual = expected()
    monkeypatch.setattr("sagellm.engines.worker.seat_state.FIRST_TOKENS", 1)
    engine = make_small_engine()
    assert play(engine, aborts=False) == usual
    assert 8 <= engine.client.core.kv.seats.tables.shape[2] < 16  # blocks of the longest sequence: 8


def test_aborts_in_flight_lose_nothing(make_small_engine, expected, monkeypatch):
    whole = expected()
    with_executor(monkeypatch, LateExecutor)
    for one, known in zip(play(make_small_engine()), whole, strict=True):
        assert one in ("aborted", known)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_failing_sequence_alone_ends_with_steps_in_flight(
    make_small_engine, expected, monkeypatch, depth
):
    whole = expected()
    if depth:
        with_executor(monkeypatch, LateExecutor)
    engine = make_small_engine()
    runner, poison = engine.client.core.runner, 77

    execute = runner.execute_model

    def fail(batch: Any) -> Any:
        if poison in batch.input_ids.tolist():
            raise RuntimeError("poisoned")
        return execute(batch)

    monkeypatch.setattr(runner, "execute_model", fail)
    outcomes = play(engine, aborts=False)
    failed = 0
    for one, known in zip(outcomes, whole, strict=True):
        is_poisoned = [last for _, _, last, _, _ in one[1] if last == "error"]
        failed += bool(is_poisoned)
        if not is_poisoned:
            assert one == known
    assert 0 < failed < len(outcomes)


class Proposals:
    """Drafts for sequences whose outputs are known."""

    def __init__(self, expected: dict[bytes, list[int]], seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self._expected = expected
        self.num_drafts = 0

    def true(self, tokens: TokenIds, length: int) -> list[int]:
        for prompt, output in self._expected.items():
            done = tokens.data[len(prompt) :]
            known = TokenIds(b"".join(int(each).to_bytes(4, "little") for each in output))
            if tokens.data.startswith(prompt) and known.data.startswith(done):
                return output[len(done) // 4 :][:length]
        return []


def oracle(proposals: Proposals, tokens: TokenIds) -> list[int]:
    return proposals.true(tokens, proposals.chance.randint(1, 7))


def random_draft(proposals: Proposals, tokens: TokenIds) -> list[int]:
    return [proposals.chance.randrange(90) for _ in range(proposals.chance.randint(0, 7))]


def adversarial(proposals: Proposals, tokens: TokenIds) -> list[int]:
    """Right up to one token, then wrong, then right again."""
    draft = proposals.true(tokens, 7)
    if draft:
        place = proposals.chance.randrange(len(draft))
        draft[place] = (draft[place] + 1) % 90
    return draft


@pytest.fixture(scope="module")
def greedy(make_small_engine) -> dict[bytes, list[int]]:
    """The greedy output of each prompt, by the prompt's packed tokens."""
    engine = make_small_engine()
    return {
        b"".join(each.to_bytes(4, "little") for each in prompt): output.outputs[0].token_ids
        for prompt in PROMPTS
        for output in engine.generate([prompt], PARAMS[0])
    }


@pytest.mark.parametrize(("draft", "settings", "depth"), with_settings(oracle, random_draft, adversarial))
def test_drafts_change_no_token(make_small_engine, expected, greedy, monkeypatch, draft, settings, depth):
    undrafted = expected(**settings)
    if depth:
        with_executor(monkeypatch, LateExecutor)
    engine = make_small_engine(**settings, **DRAFTING)
    core, proposals = engine.client.core, Proposals(greedy)
    num_accepted: list[int] = []
    propose_with(engine, lambda tokens: [draft(proposals, each) for each in tokens])
    commit = core.steps._commit

    def note(step: Any, output: Any, is_live: Any) -> Any:
        num_accepted.extend(output.num_accepted.tolist())
        result = commit(step, output, is_live)
        seats = core.kv.seats
        assert (seats.num_committed <= seats.num_tokens).all()
        return result

    monkeypatch.setattr(core.steps, "_commit", note)
    assert play(engine, aborts=False) == undrafted
    assert max(num_accepted) >= (6 if draft is oracle and settings == {} else 0)


@pytest.mark.parametrize(
    ("proposer", "settings", "depth"), with_settings("ngram{min_match=1}", "suffix{min_match=1,max_tokens=9}")
)
def test_a_proposer_changes_no_token(make_small_engine, expected, monkeypatch, proposer, settings, depth):
    undrafted = expected(**settings)
    if depth:
        with_executor(monkeypatch, LateExecutor)
    engine = make_small_engine(speculation=proposer, adaptive_speculation=False, **settings)
    assert play(engine, aborts=False) == undrafted
    found = engine.metrics().modules["speculation"]
    assert found.failure == ""
    assert found.num_draft_tokens > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_aborts_with_drafts_lose_nothing(make_small_engine, expected, greedy, monkeypatch, depth):
    whole = expected()
    if depth:
        with_executor(monkeypatch, LateExecutor)
    engine, proposals = make_small_engine(**DRAFTING), Proposals(greedy)
    made = propose_with(engine, lambda tokens: [adversarial(proposals, each) for each in tokens])
    for one, known in zip(play(engine), whole, strict=True):
        assert one in ("aborted", known)
    assert engine.metrics().modules["speculation"].num_accepted_tokens > 0
    assert made.texts == {}


@pytest.mark.parametrize("depth", [0, 1])
def test_the_failing_sequence_alone_ends_with_drafts(make_small_engine, expected, greedy, monkeypatch, depth):
    whole = expected()
    if depth:
        with_executor(monkeypatch, LateExecutor)
    engine, proposals = make_small_engine(**DRAFTING), Proposals(greedy)
    propose_with(engine, lambda tokens: [oracle(proposals, each) for each in tokens])
    runner = engine.client.core.runner
    execute, poison = runner.execute_model, 77

    def fail(batch: Any) -> Any:
        if poison in batch.input_ids.tolist():
            raise RuntimeError("poisoned")
        return execute(batch)

    monkeypatch.setattr(runner, "execute_model", fail)
    outcomes = play(engine, aborts=False)
    is_failed = [any(last == "error" for _, _, last, *_ in one[1]) for one in outcomes]
    assert 0 < sum(is_failed) < len(outcomes)
    for one, known, failed in zip(outcomes, whole, is_failed, strict=True):
        assert failed or one == known
    assert engine.metrics().modules["speculation"].num_accepted_tokens > 0


def test_blocks_of_refused_drafts_are_given_back(make_small_engine, monkeypatch):
    engine = make_small_engine(block_size=4, **DRAFTING)
    core = engine.client.core
    propose_with(engine, lambda tokens: [[1, 2, 3, 4, 5, 6, 7] for _ in tokens])
    engine.add_request(PROMPTS[0], PARAMS[0])
    while engine.has_unfinished_requests():
        engine.step()
        seats = core.kv.seats
        assert (seats.num_blocks <= -(-seats.num_tokens // 4)).all()


def test_nothing_speculative_is_cached_or_told(make_small_engine):
    """Each stored block holds tokens of a prompt or of an output that was handed out."""
    engine = make_small_engine(block_size=4, **DRAFTING)
    core = engine.client.core
    events: list[Any] = []
    core.kv.observe(events.extend)
    chance = random.Random(1)
    propose_with(engine, lambda tokens: [[chance.randrange(90) for _ in range(7)] for _ in tokens])
    outputs = engine.generate(PROMPTS, [PARAMS[2]] * len(PROMPTS))
    whole = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    stored = [event for event in events if type(event).__name__ == "BlockStored"]
    assert stored
    by_hash: dict[Any, list[int]] = {}
    for event in stored:
        path = by_hash.get(event.parent_block_hash, []) + list(event.token_ids)
        for end, block_hash in zip(range(4, len(path) + 1, 4), event.block_hashes, strict=False):
            by_hash[block_hash] = path[:end]
        assert any(known[: len(path)] == path for known in whole)


def test_sampling_with_drafts_keeps_its_distribution(make_small_engine):
    """Chi-square of the second tokens with drafts, other seeds, against those without."""

    def second_tokens(seeds: range, draft: list[int]) -> tuple[Counter[int], int]:
        engine = make_small_engine(max_num_batched_tokens=1024, **DRAFTING)
        core, num_accepted = engine.client.core, 0
        commit = core.steps._commit

        def count(step: Any, output: Any, is_live: Any) -> Any:
            nonlocal num_accepted
            num_accepted += int(output.num_accepted.sum())
            return commit(step, output, is_live)

        core.steps._commit = count
        propose_with(engine, lambda tokens: [draft for _ in tokens])
        params = [
            SamplingParams(temperature=0.07, seed=seed, max_tokens=3, ignore_eos=True) for seed in seeds
        ]
        outputs = engine.generate([PROMPTS[0]] * len(seeds), params)
        return Counter(output.outputs[0].token_ids[1] for output in outputs), num_accepted

    plain, _ = second_tokens(range(800), [])
    (likely, _), *_ = plain.most_common(1)
    drafted, num_accepted = second_tokens(range(800, 1600), [likely])
    assert 20 < num_accepted < 800
    cells = [token for token in plain | drafted if plain[token] + drafted[token] >= 10]
    pairs = [(plain[token], drafted[token]) for token in cells]
    pairs.append((800 - sum(one for one, _ in pairs), 800 - sum(other for _, other in pairs)))
    statistic = sum((one - other) ** 2 / (one + other) for one, other in pairs if one + other)
    degrees = len(pairs) - 1
    assert degrees >= 5
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # 4 standard deviations


def test_workers_in_two_processes_give_equal_outputs(make_small_engine, monkeypatch):
    settings = make_small_engine.settings | {"num_blocks": 40, "block_size": 8, "max_num_seqs": 12}
    settings |= DRAFTING
    ReplicatingExecutor.settings = settings
    with_executor(monkeypatch, ReplicatingExecutor)
    engine = make_small_engine(**settings)
    core = engine.client.core
    chance = random.Random(2)
    propose_with(engine, lambda tokens: [[chance.randrange(90)] * chance.randint(0, 2) for _ in tokens])
    play(engine, aborts=True)
    engine.close()
    pairs = core.parts.executor.pairs
    assert len(pairs) > 50
    assert engine.metrics().num_preemptions > 0
    for here, there in pairs:
        assert here.step == there.step
        assert here.tokens.lists() == there.tokens.lists()
        assert here.num_accepted.tolist() == there.num_accepted.tolist()
        assert (here.logprobs, here.scores) == (there.logprobs, there.scores)
        assert not here.errors
        assert not there.errors


def test_a_decode_of_256_is_less_than_8_kib(make_small_engine):
    """With the blocks that a sixteenth of the sequences is given in each step."""
    engine = make_small_engine(num_blocks=1024, max_num_seqs=256, max_num_batched_tokens=4096)
    core = engine.client.core
    sizes, submit = [], core.parts.executor.submit

    def measured(step: StepInput) -> None:
        if len(step.seats) == 256 == step.num_tokens:
            sizes.append(len(pickle.dumps(step, protocol=5)))
        submit(step)

    core.parts.executor.submit = measured
    engine.generate([[5 + n % 90] * (1 + n % 16) for n in range(256)], PARAMS[0])
    assert len(sizes) > 20
    assert max(sizes) < 8192
