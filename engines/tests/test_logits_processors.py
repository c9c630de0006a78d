"""The built-in logits processors: the contract, and what each of them does to a row."""

from __future__ import annotations

import pytest
import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors import AllowedTokenIds, BadWords, LogitBias, MinTokens
from sagellm.engines.testing import make_tokenizer
from sagellm.engines.text.bad_words import bad_words_token_ids
from sagellm.testing import LogitsProcessorContract

STOPS = frozenset({3, 96})


class TestLogitBias(LogitsProcessorContract):
    def make(self, vocab_size):
        return LogitBias(vocab_size)

    def requests(self):
        return [LogitsRequest(logit_bias={5: -100.0}), LogitsRequest(logit_bias={0: 1.5, 96: 100.0})]


class TestMinTokens(LogitsProcessorContract):
    def make(self, vocab_size):
        return MinTokens(vocab_size)

    def requests(self):
        return [LogitsRequest(min_tokens=count, stop_token_ids=STOPS) for count in (1, 3, 100)]


class TestAllowedTokenIds(LogitsProcessorContract):
    def make(self, vocab_size):
        return AllowedTokenIds(vocab_size)

    def requests(self):
        return [LogitsRequest(allowed_token_ids=ids) for ids in ((0,), (1, 2, 96), tuple(range(97)))]


class TestBadWords(LogitsProcessorContract):
    def make(self, vocab_size):
        return BadWords(vocab_size)

    def requests(self):
        words = [((4,),), ((1, 2), (3,)), tuple((first, 5) for first in range(97)), ((7, 8, 9),)]
        return [LogitsRequest(bad_words_token_ids=each) for each in words]


def changed(processor, output=(), **asked):
    """What becomes of a row of zeros over ten tokens."""
    logits = torch.zeros(1, 10)
    state = processor.start(LogitsRequest(**asked))
    if state is not None:
        processor.apply(logits, [LogitsRow(0, state, list(output))])
    return logits[0].tolist()


def forbidden(processor, output=(), **asked):
    return [token for token, value in enumerate(changed(processor, output, **asked)) if value == -torch.inf]


def test_a_bias_is_added():
    assert changed(LogitBias(10), logit_bias={2: 5.0, 7: -0.5}) == [0, 0, 5, 0, 0, 0, 0, -0.5, 0, 0]


def test_stop_tokens_come_back_when_the_minimum_is_reached():
    asked = {"min_tokens": 2, "stop_token_ids": STOPS}
    assert forbidden(MinTokens(10), [], **asked) == [3]  # 96 has no logit
    assert forbidden(MinTokens(10), [1], **asked) == [3]
    assert forbidden(MinTokens(10), [1, 1], **asked) == []


@pytest.mark.parametrize("asked", [{"min_tokens": 2}, {"stop_token_ids": STOPS}])
def test_a_minimum_needs_a_number_and_a_stop_token(asked):
    assert MinTokens(10).start(LogitsRequest(**asked)) is None


def test_only_what_is_allowed_is_left_and_keeps_its_logit():
    logits = torch.arange(10.0)[None].clone()
    processor = AllowedTokenIds(10)
    state = processor.start(LogitsRequest(allowed_token_ids=(4, 2, 4)))
    processor.apply(logits, [LogitsRow(0, state, [])])
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [2, 4]
    assert logits[0, [2, 4]].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [6]),
        ([1], [2, 6]),
        ([1, 2], [3, 6]),  # 2 is no longer forbidden, 1 2 3 and 2 3 are
        ([2], [3, 6]),
        ([5, 2], [3, 6]),
        ([1, 1], [2, 6]),
        ([9], [6]),
    ],
)
def test_the_last_token_of_a_word_is_forbidden_after_the_others(output, expected):
    words = ((1, 2), (1, 2, 3), (2, 3), (6,))
    assert forbidden(BadWords(10), output, bad_words_token_ids=words) == expected


def test_the_words_of_a_job_are_not_copied_for_each_of_its_sequences():
    words = (tuple(range(9)), (3,))
    states = [BadWords(10).start(LogitsRequest(bad_words_token_ids=words)) for _ in range(2)]
    assert all(state.longer[0] is words[0] for state in states)


def test_a_prompt_does_not_begin_a_word():
    from sagellm.core import pack

    asked = {"bad_words_token_ids": ((1, 2),), "prompt_token_ids": pack([1])}
    assert forbidden(BadWords(10), [], **asked) == []


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def vllm_bad_words(words, tokenizer):
    """The rule as vLLM states it (`SamplingParams.update_from_tokenizer`)."""
    found = []
    for word in words:
        for add_prefix_space in (False, True):
            prompt = (" " if add_prefix_space else "") + word.lstrip()
            ids = tokenizer.encode(text=prompt, add_special_tokens=False)
            if not add_prefix_space or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


def test_words_have_a_form_with_and_without_a_space_as_in_vllm(tokenizer):
    words = ["the", " the", "wall", "lighthouse", "x", "Ω", "  two words", "the.", "is"]
    ours = bad_words_token_ids(words, tokenizer)
    assert [list(word) for word in ours] == vllm_bad_words(words, tokenizer)
    assert len(ours) > len(words)  # some have two forms
    assert max(map(len, ours)) > 1


@pytest.mark.cuda
@pytest.mark.parametrize("contract", [TestLogitBias, TestMinTokens, TestAllowedTokenIds, TestBadWords])
def test_a_cuda_device_gives_what_the_cpu_gives(contract):
    kit = contract()
    processor, logits = kit.make(kit.vocab_size), kit.logits(torch)
    on_device = logits.cuda()
    processor.apply(logits, kit.rows(processor))
    processor.apply(on_device, kit.rows(processor))
    assert torch.equal(on_device.cpu(), logits)
