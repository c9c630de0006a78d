"""The slash commands of a chat session, and their effects on the conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

from sagellm.core import ConfigError, InvalidRequestError, nearest
from sagellm.core.plugins.option_text import read_value
from sagellm.engines.cli.chat.command import NOT_FOR_CHAT
from sagellm.engines.cli.chat.conversation import Conversation
from sagellm.engines.sampling.params import PARAMETERS, SamplingParams
from sagellm.engines.text.chat_messages import read_messages
from sagellm.engines.whole_file import whole_file

_EXITS = ("/exit", "/quit")
_BARE_EXITS = ("exit", "quit")
_PARAMETERS = tuple(name for name in PARAMETERS if name not in NOT_FOR_CHAT)


class Outcome(NamedTuple):
    """The result of a command: something to print, a question to ask now, or the end of the conversation.

    `params` are those of the answers from here on, if they change.
    """

    told: str = ""
    question: str | None = None
    leaves: bool = False
    params: SamplingParams | None = None


def is_command(line: str) -> bool:
    """Say whether the input is a command: a line that begins with a slash, or a bare `exit` or `quit`.

    Several lines that begin with a path are a question.
    """
    if line.strip() in _BARE_EXITS:
        return True
    return line.startswith("/") and ("\n" not in line or line.split(maxsplit=1)[0] in (*_COMMANDS, "/set"))


def run_command(line: str, conversation: Conversation, params: SamplingParams) -> Outcome:
    """Run a command and return its result; `params` are those of the answers so far."""
    name, *rest = line.split(maxsplit=1)
    argument = rest[0].strip() if rest else ""
    if name in (*_EXITS, *_BARE_EXITS):
        return Outcome(leaves=True)
    if name == "/set":
        return _set(params, argument)
    command = _COMMANDS.get(name)
    if command is None:
        hint = nearest(name, [*_COMMANDS, "/set", *_EXITS])
        return Outcome(f"unknown command {name}; /help lists the commands.{hint}")
    return command(conversation, argument)


def _help(_conversation: Conversation, _argument: str) -> Outcome:
    return Outcome(
        "/reset               forget what has been said\n"
        "/system [TEXT]       set the system message; without TEXT show it\n"
        "/set [NAME [VALUE]]  show all sampling parameters or one, or set one: /set temperature 0.7\n"
        "/undo                take back the last question and its answer\n"
        "/regen               answer the last question again\n"
        "/save FILE           write the conversation as JSON, also to the file it is from\n"
        "/load FILE           continue a saved conversation\n"
        "/exit                leave, as exit, quit and Ctrl-D do; Ctrl-C stops an answer\n"
        '"""                  begins and ends a question of several lines; a pasted one needs none'
    )


def _reset(conversation: Conversation, _argument: str) -> Outcome:
    conversation.turns.clear()
    conversation.files.clear()
    return Outcome("a new conversation begins")


def _system(conversation: Conversation, text: str) -> Outcome:
    if not text:
        return Outcome(conversation.system or "no system message is set")
    conversation.system = text
    return Outcome("the system message is set")


def _set(params: SamplingParams, text: str) -> Outcome:
    if not text:
        width = max(map(len, _PARAMETERS)) + 2
        return Outcome("\n".join(f"{name:{width}}{_written(params, name)}" for name in _PARAMETERS))
    given, *rest = re.split(r"\s*=\s*|\s+", text, maxsplit=1)
    name = given.lstrip("-").replace("-", "_")
    if name not in _PARAMETERS:
        return Outcome(f"there is no parameter {given}; /set lists them.{nearest(name, _PARAMETERS)}")
    if not rest or not rest[0]:
        return Outcome(f"{name} is {_written(params, name)}")
    try:
        changed = params.overridden(**{name: _read(name, rest[0])})
    except (ConfigError, InvalidRequestError) as error:
        return Outcome(f"{name} stays {_written(params, name)}: {error}")
    return Outcome(f"{name} is {_written(changed, name)}", params=changed)


def _read(name: str, text: str) -> object:
    value = read_value(text)
    if element := get_args(PARAMETERS[name].type):  # a list, of which one element may be given alone
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [str(each) for each in values] if element == (str,) else values
    return value


def _written(params: SamplingParams, name: str) -> str:
    value = getattr(params, name)
    if value is None or value == ():
        return "not set"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def _undo(conversation: Conversation, _argument: str) -> Outcome:
    if not conversation.turns:
        return Outcome("there is nothing to undo")
    question = conversation.turns.pop().question.content
    return Outcome(f"taken back: {question}")


def _regen(conversation: Conversation, _argument: str) -> Outcome:
    if not conversation.turns:
        return Outcome("nothing has been asked yet")
    return Outcome(question=conversation.turns.pop().question.content)


def _save(conversation: Conversation, name: str) -> Outcome:
    if not name:
        return Outcome("name a file: /save FILE")
    messages = [{"role": each.role, "content": each.content} for each in conversation.messages()]
    if not messages:
        return Outcome("there is nothing to save: the conversation is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        return Outcome(f"{path} cannot be written: it is a folder; name a file in it")
    if path.exists() and path.resolve() not in conversation.files:
        return Outcome(f"{path} exists, and this conversation is not from it; name another file")
    try:
        with whole_file(path) as file:
            file.write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        return Outcome(f"{path} cannot be written: {error.strerror}")
    conversation.files.add(path.resolve())
    return Outcome(f"{len(messages)} messages are in {path}")


def _load(conversation: Conversation, name: str) -> Outcome:
    if not name:
        return Outcome("name a file: /load FILE")
    path = Path(name).expanduser()
    try:
        messages = read_messages(json.loads(path.read_text(encoding="utf-8")))
        question = conversation.load(messages)
    except OSError as error:
        return Outcome(f"{path} cannot be read: {error.strerror}")
    except InvalidRequestError as error:
        return Outcome(f"{path} is not a conversation: {error}")
    except (ValueError, RecursionError):
        return Outcome(f"{path} is not a conversation: it must be JSON as /save writes it")
    conversation.files = {path.resolve()}
    return Outcome(f"loaded {len(messages)} messages from {path}", question)


_COMMANDS: dict[str, Callable[[Conversation, str], Outcome]] = {
    "/help": _help,
    "/reset": _reset,
    "/system": _system,
    "/undo": _undo,
    "/regen": _regen,
    "/save": _save,
    "/load": _load,
}
