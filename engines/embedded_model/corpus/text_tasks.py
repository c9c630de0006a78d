"""Tasks on a given text or list: feelings, topics, the odd one out, gaps, sorting, summaries."""

from __future__ import annotations

import random
from collections.abc import Callable

from corpus import reading, stories
from corpus.sample import Sample
from corpus.tables.categories import BY_NAME, GROUPS, MEMBERS, takes_article
from corpus.tables.read import read_table, split
from corpus.wording import NAMES, capital, dialogue, join, number, request, rough, with_article

_TABLE = read_table("opinions")
FEELINGS = ("positive", "negative", "neutral")
OPINIONS = {feeling: [split(texts) for _, texts in _TABLE[feeling]] for feeling in FEELINGS}
TOPICS = [(topic, split(texts)) for topic, texts in _TABLE["topic"]]
GAPS = _TABLE["gap"]


def _feeling(rng: random.Random) -> Sample:
    feeling = rng.choices(FEELINGS, (4, 4, 1))[0]
    about = rng.sample(OPINIONS[feeling], rng.choice((1, 1, 2, 3)))
    text = " ".join(rng.choice(texts) for texts in about)
    cases = (
        ("Is this positive or negative? {}", f"{capital(feeling)}."),
        ("What is the sentiment of this text? {}", f"{capital(feeling)}."),
        ("Sentiment: {}", f"{capital(feeling)}."),
        ("Classify as positive, negative, or neutral: {}", f"{capital(feeling)}."),
        ("Answer in one word, positive, negative, or neutral: {}", f"{capital(feeling)}."),
        (
            "{} Was that good or bad?",
            {"positive": "Good.", "negative": "Bad.", "neutral": "Neither."}[feeling],
        ),
        ("Review: {}\nSentiment:", f"{feeling}"),
        ("How does the writer feel? {}", f"The text is {feeling}."),
    )
    frame, answer = rng.choice(cases)
    return dialogue(rng, frame.format(text), answer)


def _topic(rng: random.Random) -> Sample:
    some = rng.sample(TOPICS, 3)
    topic, texts = rng.choice(some)
    text = rng.choice(texts)
    names = join([name for name, _ in some], "or")
    cases = (
        (f"Is this about {names}? {text}", f"{capital(topic)}."),
        (f"What is this about: {names}? {text}", f"It is about {topic}."),
        (f"Choose the topic ({names}): {text}", f"{capital(topic)}."),
        (f"What is the topic of this sentence? {text}", f"The topic is {topic}."),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, question, answer)


def _odd_one(rng: random.Random) -> Sample:
    first, second = rng.sample(range(len(GROUPS)), 2)
    one, other = rng.choice(GROUPS[first]), rng.choice(GROUPS[second])
    odd = rng.choice([item for item in BY_NAME[other] if item not in BY_NAME[one]])
    items = [
        *rng.sample([item for item in BY_NAME[one] if item not in BY_NAME[other]], rng.randint(2, 4)),
        odd,
    ]
    rng.shuffle(items)
    shown = ", ".join(items)
    kind = next(kind for kind in MEMBERS if kind.one == one)
    noun = with_article(odd) if takes_article(odd, other) else odd
    cases = (
        (f"Which one does not belong: {shown}?", f"{capital(odd)}."),
        (f"Pick the odd one out: {shown}", f"{capital(odd)}."),
        (f"Find the odd one out: {shown}", f"{capital(odd)}."),
        (f"Odd one out? {shown}", f"{capital(odd)}. The others are {kind.many}."),
        (f"Which word does not fit, and why? {shown}", f"{capital(odd)}. {capital(noun)} is not {one}."),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _gap(rng: random.Random) -> Sample:
    word, text = rng.choice(GAPS)
    full = text.replace("___", word)
    cases = (
        ("Fill in the blank: {}", f"{word}"),
        ("Fill the gap: {}", full),
        ("Complete the sentence: {}", full),
        ("Which word is missing? {}", f"{capital(word)}."),
        ("{}", full),
    )
    frame, answer = rng.choice(cases)
    return dialogue(rng, frame.format(text), answer)


def _sort(rng: random.Random) -> Sample:
    count = rng.randint(3, 6)
    if rng.random() < 0.5:
        numbers = rng.sample(range(rng.choice((10, 20, 100))), count)
        rising = rng.random() < 0.7
        how = (
            ("", " from small to large", " in ascending order")
            if rising
            else (" from large to small", " in descending order")
        )
        answer = ", ".join(map(str, sorted(numbers, reverse=not rising)))
        verb = rng.choice(("Sort these numbers", "Put these numbers in order", "Order the numbers"))
        return dialogue(rng, f"{verb}{rng.choice(how)}: {', '.join(map(str, numbers))}", answer)
    items = rng.sample(rng.choice((*BY_NAME.values(), NAMES)), count)
    verb = rng.choice(
        (
            "Sort these words",
            "Sort by the alphabet",
            "Put these words in alphabetical order",
            "Sort from A to Z",
        )
    )
    return dialogue(rng, f"{verb}: {', '.join(items)}", ", ".join(sorted(items, key=str.lower)))


def _find(rng: random.Random) -> Sample:
    items = rng.sample(NAMES, rng.randint(3, 5))
    ages = dict(zip(items, rng.sample(range(3, 90), len(items)), strict=True))
    oldest, youngest = max(ages, key=lambda name: ages[name]), min(ages, key=lambda name: ages[name])
    text = join([f"{name} is {age}" for name, age in ages.items()]) + "."
    words = sorted(
        rng.sample([word for word in BY_NAME["a fruit"] + BY_NAME["a tool"] if " " not in word], 4), key=len
    )
    cases = [
        (f"{text} Who is the oldest?", f"{oldest} is the oldest."),
        (f"{text} Who is the youngest?", f"{youngest} is the youngest."),
        (f"Who is the oldest? {text}", f"{oldest}, who is {ages[oldest]}."),
        (f"How old is {items[0]}? {text}", f"{items[0]} is {ages[items[0]]}."),
        (f"{text} How many people are these?", f"{capital(number(rng, len(items)))}."),
        (f"{text} Who comes first in the text?", f"{items[0]}."),
    ]
    if len(words[-1]) > len(words[-2]):
        shown = ", ".join(rng.sample(words, 4))
        cases.append((f"Which is the longest word: {shown}?", f"{capital(words[-1])}."))
    question, answer = rng.choice(cases)
    return dialogue(rng, question, answer)


def _summary(rng: random.Random) -> Sample:
    story = stories.compose(rng)
    text = story.tell(rng.choice((1, 1, 2)))
    asks: tuple[str, ...] = (
        "sum up this story in one sentence",
        "summarize this story in one sentence",
        "write a summary of this text",
        "tell me in one sentence what happens",
        "summarize the text",
    )
    answer = story.fill(story.plot.summary)
    if rng.random() < 0.15:
        asks, answer = ("give this story a title", "find a title for this text"), stories.title(story)
    elif rng.random() < 0.15:
        asks, answer = (
            ("tell me what one can learn from this story",),
            story.fill("One can learn that {lesson}."),
        )
    ask = request(rng, rng.choice(asks))
    return dialogue(rng, f"{ask}\n\n{text}" if rng.random() < 0.7 else f"{text}\n\n{ask}", answer)


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_feeling, 14), (_topic, 6), (_odd_one, 10), (_gap, 6), (_sort, 13), (_find, 7), (_summary, 10),
    (reading.make, 34),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One task on a text."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
