"""How log-probabilities are written, whole and streamed, with and without an echo, by each decoder."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, processors

from sagellm.core import Request, Runtime, TokenOutput, pack
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.engines import SamplingParams
from sagellm.engines.requests.output_processor import OutputProcessor
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.testing.decoders import TOKENIZERS, byte_ids, byte_level, llama_style
from sagellm.server.http.chat_shape import ChatShape
from sagellm.server.http.completion_shape import CompletionShape
from sagellm.server.http.prompt_encoder import EncodedPrompt
from sagellm.server.http.shape import Job

NUM_TOP = 3
SEEDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=15)
RUNS = st.lists(st.integers(1, 5), min_size=1, max_size=3)
NAMES = pytest.mark.parametrize("name", TOKENIZERS)
WORDS = ["🌊", " port", "a", "é", "あ", " the", "  ", "fox", "<|end|>", "</s>", " "]


def write(tokenizer, ids, *, shape=CompletionShape, runs=(3,), prompt=None, params=None, top=(), **how):
    """The whole answer, and the events of a stream, for an output of these tokens.

    `prompt` defaults to the one token 0, of which there is no text.
    """
    prompt = prompt or EncodedPrompt(token_ids=[0], text="")
    top = list(top) or [(token_id, -0.5 - token_id) for token_id in range(NUM_TOP)]
    asked = SamplingParams(**{"logprobs": NUM_TOP, "max_tokens": len(ids), **(params or {})})
    processor = OutputProcessor(tokenizer, Runtime.virtual())
    request = Request(request_id="a", token_ids=pack(prompt.token_ids), max_tokens=len(ids), arrival_ns=0)
    processor.add(QueuedRequest(request, asked, 0, frozenset()))
    job = Job(prompts=[prompt], params=asked, model="m", is_streamed=True, num_choices=1, **how)
    writer = shape(job)
    (cursor,) = writer.cursors()
    events, start, step = [], 0, 0
    while start < len(ids):
        run = ids[start : start + runs[step % len(runs)]]
        start, step = start + len(run), step + 1
        tokens = [SampledToken(each, dict(top).get(each, -0.25), top, 1) for each in run]
        scores = scores_of(prompt.token_ids, top) if step == 1 else None
        reason = "length" if start >= len(ids) else None
        told = TokenOutput("a#0", run, reason, logprobs=tokens, prompt_scores=scores)
        (changed,) = processor.process([told]).changed
        events += writer.render(cursor, changed.outputs[0]).split(b"\n\n")[:-1]
        if changed.finished:
            break
    whole = json.loads(b"".join(writer.parts([changed])))
    return whole, [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]


def scores_of(token_ids, top):
    num_tokens = len(token_ids) - 1
    ranks = array("i", [1] * num_tokens)
    values = array("d", [-0.25, *(value for _, value in top)] * num_tokens)
    return PromptScores(
        len(top),
        ranks.tobytes(),
        values.tobytes(),
        array("i", [token_id for token_id, _ in top] * num_tokens).tobytes(),
    )


def ids_of(tokenizer, seeds):
    return [seed % (tokenizer.get_vocab_size() + 3) for seed in seeds]


@NAMES
@settings(max_examples=40, deadline=None)
@given(
    seeds=SEEDS, runs=RUNS, skip=st.booleans(), as_ids=st.booleans(), stop=st.sampled_from([None, "e", "�"])
)
def test_streamed_log_probabilities_joined_are_the_whole_ones(name, seeds, runs, skip, as_ids, stop):
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, seeds)
    params = {"skip_special_tokens": skip, "stop": stop}
    whole, events = write(tokenizer, ids, runs=runs, params=params, shows_tokens_as_ids=as_ids)
    (choice,) = whole["choices"]
    assert "".join(event["text"] for event in events) == choice["text"]
    for column, values in choice["logprobs"].items():
        assert [value for event in events for value in event["logprobs"][column]] == values
    whole, events = write(
        tokenizer, ids, shape=ChatShape, runs=runs, params=params, shows_tokens_as_ids=as_ids
    )
    (choice,) = whole["choices"]
    assert "".join(event["delta"]["content"] for event in events) == choice["message"]["content"]
    joined = [entry for event in events if event["logprobs"] for entry in event["logprobs"]["content"]]
    assert joined == choice["logprobs"]["content"]


@NAMES
@settings(max_examples=60, deadline=None)
@given(seeds=SEEDS, skip=st.booleans())
def test_each_token_begins_at_its_offset(name, seeds, skip):
    tokenizer = TOKENIZERS[name]()
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = ids_of(tokenizer, seeds)
    whole, _ = write(tokenizer, ids, params={"skip_special_tokens": skip})
    (choice,) = whole["choices"]
    text, written = choice["text"], choice["logprobs"]
    tokens, offsets = written["tokens"], written["text_offset"]
    kept = [not (skip and each in special) for each in ids]
    assert "".join(token for token, is_kept in zip(tokens, kept, strict=True) if is_kept) == text
    for token, offset, is_kept in zip(tokens, offsets, kept, strict=True):
        assert text[offset:].startswith(token) or not is_kept
    named, _ = write(tokenizer, ids, params={"skip_special_tokens": skip}, shows_tokens_as_ids=True)
    assert named["choices"][0]["logprobs"]["text_offset"] == offsets
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{each}" for each in ids]


@NAMES
@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), seeds=SEEDS, has_ids=st.booleans())
def test_each_token_of_an_echo_begins_at_its_offset(name, words, seeds, has_ids):
    tokenizer = TOKENIZERS[name]()
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = ids_of(tokenizer, seeds)
    if has_ids:
        prompt_ids = ids[::-1]
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    else:
        text = tokenizer.decode(tokenizer.encode("".join(words)).ids, skip_special_tokens=False)
        prompt_ids = tokenizer.encode(text).ids or [0]
        if tokenizer.decode(prompt_ids, skip_special_tokens=False) != text:
            return  # not even the whole text is told by its tokens
    prompt = EncodedPrompt(token_ids=prompt_ids, text=text, is_decoded=has_ids)
    whole, _ = write(tokenizer, ids, prompt=prompt, echoes=True, params={"prompt_logprobs": NUM_TOP})
    (choice,) = whole["choices"]
    written = choice["logprobs"]
    assert choice["text"] == text + tokenizer.decode(ids)
    places = list(zip([*prompt_ids, *ids], written["tokens"], written["text_offset"], strict=True))
    for _, token, offset in places[: len(prompt_ids)]:
        there = choice["text"][offset:]
        assert there.startswith(token) or (there.startswith(token.lstrip()) and not has_ids)
    for token_id, token, offset in places[len(prompt_ids) :]:
        assert choice["text"][offset:].startswith(token) or token_id in special
    joined = "".join(written["tokens"][: len(prompt_ids)])
    # Around special tokens that the caller wrote, a tokenizer may add spaces or remove them.
    assert joined == text or ("".join(joined.split()) == "".join(text.split()) and not has_ids)
    assert written["token_logprobs"][0] is written["top_logprobs"][0] is None


def test_special_tokens_that_the_tokenizer_adds_are_not_in_an_echo():
    tokenizer = Tokenizer.from_str(llama_style().to_str())
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    prompt = EncodedPrompt(token_ids=tokenizer.encode("ab a</s>b").ids, text="ab a</s>b")
    ids = [tokenizer.token_to_id(token) for token in ("▁", "c")]
    whole, _ = write(tokenizer, ids, prompt=prompt, echoes=True, params={"prompt_logprobs": NUM_TOP})
    (choice,) = whole["choices"]
    assert choice["text"] == "ab a</s>bc"
    places = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    assert [place for place in places if place[0]] == [
        ("<s>", 0),
        ("a", 0),
        ("b", 1),
        (" ", 2),
        ("a", 3),
        ("</s>", 4),
        (" ", 8),  # the tokenizer begins each part with one
        ("b", 8),
        ("c", 9),
    ]


@NAMES
@settings(max_examples=40, deadline=None)
@given(seeds=SEEDS, skip=st.booleans())
def test_bytes_of_a_chat_joined_decode_to_its_content(name, seeds, skip):
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, seeds)
    whole, _ = write(tokenizer, ids, shape=ChatShape, params={"skip_special_tokens": skip})
    (choice,) = whole["choices"]
    joined = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    content = choice["message"]["content"]
    if name == "byte_level" or "\ufffd" not in content:
        assert joined.decode(errors="replace") == content


def test_a_character_over_several_tokens_is_written_with_the_last():
    tokenizer = byte_level()
    ids = [*byte_ids(tokenizer, "🌊".encode()), *tokenizer.encode(" fox").ids]
    written = write(tokenizer, ids)[0]["choices"][0]["logprobs"]
    assert written["tokens"][:4] == ["", "", "", "🌊"]
    assert written["text_offset"][:5] == [0, 0, 0, 0, 1]
    entries = write(tokenizer, ids, shape=ChatShape)[0]["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries[:4]] == [[byte] for byte in "🌊".encode()]


def test_no_token_vanishes_because_another_has_the_same_text():
    tokenizer = byte_level()
    first, second, third = byte_ids(tokenizer, b"\xf0\xe2\x82")
    (a,) = byte_ids(tokenizer, b"a")
    top = [(second, -0.1), (a, -0.2), (third, -0.3)]
    written = write(tokenizer, [first, a], top=top)[0]["choices"][0]["logprobs"]
    assert written["tokens"] == ["\ufffd", "a"]
    assert written["top_logprobs"] == [
        {"\ufffd": -0.25, "": -0.1, "a": -0.2, f"token_id:{third}": -0.3},
        {"a": -0.2, "": -0.1, f"token_id:{third}": -0.3},
    ]
    named = write(tokenizer, [first, a], top=top, shows_tokens_as_ids=True)[0]["choices"][0]["logprobs"]
    assert named["top_logprobs"][0] == {
        f"token_id:{token_id}": value for token_id, value in [(first, -0.25), *top]
    }


def test_the_token_itself_has_its_text_as_its_name():
    tokenizer = byte_level()
    first, second = byte_ids(tokenizer, "é".encode())
    whole, _ = write(tokenizer, [first, second], top=[(second, -0.1)], params={"logprobs": 1})
    written = whole["choices"][0]["logprobs"]
    assert written["tokens"] == ["", "é"]
    assert written["top_logprobs"][0] == {"": -0.25, f"token_id:{second}": -0.1}
    for token, value, top in zip(
        written["tokens"], written["token_logprobs"], written["top_logprobs"], strict=True
    ):
        assert top[token] == value


def test_tokens_of_chats_are_named_by_their_ids():
    tokenizer = byte_level()
    ids = tokenizer.encode("The fox").ids
    whole, _ = write(tokenizer, ids, shape=ChatShape, shows_tokens_as_ids=True)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in ids]
    assert [each["token"] for each in entries[0]["top_logprobs"]] == [f"token_id:{each}" for each in range(3)]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "The fox"


def test_a_prompt_is_scored_in_vllms_shape_with_texts_in_place():
    tokenizer = llama_style()
    prompt_ids = tokenizer.encode("a b🌊").ids
    prompt = EncodedPrompt(token_ids=prompt_ids, text="a b🌊")
    whole, _ = write(tokenizer, prompt_ids[:1], prompt=prompt, params={"prompt_logprobs": NUM_TOP})
    first, *rest = whole["choices"][0]["prompt_logprobs"]
    assert first is None
    texts = [
        entry[str(token_id)]["decoded_token"] for token_id, entry in zip(prompt_ids[1:], rest, strict=True)
    ]
    assert "".join(texts) == "a b🌊"
    assert texts[-4:] == ["", "", "", "🌊"]
    assert rest[0]["0"] == {"logprob": -0.5, "rank": 1, "decoded_token": "<unk>"}
