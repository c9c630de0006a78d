"""Command groups that know their commands' names, and import each command when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from typer.core import TyperGroup
from typer.main import get_command

from sagellm.core import PluginImportError, PluginRegistry, nearest
from sagellm.core.plugins.failure import contained
from sagellm.core.plugins.registry import InstalledCommand


class Entry(NamedTuple):
    """A command that can be imported: `target` is `module:attribute` of a `typer.Typer`."""

    target: str
    summary: str
    distribution: str = ""


@cache
def installed_commands() -> Mapping[str, Entry]:
    """Return the commands that installed plugins add to `sage llm`, by their words."""
    return {each.command.name: _entry(each) for each in PluginRegistry.load().commands()}


def _entry(installed: InstalledCommand) -> Entry:
    command = installed.command
    return Entry(command.target, command.summary, f"{installed.distribution} {installed.version}")


class LazyGroup(TyperGroup):
    """A group of the commands in `table`, in its order.

    Help lists those that have a summary, without importing any. The group's own `--debug` is taken after a
    command, too, since that is where people type it.
    """

    @property
    def table(self) -> Mapping[str, Entry]:
        """The commands by name."""
        return {}

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Commands that are not here, and what to do to have them."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Names that users may try, and the actual command; "" for a word to leave out."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands that have a summary."""
        return [name for name, entry in self.table.items() if entry.summary]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command and what plugins add to it, or return None for an unknown name."""
        if cmd_name not in self.commands and cmd_name in self.table:
            command = _imported(cmd_name, self.table[cmd_name])
            if hasattr(command, "add_command"):
                for words, entry in installed_commands().items():
                    group, _, name = words.partition(" ")
                    if name and group == cmd_name:
                        command.add_command(_imported(name, entry))
            self._share_debug(command)
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; suggest the nearest for an unknown name."""
        if args[0] not in self.table and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{self._suggestion(ctx.command_path, args)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, program: str, args: list[str]) -> str:
        name = args[0]
        if name in self.elsewhere:
            return f" {self.elsewhere[name]}"
        if name in self.synonyms:
            words = [self.synonyms[name]] if self.synonyms[name] else args[1:2]
            return f" Did you mean `{' '.join([program, *words])}`?"
        return nearest(name, self.table)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write names and summaries into the help."""
        rows = [(name, self.table[name].summary) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _share_debug(self, command: Any) -> None:
        debug = [param for param in self.params if param.name == "debug"]
        if not any(param.name == "debug" for param in command.params):
            command.params += debug
        if not isinstance(command, LazyGroup):
            for child in getattr(command, "commands", {}).values():
                self._share_debug(child)


def _imported(name: str, entry: Entry) -> Any:
    """Import a command. Raises PluginImportError if it is another distribution's and does not import."""
    module_name, _, attribute = entry.target.partition(":")
    with contained() as failure:
        command = get_command(getattr(import_module(module_name), attribute))
        command.name = name
        return command
    error = failure.error
    raise PluginImportError(
        f"the command {name!r} of {entry.distribution} does not import ({entry.target}): "
        f"{type(error).__name__}: {error}"
    ) from error
