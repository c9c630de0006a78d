"""The model of a command that runs one in its own process."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from sagellm.core import ConfigError
from sagellm.engines.config.schema import EngineConfig


def model_of(config: EngineConfig) -> str:
    """Return what the configuration names. Raises ConfigError if it names none."""
    if config.model.name is None:
        raise ConfigError(
            "no model is named; name one with --model DIRECTORY or --model HUB_ID, or set model.name"
        )
    return config.model.name


def loading(model: str) -> AbstractContextManager[object]:
    """Show on a terminal that a model is being loaded; a hub id has the hub's own bars."""
    if not sys.stderr.isatty() or not Path(model).is_dir():
        return nullcontext()
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(f"loading {model}"))
