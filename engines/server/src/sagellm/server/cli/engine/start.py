"""`engine start`: serves a model in the background and returns once it answers."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sagellm.core import ConfigError, EngineError, PluginRegistry
from sagellm.core.runtime_folder import runtime_folder
from sagellm.engines.cli.command import GroupedCommand
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import make_flag, with_flags
from sagellm.engines.cli.model import ModelArgument, say_if_embedded, with_model
from sagellm.engines.cli.status_line import status_line
from sagellm.engines.config.sources import load_config
from sagellm.server.chaos import notice
from sagellm.server.cli.serve import (
    EngineOwnName,
    LogLevel,
    run_service,
    say_state,
    with_keys,
)
from sagellm.server.cli.server_flags import SERVER_FLAGS

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.server.remote import RunningEngine

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SYNONYMS = (
    make_flag("prefix_cache_size", str, typer.Option(hidden=True)),
    make_flag(
        "prefix_cache_enable", bool, typer.Option("--prefix-cache-enable/--prefix-cache-disable", hidden=True)
    ),
)
"""Spellings that people may know; `_in_our_words` says what they mean."""


@app.command(cls=GroupedCommand)
@with_flags(MODEL_FLAG, SERVER_FLAGS, ENGINE_FLAGS, SYNONYMS)
def start(
    model_argument: ModelArgument = None,
    *,
    name: EngineOwnName = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground, as `serve` does.")
    ] = False,
    log_level: LogLevel = "WARNING",
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Start an engine that serves a model over HTTP, and leave it running.

    Returns when it takes requests. Its log is in the runtime folder; `engine status` shows it,
    `engine stop` ends it.
    """
    settings = with_keys(load_config(with_model(_in_our_words(options), model_argument), config_file=config))
    PluginRegistry.load().find("engine", settings.engine.name.name)
    if foreground:
        run_service(settings, name=name, log_level=log_level, on_state=say_state)
        return
    say_if_embedded(settings.model.name)
    answer = _run_detached(settings, name=name, log_level=log_level)
    if "error" in answer:
        raise (ConfigError if answer.get("is_usage") else EngineError)(answer["error"])
    typer.echo(
        f"{answer['name']} serves {answer['model']} at {answer['url']}/v1 (process {answer['pid']}); "
        f"end it with: sage llm engine stop {answer['name']}{notice()}"
    )


def _in_our_words(options: dict[str, Any]) -> dict[str, Any]:
    """Replace other spellings of a flag by ours."""
    given = dict(options)
    for synonym, name in (
        ("prefix_cache_size", "prefix_cache_max_blocks"),
        ("prefix_cache_enable", "enable_prefix_caching"),
    ):
        if synonym in given:
            given.setdefault(name, given.pop(synonym))
    return given


def _run_detached(config: EngineConfig, *, name: str | None, log_level: str) -> dict[str, Any]:
    """Fork a process that serves, and wait for its message: its entry, or an error."""
    reading, writing = os.pipe()
    log = runtime_folder() / f"starting-{os.getpid()}.log"
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_the_engine(config, name, log_level, log, writing)
    os.close(writing)
    try:
        # Only now: the thread that animates the status line must not exist when the process forks.
        with status_line(f"starting {config.model.name}"), os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
    except BaseException:  # Ctrl-C, say
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        log.unlink(missing_ok=True)
        raise
    if not said:
        return {"error": f"the engine's process ended before it was ready; its log is {log}"}
    answer: dict[str, Any] = json.loads(said)
    if "error" in answer:
        log.unlink(missing_ok=True)
    return answer


def _be_the_engine(
    config: EngineConfig, name: str | None, log_level: str, log: Path, writing: int
) -> NoReturn:
    """Run as the forked process, in its own session, with its output in the log. Never returns."""

    stopped = "the engine was stopped before it was ready"
    told = os.fdopen(writing, "w", encoding="utf-8")

    def say(answer: dict[str, Any]) -> None:
        if not told.closed:
            with suppress(OSError), told:
                json.dump(answer, told)

    def say_running(engine: RunningEngine) -> None:
        if engine.state == "starting":
            say_state(engine)
        elif engine.state == "ready":
            log.replace(engine.log)
            say(asdict(engine))
        elif engine.state == "stopped":
            say({"error": stopped})

    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    code = 0
    try:
        run_service(config, name=name, log_level=log_level, on_state=say_running)
        say({"error": stopped})
    except BaseException as error:
        is_usage = isinstance(error, ConfigError)
        say({"error": str(error) or type(error).__name__, "is_usage": is_usage})
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        code = 1
    finally:
        os._exit(code)
