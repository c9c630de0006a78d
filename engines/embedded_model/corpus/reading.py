"""Questions about a given text, whose answers are copied from it."""

from __future__ import annotations

import random
import re

from corpus.sample import Sample
from corpus.tables.read import read_table, split
from corpus.wording import NAMES, capital, dialogue, rough

_TABLE = {kind: dict(block) for kind, block in read_table("reading").items() if kind}
FORMS = (
    "Text: {text}\nQuestion: {question}",
    "Text: {text} Question: {question}",
    "{text} {question}",
    "{text}\n{question}",
    "Read this: {text}\n{question}",
    "Answer from the text. {text}\nQuestion: {question}",
    "Context: {text}\n\nQuestion: {question}\nAnswer:",
    "{question}\n\n{text}",
)
FILLERS = (
    "It was a long day.",
    "The sun was shining.",
    "Nobody was in a hurry.",
    "It was a cold morning.",
    "There was much to do.",
    "The house was quiet.",
    "It began to rain.",
    "All windows were open.",
    "The old clock was slow.",
)
UNKNOWN = ("The text does not say.", "The text does not say that.", "I cannot find that in the text.")


def _facts(rng: random.Random, kind: str, count: int) -> list[dict[str, str]]:
    """Values of so many facts of a kind, in which nothing stands twice."""
    table, names = _TABLE[kind], rng.sample(NAMES, 2 * count)
    columns: dict[str, list[str]] = {"n": names[:count], "m": names[count:]}
    for key in ("x", "y"):
        choices = table[f"{{{key}}}"]
        numbers = re.fullmatch(r"(\d+)-(\d+)", choices)
        values = [str(n) for n in range(int(numbers[1]), int(numbers[2]) + 1)] if numbers else split(choices)
        columns[key] = rng.sample(values, min(count, len(values)))
    rows = min(len(values) for values in columns.values())
    return [{key: values[at] for key, values in columns.items()} for at in range(rows)]


def make(rng: random.Random) -> Sample:
    """A text of some facts, and a question about one of them."""
    kind = rng.choice(tuple(_TABLE))
    table = _TABLE[kind]
    facts = _facts(rng, kind, rng.choices((1, 2, 3, 4), (20, 45, 25, 10))[0])
    asked = rng.choice(facts)
    sentences = [capital(rng.choice(split(table["fact"])).format(**fact)) for fact in facts]
    for _ in range(rng.choice((0, 0, 1, 2))):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(FILLERS))
    text = " ".join(dict.fromkeys(sentences))
    question, answer = (part.format(**asked) for part in split(rng.choice(split(table["ask"])), "="))
    if not answer[0].isdigit() and rng.random() < 0.08:
        other = rng.choice([name for name in NAMES if name not in text])
        if asked["n"] in question:
            question, answer = question.replace(asked["n"], other), rng.choice(UNKNOWN)
    turns = [rng.choice(FORMS).format(text=text, question=rough(rng, question)), capital(answer)]
    if rng.random() < 0.15:
        then = rng.choice(facts)
        question, answer = (part.format(**then) for part in split(rng.choice(split(table["ask"])), "="))
        turns += [rough(rng, question), capital(answer)]
    return dialogue(rng, *turns)
