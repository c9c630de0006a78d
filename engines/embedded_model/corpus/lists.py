"""Lists of asked length in the asked form: members of a kind, steps, packing lists and plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from corpus.sample import Passage, Sample
from corpus.tables.categories import MEMBERS, ORDERED, PACKING_ITEMS, SHOPPING
from corpus.tables.steps import DAY, STEPS
from corpus.wording import NUMBERS, capital, dialogue, join, number, request, rough

# How the form is asked for; what is not asked for is a numbered list.
FORMS = {
    "numbers": ("as a numbered list", "as a list with numbers", "in a numbered list"),
    "bullets": ("as bullet points", "as a bulleted list", "with bullet points", "in bullets"),
    "commas": ("separated by commas", "in one line", "in one sentence", "as a comma list"),
    "lines": ("one per line", "each on its own line", "line by line"),
}


def write(items: Sequence[str], form: str) -> str:
    """The items as numbered or bulleted lines, as plain lines, or as one sentence."""
    if form == "commas":
        return capital(join([item.rstrip(".") for item in items])) + "."
    if form == "numbers":
        return "\n".join(f"{at}. {capital(item)}" for at, item in enumerate(items, 1))
    mark = "- " if form == "bullets" else ""
    return "\n".join(mark + capital(item) for item in items)


def _asked(rng: random.Random, task: str, default: str = "numbers") -> tuple[str, str]:
    """The task, in some cases with a wish for a form, and the form to use."""
    if rng.random() < 0.6:
        return task, default
    form = rng.choice(tuple(FORMS))
    return f"{task} {rng.choice(FORMS[form])}", form


def _choose(rng: random.Random, most: int = 12) -> tuple[str, tuple[str, ...], list[str]]:
    """The name of a kind, its members, and some of them."""
    kind, members = rng.choice(tuple(MEMBERS.items()))
    name = rng.choice((kind.many, kind.many, kind.other))
    count = min(rng.choice((3, 3, 3, 4, 4, 5, 5, 5, 6, 7, 8, 10, 12)), len(members), most)
    if kind.many in ORDERED:
        return name, members, list(members[:count])
    return name, members, rng.sample(members, count)


def _members(rng: random.Random) -> Sample:
    name, members, items = _choose(rng)
    count = number(rng, len(items))
    if rng.random() < 0.3:
        question = f"{rng.choice(('name', 'tell me', 'can you name'))} {count} {name}"
        return dialogue(rng, rough(rng, capital(question) + "."), write(items, "commas"))
    if rng.random() < 0.15:
        few = (items + [item for item in members if item not in items])[:5]
        task, form = _asked(
            rng, f"{rng.choice(('list some', 'give me a list of', 'write a list of'))} {name}"
        )
        return dialogue(rng, request(rng, task), write(few, form))
    task, form = _asked(
        rng, f"{rng.choice(('list', 'list', 'give me', 'write down', 'write', 'show me'))} {count} {name}"
    )
    answer = write(items, form)
    if form != "commas" and "give me" in task:
        answer = f"Here are {NUMBERS[len(items)]} {name}:\n{answer}"
    return dialogue(rng, request(rng, task), answer)


def _question(rng: random.Random) -> Sample:
    name, _, items = _choose(rng, 6)
    cases = (
        f"What are {number(rng, len(items))} {name}?",
        f"Which {number(rng, len(items))} {name} can you think of?",
        f"I need {number(rng, len(items))} {name}. Which ones do you suggest?",
        f"{number(rng, len(items))} {name}?",
    )
    return dialogue(rng, rough(rng, capital(rng.choice(cases))), write(items, "commas"))


def _example(rng: random.Random) -> Sample:
    kind, members = rng.choice(tuple(MEMBERS.items()))
    item = rng.choice(members)
    frames = (
        "Name {}.",
        "Give me an example of {}.",
        "What is an example of {}?",
        "Tell me {}.",
        "Can you think of {}?",
    )
    question = rng.choice(frames).format(kind.one)
    turns = [rough(rng, question), capital(item) + "."]
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice([member for member in members if capital(member) + "." not in turns])
        turns += [
            rough(rng, rng.choice(("Another one?", "One more.", "And another?", "Give me one more."))),
            capital(other) + ".",
        ]
    return dialogue(rng, *turns)


def _member_of(rng: random.Random) -> Sample:
    kind, members = rng.choice(tuple(MEMBERS.items()))
    items = rng.sample(members, rng.randint(2, 5))
    question = rng.choice(
        (f"What do these have in common: {', '.join(items)}?", f"What are these: {', '.join(items)}?")
    )
    return dialogue(rng, rough(rng, question), f"They are {kind.many}.")


def _more(rng: random.Random) -> Sample:
    """A list, then more members, another form, or fewer of them."""
    name, members, items = _choose(rng, 5)
    turns = [request(rng, f"list {number(rng, len(items))} {name}"), write(items, "numbers")]
    form = rng.choice(("bullets", "commas"))
    rest = [member for member in members if member not in items]
    cases = [
        (f"Now {rng.choice(FORMS[form])}.", write(items, form)),
        ("Only the first two, please.", write(items[:2], "numbers")),
        ("Which one was the first?", f"The first one was {items[0]}."),
        ("Which one was the last?", f"The last one was {items[-1]}."),
        ("In the other order, please.", write(items[::-1], "numbers")),
        ("Sort them by the alphabet.", write(sorted(items, key=str.lower), "numbers")),
        ("How many did you list?", f"I listed {NUMBERS[len(items)]} {name}."),
    ]
    if rest:
        extra = rest[0] if name in ORDERED else rng.choice(rest)
        cases += [("Add one more.", write([*items, extra], "numbers")), ("One more?", capital(extra) + ".")]
    question, answer = rng.choice(cases)
    return dialogue(rng, *turns, rough(rng, question), answer)


def _steps(rng: random.Random) -> Sample:
    name, steps = rng.choice(tuple(STEPS.items()))
    you = name.replace("your", "my")
    if rng.random() < 0.3:
        question = rng.choice((f"How do I {you}?", f"How can I {you}?", f"What are the steps to {you}?"))
        return dialogue(rng, rough(rng, question), write(steps, "numbers"))
    if rng.random() < 0.2:
        question = rng.choice((f"What is the first step to {you}?", f"How do I begin to {you}?"))
        turns = [rough(rng, question), steps[0]]
        for step in steps[1 : rng.randint(1, 3)]:
            turns += [rough(rng, rng.choice(("And then?", "What comes next?", "And the next step?"))), step]
        return dialogue(rng, *turns)
    if rng.random() < 0.15:
        return Passage(f"How to {name}\n\n{write(steps, 'numbers')}")
    task = rng.choice(
        (
            f"list the steps to {you}",
            f"explain how to {you}",
            f"tell me how to {you}",
            f"write down the steps to {you}",
        )
    )
    if task.startswith("explain") or rng.random() < 0.8:
        return dialogue(rng, request(rng, task), write(steps, "numbers"))
    return dialogue(rng, request(rng, task + " as bullet points"), write(steps, "bullets"))


def _packing(rng: random.Random) -> Sample:
    if rng.random() < 0.3:
        items, place = rng.sample(SHOPPING, rng.randint(3, 9)), ""
        task = rng.choice(
            (
                f"write a shopping list with {number(rng, len(items))} things",
                f"give me a shopping list of {len(items)} items",
            )
        )
    else:
        place, everything = rng.choice(tuple(PACKING_ITEMS.items()))
        items = rng.sample(everything, rng.randint(3, 9))
        count = number(rng, len(items))
        task = rng.choice(
            (
                f"list {count} things to pack for {place}",
                f"write a packing list with {count} things for {place}",
            )
        )
    task, form = _asked(rng, task, "bullets")
    return dialogue(rng, request(rng, task), write(items, form))


def _day(rng: random.Random) -> Sample:
    count = rng.randint(3, len(DAY))
    parts = sorted(rng.sample(range(len(DAY)), count))
    plan = [(DAY[at][0], rng.choice(DAY[at][1])) for at in parts]
    day = rng.choice(
        ("my day", "tomorrow", "Saturday", "a quiet Sunday", "a busy day", "the first day of the holidays")
    )
    if rng.random() < 0.5:
        lines = [f"{hour:02d}:00 - {what}" for hour, what in plan]
        task = f"make a plan for {day} with times and {number(rng, count)} points"
        return dialogue(rng, request(rng, task), "\n".join(lines))
    task = rng.choice(
        (
            f"plan {day} in {number(rng, count)} steps",
            f"make a plan with {number(rng, count)} points for {day}",
        )
    )
    return dialogue(rng, request(rng, task), write([what + "." for _, what in plan], "numbers"))


def _plain(rng: random.Random) -> Sample:
    name, _, items = _choose(rng)
    frames = (
        f"Some {name} are {join(items)}.",
        f"{capital(join(items))} are {name}.",
        f"{capital(name)}: {', '.join(items)}.",
    )
    return Passage(rng.choice(frames))


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_members, 40), (_question, 8), (_example, 7), (_member_of, 6), (_more, 10),
    (_steps, 15), (_packing, 8), (_day, 5), (_plain, 3),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One list that has as many points as were asked for."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
