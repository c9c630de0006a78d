"""Questions that ask for JSON, answered with JSON and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from corpus.sample import Dialogue, Message, Passage, Sample
from corpus.tables.categories import BY_NAME, MEMBERS
from corpus.tables.records import RECORD_KINDS, Record, record
from corpus.wording import NAMES, capital, dialogue, join, number, rough, with_article

SYSTEMS = (
    "You answer in JSON.",
    "Answer only with JSON.",
    "Always reply with a JSON object.",
    "Output JSON only.",
)
INDENTED = ("Indent it.", "Use two spaces for each level.", "Make it pretty.", "Use several lines.")
COMPACT = ("Put it on one line.", "No line breaks.", "Make it compact.")


def _form(rng: random.Random, value: Any) -> tuple[str, str]:
    """A wish about the form, mostly empty, and the JSON in that form."""
    roll = rng.random()
    if roll < 0.2:
        return " " + rng.choice(INDENTED), json.dumps(value, indent=2)
    return (" " + rng.choice(COMPACT) if roll < 0.3 else ""), json.dumps(value)


def _reply(rng: random.Random, question: str, value: Any) -> Sample:
    wish, answer = _form(rng, value)
    question += wish if question[-1] in ".?!" else f".{wish}" if wish else ""
    if rng.random() < 0.12:
        turns = (
            Message("system", rng.choice(SYSTEMS)),
            Message("user", question),
            Message("assistant", answer),
        )
        return Dialogue(turns)
    return dialogue(rng, question, answer)


def _keys(rng: random.Random, keys: Sequence[str]) -> str:
    """A request for JSON with these keys."""
    plain, quoted = join(keys), join([f'"{key}"' for key in keys])
    frames = (
        f"Return JSON with {plain}",
        f"Return a JSON object with {plain}",
        f"Give me JSON with the keys {plain}",
        f"Extract {plain} as JSON",
        f"Write a JSON object with the keys {quoted}",
        f"Find {plain} in the text and answer in JSON",
        f"Answer in JSON with the fields {plain}",
        f"Turn this into JSON with {quoted}",
    )
    return rough(rng, rng.choice(frames))


def _extract(rng: random.Random) -> Sample:
    found = record(rng)
    ask = _keys(rng, found.keys)
    if rng.random() < 0.25:
        kinds = {key: "number" if isinstance(value, int) else "string" for key, value in found.wanted.items()}
        ask = rng.choice(("Extract JSON in this form", "Answer in this form", "Schema"))
        return _reply(rng, f"{ask}: {json.dumps(kinds)}\n{found.text}", found.wanted)
    frame = rng.choice(("{}: {}", "{}: {}", "{}.\n{}", "{}.\nText: {}"))
    if rng.random() < 0.2:
        return _reply(rng, f"{found.text} {capital(ask)}.", found.wanted)
    return _reply(rng, frame.format(ask, found.text), found.wanted)


def _missing(rng: random.Random) -> Sample:
    """A key that the text says nothing about is null."""
    found = record(rng, rng.choice(("age", "home")))
    key = rng.choice(("job", "email", "phone", "color"))
    ask = f"{_keys(rng, [*found.keys, key])}, and use null for what is not there"
    return _reply(rng, f"{ask}: {found.text}", found.wanted | {key: None})


def _array(rng: random.Random) -> Sample:
    kind, members = rng.choice(tuple(MEMBERS.items()))
    items = rng.sample(members, rng.randint(2, 6))
    count = number(rng, len(items))
    key = kind.many if kind.many.isalpha() else "items"
    cases = (
        (f"List {count} {kind.many} as a JSON array", items),
        (f"Give me a JSON array of {count} {kind.many}", items),
        (f"Return {count} {kind.many} as JSON with the key items", {"items": items}),
        (f"Turn this list into a JSON array: {', '.join(items)}", items),
        (f"Write as a JSON list: {join(items)}", items),
        (f'Put these into JSON under the key "{key}": {", ".join(items)}', {key: items}),
        (f"How many things are here? Answer as JSON with count: {', '.join(items)}", {"count": len(items)}),
        (f"Which kind are these? Answer as JSON with kind: {', '.join(items)}", {"kind": kind.many}),
    )
    question, value = rng.choice(cases)
    return _reply(rng, question, value)


def _several(rng: random.Random) -> Sample:
    kind = rng.choice([kind for kind in RECORD_KINDS if kind not in ("order", "flight", "event")])
    first = record(rng, kind)
    rows = [first] + [record(rng, kind, first.keys) for _ in range(rng.randint(1, 2))]
    ask = rng.choice(
        ("Return a JSON array of objects with {}", "Make a JSON list with {} for each", "JSON array with {}")
    )
    text = " ".join(row.text if row.text.endswith(".") else row.text + "." for row in rows)
    return _reply(rng, f"{ask.format(join(first.keys))}: {text}", [row.wanted for row in rows])


def _nested(rng: random.Random) -> Sample:
    first = record(rng, rng.choice(("person", "age", "home")))
    second = record(rng, rng.choice(("pet", "book", "event", "weather", "file")))
    value = {"person": first.wanted, second.kind: second.wanted}
    ask = f"Return nested JSON: person with {join(first.keys)}, and {second.kind} with {join(second.keys)}"
    if rng.random() < 0.4:
        keys, other_keys = ", ".join(first.keys), ", ".join(second.keys)
        ask = f"JSON with two objects, person ({keys}) and {second.kind} ({other_keys})"
    return _reply(rng, f"{ask}. {first.text} {second.text}", value)


def _invent(rng: random.Random) -> Sample:
    found: Record = record(rng)
    noun = {"age": "person", "home": "person", "weather": "weather report"}.get(found.kind, found.kind)
    frames = (
        f"Give me an example of {with_article(noun)} as JSON with {join(found.keys)}",
        f"Write a JSON object for {with_article(noun)} with {join(found.keys)}",
        f"Make up {with_article(noun)} and answer in JSON with {join(found.keys)}",
        f"Describe {with_article(noun)} in JSON",
        f"Give me {with_article(noun)} as JSON",
    )
    return _reply(rng, rough(rng, rng.choice(frames) + "."), found.wanted)


def _result(rng: random.Random) -> Sample:
    a, b, name = rng.randint(0, 20), rng.randint(0, 20), rng.choice(NAMES)
    one = rng.choice(tuple(BY_NAME))
    item = rng.choice(BY_NAME[one])
    cases: tuple[tuple[str, Any], ...] = (
        (f"What is {a} + {b}? Answer as JSON with the key result.", {"result": a + b}),
        (f"Is {a} greater than {b}? Answer as JSON with the key answer, true or false.", {"answer": a > b}),
        (f"Is {a} even? Reply in JSON with even set to true or false.", {"number": a, "even": a % 2 == 0}),
        (f"Put the name {name} and the number {a} into JSON.", {"name": name, "number": a}),
        (
            f"How long is the word {item}? Answer in JSON with word and length.",
            {"word": item, "length": len(item)},
        ),
        (f"Name {one}. Answer in JSON with the key answer.", {"answer": item}),
        ("Return an empty JSON object.", {}),
        ("Return an empty JSON array.", []),
        (f"Count from 1 to {a % 8 + 2} as a JSON array.", list(range(1, a % 8 + 3))),
        ('Say hello in JSON with the key "message".', {"message": "Hello!"}),
        ("Answer yes in JSON.", {"answer": "yes"}),
    )
    return _reply(rng, *rng.choice(cases))


def _change(rng: random.Random) -> Sample:
    """An object is given, and one thing in it is asked for or changed."""
    found = record(rng)
    key = rng.choice(found.keys)
    other = record(rng, found.kind).facts[key]
    given, rest = (
        json.dumps(found.wanted),
        {name: value for name, value in found.wanted.items() if name != key},
    )
    if rng.random() < 0.4:
        ask = rng.choice((f"What is the {key} in this JSON?", f"Read the value of {key} from this JSON."))
        return dialogue(rng, f"{ask} {given}", f"{found.facts[key]}")
    cases = (
        (f"Set {key} to {json.dumps(other)} in this JSON: {given}", found.wanted | {key: other}),
        (f"Remove {key} from this JSON: {given}", rest),
        (f"Add the key done with the value true to this JSON: {given}", found.wanted | {"done": True}),
        (f"List the keys of this JSON as an array: {given}", list(found.wanted)),
        (f"Format this JSON: {given}", found.wanted),
    )
    ask, value = rng.choice(cases)
    return dialogue(rng, ask, json.dumps(value, indent=2 if ask.startswith("Format") else None))


def _plain(rng: random.Random) -> Sample:
    found = record(rng)
    return Passage(f"{found.text}\n{json.dumps(found.wanted, indent=rng.choice((None, 2)))}")


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_extract, 38), (_missing, 4), (_array, 14), (_several, 8), (_nested, 7),
    (_invent, 10), (_result, 10), (_change, 8), (_plain, 2),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One request for JSON and the answer."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
