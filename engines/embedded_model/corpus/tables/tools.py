"""The tools of `tools.txt`: schemas with names drawn anew each time, and calls with questions and results."""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass
from typing import Any

from corpus.tables.read import Block, read_table, split

_TABLE = {name: block for name, block in read_table("tools").items() if name}
TOOL_KINDS = tuple(_TABLE)
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_RESERVED = ("names", "about", "result", "ask", "say", "open")

Value = str | int | float | bool


@dataclass(frozen=True)
class Use:
    """A question, the call that it needs, the result of the call, and the answer."""

    ask: str
    arguments: dict[str, Value]
    result: dict[str, Value]
    say: str
    values: dict[str, Value]


@dataclass(frozen=True)
class Tool:
    """A tool under the names drawn for it and for its parameters."""

    kind: str
    name: str
    parameters: dict[str, str]

    @property
    def block(self) -> Block:
        """The tool's lines."""
        return _TABLE[self.kind]

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema as OpenAI's API takes it."""
        texts = dict(self.block)
        asks = split(texts["ask"])
        required = [name for key, name in self.parameters.items() if all(f"{{{key}}}" in ask for ask in asks)]
        properties = {name: _property(texts[key]) for key, name in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": texts["about"], "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, use: Use) -> dict[str, Any]:
        """The call as the assistant writes it."""
        return {"name": self.name, "arguments": use.arguments}

    def use(self, rng: random.Random) -> Use:
        """A random question with its call, result and answer."""
        texts, values = dict(self.block), _values(rng, self.block)
        ask = rng.choice(split(texts["ask"]))
        arguments = {name: values[key] for key, name in self.parameters.items() if f"{{{key}}}" in ask}
        result = {key: values[key] for key in texts["result"].split()}
        say = rng.choice(split(texts["say"])).format(**values)
        return Use(ask.format(**values), arguments, result, say, values)

    def unclear(self, use: Use) -> tuple[str, ...]:
        """A question that lacks an argument, the question back, and its answer; empty where there is none."""
        text = dict(self.block).get("open")
        return tuple(part.format(**use.values) for part in split(text)) if text else ()


def draw_tool(rng: random.Random, kind: str) -> Tool:
    """The tool of this kind under random names."""
    texts, parameters = dict(_TABLE[kind]), dict[str, str]()
    for key, value in texts.items():
        if key not in _RESERVED and not key.startswith("{"):
            names = [name for name in split(value)[0].split() if name not in parameters.values()]
            parameters[key] = rng.choice(names)
    return Tool(kind, rng.choice(split(texts["names"])), parameters)


def _property(line: str) -> dict[str, Any]:
    _, kind, about = split(line)
    if " " in kind:
        return {"type": "string", "enum": kind.split(), "description": about}
    return {"type": kind, "description": about}


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else text


def _values(rng: random.Random, block: Block) -> dict[str, Value]:
    values: dict[str, Value] = {}
    rows = [(key, value) for key, value in block if key.startswith("{") and " " in key]
    if rows:
        keys, row = rng.choice(rows)
        values |= zip(keys.strip("{}").split(), map(_value, split(row)), strict=True)
    for key, value in block:
        if key.startswith("{") and " " not in key:
            if re.fullmatch(r"\d+-\d+", value):
                values[key.strip("{}")] = rng.randint(*map(int, value.split("-")))
            else:
                values[key.strip("{}")] = _value(rng.choice(split(value)).format(**values))
    if "expression" in values:
        a, sign, b = str(values["expression"]).split()
        values["answer"] = _OPERATORS[sign](int(a), int(b))
    return values
