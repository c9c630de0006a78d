"""Dialogues with tools: a call, its result, the answer; and turns where no tool fits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from corpus import arithmetic, lists
from corpus.sample import Dialogue, Message, Passage, Sample
from corpus.tables.tools import TOOL_KINDS, Tool, Use, draw_tool
from corpus.wording import BOYS, capital

SYSTEMS = (
    "You are a helpful assistant with tools.",
    "Use the tools when they help.",
    "You can call functions.",
)
ERRORS = (
    ("not found", "Sorry, that was not found."),
    ("no connection", "Sorry, there is no connection."),
    ("timeout", "Sorry, the tool took too long. Please try again later."),
    ("not allowed", "Sorry, that is not allowed."),
    ("try again later", "Sorry, it does not work now. Please try again later."),
)
NO_TOOL = (
    "I have no tool for that.",
    "Sorry, I cannot do that. None of my tools fits.",
    "I cannot do that with the tools that I have.",
)
TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi there", "Hello! What can I do for you?"),
    ("Thank you!", "You are welcome."),
    ("Thanks, that is all.", "You are welcome. Goodbye!"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
)


def _typed(rng: random.Random, text: str) -> str:
    """The user's turn; names keep their large letters, since the call repeats them."""
    roll = rng.random()
    if roll < 0.1:
        return text.rstrip(".?")
    return text[0].lower() + text[1:].rstrip(".?") if roll < 0.18 and text.split()[0] not in BOYS else text


def _dialogue(
    rng: random.Random, messages: Sequence[Message], fitting: Sequence[Tool], *without: str
) -> Dialogue:
    """The messages with the tools that fit and some others, in any order."""
    kinds = [
        kind for kind in TOOL_KINDS if kind not in without and all(kind != tool.kind for tool in fitting)
    ]
    names = {tool.name for tool in fitting}
    others = [
        draw_tool(rng, kind) for kind in rng.sample(kinds, rng.choice((0, 0, 1, 1, 2, 3)) if fitting else 2)
    ]
    tools = [*fitting, *(tool for tool in others if tool.name not in names)]
    rng.shuffle(tools)
    system = (Message("system", rng.choice(SYSTEMS)),) if rng.random() < 0.12 else ()
    return Dialogue((*system, *messages), tuple(tool.schema for tool in tools))


def _run(tool: Tool, use: Use) -> list[Message]:
    """The call, its result and the answer."""
    call = Message("assistant", "", (tool.call(use),))
    return [call, Message("tool", json.dumps(use.result)), Message("assistant", capital(use.say))]


def _draw(rng: random.Random, *without: str) -> tuple[Tool, Use]:
    tool = draw_tool(rng, rng.choice([kind for kind in TOOL_KINDS if kind not in without]))
    return tool, tool.use(rng)


def _single(rng: random.Random) -> Sample:
    tool, use = _draw(rng)
    messages = [Message("user", _typed(rng, use.ask)), *_run(tool, use)]
    if rng.random() < 0.15:
        question, answer = rng.choice(
            (("Thank you!", "You are welcome."), ("Great, thanks.", "You are welcome!"))
        )
        messages += [Message("user", question), Message("assistant", answer)]
    return _dialogue(rng, messages, [tool])


def _again(rng: random.Random) -> Sample:
    """A second question, to the same tool or to another."""
    tool, use = _draw(rng)
    other = tool if rng.random() < 0.5 else _draw(rng, tool.kind)[0]
    if other.name == tool.name:
        other = tool
    then = other.use(rng)
    messages = [Message("user", _typed(rng, use.ask)), *_run(tool, use)]
    messages += [Message("user", _typed(rng, then.ask)), *_run(other, then)]
    return _dialogue(rng, messages, list({tool.kind: tool, other.kind: other}.values()))


def _two(rng: random.Random) -> Sample:
    """Two calls at once."""
    tool, use = _draw(rng, "note", "message")
    other = tool if rng.random() < 0.4 else _draw(rng, tool.kind)[0]
    if other.name == tool.name:
        other = tool
    then = other.use(rng)
    ask = f"{use.ask} {rng.choice(('', '', 'And then: ', 'Also: '))}{then.ask}"
    messages = [
        Message("user", ask),
        Message("assistant", "", (tool.call(use), other.call(then))),
        Message("tool", json.dumps(use.result)),
        Message("tool", json.dumps(then.result)),
        Message("assistant", f"{capital(use.say)} {capital(then.say)}"),
    ]
    return _dialogue(rng, messages, list({tool.kind: tool, other.kind: other}.values()))


def _unclear(rng: random.Random) -> Sample:
    """The assistant asks for what it needs before it calls."""
    tool, use = _draw(rng)
    turns = tool.unclear(use)
    while not turns or "unit" in use.arguments:
        tool, use = _draw(rng)
        turns = tool.unclear(use)
    question, back, answer = turns
    messages = [
        Message("user", _typed(rng, question)),
        Message("assistant", back),
        Message("user", _typed(rng, answer)),
    ]
    return _dialogue(rng, [*messages, *_run(tool, use)], [tool])


def _error(rng: random.Random) -> Sample:
    tool, use = _draw(rng)
    error, answer = rng.choice(ERRORS)
    messages = [Message("user", _typed(rng, use.ask)), Message("assistant", "", (tool.call(use),))]
    messages += [Message("tool", json.dumps({"error": error})), Message("assistant", answer)]
    return _dialogue(rng, messages, [tool])


def _no_tool(rng: random.Random) -> Sample:
    """What none of the tools can do."""
    tool, use = _draw(rng, "calculator", "convert")
    messages = [Message("user", _typed(rng, use.ask)), Message("assistant", rng.choice(NO_TOOL))]
    alike = {
        "event": ("reminder", "note"),
        "reminder": ("event", "note", "timer"),
        "note": ("reminder", "message"),
    }
    return _dialogue(rng, messages, [], tool.kind, *alike.get(tool.kind, ()), "server", "reader", "docs")


def _plain(rng: random.Random) -> Sample:
    """A question that needs no tool."""
    if rng.random() < 0.4:
        question, answer = rng.choice(TALK)
        return _dialogue(rng, [Message("user", question), Message("assistant", answer)], [])
    sample = rng.choice((arithmetic.make, lists.make))(rng)
    if isinstance(sample, Passage):
        return _plain(rng)
    messages = [message for message in sample.messages if message.role != "system"]
    return _dialogue(rng, messages, [], "calculator", "convert", "note", "event", "reminder", "dice")


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_single, 55), (_again, 9), (_two, 8), (_unclear, 8), (_error, 6), (_no_tool, 5), (_plain, 9),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One dialogue that has tools at hand."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
