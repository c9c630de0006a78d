"""Our settings in the words of another engine."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sagellm.core.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """How another engine is started so that it does what settings say."""

    arguments: tuple[str, ...] = ()  # the program first
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The command for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*variables, shlex.join(self.arguments)))


class EngineAdapterProtocol(ABC):
    """Says how another engine is told what settings of ours mean.

    Providers are called as `factory()`. Settings have the keys of our configuration, such as
    `scheduler.max_num_seqs`, and plain values: numbers, texts, lists, mappings. An adapter starts nothing and
    imports nothing of that engine: its answer is text that anybody can read first. A setting is exported or
    refused, never left out.
    """

    @property
    @abstractmethod
    def engine(self) -> str:
        """The engine with the version whose names these are."""

    @abstractmethod
    def knobs(self) -> Mapping[str, str]:
        """Return the settings that the engine has, and what it calls each."""

    @abstractmethod
    def refusals(self) -> Mapping[str, str]:
        """Return settings that people expect it to have, and why it has not and what to do."""

    @abstractmethod
    def export(self, model: str, settings: Mapping[str, Any]) -> EngineCommand:
        """Return the command that serves a model under these settings.

        Raises ConfigError for a setting that the engine does not have, or not with that value: `refuse` makes
        the one for the first.
        """

    def refuse(self, key: str) -> ConfigError:
        """Return the error for a setting that is not among the knobs."""
        why = self.refusals().get(key)
        if why is not None:
            return ConfigError(f"{key} cannot be exported to {self.engine}: {why}")
        known = self.knobs()
        return ConfigError(
            f"{key} cannot be exported to {self.engine}; it has {', '.join(known) or 'no setting of ours'}."
            f"{nearest(key, list(known))}"
        )


class NullEngineAdapter(EngineAdapterProtocol):
    """Knows no engine."""

    @property
    def engine(self) -> str:
        """`none`."""
        return "none"

    def knobs(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def refusals(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def export(self, model: str, settings: Mapping[str, Any]) -> EngineCommand:
        """Return no command, and refuse every setting."""
        for key in settings:
            raise self.refuse(key)
        return EngineCommand()
