"""What the built-in draft proposers propose."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sagellm.core import DraftProposerProtocol, Namespace
from sagellm.core.protocols.step import Runs, Seat
from sagellm.engines.drafts.ngram import NgramProposer
from sagellm.engines.drafts.occurrences import BREAK, Occurrences, continuation
from sagellm.engines.drafts.suffix import SuffixProposer
from sagellm.testing import DraftProposerContract
from sagellm.testing.draft_proposer import ints

HERE, THERE = Namespace("a"), Namespace("b")
CHANCE = random.Random(1)


class TestNgram(DraftProposerContract):
    def make(self) -> DraftProposerProtocol:
        return NgramProposer()


class TestSuffix(DraftProposerContract):
    def make(self) -> DraftProposerProtocol:
        return SuffixProposer()


class TestSmallSuffix(DraftProposerContract):
    def make(self) -> DraftProposerProtocol:
        return SuffixProposer(max_kept_tokens=64, min_match=1)


def draft(proposer: Any, tokens: list[int], most: int = 100, *, seat: int = 0, prompt: int = 1) -> list[int]:
    proposer.arrived(Seat(seat), ints(*tokens), prompt, HERE)
    found: list[int] = proposer.propose(ints(seat), ints(most)).ids.tolist()
    return found


def answer(proposer: Any, tokens: list[int], namespace: Namespace = HERE, prompt: int = 1) -> None:
    proposer.arrived(Seat(7), ints(*tokens), prompt, namespace)
    proposer.departed(Seat(7), is_over=True)


def longest_before(tokens: list[int], least: int) -> tuple[int, int]:
    """Return the latest place after the longest earlier occurrence of the end, and its length, by search."""
    size = len(tokens)
    for length in range(size - 1, least - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[size - length :]:
                return end, length
    return 0, 0


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_occurrences_are_those_that_a_search_finds(width):
    tokens = [CHANCE.randrange(3) for _ in range(300)]
    text, size = Occurrences(width), 0
    while size < len(tokens):
        number = CHANCE.choice([1, 2, 7, 20, 50])
        text.append(ints(*tokens[size : size + number]))
        size = min(size + number, len(tokens))
        found = list(text.matches(text.tokens, 1000))
        known = tokens[:size]
        ends = [end for end in range(size - 1, width - 1, -1) if known[end - width : end] == known[-width:]]
        assert [match.end for match in found] == (ends if size >= width else [])
        assert text.repeats == bool(found)
        if found:
            best = max(found, key=lambda match: match.length)
            assert (best.end, best.length) == longest_before(known, width)


def test_a_break_is_not_crossed():
    text = Occurrences(2)
    text.append(ints(1, 2, 3, BREAK, 4, 5, 1, 2))
    (match,) = text.matches(text.tokens, 9)
    assert continuation(text.tokens, match.end, 5).tolist() == [3]
    other = Occurrences(2)
    other.append(ints(BREAK, 1, 2))
    assert [match.length for match in text.matches(other.tokens, 9)] == [2, 2]


def test_ngram_proposes_what_followed_the_longest_match():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 2, 3, 4]
    assert draft(NgramProposer(), tokens, 1) == [50]  # three tokens agree there, two before 60
    assert draft(NgramProposer(max_match=2), tokens, 1) == [60]  # the latest of equals
    assert draft(NgramProposer(min_match=4), tokens) == []


def test_a_cycle_goes_on_beyond_the_end():
    assert draft(NgramProposer(max_tokens=7), [1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1, 2, 3]


def test_a_draft_has_at_most_what_is_wanted_and_max_tokens():
    tokens = list(range(40)) * 2
    assert len(draft(NgramProposer(), tokens)) == 8
    assert len(draft(NgramProposer(max_tokens=20), tokens)) == 20
    assert len(draft(NgramProposer(), tokens, 3)) == 3


def test_suffix_proposes_what_followed_most_often():
    proposer = SuffixProposer()
    for following in (30, 40, 30, 50):
        answer(proposer, [0, 7, 8, 9, following, following + 1])
    assert draft(proposer, [1, 7, 8, 9], 1) == [30]


def test_suffix_stops_where_it_becomes_unlikely():
    proposer = SuffixProposer(min_probability=0.5, factor=5.0)
    for following in ([30, 31, 1], [30, 31, 2], [30, 31, 3], [30, 31, 4]):
        answer(proposer, [0, 7, 8, 9, *following])
    assert draft(proposer, [1, 7, 8, 9]) == [30, 31]


def test_a_draft_of_suffix_grows_with_the_match():
    tokens = list(range(60))
    for length in (2, 4, 8):
        proposer = SuffixProposer(factor=1.5, max_tokens=50)
        answer(proposer, [0, *tokens])
        assert len(draft(proposer, [99, *tokens[10 : 10 + length]])) == int(1.5 * length)


def test_suffix_knows_the_answers_of_its_namespace_alone():
    tokens = [0, *range(1, 30)]
    proposer = SuffixProposer()
    answer(proposer, tokens, THERE)
    assert draft(proposer, [99, 5, 6, 7]) == []
    answer(proposer, tokens, HERE)
    assert draft(proposer, [99, 5, 6, 7], 2, seat=1) == [8, 9]


def test_suffix_keeps_answers_and_no_prompts():
    proposer = SuffixProposer()
    answer(proposer, [1, 2, 3, 4, 5, 6], prompt=4)
    assert draft(proposer, [9, 1, 2]) == []
    assert draft(proposer, [9, 5, 6], seat=1) == []  # nothing followed
    proposer.arrived(Seat(2), ints(1, 2, 3), 1, HERE)
    proposer.departed(Seat(2), is_over=False)
    assert proposer.metrics().num_namespaces == 1


def test_suffix_forgets_what_was_used_least_recently():
    proposer = SuffixProposer(max_kept_tokens=400)
    for number in range(200):
        tokens = [1000 * number + each for each in range(50)]
        answer(proposer, [0, *tokens], Namespace(f"t{number % 3}"))
        found = proposer.metrics()
        assert found.num_kept_tokens <= 400
        assert found.num_namespaces <= 3
    proposer.arrived(Seat(0), ints(0, 199_010, 199_011), 1, Namespace(f"t{199 % 3}"))
    assert proposer.propose(ints(0), ints(1)).ids.tolist() == [199_012]


def test_nothing_is_kept_of_answers_if_nothing_may_be():
    proposer = SuffixProposer(max_kept_tokens=0)
    answer(proposer, list(range(50)))
    assert proposer.metrics().num_kept_tokens == 0
    assert draft(proposer, [1, 2, 3, 1, 2, 3, 1, 2], 1) == [3]


def test_runs_are_for_the_rows_in_order():
    proposer = NgramProposer()
    proposer.arrived(Seat(1), ints(1, 2, 3, 1, 2), 1, HERE)
    proposer.arrived(Seat(4), ints(5, 6), 1, HERE)
    found: Runs = proposer.propose(ints(4, 1), ints(3, 2))
    assert found.counts.tolist() == [0, 2]
    assert found.ids.tolist() == [3, 1]
