"""Settings that become one flag each, as a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sagellm.core import ConfigError
from sagellm.core.protocols.engine_adapter import EngineAdapterProtocol, EngineCommand

FP8 = "float8_e4m3fn"
"""What a setting that says fp8 has as its value."""


class Flag(NamedTuple):
    """A flag of another engine: `write` turns our value into its arguments, `check` says what it must be."""

    name: str
    write: Callable[[Any], tuple[str, ...]] = lambda value: (str(value),)
    check: Callable[[Any], bool] = lambda _: True
    possible: str = ""


def switch(name: str, *, is_on: bool = True) -> Flag:
    """Return a flag that stands alone; its opposite is the engine's default."""
    return Flag(name, lambda _: (), lambda value: value is is_on, str(is_on).lower())


class FlagAdapter(EngineAdapterProtocol):
    """An adapter whose settings are flags. Subclasses give the tables."""

    flags: Mapping[str, Flag]
    refused: Mapping[str, str]

    def knobs(self) -> Mapping[str, str]:
        """Return each setting with the engine's flag."""
        return {key: flag.name for key, flag in self.flags.items()}

    def refusals(self) -> Mapping[str, str]:
        """Return what the engine has not."""
        return self.refused

    @abstractmethod
    def command(self, model: str) -> tuple[str, ...]:
        """Return the command without flags."""

    def export(self, model: str, settings: Mapping[str, Any]) -> EngineCommand:
        """Return the command with a flag for each setting. Raises ConfigError."""
        arguments = [*self.command(model)]
        for key, value in settings.items():
            flag = self.flags.get(key)
            if flag is None:
                raise self.refuse(key)
            if not flag.check(value):
                raise ConfigError(f"{key} is {value!r}; for {self.engine} it must be {flag.possible}")
            arguments += (flag.name, *flag.write(value))
        return EngineCommand(arguments=tuple(arguments))
