"""Random facts with the sentences that say them, from `records.txt`."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from corpus.tables.read import read_table, split
from corpus.wording import NAMES

Value = str | int


@dataclass(frozen=True)
class Record:
    """Some facts, a text that says them, and the keys that somebody may want of them."""

    kind: str
    facts: dict[str, Value]
    text: str
    keys: tuple[str, ...]

    @property
    def wanted(self) -> dict[str, Value]:
        """The facts under the wanted keys."""
        return {key: self.facts[key] for key in self.keys}


_TABLE = {kind: block for kind, block in read_table("records").items() if kind}
RECORD_KINDS = tuple(_TABLE)


def _value(rng: random.Random, choices: str) -> Value:
    if re.fullmatch(r"\d+-\d+", choices):
        low, high = choices.split("-")
        return rng.randint(int(low), int(high))
    return rng.choice(split(choices))


def record(rng: random.Random, kind: str = "", keys: tuple[str, ...] = ()) -> Record:
    """A random record, of the kind and with the keys that are given."""
    kind = kind or rng.choice(RECORD_KINDS)
    block = _TABLE[kind]
    facts: dict[str, Value] = {"name": rng.choice(NAMES), "author": rng.choice(NAMES)}
    facts |= {key.strip("{}"): _value(rng, value) for key, value in block if key.startswith("{")}
    texts = dict(block)
    text = rng.choice(split(texts["say"])).format(**facts)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return Record(kind, facts, text, keys or tuple(rng.choice(split(texts["keys"])).split()))
