"""Log-probabilities in outputs: each token with its part of the text, whatever the decoder and the run."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import EngineError, Request, Runtime, TokenOutput, pack
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.engines import SamplingParams
from sagellm.engines.logprobs import Logprob, Logprobs, Position, PromptLogprobs
from sagellm.engines.requests.output_processor import OutputProcessor
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.testing.decoders import TOKENIZERS, byte_ids, byte_level, llama_style
from sagellm.engines.text.detokenizer import Decoders, TokenText

SEEDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=20)


def scored(rng, token_id, vocab_size, num_top):
    others = rng.sample([each for each in range(vocab_size) if each != token_id], num_top)
    top = [(other, -index / 9) for index, other in enumerate(others, start=1)]
    return SampledToken(token_id, -2.0, top, num_top + 1)


@dataclass
class Played:
    """What became of a sequence of tokens: its output after each step, and at the end."""

    output: Any
    seen: list[list[Any]] = field(default_factory=list)  # log-probabilities that each step added
    snapshots: list[tuple[Any, list[Any]]] = field(default_factory=list)


def play(tokenizer, ids, *, runs=(1,), reason="length", num_top=3, **params):
    """Have a processor take tokens, in runs of these lengths over and over."""
    rng = random.Random(len(ids))
    vocab_size = 5 if tokenizer is None else tokenizer.get_vocab_size() + 3
    processor = OutputProcessor(tokenizer, Runtime.virtual())
    asked = SamplingParams(logprobs=num_top, max_tokens=len(ids), **params)
    request = Request(request_id="a", token_ids=pack([1]), max_tokens=len(ids), arrival_ns=0)
    processor.add(QueuedRequest(request, asked, 0, frozenset()))
    played = Played(None)
    start = step = 0
    while start < len(ids):
        run = ids[start : start + runs[step % len(runs)]]
        start, step = start + len(run), step + 1
        tokens = [scored(rng, token_id, vocab_size, num_top) for token_id in run]
        is_last = start >= len(ids)
        told = TokenOutput(
            "a#0",
            run,
            reason if is_last else None,
            run[-1] if reason == "stop" and is_last else None,
            logprobs=tokens,
        )
        (changed,) = processor.process([told]).changed
        output = changed.outputs[0]
        played.seen.append(list(output.logprobs[sum(map(len, played.seen)) :]))
        snapshot = changed.snapshot().outputs[0].logprobs
        played.snapshots.append((snapshot, list(snapshot)))
        if output.finish_reason is not None:
            break
    played.output = output
    return played


def chosen(output):
    return [entry[token_id] for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)]


def ids_of(tokenizer, seeds):
    return [seed % (tokenizer.get_vocab_size() + 3) for seed in seeds]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(seeds=SEEDS, runs=st.lists(st.integers(1, 5), min_size=1, max_size=4), skip=st.booleans())
def test_tokens_joined_are_the_text_and_come_as_they_are_at_the_end(name, seeds, runs, skip):
    tokenizer = TOKENIZERS[name]()
    played = play(tokenizer, ids_of(tokenizer, seeds), runs=runs, skip_special_tokens=skip)
    output = played.output
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=skip)
    assert "".join(each.decoded_token for each in chosen(output) if each.token_bytes) == output.text
    assert [entry for step in played.seen for entry in step] == output.logprobs
    assert all(snapshot == before for snapshot, before in played.snapshots)
    assert all(
        next(iter(entry)) == token_id
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen(output)))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(seeds=SEEDS, runs=st.lists(st.integers(1, 5), min_size=1, max_size=3), where=st.floats(0, 1))
def test_tokens_before_a_stop_string_are_the_uncut_text(name, seeds, runs, where):
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, seeds)
    whole = tokenizer.decode(ids)
    stop = whole[int(where * len(whole)) :][:2] or "zz"
    output = play(tokenizer, ids, runs=runs, stop=[stop]).output
    uncut = "".join(each.decoded_token for each in chosen(output) if each.token_bytes)
    assert uncut.startswith(output.text)
    if output.stop_reason == stop:
        assert uncut[len(output.text) :].startswith(stop)
    else:
        assert uncut == output.text == whole


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_token_is_spelled_and_has_bytes_only_in_the_text(keeps):
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick fox").ids
    output = play(
        tokenizer, ids, reason="stop", stop_token_ids=[ids[-1]], include_stop_str_in_output=keeps
    ).output
    last = chosen(output)[-1]
    assert last.decoded_token == tokenizer.decode(ids[-1:])
    assert last.token_bytes == (last.decoded_token.encode() if keeps else b"")
    assert output.text == tokenizer.decode(ids if keeps else ids[:-1])


def test_an_incomplete_character_before_a_stop_token_is_its_tokens_own():
    tokenizer = byte_level()
    ids = [*byte_ids(tokenizer, "🌊".encode()[:3]), tokenizer.token_to_id("<|end|>")]
    played = play(tokenizer, ids, reason="stop", stop_token_ids=[ids[-1]])
    assert [each.decoded_token for each in chosen(played.output)] == ["", "", "\ufffd", "<|end|>"]
    assert [len(step) for step in played.seen] == [0, 1, 1, 2]


def test_an_alternative_is_decoded_in_place_of_the_token():
    tokenizer = llama_style()
    a, space = tokenizer.token_to_id("a"), tokenizer.token_to_id("▁")
    bytes_of = byte_ids(tokenizer, "🌊".encode())
    processor = OutputProcessor(tokenizer, Runtime.virtual())
    request = Request(request_id="a", token_ids=pack([1]), max_tokens=9, arrival_ns=0)
    processor.add(QueuedRequest(request, SamplingParams(logprobs=2), 0, frozenset()))
    top = [(space, -0.1), (bytes_of[3], -0.2)]
    ids = [a, *bytes_of]
    told = TokenOutput("a#0", ids, "length", logprobs=[SampledToken(each, -0.3, top, 2) for each in ids])
    output = processor.process([told]).changed[0].outputs[0]
    assert output.text == "a🌊"
    assert [entry[space].decoded_token for entry in output.logprobs] == ["", " ", " ", " ", " "]
    assert output.logprobs[4] == {
        bytes_of[3]: Logprob(-0.2, 2, "🌊", b"\x8a"),
        space: Logprob(-0.1, 1, " ", b" "),
    }


@pytest.mark.parametrize("fields", [{"detokenize": False}, {}])
def test_without_text_tokens_have_none(fields):
    output = play(byte_level() if fields else None, [1, 2, 3], **fields).output
    assert [(each.decoded_token, each.token_bytes) for each in chosen(output)] == [("", b"")] * 3


def test_a_sequence_that_fails_keeps_its_log_probabilities(monkeypatch):
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, b"\xf0")
    monkeypatch.setattr("sagellm.engines.text.detokenizer.TokenwiseDetokenizer.finish", lambda _: 1 / 0)
    output = play(tokenizer, ids).output
    assert (output.finish_reason, [each.decoded_token for each in chosen(output)]) == ("error", [""])


def test_an_engine_that_scores_nothing_gives_outputs_without():
    processor = OutputProcessor(byte_level(), Runtime.virtual())
    request = Request(request_id="a", token_ids=pack([1]), max_tokens=9, arrival_ns=0)
    processor.add(QueuedRequest(request, SamplingParams(logprobs=2), 0, frozenset()))
    output = processor.process([TokenOutput("a#0", [40, 41], "length")]).changed[0].outputs[0]
    assert (output.token_ids, output.logprobs, output.cumulative_logprob) == ([40, 41], [], None)


def packed(rows):
    """PromptScores of (values, rank, top ids) rows."""
    num_top = len(rows[0][2]) if rows else 0
    columns = [array(kind) for kind in "idi"]
    for values, rank, top_ids in rows:
        for column, new in zip(columns, ([rank], values, top_ids), strict=True):
            column.extend(new)
    return PromptScores(num_top, *(column.tobytes() for column in columns))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(seeds=SEEDS, skip=st.booleans())
def test_tokens_of_a_prompt_joined_are_its_text(name, seeds, skip):
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, seeds)
    rows = [((-1.0, -0.5), 2, (each,)) for each in reversed(ids[1:])]
    logprobs = PromptLogprobs(ids, packed(rows), Decoders(tokenizer))
    texts = [each.texts[0] for each in logprobs.positions(skip_special_tokens=skip) if each is not None]
    assert "".join(each.text for each in texts if each.raw) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert (len(texts), logprobs[0]) == (len(ids), None)
    for token_id, (_, _, (other,)), entry in zip(ids[1:], rows, logprobs[1:], strict=True):
        assert list(entry) == list(dict.fromkeys((token_id, other)))


def test_a_prompt_can_be_read_in_small_parts():
    """Also one whose texts become known at its end alone."""
    tokenizer = llama_style()
    ids = byte_ids(tokenizer, b"\xf0" * 500)
    logprobs = PromptLogprobs(ids, packed([((-1.0,), 1, ())] * 499), Decoders(tokenizer))
    pauses = [each is None for each in logprobs.positions()]
    assert pauses == [True] * 500 + [False] * 500
    assert [entry[ids[0]].decoded_token for entry in logprobs[1:]] == ["\ufffd"] * 499


def test_a_prompt_of_which_not_all_is_scored_is_the_engines_fault():
    with pytest.raises(EngineError, match="scored 1 tokens of a prompt of 3"):
        PromptLogprobs([1, 2, 3], packed([((-1.0,), 1, ())]), Decoders(None))


def test_log_probabilities_are_kept_without_an_object_for_each():
    logprobs, text = Logprobs(), TokenText(" a", b" a")
    for _ in range(1000):
        logprobs.append(Position(range(21), [-1.0] * 21, 3, [text] * 21))
    kept = sum(each.__sizeof__() for each in vars(logprobs).values())
    assert kept < 30 * 21_000
    assert logprobs[-1][20] == Logprob(-1.0, 20, " a", b" a")
    assert len(logprobs[5:9]) == 4
    assert repr(logprobs[:1]) == repr([logprobs[0]])
    with pytest.raises(IndexError):
        logprobs[1000]


def test_what_was_there_does_not_change_in_a_snapshot():
    logprobs = Logprobs()
    logprobs.append(Position([1], [-1.0], 1, [TokenText("a", b"a")]))
    snapshot = logprobs.snapshot()
    logprobs.append(Position([2], [-2.0], None, [TokenText("b", b"b")]))
    assert (len(snapshot), len(logprobs)) == (1, 2)
    assert snapshot == logprobs[:1] != logprobs
    assert logprobs[1][2].rank is None
