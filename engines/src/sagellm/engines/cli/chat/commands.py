"""The commands of a chat session: what is typed with a slash, and what it does to the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sagellm.core import nearest
from sagellm.engines.cli.chat.conversation import Conversation

_EXITS = ("/exit", "/quit")


def run_command(line: str, conversation: Conversation) -> str | None:
    """Run a command and return what there is to say; None leaves the session."""
    name, _, argument = line.partition(" ")
    if name in _EXITS:
        return None
    command = _COMMANDS.get(name)
    if command is None:
        return f"there is no command {name}; /help lists them.{nearest(name, [*_COMMANDS, *_EXITS])}"
    return command(conversation, argument.strip())


def _help(_conversation: Conversation, _argument: str) -> str:
    return (
        "/reset          forget what has been said\n"
        "/system [TEXT]  say how the model shall behave; without TEXT show it\n"
        "/undo           take back the last question and its answer\n"
        "/save FILE      write the conversation as JSON\n"
        "/exit           leave, as Ctrl-D does; Ctrl-C stops an answer"
    )


def _reset(conversation: Conversation, _argument: str) -> str:
    conversation.turns.clear()
    return "a new conversation begins"


def _system(conversation: Conversation, text: str) -> str:
    if not text:
        return conversation.system or "there is no system message"
    conversation.system = text
    return "the system message is set"


def _undo(conversation: Conversation, _argument: str) -> str:
    if not conversation.turns:
        return "there is nothing to take back"
    question = conversation.turns.pop().question.content
    return f"taken back: {question}"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "name a file: /save FILE"
    messages = [{"role": each.role, "content": each.content} for each in conversation.messages()]
    path = Path(name).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:  # a file that is there stays as it is
            json.dump(messages, file, indent=2, ensure_ascii=False)
            file.write("\n")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return f"{len(messages)} messages are in {path}"


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/help": _help,
    "/reset": _reset,
    "/system": _system,
    "/undo": _undo,
    "/save": _save,
}
