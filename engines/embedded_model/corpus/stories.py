"""Small stories by a grammar: a cast, a plot, and as many of its lines as the length allows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from corpus.sample import Passage, Sample
from corpus.tables.cast import ADJECTIVES, FRIENDS, HELPERS, HEROES, PEOPLE_HELPERS, Hero
from corpus.tables.plots import PLOTS, Plot
from corpus.wording import BOYS, GIRLS, capital, dialogue, request, rough, with_article

PRONOUNS = {True: ("she", "her", "her", "herself"), False: ("he", "him", "his", "himself")}
OPENINGS = (
    "Once upon a time there was {a} named {n}, who lived {home}.",
    "Once upon a time, {a} named {n} lived {home}.",
    "There once was {a} named {n}, who lived {home}.",
    "{N} was {a} who lived {home}.",
    "Long ago, {a} named {n} lived {home}.",
    "{N}, {a}, lived {home}.",
    "This is the story of {n}, {a} who lived {home}.",
)
BETWEEN = ("But that was not all.", "A few weeks went by.", "Soon there was something new.")
LESSONS = ("{N} had learned that {lesson}.", "So {n} learned that {lesson}.", "The lesson is that {lesson}.")


class _Slots(Mapping[str, str]):
    """Fills slots; helper and friend get their full names where they come first."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values, self._known = values, set[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str) -> str:
        if key[0].isupper():
            return capital(self[key[0].lower() + key[1:]])
        if key in ("h", "f") and key not in self._known:
            self._known.add(key)
            return self._values[f"{key}_full"]
        if key.startswith("a_"):
            return with_article(self[key[2:]])
        return self._values[key].format_map(self)


@dataclass(frozen=True)
class Story:
    """One cast with one plot, to be told at any length."""

    plot: Plot
    values: dict[str, str]
    seed: int

    def fill(self, text: str) -> str:
        """The text with its slots filled."""
        return capital(text.format_map(_Slots(self.values)))

    def tell(self, level: int, *, opening: bool = True) -> str:
        """The story with all lines up to the level."""
        rng = random.Random(self.seed)
        slots = _Slots(self.values)
        lines: list[str] = [rng.choice(OPENINGS)] if opening else []
        for line in self.plot.lines:
            wording = rng.choice(
                line.wordings
            )  # drawn at every level, so that all levels tell the same story
            if line.level <= level:
                lines.append(wording)
        if level > 1 and rng.random() < 0.5:
            lines.append(rng.choice(LESSONS))
        if rng.random() < 0.15:
            lines.append("The end.")
        told = [capital(line.format_map(slots)) for line in lines]
        breaks = {len(told) // 3, 2 * len(told) // 3} if len(told) > 9 and rng.random() < 0.5 else set()
        return "".join(("\n\n" if at in breaks else " " if at else "") + line for at, line in enumerate(told))


def _person(rng: random.Random, people: str, taken: Sequence[str]) -> tuple[str, bool]:
    """A name that nobody has yet, and whether it is a girl's."""
    girl = people == "girl" if people else rng.random() < 0.5
    return rng.choice([name for name in (GIRLS if girl else BOYS) if name not in taken]), girl


def _helper(rng: random.Random, hero: Hero) -> tuple[str, str]:
    """What the helper is, and whether that takes a girl's or a boy's name, or either."""
    if hero.people and rng.random() < 0.7:
        people = rng.choice(("girl", "boy"))
        return rng.choice(PEOPLE_HELPERS[people]), people
    return rng.choice([kind for kind in HELPERS if hero.kind not in kind]), ""


def compose(rng: random.Random, hero: Hero | None = None, plot: Plot | None = None, name: str = "") -> Story:
    """A story with a random cast and plot, or with those that are given."""
    hero = hero or rng.choice(HEROES)
    plot = plot or rng.choice([plot for plot in PLOTS if hero.kind not in plot.unfit])
    girl = name in GIRLS
    if not name:
        name, girl = _person(rng, hero.people, ())
    helper, people = _helper(rng, hero)
    h_name, h_girl = _person(rng, people, (name,))
    f_name, f_girl = _person(rng, "", (name, h_name))
    friend = rng.choice([kind for kind in FRIENDS if kind != hero.kind])
    if hero.kind in ("girl", "boy"):
        friend = "girl" if f_girl else "boy"
    noun = helper.split()[-1]
    values = {"n": name, "kind": hero.kind, "home": hero.home, "hn": h_name, "fn": f_name, "f": f_name}
    values |= {"a": with_article(f"{rng.choice(ADJECTIVES)} {hero.kind}"), "lesson": plot.lesson}
    values |= {"h_full": f"{with_article(helper)} named {h_name}", "h": rng.choice((h_name, f"the {noun}"))}
    values |= {"f_full": f"{with_article(friend)} named {f_name}"}
    for prefix, female in (("", girl), ("h_", h_girl), ("f_", f_girl)):
        he, him, his, himself = PRONOUNS[female]
        values |= {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his, f"{prefix}reflexive": himself}
    values |= {slot: rng.choice(choices) for slot, choices in plot.slots.items()} | rng.choice(plot.rows)
    return Story(plot, values, rng.getrandbits(32))


def _long(rng: random.Random, story: Story, hero: Hero) -> str:
    """The story with every line, and often with a second one about the same hero."""
    text = story.tell(3)
    if rng.random() < 0.5:
        others = [plot for plot in PLOTS if plot is not story.plot and hero.kind not in plot.unfit]
        second = compose(rng, hero, rng.choice(others), story.values["n"])
        sequel = second.tell(rng.choice((2, 3)), opening=False)
        text = f"{text.removesuffix(' The end.')}\n\n{rng.choice(BETWEEN)} {sequel}"
    return text


def _topic(rng: random.Random, story: Story) -> str:
    """What to ask for, so that this story fits."""
    kind = with_article(story.values["kind"])
    named = f"{kind} named {story.values['n']}"
    theme = story.fill(story.plot.topic)
    theme = theme[0].lower() + theme[1:]
    return rng.choice((kind, kind, kind, named, named, theme, f"{kind} and {theme}"))


ASKS = {
    1: (
        "write a very short story about {}",
        "tell me a story about {} in a few sentences",
        "tell a tiny story about {}",
        "write a story about {} in three or four sentences",
    ),
    2: (
        "tell me a story about {}",
        "tell me a story about {}",
        "write a short story about {}",
        "write a story about {}",
        "make up a story about {}",
        "tell me a bedtime story about {}",
        "tell a short story about {}",
    ),
    3: ("tell me a long story about {}", "write a long story about {}", "write a longer story about {}"),
}
PLAIN = {1: "tell me a very short story", 2: "tell me a story", 3: "tell me a long story"}


def _follow_up(rng: random.Random, story: Story) -> list[str]:
    """A turn about the story that was just told, with its answer."""
    values, kind = story.values, story.values["kind"]
    cases = (
        (f"What was the name of the {kind}?", f"The {kind} was named {values['n']}."),
        (f"Who is {values['n']}?", story.fill("{N} is {a}.")),
        (f"Where did {values['n']} live?", story.fill("{N} lived {home}.")),
        ("What is the lesson of the story?", story.fill("The lesson is that {lesson}.")),
        ("Tell it shorter.", story.tell(1)),
        ("Make it longer.", story.tell(3)),
        ("Can you sum it up in one sentence?", story.fill(story.plot.summary)),
        ("Give the story a title.", title(story)),
        ("Another one, please.", compose(rng).tell(2)),
    )
    question, answer = rng.choice(cases)
    return [rough(rng, question), answer]


def title(story: Story) -> str:
    """The story's title in large letters where titles have them."""
    first, *words = story.fill(story.plot.title).split()
    small = ("a", "the", "and", "in", "to", "for")
    return " ".join([first, *(word if word in small else capital(word) for word in words)])


def make(rng: random.Random) -> Sample:
    """One story, as a passage or as the answer to somebody who asked for one."""
    hero = rng.choice(HEROES)
    story = compose(rng, hero)
    level = rng.choices((1, 2, 3), (30, 45, 25))[0]
    text = story.tell(level) if level < 3 else _long(rng, story, hero)
    if rng.random() < 0.3:
        return Passage(f"{title(story)}\n\n{text}" if rng.random() < 0.5 else text)
    task = rng.choice(ASKS[level]).format(_topic(rng, story)) if rng.random() < 0.88 else PLAIN[level]
    turns = [request(rng, task), text]
    if level < 3 and rng.random() < 0.25:
        turns += _follow_up(rng, story)
    return dialogue(rng, *turns)
