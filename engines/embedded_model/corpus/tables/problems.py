"""Word problems of one operation."""

from __future__ import annotations

from typing import NamedTuple

from corpus.tables.read import read_table, split, words


class Problem(NamedTuple):
    """A problem about `{a}` and `{b}`; `{r}` is the result, `{x}` the things, `{n}` and `{f}` people."""

    sign: str
    text: str
    answer: str
    things: tuple[str, ...]


THINGS = {
    "food": words("apples pears cookies oranges plums cakes nuts"),
    "toys": words("books balls pens coins stamps cards shells stones"),
    "animals": words("birds ducks cows sheep frogs cats bees"),
    "birds": ("birds", "owls", "crows"),
}
THINGS["food and toys"] = THINGS["food"] + THINGS["toys"]


def _problem(sign: str, parts: tuple[str, ...]) -> Problem:
    text, answer, things = parts
    return Problem(sign, text, answer, THINGS[things])


PROBLEMS = tuple(_problem(sign, split(value)) for sign, value in read_table("problems")[""])
