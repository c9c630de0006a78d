"""Who is in the stories: heroes with their homes, and helpers."""

from __future__ import annotations

from typing import NamedTuple

from corpus.tables.read import words


class Hero(NamedTuple):
    """A kind of hero and where one lives; `people` is `girl`, `boy`, or empty for animals and others."""

    kind: str
    home: str
    people: str = ""


_FOREST = "at the edge of a green forest"
_MEADOW = "in a wide meadow by a river"
_TOWN = "in a small town by the sea"

HEROES = (
    Hero("fox", _FOREST),
    Hero("bear", "in a warm cave in the hills"),
    Hero("rabbit", _MEADOW),
    Hero("mouse", "under the floor of an old mill"),
    Hero("cat", "in a house with a red door"),
    Hero("dog", "on a farm near the hills"),
    Hero("duck", "on a quiet pond behind the mill"),
    Hero("frog", "between the reeds of a pond"),
    Hero("squirrel", "in a hollow oak tree"),
    Hero("hedgehog", "under a pile of leaves in a garden"),
    Hero("turtle", "near a blue lake"),
    Hero("sparrow", "in a nest under an old roof"),
    Hero("pony", "in a stable on a hill"),
    Hero("elephant", "near a wide brown river"),
    Hero("lion", "on a sunny plain"),
    Hero("monkey", "in the tall trees of the jungle"),
    Hero("penguin", "on a cold white shore"),
    Hero("dragon", "on top of a gray mountain"),
    Hero("robot", "in a workshop full of tools"),
    Hero("wizard", "in a crooked tower", "boy"),
    Hero("princess", "in a castle above the town", "girl"),
    Hero("prince", "in a castle with seven towers", "boy"),
    Hero("girl", _TOWN, "girl"),
    Hero("girl", "on a farm at the end of a long road", "girl"),
    Hero("boy", "in a village in the hills", "boy"),
    Hero("boy", "in a big city, on the fifth floor", "boy"),
    Hero("sailor", "in a white house by the harbor", "boy"),
    Hero("baker", "above a little bakery", "girl"),
)
ADJECTIVES = words("little young small shy brave kind quiet cheerful clever curious friendly")
HELPERS = (
    "old owl", "wise turtle", "gray goose", "tall stork", "friendly badger", "old horse", "clever crow",
    "kind goat", "gentle ox", "old wolf", "patient donkey", "little bat", "wise old cat",
)  # fmt: skip
PEOPLE_HELPERS = {
    "girl": ("kind farmer", "old gardener", "young teacher", "friendly nurse"),
    "boy": ("old fisherman", "kind miller", "tall shepherd", "friendly postman"),
}
FRIENDS = ("rabbit", "mole", "beaver", "otter", "deer", "pigeon", "lamb", "kitten", "puppy", "raccoon")
