"""The front's side: calls go to workers, which are started, timed, killed and replaced here."""

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
from sagellm.engines.serving.frames import MAX_FRAME_BYTES, encode
from sagellm.engines.text.calls import Call, Decode, Render, TokenCall
from sagellm.engines.text.errors import (
    ChatTemplateError,
    ForeignTextError,
    TextBusyError,
    TextLimitError,
    TokenizerError,
)
from sagellm.engines.text.limits import Limits
from sagellm.engines.text.local import is_long
from sagellm.engines.text.process.messages import Answer, Failure

logger = get_logger(__name__)

_START_S = 60.0  # the fork server loads the tokenizer before its first worker
_FORK_S = 10.0  # once it has: a fork takes milliseconds
_STOP_S = 1.0
_MAX_WAIT_S = 30.0
_WORKERS = 2
"""Workers of a pool: one call that takes its whole time holds up none of the others."""

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # this one and the next two: no threads, as the process forks
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",  # it would warn that there is no torch
}

_answers = msgspec.msgpack.Decoder(Answer)


class TextProcess:
    """A TextRunner whose work is done in other processes, each call within the limits.

    Conversations and plain texts, short ones and long ones have workers of their own: a template that
    never ends keeps no one from completing a text, nor a long text others from chatting. Workers are
    forked when they are first needed. Everything runs on one event loop.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        self._server = _ForkServer(tokenizer_path)
        self._pools: dict[tuple[bool, bool], _Pool] = {}
        self._limits: Limits | None = None
        self._numbers = count()

    @property
    def pids(self) -> list[int]:
        """The process that workers are forked from."""
        return self._server.pids

    def load(self) -> None:
        """Begin to load the tokenizer, and return at once."""
        self._server.start()

    async def start(self, limits: Limits) -> None:
        """Return when calls are answered. Raises EngineError with its reason if they never will be."""
        self._limits = limits
        await self._pool(is_chat=True, is_long=False).start()

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        token_ids = (await self._run(call)).token_ids
        assert token_ids is not None, "the kind of result that this call has"
        return token_ids

    async def text(self, call: Decode) -> str:
        """Return a text."""
        text = (await self._run(call)).text
        assert text is not None, "the kind of result that this call has"
        return text

    async def close(self) -> None:
        """End all processes; calls that run or wait fail with EngineError."""
        for pool in self._pools.values():
            pool.close()
        await self._server.stop()

    async def _run(self, call: Call) -> Answer:
        answer = await self._pool(is_chat=isinstance(call, Render), is_long=is_long(call)).run(call)
        if answer.failure is not None:
            raise _error(answer.failure)
        return answer

    def _pool(self, *, is_chat: bool, is_long: bool) -> _Pool:
        assert self._limits is not None, "start came first"
        key = is_chat, is_long
        if key not in self._pools:
            workers = [_Worker(self._server, next(self._numbers), self._limits) for _ in range(_WORKERS)]
            self._pools[key] = _Pool(workers)
        return self._pools[key]


def _error(failure: Failure) -> Exception:
    match failure.kind:
        case "template":
            return ChatTemplateError(failure.summary, failure.detail)
        case "tokenizer":
            return TokenizerError(failure.summary, failure.detail)
        case "limit":
            return TextLimitError(failure.summary, failure.detail)
        case "request":
            return InvalidRequestError(failure.summary)
    return EngineError(f"a text worker failed: {failure.summary}")


class _Pool:
    """Workers that are alike, and the calls that wait for one."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers
        self._idle = workers[::-1]
        self._free = asyncio.Semaphore(len(workers))
        self._is_closed = False

    async def start(self) -> None:
        """Start one worker."""
        await self._workers[0].start()

    async def run(self, call: Call) -> Answer:
        """Run a call on the worker that was used last, which is there already."""
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise TextBusyError(
                "the server is busy with templates and texts of others; try again later"
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
        """Take no more calls, and fail those that run."""
        self._is_closed = True
        for worker in self._workers:
            worker.end()


class _Worker:
    """One worker's process, which is started by the first call and again after each one that ended it."""

    def __init__(self, server: _ForkServer, number: int, limits: Limits) -> None:
        self._server, self._number, self._limits = server, number, limits
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, call: Call) -> Answer:
        """Have a call answered; whatever keeps it from that ends the process, and it alone."""
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
        """Fork the process if there is none. Raises EngineError."""
        if self._streams is not None:
            if not self._streams[0].at_eof():
                return
            self.end()  # killed by someone else meanwhile
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
        """Kill the process, if there is one; a call that it runs fails."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
            self._server.end(self._number)

    @flaky("tokenizer.exchange")
    async def _exchange(self, frame: bytes) -> Answer:
        assert self._streams is not None, "started"
        reader, writer = self._streams
        writer.write(frame)
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"an answer of {size} bytes")
        return _answers.decode(await reader.readexactly(size))


def _what(call: Call) -> str:
    return "the model's chat template and tokenizer" if isinstance(call, Render) else "the model's tokenizer"


def _too_long(call: Call, timeout_s: float) -> ForeignTextError:
    logger.warning(
        "%s took more than %g s (server.encoding_timeout) for a request; its process was killed",
        _what(call),
        timeout_s,
    )
    return TextLimitError(
        f"{_what(call)} took more than {timeout_s:g} s (server.encoding_timeout) and had to be stopped"
    )


def _crashed(call: Call) -> ForeignTextError:
    return TokenizerError(f"{_what(call)} crashed, perhaps for want of memory", "the process ended")


class _ForkServer:
    """The process that workers are forked from, started again if it should be gone."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._path = tokenizer_path
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_stopped = False
        self.has_forked = False  # a worker that has answered, so the tokenizer is loaded

    @property
    def pids(self) -> list[int]:
        """The process, if there is one."""
        return [] if self._process is None else [self._process.pid]

    @property
    def state(self) -> str:
        """What has become of the process, for an error."""
        if self._process is None or (code := self._process.poll()) is None:
            return "no process answers"
        return f"the process that does it ended with {code}; its error stands above"

    def start(self) -> None:
        """Start the process unless it runs. Raises EngineError after `stop`."""
        if self._is_stopped:
            raise EngineDeadError("the engine is shutting down")
        if self._process is not None and self._process.poll() is None:
            return
        self._release()
        self.has_forked = False
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sagellm.engines.text.process.fork_server", str(self._path)]
        with theirs:
            environment = {**os.environ, **_ENVIRONMENT}
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)

    def fork(self, number: int, connection: socket.socket) -> None:
        """Fork a worker that talks over the connection; one of that number is ended."""
        self.start()
        assert self._control is not None, "started"
        with suppress(OSError):  # it has just died: so does the connection, and its owner learns of it there
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
        """End the process and all that were forked from it."""
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
