"""Answers break between words, also wide ones, while they come in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rich.cells import cell_len

from sagellm.engines.cli.chat.wrapping import WordWrap

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."


def wrap(pieces, width):
    wrapping = WordWrap(lambda: width)
    return "".join(map(wrapping.feed, pieces)) + wrapping.end()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("width", [8, 13, 20, 64, 80])
def test_words_stay_whole_however_they_come(size, width):
    shown = wrap([TEXT[at : at + size] for at in range(0, len(TEXT), size)], width)
    assert shown.split() == TEXT.split()
    lines = shown.split("\n")
    assert all(len(line) <= width for line in lines)
    for line, following in pairwise(lines):
        assert len(line) + 1 + len(following.split()[0]) > width, "no line is broken too early"


def test_a_word_that_is_longer_than_a_line_is_left_to_the_terminal_so_that_it_can_be_copied():
    assert wrap(["see https://example.org/a/b ok solved"], 10) == "see\nhttps://example.org/a/b ok\nsolved"


def test_wide_characters_take_two_columns_and_may_be_parted():
    shown = wrap(list("什么是 KV 缓存？它保存注意力的键和值。"), 12)
    assert shown.replace("\n", "").replace(" ", "") == "什么是KV缓存？它保存注意力的键和值。"
    assert [cell_len(line) for line in shown.split("\n")][:-1] == [12, 12, 12]


def test_newlines_indentation_and_tabs_stay():
    text = "def f():\n    return 1\n\n\tx\n"
    assert wrap(list(text), 40) == text
    assert wrap(["a\tb c"], 10) == "a\tb\nc"


def test_a_window_that_becomes_narrow_counts_from_the_next_word_on():
    widths = iter([80, 80, 5, 5, 5])
    wrapping = WordWrap(lambda: next(widths))
    assert wrapping.feed("one two three four ") + wrapping.end() == "one two\nthree\nfour "


def test_whole_words_are_shown_at_once_and_the_last_one_at_the_end():
    wrapping = WordWrap(lambda: 80)
    assert [wrapping.feed(piece) for piece in ("Hel", "lo wor", "ld", "\n")] == ["", "Hello", "", " world\n"]
