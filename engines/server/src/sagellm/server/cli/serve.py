"""`serve`: the OpenAI API over one model, until a signal ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.engines.cli.command import GroupedCommand
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import ModelArgument, say_if_embedded, with_model
from sagellm.engines.cli.output import tell
from sagellm.engines.config.sources import LoadedConfig, load_config
from sagellm.server.chaos import notice
from sagellm.server.cli.server_flags import SERVER_FLAGS

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.server.remote import RunningEngine

app = typer.Typer(add_completion=False, rich_markup_mode=None)

EngineOwnName = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Name for admin commands; engine-PORT by default.", show_default=False
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        envvar="SAGELLM_LOG_LEVEL",
        help="Log from this level on: DEBUG, INFO, WARNING or ERROR.",
    ),
]


@app.command(cls=GroupedCommand)
@with_flags(MODEL_FLAG, SERVER_FLAGS, ENGINE_FLAGS)
def serve(
    model_argument: ModelArgument = None,
    *,
    name: EngineOwnName = None,
    log_level: LogLevel = "WARNING",
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP, as the OpenAI API.

    Ctrl-C or SIGTERM lets running requests end first; a second one stops at once.
    """
    loaded = load_config(with_model(options, model_argument), config_file=config)
    configure_log(loaded.config, log_level)
    settings = with_keys(loaded)
    say_if_embedded(settings.model.name)
    run_service(settings, name=name, log_level=log_level, on_state=say_state)


def with_keys(loaded: LoadedConfig) -> EngineConfig:
    """Return the settings with the keys of `api_key_file`; warn about keys that other users can see."""
    from sagellm.server.http.api_key_file import with_key_file

    def warn(text: str) -> None:
        tell(text, logging.WARNING)

    if loaded.origins["server.api_keys"].kind == "flag":
        warn(
            "all users of this machine can see the key of --api-key, in the list of processes; "
            "use --api-key-file or the environment variable SAGELLM_API_KEY"
        )
    server = with_key_file(loaded.config.server, warn)
    return loaded.config.model_copy(update={"server": server})


def configure_log(config: EngineConfig, level: str) -> None:
    """Begin to log as the settings say. Raises ConfigError for an unknown level."""
    from sagellm.engines.logging import configure

    log_format = config.server.log_format
    configure(level, as_json=None if log_format is None else log_format == "json")


def run_service(
    config: EngineConfig, *, name: str | None, log_level: str, on_state: Callable[[RunningEngine], None]
) -> None:
    """Serve in this process."""
    from sagellm.server.http.access_log import logger as access_logger
    from sagellm.server.memory import return_large_blocks
    from sagellm.server.serve import serve as run

    configure_log(config, log_level)
    if config.server.access_log:  # a line per request is logged at any level
        access_logger.setLevel(logging.INFO)
    return_large_blocks()
    run(config, name=name, log_level=log_level, on_state=on_state)


def say_state(engine: RunningEngine) -> None:
    """Print where the engine is, or what it is waiting for."""
    if engine.state == "starting":
        tell(f"loading {engine.model}")
    elif engine.state == "draining":
        tell("stopping: the requests that run may finish; a second Ctrl-C or SIGTERM ends them")
    elif engine.state == "ready":
        tell(f"{engine.name} serves {engine.model} at {engine.url}/v1 (Ctrl-C ends it){notice()}")
