"""Tasks on words and sentences: repeat, capitals, spelling, order of words, other wordings."""

from __future__ import annotations

import random
from collections.abc import Callable

from corpus.sample import Sample
from corpus.tables.categories import BY_NAME
from corpus.tables.read import read_table
from corpus.wording import NAMES, NUMBERS, capital, dialogue, request, rough

OBJECTS = (
    "the book",
    "a red apple",
    "the old house",
    "a small boat",
    "the garden",
    "a letter",
    "the blue door",
)
VERBS = (
    ("sees", "saw", "see"),
    ("likes", "liked", "like"),
    ("finds", "found", "find"),
    ("paints", "painted", "paint"),
    ("wants", "wanted", "want"),
    ("needs", "needed", "need"),
    ("remembers", "remembered", "remember"),
)
PLACES = ("", "", " today", " in the morning", " every day", " after lunch", " on Sunday")

_TABLE = read_table("words")
RUDE = _TABLE["polite"]
PAIRS = ("the opposite", "the plural", "the past")


def _word(rng: random.Random) -> str:
    kind = rng.choice(("a fruit", "a vegetable", "a tool", "a bird", "a drink", "a color", "a tree"))
    return rng.choice([word for word in BY_NAME[kind] if word.isalpha()])


def _sentence(rng: random.Random) -> str:
    return f"{rng.choice(NAMES)} {rng.choice(VERBS)[0]} {rng.choice(OBJECTS)}{rng.choice(PLACES)}."


def _repeat(rng: random.Random) -> Sample:
    text = rng.choice((_sentence(rng), _word(rng), " ".join(_word(rng) for _ in range(rng.randint(2, 5)))))
    if rng.random() < 0.25:
        count = rng.randint(2, 5)
        word = _word(rng)
        often = "twice" if count == 2 else f"{NUMBERS[count]} times"
        verb = rng.choice(("Say", "Write", "Repeat"))
        return dialogue(rng, f"{verb} the word {word} {often}.", " ".join([word] * count))
    frames = (
        "Repeat: {}",
        "Say: {}",
        "Repeat after me: {}",
        "Write exactly this: {}",
        'Say "{}"',
        "Copy: {}",
    )
    return dialogue(rng, rng.choice(frames).format(text), text)


def _case(rng: random.Random) -> Sample:
    text = rng.choice((_sentence(rng), _word(rng), _word(rng)))
    cases = (
        ("Write in capital letters: {}", text.upper()),
        ("Upper case: {}", text.upper()),
        ("Make this upper case: {}", text.upper()),
        ("Write {} in capital letters", text.upper()),
        ("Lower case: {}", text.lower()),
        ("Write in small letters: {}", text.lower()),
    )
    frame, answer = rng.choice(cases)
    return dialogue(rng, frame.format(text.upper() if answer.islower() and text.islower() else text), answer)


def _order(rng: random.Random) -> Sample:
    words = [_word(rng) for _ in range(rng.randint(2, 5))]
    frames = (
        "Reverse the order of these words: {}",
        "Write these words in reverse order: {}",
        "From last to first: {}",
    )
    return dialogue(rng, rng.choice(frames).format(" ".join(words)), " ".join(reversed(words)))


def _spell(rng: random.Random) -> Sample:
    word = rng.choice((_word(rng), rng.choice(NAMES)))
    letters = "-".join(word.upper())
    letter = rng.choice(word)
    count, at = word.lower().count(letter.lower()), rng.randrange(min(3, len(word)))
    cases = (
        (f"Spell {word}.", f"{letters}."),
        (f"Spell the word {word}.", f"{letters}."),
        (f"How do you spell {word}?", f"{letters}."),
        (f"How many letters does {word} have?", f"{letters}: {len(word)} letters."),
        (f"How many letters are in the word {word}?", f"{letters}: {len(word)} letters."),
        (f"Count the letters of {word}.", f"{letters}: {len(word)} letters."),
        (f"How often is {letter} in {word}?", f"{letters}: {count} time{'s' if count > 1 else ''}."),
        (f"What is the {('first', 'second', 'third')[at]} letter of {word}?", f"{word[at].upper()}."),
        (f"What is the last letter of {word}?", f"{word[-1].upper()}."),
        (f"Which letter does {word} start with?", f"{word[0].upper()}."),
        (f"Write {word} backwards.", f"{word[::-1].lower()}"),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _words(rng: random.Random) -> Sample:
    sentence = _sentence(rng)
    words = sentence.rstrip(".").split()
    cases = (
        ("How many words are in this sentence? {}", f"{capital(NUMBERS[len(words)])}."),
        ("What is the first word? {}", f"{words[0]}"),
        ("What is the last word? {}", f"{words[-1]}"),
        ("What is the second word? {}", f"{words[1]}"),
        ("Who is it about? {}", f"{words[0]}"),
        ("Write each word on its own line: {}", "\n".join(words)),
    )
    frame, answer = rng.choice(cases)
    return dialogue(rng, frame.format(sentence), answer)


def _rewrite(rng: random.Random) -> Sample:
    name, (now, past, base) = rng.choice(NAMES), rng.choice(VERBS)
    rest = rng.choice(OBJECTS)
    cases = (
        ("Put this into the past", f"{name} {past} {rest}."),
        ("Make this a question", f"Does {name} {base} {rest}?"),
        ("Say the opposite", f"{name} does not {base} {rest}."),
        ("Say this about tomorrow", f"{name} will {base} {rest}."),
    )
    task, answer = rng.choice(cases)
    return dialogue(rng, f"{task}: {name} {now} {rest}.", answer)


def _polite(rng: random.Random) -> Sample:
    rude, polite = rng.choice(RUDE)
    frames = (
        "Say this politely: {}",
        "Make this polite: {}",
        "How can I say this politely? {}",
        "More polite: {}",
    )
    return dialogue(rng, rng.choice(frames).format(rude), polite)


def _pair(rng: random.Random) -> Sample:
    """Opposites, plurals and past forms."""
    name = rng.choice(PAIRS)
    first, second = rng.choice(_TABLE[name])
    if name == "the opposite" and rng.random() < 0.5:
        first, second = second, first
    if rng.random() < 0.3:
        return dialogue(rng, request(rng, f"give me {name} of {first}"), f"{capital(second)}.")
    return dialogue(
        rng, rough(rng, f"What is {name} of {first}?"), f"{capital(name)} of {first} is {second}."
    )


def _make_sentence(rng: random.Random) -> Sample:
    thing = rng.choice(OBJECTS)
    word = thing.split()[-1]
    name, (_, past, _) = rng.choice(NAMES), rng.choice(VERBS)
    return dialogue(rng, request(rng, f"write a sentence with the word {word}"), f"{name} {past} {thing}.")


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_repeat, 22), (_case, 14), (_order, 8), (_spell, 18), (_words, 10), (_rewrite, 8),
    (_polite, 8), (_pair, 9),
    (_make_sentence, 3),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One task on a word or a sentence."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
