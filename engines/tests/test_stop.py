import itertools

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import InvalidInputError
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.sampling.stop import StopStringMatcher, check_stop_conditions

EOS = {2}


def stream(pieces, stops, **options):
    """The pieces that were shown, and the stop string."""
    matcher = StopStringMatcher(stops, **options)
    shown = []
    for piece in pieces:
        text, stop = matcher.append(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


def expected(text, stops, *, include_stop):
    """By looking at every end of the text in turn."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def test_the_end_of_sequence_stops_without_a_stop_reason():
    params = SamplingParams()
    assert check_stop_conditions(params, [5, 2], EOS, 16) == ("stop", None)
    assert check_stop_conditions(params, [2, 5], EOS, 16) == (None, None)
    assert check_stop_conditions(params, [], EOS, 16) == (None, None)


def test_end_of_sequence_is_a_token_like_any_other_where_it_is_ignored():
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    assert check_stop_conditions(params, [5, 2], EOS, 16) == (None, None)
    assert check_stop_conditions(params, [5, 7], EOS, 16) == ("stop", 7)


def test_a_stop_token_is_the_stop_reason():
    params = SamplingParams(stop_token_ids=[7, 2])
    assert check_stop_conditions(params, [5, 7], EOS, 16) == ("stop", 7)
    assert check_stop_conditions(params, [5, 2], EOS, 16) == ("stop", 2)


def test_the_limit_ends_with_length_and_a_stop_token_at_the_limit_with_stop():
    params = SamplingParams(stop_token_ids=[7])
    assert check_stop_conditions(params, [5, 5], EOS, 3) == (None, None)
    assert check_stop_conditions(params, [5, 5, 5], EOS, 3) == ("length", None)
    assert check_stop_conditions(params, [5, 5, 7], EOS, 3) == ("stop", 7)


def test_nothing_but_the_limit_stops_before_min_tokens():
    params = SamplingParams(min_tokens=3, stop_token_ids=[7])
    assert check_stop_conditions(params, [5, 5, 7], EOS, 16) == (None, None)
    assert check_stop_conditions(params, [5, 5, 2], EOS, 16) == (None, None)
    assert check_stop_conditions(params, [5, 5, 5, 2], EOS, 16) == ("stop", None)
    assert check_stop_conditions(params, [5, 5, 5, 7], EOS, 16) == ("stop", 7)
    assert check_stop_conditions(params, [5, 5, 2], EOS, 3) == ("length", None)


def test_the_sampler_offers_the_check_under_its_name():
    assert Sampler().check_stop_conditions(SamplingParams(), [2], EOS, 16).finish_reason == "stop"


def test_a_stop_string_across_pieces_is_never_shown():
    assert stream(["Hello wo", "rl", "d and", " more"], ["world"]) == (["Hello ", "", ""], "world")
    assert stream(["a<", "/", "s", ">b"], ["</s>"]) == (["a", "", "", ""], "</s>")


def test_the_stop_string_is_shown_where_it_is_asked_for():
    assert stream(["Hello wo", "rld!"], ["world"], include_stop=True) == (["Hello ", "world"], "world")


def test_only_what_could_become_a_stop_string_is_held_back():
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.append("Yes.\n") == ("Yes.", None)
    assert matcher.append("No.\n\n") == ("\nNo.", None)
    assert matcher.append("\n") == ("\n", None)
    assert matcher.append("Us") == ("", None)
    assert matcher.append("age") == ("\n\nUsage", None)
    assert matcher.append("\n\nU") == ("", None)
    assert matcher.finish() == "\n\nU"
    assert matcher.finish() == ""


def test_the_string_that_is_complete_first_wins():
    assert stream(["one two three"], ["three", "two"]) == (["one "], "two")
    assert stream(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert stream(["xabc"], ["c", "bc", "abc"]) == (["x"], "abc")


def test_text_after_a_stop_is_dropped():
    matcher = StopStringMatcher(["stop"])
    assert matcher.append("a stop b") == ("a ", "stop")
    assert matcher.append("more") == ("", "stop")
    assert matcher.finish() == ""


def test_a_stop_string_completed_too_early_is_text():
    matcher = StopStringMatcher(["aba"])
    assert matcher.append("xaba", may_stop=False) == ("xab", None)
    assert matcher.append("ba") == ("ab"[:0], "aba")
    matcher = StopStringMatcher(["ab"])
    assert matcher.append("xa", may_stop=False) == ("x", None)
    assert matcher.append("b") == ("", "ab")


def test_without_strings_everything_passes():
    assert stream(["a", "b"], []) == (["a", "b", ""], None)


@pytest.mark.parametrize("stops", ["text", ["a", ""]])
def test_stop_strings_have_to_be_a_list_of_texts(stops):
    with pytest.raises(InvalidInputError):
        StopStringMatcher(stops)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=8),
    st.booleans(),
)
def test_how_the_text_is_cut_does_not_matter(text, stops, cuts, include_stop):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    shown, stop = stream(pieces, stops, include_stop=include_stop)
    assert ("".join(shown), stop) == expected(text, stops, include_stop=include_stop)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_all_is_shown_that_cannot_begin_a_stop_string(text, stops):
    matcher = StopStringMatcher(stops)
    seen = ""
    for index, character in enumerate(text):
        piece, stop = matcher.append(character)
        if stop is not None:
            return
        seen += piece
        so_far = text[: index + 1]
        begins = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
        assert len(so_far) - len(seen) == max(begins, default=0)


def test_a_long_repetitive_stop_string_costs_no_more_than_its_text():
    matcher = StopStringMatcher(["a" * 1000 + "b"])
    for _ in range(200):
        assert matcher.append("a" * 100)[1] is None
    assert matcher.append("b") == ("", "a" * 1000 + "b")
