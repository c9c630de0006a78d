"""Small talk and longer talks: greetings, names that are remembered, follow-ups, choices, yes or no."""

from __future__ import annotations

import random
from collections.abc import Callable

from corpus import word_tasks
from corpus.sample import Sample
from corpus.tables.categories import BY_NAME, GROUPS, takes_article
from corpus.tables.read import read_table, split
from corpus.wording import CITIES, NAMES, capital, dialogue, rough, with_article

_TALK = read_table("talk")
SAME = [(split(questions, "/"), split(answers)) for questions, answers in _TALK["same"]]
UNKNOWN = [(split(questions, "/"), split(answers)) for questions, answers in _TALK["unknown"]]
THEMES = [(split(names, "/")[0], *split(texts)) for names, texts in _TALK["theme"]]

COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange")
PETS = ("dog", "cat", "rabbit", "parrot", "hamster", "pony")
MEALS = ("pizza", "soup", "pancakes", "rice", "apple pie", "noodles", "salad")
PLANS = ("go swimming", "visit a friend", "clean the house", "read a book", "bake a cake", "ride my bike")
REMEMBER = [(said, *split(texts)) for said, texts in _TALK["remember"]]


def _talk(rng: random.Random) -> Sample:
    turns: list[str] = []
    for _ in range(rng.choices((1, 2, 3), (70, 22, 8))[0]):
        questions, answers = rng.choice(SAME)
        turns += [rough(rng, rng.choice(questions)), rng.choice(answers)]
    return dialogue(rng, *turns)


def _unknown(rng: random.Random) -> Sample:
    if rng.random() < 0.4:
        word = "".join(rng.choice("bdfgklmprst") + rng.choice("aeiou") for _ in range(rng.choice((2, 3))))
        word += rng.choice("klmnrst")
        question = rng.choice((f"What is a {word}?", f"What does {word} mean?", f"Who is {capital(word)}?"))
        return dialogue(rng, rough(rng, question), "I do not know that. I am a very small model.")
    questions, answers = rng.choice(UNKNOWN)
    return dialogue(rng, rough(rng, rng.choice(questions)), rng.choice(answers))


def _name(rng: random.Random) -> Sample:
    """A name that is given early and asked for later."""
    name = rng.choice(NAMES)
    frames = (
        "My name is {}.",
        "I am {}.",
        "Hi, I am {}.",
        "Hello, my name is {}.",
        "You can call me {}.",
        "I'm {}",
    )
    turns = [rng.choice(frames).format(name)]
    turns += [
        rng.choice((f"Hello, {name}! How can I help you?", f"Nice to meet you, {name}!", f"Hi, {name}!"))
    ]
    for _ in range(rng.choice((0, 0, 1, 2))):
        sample = rng.choice((_talk, _compare, word_tasks.make))(rng)
        turns += [message.content for message in getattr(sample, "messages", ()) if message.role != "system"]
    question = rng.choice(
        ("What is my name?", "Do you remember my name?", "Who am I?", "What was my name again?")
    )
    turns += [rough(rng, question), rng.choice((f"Your name is {name}.", f"You are {name}."))]
    return dialogue(rng, *turns)


def _remember(rng: random.Random) -> Sample:
    values = {
        "color": rng.choice(COLORS),
        "pet": rng.choice(PETS),
        "city": rng.choice(CITIES),
        "meal": rng.choice(MEALS),
    }
    values |= {"name": rng.choice(NAMES), "plan": rng.choice(PLANS)}
    values |= {"age": str(rng.randint(5, 80)), "number": str(rng.randint(2, 99))}
    values |= {"Color": capital(values["color"]), "Meal": capital(values["meal"])}
    facts = rng.sample(REMEMBER, rng.choice((1, 1, 2, 3)))
    kept = [fact for fact in facts if not ("{name}" in fact[0] and fact is not facts[0])] or facts[:1]
    turns = [text.format(**values) for fact in kept for text in fact[:2]]
    asked = rng.choice(kept)
    return dialogue(rng, *turns, rough(rng, asked[2].format(**values)), asked[3].format(**values))


def _follow_up(rng: random.Random) -> Sample:
    """A theme, then the same in short, at length, or again."""
    name, usual, short, long = rng.choice(THEMES)
    frames = ("What is {}?", "Tell me about {}.", "Explain {}.", "Can you tell me what {} is?", "{}?")
    texts = {"usual": usual, "short": short, "long": long}
    asks = {
        "short": (
            "And in short?",
            "Make it shorter.",
            "In one sentence, please.",
            "Shorter, please.",
            "Sum it up.",
        ),
        "long": (
            "Make it longer.",
            "Tell me more.",
            "Can you say more?",
            "A bit longer, please.",
            "More details?",
        ),
        "again": (
            "Say it again.",
            "Can you repeat that?",
            "Once more, please.",
            "Again, please.",
            "Please repeat it.",
        ),
    }
    if rng.random() < 0.25:
        form = rng.choice(("short", "long"))
        ends = (
            ("{} in one sentence.", "In short, {}.")
            if form == "short"
            else ("{} in detail.", "{} at length.")
        )
        ask = f"{'explain' if form == 'short' else 'describe'} {name}"
        return dialogue(rng, rough(rng, capital(rng.choice(ends).format(ask))), texts[form])
    turns, last = [rough(rng, capital(rng.choice(frames).format(name))), usual], "usual"
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        kind = rng.choice([kind for kind in asks if kind != last])
        last = last if kind == "again" else kind
        turns += [rough(rng, rng.choice(asks[kind])), texts[last]]
    return dialogue(rng, *turns)


def _is_a(rng: random.Random) -> Sample:
    """Whether a thing is of a kind, and of which."""
    at = rng.randrange(len(GROUPS))
    one = rng.choice(GROUPS[at])
    item = rng.choice(BY_NAME[one])
    noun = with_article(item) if takes_article(item, one) else item
    if rng.random() < 0.35:
        question = rng.choice((f"What is {noun}?", f"What kind of thing is {noun}?"))
        return dialogue(rng, rough(rng, question), f"{capital(noun)} is {one}.")
    if rng.random() < 0.5:
        return dialogue(rng, rough(rng, f"Is {noun} {one}?"), f"Yes, {noun} is {one}.")
    other = rng.choice([name for number, group in enumerate(GROUPS) if number != at for name in group])
    if item in BY_NAME[other]:
        return _is_a(rng)
    return dialogue(rng, rough(rng, f"Is {noun} {other}?"), f"No, {noun} is {one}.")


SIZES = ("ant", "mouse", "cat", "dog", "sheep", "horse", "elephant", "house", "mountain")
SPEEDS = ("snail", "turtle", "person", "bicycle", "car", "train", "plane", "rocket")
HEAT = ("ice", "cold water", "warm milk", "boiling water", "fire")
SCALES = (
    (SIZES, "bigger", "smaller", True),
    (SPEEDS, "faster", "slower", True),
    (HEAT, "hotter", "colder", False),
)


def _yes_no(truth: object, first: str, second: str, more: str) -> str:
    return f"Yes, {first} is {more}." if truth else f"No, {second} is {more}."


def _compare(rng: random.Random) -> Sample:
    things, more, less, article = rng.choice(SCALES)
    low, high = sorted(rng.sample(range(len(things)), 2))
    small, large = (with_article(things[at]) if article else things[at] for at in (low, high))
    first, second = rng.sample((small, large), 2)
    cases = (
        (f"Which is {more}, {first} or {second}?", f"{capital(large)} is {more}."),
        (f"Which is {less}, {first} or {second}?", f"{capital(small)} is {less}."),
        (f"What is {more}: {first} or {second}?", f"{capital(large)}."),
        (f"Is {first} {more} than {second}?", _yes_no(first == large, first, second, more)),
        (f"Is {first} {less} than {second}?", _yes_no(first == small, first, second, less)),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


CHOICES = (
    ("tea", "coffee", "I would take tea, for it is milder."),
    ("a book", "a movie", "I would choose a book, since you can read it anywhere."),
    ("a cat", "a dog", "A dog needs walks, and a cat needs less time. If you have little time, take a cat."),
    ("the bus", "the train", "I would take the train, for it does not stand in traffic."),
    ("summer", "winter", "I would choose summer, since the days are long."),
    ("an apple", "a cookie", "Take the apple. It is good for you."),
    ("red", "blue", "I would take blue, for it is calm."),
    ("the sea", "the hills", "I would go to the sea, since you can swim there."),
    ("walk", "drive", "If it is not far, walk. It is healthy."),
    ("call", "write", "Call if it is urgent, and write if it can wait."),
)


def _choose(rng: random.Random) -> Sample:
    first, second, answer = rng.choice(CHOICES)
    if rng.random() < 0.5:
        first, second = second, first
    frames = (
        "{} or {}?",
        "What should I choose, {} or {}?",
        "Which is better, {} or {}?",
        "Should I take {} or {}?",
    )
    frame = rng.choice(
        frames if first not in ("walk", "drive", "call", "write") else ("{} or {}?", "Should I {} or {}?")
    )
    return dialogue(rng, rough(rng, capital(frame.format(first, second))), answer)


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_talk, 20), (_unknown, 7), (_name, 10), (_remember, 9), (_follow_up, 12), (_is_a, 9),
    (_compare, 5), (_choose, 3), (word_tasks.make, 25),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One talk of one or more turns."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
