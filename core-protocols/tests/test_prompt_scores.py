"""Scores of a prompt, packed: what went in comes out, and columns that do not fit are refused."""

from __future__ import annotations

from array import array

import pytest

from sagellm.core import InvalidInputError
from sagellm.core.protocols.engine import PromptScore, PromptScores


def packed(*scores: PromptScore) -> PromptScores:
    columns = array("i"), array("d"), array("i")
    for score in scores:
        columns[0].append(score.rank)
        columns[1].extend(score.values)
        columns[2].extend(score.top_ids)
    return PromptScores(len(scores[0].top_ids), *(column.tobytes() for column in columns))


FIRST, SECOND = (
    PromptScore((-1.5, -0.5, -0.7), 3, (7, 9)),
    PromptScore((-0.25, -0.25, -2.0), 1, (2**31 - 1, 0)),
)


def test_each_score_is_found_at_its_place() -> None:
    scores = packed(FIRST, SECOND)
    assert len(scores) == 2
    assert [scores[0], scores[1]] == list(scores) == [FIRST, SECOND]
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"no score {index} of 2"):
            scores[index]


def test_scores_without_others_have_the_tokens_own() -> None:
    score = PromptScore((-1.0,), 5, ())
    assert list(packed(score, score)) == [score, score]


def test_parts_are_joined_in_order() -> None:
    assert list(PromptScores.joined([packed(FIRST), packed(SECOND, FIRST)])) == [FIRST, SECOND, FIRST]
    assert len(PromptScores.joined([])) == 0


def test_parts_that_differ_in_width_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\[2, 0\] others"):
        PromptScores.joined([packed(FIRST), packed(PromptScore((-1.0,), 5, ()))])


@pytest.mark.parametrize(
    "columns",
    [(1, bytes(4), bytes(16), bytes(8)), (1, bytes(5), bytes(16), bytes(4)), (-1, bytes(4), b"", b"")],
)
def test_columns_of_different_lengths_are_refused(columns: tuple[int, bytes, bytes, bytes]) -> None:
    with pytest.raises(InvalidInputError, match="not those of the same tokens"):
        PromptScores(*columns)
