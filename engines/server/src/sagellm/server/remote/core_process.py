"""The core's process: `python -m sagellm.server.remote.core_process`, started by the front.

Standard input carries one line of JSON (configuration, socket path, heartbeat descriptor) and stays open: it
closes when the front ends, for whatever reason, and then the core ends too.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import SageLLMError, get_logger
from sagellm.core.chaos import flaky_socket
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.logging import configure
from sagellm.engines.usage_errors import USAGE_ERRORS
from sagellm.server.memory import keep_returning_memory
from sagellm.server.remote.heartbeat import Heartbeat
from sagellm.server.remote.messages import Failed, Hello, encode

if TYPE_CHECKING:
    from sagellm.core import EngineProtocol

logger = get_logger(__name__)

_COLLECTIONS_BEFORE_A_FULL_ONE = 10_000
"""Collections of the middle generation, of about 40 requests each."""

_TELL_FAILURE_S = 2.0
_WARM_UP_TOKENS = 16


def main() -> None:
    """Listen, load, serve. Exit code 1 if the model cannot be loaded."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold users' texts
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    configure(order["log_level"], as_json=order["logs_json"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is handled by the front
    try:
        listener = listen(Path(order["socket"]))
    except OSError as error:
        logger.error("the engine cannot listen at %s: %s", order["socket"], error)
        sys.exit(1)
    try:
        server = _load(EngineConfig.from_values(order["config"]), listener, Heartbeat(order["heartbeat"]))
    except Exception as error:
        known = isinstance(error, SageLLMError)
        logger.log(10 if known else 40, "the engine cannot start", exc_info=error)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        _tell(listener, encode(Failed(message, isinstance(error, USAGE_ERRORS))))
        sys.exit(1)
    settle_collector()
    keep_returning_memory()
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        server.serve()
    finally:
        server.close()


def settle_collector() -> None:
    """Keep full collections of garbage out of steps: they skip all that exists now, and become rare.

    One takes 80 ms for what was loaded and 40 ms for 2,000 requests, and would come with every 500th request.
    It finds next to nothing: what outlives a younger collection here is freed by its reference counts.
    """
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _COLLECTIONS_BEFORE_A_FULL_ONE)


def listen(path: Path) -> socket.socket:
    """Listen on a socket that only its owner may use."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(256)
    return flaky_socket("core.socket", listener)


def _load(config: EngineConfig, listener: socket.socket, heartbeat: Heartbeat) -> Any:
    from sagellm.engines.assembly import assemble
    from sagellm.server.remote.core_server import CoreServer
    from sagellm.server.remote.operations import core_operations

    assembled = assemble(config)
    core = assembled.core
    _warm_up(core)
    values = assembled.config.values()
    hello = Hello(
        config={key: value for key, value in values.items() if not key.startswith("server.")},
        limits=core.info.limits,
        default_params=assembled.default_params,
        pid=os.getpid(),
    )
    operations = core_operations(core)
    return CoreServer(core, listener, hello, operations, lifeline=sys.stdin.fileno(), beat=heartbeat.beat)


def _warm_up(core: EngineProtocol) -> None:
    """Run a prefill and a decode step of our own engine, so the first request is not slower."""
    from sagellm.engines.engine_core.core import EngineCore
    from sagellm.engines.requests.input_processor import InputProcessor
    from sagellm.engines.sampling.params import SamplingParams

    if not isinstance(core, EngineCore):
        return
    limits = core.info.limits
    num_tokens = min(_WARM_UP_TOKENS, limits.max_model_len - 2, limits.num_blocks * limits.block_size - 1)
    if num_tokens > 0:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        requests = InputProcessor(None, limits, core.parts.runtime)
        core.warm_up(requests.process_request([0] * num_tokens, params).sequences[0])


def _tell(listener: socket.socket, frame: bytes) -> None:
    """Send a frame to all waiting connections, the front's among them."""
    wait_s = _TELL_FAILURE_S
    while select.select([listener], [], [], wait_s)[0]:
        wait_s = 0.0
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.sendall(frame)


if __name__ == "__main__":
    main()
