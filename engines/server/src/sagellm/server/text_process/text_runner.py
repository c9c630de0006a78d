"""The front's side: sends calls to workers, and starts, times, kills and replaces them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from sagellm.core import EngineDeadError, EngineError, InvalidRequestError, get_logger
from sagellm.core.chaos import flaky
from sagellm.engines.text.calls import Call, Decode, Render, TokenCall
from sagellm.engines.text.errors import (
    ChatTemplateError,
    ForeignTextError,
    TextBusyError,
    TextLimitError,
    TokenizerError,
)
from sagellm.engines.text.limits import TextLimits
from sagellm.engines.text.local import is_long
from sagellm.server.remote.frames import MAX_FRAME_BYTES, encode
from sagellm.server.text_process.messages import Answer, Failure

logger = get_logger(__name__)

_START_S = 60.0  # the fork server loads the tokenizer before its first worker
_FORK_S = 10.0  # once it has: a fork takes milliseconds
_STOP_S = 1.0
_MAX_WAIT_S = 30.0
_WORKERS_PER_POOL = 2  # so that a call that hits its limit does not delay the others

_ENVIRONMENT = {
    # A process that forks must not have threads.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",  # else it warns that there is no torch
}

_FOREIGN_ERRORS = {"template": ChatTemplateError, "tokenizer": TokenizerError, "limit": TextLimitError}

_answers = msgspec.msgpack.Decoder(Answer)


class ProcessTextRunner:
    """A TextRunner that runs calls in worker processes, within limits.

    There are separate pools for conversations and plain texts, short and long: an endless template does not
    delay completions, nor a long text chats. Workers are forked when first needed. All methods are called on
    one event loop.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        self._server = _ForkServer(tokenizer_path)
        self._pools: dict[tuple[bool, bool], _Pool] = {}
        self._limits: TextLimits | None = None
        self._numbers = count()

    def load(self) -> None:
        """Start loading the tokenizer, without waiting."""
        self._server.start()

    async def start(self, limits: TextLimits) -> None:
        """Wait until calls can be answered. Raises EngineError with the reason if they cannot."""
        self._limits = limits
        await self._pool(is_chat=True, is_long=False).start()

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        token_ids = (await self._run(call)).token_ids
        assert token_ids is not None, "a TokenCall returns token ids"
        return token_ids

    async def text(self, call: Decode) -> str:
        """Return a text."""
        text = (await self._run(call)).text
        assert text is not None, "Decode returns a text"
        return text

    async def close(self) -> None:
        """End all processes; pending calls fail with EngineDeadError."""
        for pool in self._pools.values():
            pool.close()
        await self._server.stop()

    async def _run(self, call: Call) -> Answer:
        answer = await self._pool(is_chat=isinstance(call, Render), is_long=is_long(call)).run(call)
        if answer.failure is not None:
            raise _error(answer.failure)
        return answer

    def _pool(self, *, is_chat: bool, is_long: bool) -> _Pool:
        assert self._limits is not None, "start is called first"
        key = is_chat, is_long
        if key not in self._pools:
            workers = [
                _Worker(self._server, next(self._numbers), self._limits) for _ in range(_WORKERS_PER_POOL)
            ]
            self._pools[key] = _Pool(workers)
        return self._pools[key]


def _error(failure: Failure) -> Exception:
    if (kind := _FOREIGN_ERRORS.get(failure.kind)) is not None:
        return kind(failure.summary, failure.detail)
    if failure.kind == "request":
        return InvalidRequestError(failure.summary)
    return EngineError(f"a text worker failed: {failure.summary}")


class _Pool:
    """Interchangeable workers, and the calls that wait for one."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers
        self._idle = workers[::-1]
        self._free = asyncio.Semaphore(len(workers))
        self._is_closed = False

    async def start(self) -> None:
        """Start one worker."""
        await self._workers[0].start()

    async def run(self, call: Call) -> Answer:
        """Run a call on the most recently used worker, whose process exists already."""
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise TextBusyError(
                "the server is busy with other templates and texts; try again later"
            ) from None
        try:
            if self._is_closed:
                raise EngineDeadError("the engine is shutting down")
            worker = self._idle.pop()
            try:
                return await worker.run(call)
            except ForeignTextError:
                if self._is_closed:
                    raise EngineDeadError("the engine is shutting down") from None
                raise
            finally:
                self._idle.append(worker)
        finally:
            self._free.release()

    def close(self) -> None:
        """Refuse further calls and fail the running ones."""
        self._is_closed = True
        for worker in self._workers:
            worker.end()


class _Worker:
    """One worker, whose process is forked for its first call and after each call that killed it."""

    def __init__(self, server: _ForkServer, number: int, limits: TextLimits) -> None:
        self._server, self._number, self._limits = server, number, limits
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, call: Call) -> Answer:
        """Run a call; kill the process if it times out, is cancelled or gives no valid answer."""
        try:
            frame = encode(call)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}") from error
        await self.start()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                answer = await self._exchange(frame)
        except BaseException as error:
            self.end()
            if isinstance(error, TimeoutError):
                raise _too_long(call, self._limits.timeout_s) from None
            if isinstance(error, OSError | EOFError):
                raise _crashed(call) from error
            raise
        if answer.is_last:
            self.end()
        return answer

    async def start(self) -> None:
        """Fork the process unless it is running. Raises EngineError."""
        if self._streams is not None:
            if not self._streams[0].at_eof():
                return
            self.end()  # it died between two calls
        ours, theirs = socket.socketpair()
        with theirs:
            self._server.fork(self._number, theirs)
        ours.setblocking(False)
        self._streams = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(_FORK_S if self._server.has_forked else _START_S):
                await self._exchange(encode(self._limits))
            self._server.has_forked = True
        except BaseException as error:
            self.end()
            if isinstance(error, TimeoutError):
                self._server.kill()  # so that the next call gets another one
            if isinstance(error, OSError | EOFError):  # TimeoutError is one
                raise EngineError(f"texts cannot be tokenized: {self._server.state}") from error
            raise

    def end(self) -> None:
        """Kill the process, if any; its running call fails."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
            self._server.end(self._number)

    @flaky("tokenizer.exchange")
    async def _exchange(self, frame: bytes) -> Answer:
        assert self._streams is not None, "start is called first"
        reader, writer = self._streams
        writer.write(frame)
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"an answer of {size} bytes")
        return _answers.decode(await reader.readexactly(size))


def _subject(call: Call) -> str:
    return "the model's chat template and tokenizer" if isinstance(call, Render) else "the model's tokenizer"


def _too_long(call: Call, timeout_s: float) -> ForeignTextError:
    logger.warning(
        "%s took more than %g s (server.encoding_timeout) for a request; its process was killed",
        _subject(call),
        timeout_s,
    )
    return TextLimitError(
        f"{_subject(call)} took more than {timeout_s:g} s (server.encoding_timeout) and had to be stopped"
    )


def _crashed(call: Call) -> ForeignTextError:
    return TokenizerError(f"{_subject(call)} crashed, perhaps out of memory", "it ended")


class _ForkServer:
    """The process that workers are forked from, restarted if it has died."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._path = tokenizer_path
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_stopped = False
        self.has_forked = False  # a worker that has answered, so the tokenizer is loaded

    @property
    def state(self) -> str:
        """The state of the process, for an error message."""
        if self._process is None or (code := self._process.poll()) is None:
            return "the tokenizer's process does not answer"
        return f"the tokenizer's process ended with exit code {code}; its error is above"

    def start(self) -> None:
        """Start the process unless it is running. Raises EngineDeadError after `stop`."""
        if self._is_stopped:
            raise EngineDeadError("the engine is shutting down")
        if self._process is not None and self._process.poll() is None:
            return
        self._release()
        self.has_forked = False
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sagellm.server.text_process.fork_server", str(self._path)]
        with theirs:
            environment = {**os.environ, **_ENVIRONMENT}
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)

    def fork(self, number: int, connection: socket.socket) -> None:
        """Fork a worker that talks over the connection, replacing the one with this number."""
        self.start()
        assert self._control is not None, "start opened it"
        with suppress(OSError):  # it has just died, which its owner notices on the connection
            socket.send_fds(self._control, [bytes([number])], [connection.fileno()])

    def end(self, number: int) -> None:
        """Kill a worker."""
        if self._control is not None:
            with suppress(OSError):
                self._control.send(bytes([number]))

    def kill(self) -> None:
        """End the process, which does not answer; its workers end with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """End the process and all its workers."""
        self._is_stopped = True
        self._release()
        if self._process is not None:
            deadline = time.monotonic() + _STOP_S
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            self._process.kill()  # it may still be loading
            self._process.wait()

    def _release(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
