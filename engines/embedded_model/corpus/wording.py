"""How users put things, and the little grammar that the generators share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from corpus.sample import Dialogue, Message
from corpus.tables.read import words

GIRLS = words(
    "Anna Bella Clara Dora Ella Emma Eva Gina Hanna Ida Ivy Julia Kate Lena Lily Lucy Maria Mia Nina Nora "
    "Olga Paula Rita Rosa Ruth Sara Sofia Tina Vera Zoe"
)
BOYS = words(
    "Adam Alex Ben Carl David Emil Felix Finn Frank George Hugo Ian Jack Jan Karl Leo Lucas Mark Max Noah "
    "Oscar Otto Paul Peter Robin Sam Simon Theo Tim Tom"
)
NAMES = GIRLS + BOYS
CITIES = words(
    "Athens Berlin Boston Cairo Chicago Dublin Lima London Madrid Oslo Paris Prague Rome Tokyo Vienna"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small model. Answer briefly.",
    "Answer the user's questions.",
    "You are an assistant. Be short and clear.",
)
FRAMES = (
    "Please {}.",
    "{}, please.",
    "Can you {}?",
    "Could you {}?",
    "Could you please {}?",
    "I would like you to {}.",
    "I need you to {}.",
    "Hi! {}.",
    "Hello, please {}.",
)


def pronoun(name: str) -> str:
    """`she` for the girls' names, otherwise `he`."""
    return "she" if name in GIRLS else "he"


def capital(text: str) -> str:
    """The text with a large first letter."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """The noun with `a` or `an` before it, by its first letter."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def join(items: Sequence[str], word: str = "and") -> str:
    """The items as an English enumeration: `a`, `a and b`, `a, b, and c`."""
    if len(items) < 3:
        return f" {word} ".join(items)
    return f"{', '.join(items[:-1])}, {word} {items[-1]}"


def number(rng: random.Random, value: int) -> str:
    """The number in digits or, where it is small, often as a word."""
    return NUMBERS[value] if value < 13 and rng.random() < 0.5 else str(value)


def rough(rng: random.Random, text: str) -> str:
    """The text as users type it: now and then in lower case, or without its last mark."""
    roll = rng.random()
    if roll < 0.22:
        text = text.lower()
    if 0.12 < roll < 0.32 and text[-1:] in ".?!":
        text = text[:-1]
    return text


def request(rng: random.Random, task: str) -> str:
    """A request for `task` (such as `list five fruits`) in one of many wordings."""
    if rng.random() < 0.45:
        return rough(rng, capital(task) + ".")
    frame = rng.choice(FRAMES)
    starts = frame.startswith(("{}", "Hi! {}"))
    return rough(rng, frame.format(capital(task) if starts else task))


def dialogue(rng: random.Random, *turns: str) -> Dialogue:
    """Turns of the user and the assistant by turns, now and then after a system message."""
    messages = [Message("assistant" if at % 2 else "user", text) for at, text in enumerate(turns)]
    if rng.random() < 0.08:
        messages.insert(0, Message("system", rng.choice(SYSTEMS)))
    return Dialogue(tuple(messages))
