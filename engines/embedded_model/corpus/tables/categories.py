"""Things of one kind: what lists, odd-one-out and JSON tasks choose from."""

from __future__ import annotations

from typing import NamedTuple

from corpus.tables.read import read_table, split, words


class Kind(NamedTuple):
    """What a kind is called: many of it, many in other words, and one of it with its article."""

    many: str
    other: str
    one: str


_TABLE = read_table("categories")
MEMBERS = {Kind(*split(names, "/")): split(members, ",") for names, members in _TABLE[""]}
PACKING_ITEMS = {place: split(items, ",") for place, items in _TABLE["packing"]}
ORDERED = ("planets", "months", "days of the week")

# Members of two groups are never of one kind, whatever one calls them.
GROUPS = (
    ("a fruit", "a vegetable", "a flower", "a tree", "a color"),
    ("a tool", "a piece of furniture", "a musical instrument", "a vehicle", "a piece of clothing"),
    ("a sea animal", "a farm animal", "a wild animal", "a bird", "an insect"),
    ("a month", "a day of the week"),
    ("a country", "a capital city", "a planet"),
    ("a sport", "a hobby"),
    ("a job", "a family member"),
    ("a drink",),
)
BY_NAME = {kind.one: members for kind, members in MEMBERS.items()}
_BARE_KINDS = split(
    "a color, a drink, a sport, a country, a capital city, a planet, a month, a day of the week, "
    "a kind of weather, a metal, a school subject, a hobby, a feeling, a programming language, a short word",
    ",",
)
_BARE = words("spinach broccoli lettuce cabbage lavender pliers paper clouds squid shrimp")


def takes_article(item: str, one: str) -> bool:
    """Whether one says `a hammer` and not, as with `milk`, the bare word."""
    return one not in _BARE_KINDS and item not in _BARE


SHOPPING = words(
    "milk bread eggs butter cheese apples rice salt sugar flour potatoes carrots tea coffee soap honey"
)
