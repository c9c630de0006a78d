"""Runs one served engine: port, entry in the runtime folder, core, text workers and HTTP server.

Slow imports come after the entry is written, so that `engine status` and `engine stop` find it early.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from sagellm.core import ConfigError, PluginRegistry, get_logger
from sagellm.core.runtime_folder import VARIABLE
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.sections import ServerConfig
from sagellm.engines.held_interrupts import interrupted_by_sigterm
from sagellm.server.memory import keep_returning_memory
from sagellm.server.remote.running_engine import EngineLock, EngineState, RunningEngine, check_name

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer
    from sagellm.server.remote.remote_engine import RemoteEngine
    from sagellm.server.text_process import ProcessTextRunner

logger = get_logger(__name__)

_BACKLOG = 2048
_MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
_ENDING = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: EngineConfig,
    *,
    name: str | None = None,
    log_level: str,
    on_state: Callable[[RunningEngine], None],
) -> None:
    """Serve until a signal arrives.

    The first SIGTERM or SIGINT drains running requests, the second stops at once; while the model loads, the
    first stops at once. `on_state` is called with "starting" when the port is bound, "ready", "draining" if
    requests run, and "stopped" if a signal ends the process before anything is loaded.

    Raises ConfigError for keys, a parser, a port and a name that cannot be used, all
    before the model is looked for, and then the errors of loading it.
    """
    config = _check(config)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # also for all children: a dump would hold users' texts
    with suppress(KeyboardInterrupt), bind(config.server) as listener, interrupted_by_sigterm():
        host, port = listener.getsockname()[:2]
        engine = RunningEngine(
            name=check_name(name or f"engine-{port}"),
            pid=os.getpid(),
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            model=config.model.name,
            state="starting",
        )
        _check_socket_path(engine)
        with EngineLock(engine.name) as lock:
            _announce(engine)
            on_state(engine)
            with _ended_by_signals(lock, lambda: on_state(replace(engine, state="stopped"))):
                tokenizer = _prepare(config)
            serving = _serve(config, listener, tokenizer, engine, log_level=log_level, on_state=on_state)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner, suppress(asyncio.CancelledError):
                runner.run(serving)


def _check(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the keys of its key file. Raises ConfigError."""
    from sagellm.engines.modules import check_named
    from sagellm.server.http import check_access
    from sagellm.server.http.api_key_file import with_key_file
    from sagellm.server.http.spans import check_spans

    server = with_key_file(config.server, logger.warning)
    check_access(server)
    check_spans(server)
    parsers = (each for each in config.providers() if each.key.startswith("server."))
    check_named(PluginRegistry.load(), parsers)  # the core checks all others
    return config.model_copy(update={"server": server})


def _announce(engine: RunningEngine) -> None:
    """Write an engine's first entry. Raises ConfigError."""
    try:
        engine.announce()
    except OSError as error:
        raise ConfigError(
            f"the engine's entry, {error.filename2 or error.filename}, cannot be written: {error.strerror}; "
            f"remove it, or name another runtime folder in {VARIABLE}"
        ) from error


def _check_socket_path(engine: RunningEngine) -> None:
    """Raise ConfigError if the system has no room for the path of an engine's socket."""
    size = len(os.fsencode(engine.socket))
    if size > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"the engine's socket would be {engine.socket}, {size} bytes; a socket's path has at most "
            f"{_MAX_SOCKET_PATH}: name a shorter folder in {VARIABLE}"
        )


def bind(settings: ServerConfig) -> socket.socket:
    """Listen before anything is loaded; clients that connect meanwhile wait. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port {settings.port} on {settings.host} cannot be used ({error.strerror}"
            f"{_own_engine_at(settings.port)}); name another with --port, or 0 for any that is free"
        ) from None
    return listener


def _own_engine_at(port: int) -> str:
    names = [engine.name for engine in RunningEngine.all() if engine.url.endswith(f":{port}")]
    return f" by your {names[0]}" if names else ""


def _prepare(config: EngineConfig) -> Tokenizer | None:
    """Load the server and the tokenizer, downloading it if needed."""
    # Used by `_serve`, and imported here, where a signal raises no exception.
    import_module("sagellm.server.http.app")
    import_module("sagellm.server.http.server")
    import_module("sagellm.server.remote.remote_engine")
    import_module("sagellm.server.text_process")
    from sagellm.engines.loading.source import resolve_tokenizer
    from sagellm.engines.loading.tokenizer import open_tokenizer

    return open_tokenizer(resolve_tokenizer(config.model))


async def _load(
    front: RemoteEngine, text_runner: ProcessTextRunner | None, encoding_timeout_s: float
) -> None:
    """Load the model in the core and, meanwhile, the tokenizer in the text workers."""
    from sagellm.engines.text.limits import TextLimits

    if text_runner is not None:
        text_runner.load()
    await front.supervisor.start()
    if text_runner is not None:
        await text_runner.start(TextLimits.of(front.max_model_len, timeout_s=encoding_timeout_s))


def _log_start(front: RemoteEngine) -> None:
    """Log what was loaded, and how much fits."""
    config = front.config
    num_tokens = (config.kv.num_blocks or 0) * config.kv.block_size
    logger.info(
        "%s is loaded: %s on %s, KV for %s tokens in blocks of %d, at most %s tokens a request",
        config.model.name,
        config.model.dtype,
        config.model.device,
        f"{num_tokens:,}",
        config.kv.block_size,
        f"{front.max_model_len:,}",
    )


async def _serve(
    config: EngineConfig,
    listener: socket.socket,
    tokenizer: Tokenizer | None,
    engine: RunningEngine,
    *,
    log_level: str,
    on_state: Callable[[RunningEngine], None],
) -> None:
    from sagellm.engines.loading.source import resolve_tokenizer
    from sagellm.server.http import create_app, make_server
    from sagellm.server.remote.remote_engine import RemoteEngine
    from sagellm.server.text_process import ProcessTextRunner

    def enter(state: EngineState) -> None:
        changed = replace(engine, state=state)
        _announce_if_possible(changed)
        on_state(changed)

    text_runner = None if tokenizer is None else ProcessTextRunner(resolve_tokenizer(config.model))
    front = RemoteEngine(config, engine.socket, tokenizer=tokenizer, log_level=log_level)
    is_forced = False
    try:
        with _cancelled_by_signals():
            await _load(front, text_runner, config.server.encoding_timeout)
        app = create_app(
            front, config.server, max_num_seqs=config.scheduler.max_num_seqs, text_runner=text_runner
        )
        trying = asyncio.create_task(app.state.service.encoder.try_template())
        server = make_server(app, config.server, on_drain=lambda: enter("draining"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            gc.collect()
            gc.freeze()  # a full collection would visit all that was loaded, and all streams would wait
            _log_start(front)
            enter("ready")
            keep_returning_memory()
        await serving
        trying.cancel()
        is_forced = server.force_exit
    finally:
        with _cancelled_by_signals():
            try:
                await front.close(at_once=is_forced)
            finally:
                if text_runner is not None:
                    await text_runner.close()


@contextmanager
def _ended_by_signals(lock: EngineLock, tell: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM end this process, after `tell`; it has no children yet.

    An exception would be raised inside whatever is being imported, and some native modules then abort.
    """

    def end(*_: object) -> None:
        try:
            lock.release()
            tell()
            sys.stderr.flush()
        finally:  # also where the folder or the terminal is gone
            os._exit(0)

    handlers = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _announce_if_possible(engine: RunningEngine) -> None:
    """Update an engine's entry; if that fails, log a warning and keep serving."""
    try:
        engine.announce()
    except OSError as error:
        logger.warning("the engine's entry cannot be written: %s; it shows an outdated state", error)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Have each SIGINT and SIGTERM cancel this task: the first its work, the second its clean-up."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called by a coroutine"
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)  # this restores the default handler
            signal.signal(number, handlers[number])


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop
