"""What is found of the latest requests, and by which names."""

from __future__ import annotations

import pytest

from sagellm.core import InvalidInputError, Request, RequestId, SequenceId, UnknownRequestError, pack
from sagellm.core.protocols.prefix_cache import MissExplanation
from sagellm.engines.engine_core.request_log import RequestLog
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams
from sagellm.server.http.answer_ids import request_of

MISS = MissExplanation(cause="none", num_tokens=0, match_length=0, diverges_at=0)


def log_of(*names: str, num_tokens: int = 3) -> RequestLog:
    log = RequestLog()
    for index, name in enumerate(names):
        request = Request(
            request_id=RequestId(name), token_ids=pack(range(num_tokens)), max_tokens=1, arrival_ns=0
        )
        queued = QueuedSequence(SequenceId(name), request, SamplingParams(), 0, frozenset())
        log.add(Sequence.of(queued), lambda: MISS, index)
    return log


def test_a_request_is_found_by_its_id_and_by_a_beginning_that_no_other_has():
    log = log_of("7", "abcd-0", "abcd-01", "abef-0")
    assert log.find("7").request_id == "7"
    assert log.find("abcd-0").request_id == "abcd-0", "the whole id, though another begins with it"
    assert log.find("abef").request_id == "abef-0"
    assert log.find(None).request_id == "abef-0"


def test_of_one_id_the_latest_request_is_found():
    log = log_of("again", "other", "again")
    assert log.find("again").admitted_ns == log.find("agai").admitted_ns == 2


def test_a_beginning_of_several_ids_is_refused_with_them():
    with pytest.raises(UnknownRequestError, match="'abcd' begins 2 ids: 'abcd-0', 'abcd-1'; give more of"):
        log_of("abcd-0", "other", "abcd-1").find("abcd")


@pytest.mark.parametrize("name", ["abc", "", "bcde"])
def test_what_is_short_or_no_beginning_finds_nothing(name):
    with pytest.raises(UnknownRequestError, match="give one of them, or at least 4 characters"):
        log_of("abcdef").find(name)


def test_prompts_of_a_million_tokens_together_are_remembered():
    log = log_of("one", "two", "three", num_tokens=400_000)
    assert len(log) == 2
    assert len(log_of(*map(str, range(1030)))) == 1024


@pytest.mark.parametrize("name", [["a", "b"], {"a": 1}, 5])
def test_a_name_that_is_not_a_text_is_refused(name):
    with pytest.raises(InvalidInputError, match=r"the request is .*; it must be a text"):
        log_of("abcd").find(name)


def test_an_error_quotes_a_little_of_a_long_name():
    with pytest.raises(UnknownRequestError) as refused:
        log_of("abcd").find("x" * 1_000_000)
    assert len(str(refused.value)) < 1000


def test_an_empty_log_says_so():
    with pytest.raises(UnknownRequestError, match="no request has been admitted yet"):
        RequestLog().find(None)


@pytest.mark.parametrize("name", ["cmpl-1f3a", "chatcmpl-1f3a", "1f3a"])
def test_the_id_of_an_answer_names_its_request(name):
    assert log_of("1f3a-0").find(request_of(name)).request_id == "1f3a-0"
