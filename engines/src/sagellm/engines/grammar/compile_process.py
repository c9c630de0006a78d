"""A process that compiles grammars within limits of time and memory.

It reads the vocabulary and loads xgrammar once, and is forked for each text: what exceeds a limit costs one
fork, and the next text finds the process warm. A frame is a length of four bytes, then the bytes.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING

from sagellm.core.errors import EngineError, InvalidRequestError
from sagellm.engines.grammar.vocabulary import from_bytes, to_bytes

if TYPE_CHECKING:
    from sagellm.core.protocols.grammar import StructureKind, Vocabulary
    from sagellm.engines.grammar.compiling import Compiler

_START_S = 120.0  # to import xgrammar and read the vocabulary, on a machine that is busy
_NICENESS = 10
_NO_THREAD_DATA = 127  # how glibc ends a process that has no memory for a library's thread-local data
_OK, _REFUSED, _FAILED = b"+", b"-", b"!"


@dataclass(frozen=True, kw_only=True)
class CompileLimits:
    """What compiling one text may take."""

    seconds: float = 10.0  # of this process's CPU time; of real time three times as much
    memory_bytes: int = 1 << 30
    compiled_bytes: int = 64 << 20  # what is sent back
    mask_ms: float = 20.0  # for a mask and the token after it, tried on a first text


class CompileProcess:
    """The process as its user sees it. It starts with the first call; one thread makes all but `close`."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits, **options: object) -> None:
        self._vocabulary, self._limits, self._options = vocabulary, limits, options
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed, self._starting = False, threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs. It gets ready meanwhile. Raises EngineError if it cannot run."""
        if self._process is None:
            self._start()

    def compile(self, kind: StructureKind, text: str) -> bytes:
        """Return the compiled form of a text, as xgrammar writes it.

        Raises InvalidRequestError, which names what is not supported or the limit; EngineError if the process
        cannot run.
        """
        request = json.dumps([kind, text]).encode()
        for is_last in (False, True):
            process = self._process or self._start()
            try:
                _write(process.stdin, request)
                answer = _read(process.stdout, _START_S + 4 * self._limits.seconds)
                break
            except (OSError, EOFError, ValueError) as error:  # ValueError: another thread closed the pipes
                self._end()
                if is_last:
                    raise EngineError(f"the process that compiles grammars has ended: {error}") from error
        if answer[:1] == _OK:
            return answer[1:]
        message = answer[1:].decode("utf-8", "replace")
        raise InvalidRequestError(message) if answer[:1] == _REFUSED else EngineError(message)

    def close(self) -> None:
        """End the process and what it compiles; it does not start again."""
        with self._starting:
            self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its fork, which has the pipe too
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # a request is still in its buffer
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with self._starting:
            if self._is_closed:
                raise EngineError("the process that compiles grammars has been closed")
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "sagellm.engines.grammar.compile_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | single | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for those who serve; its forks end with it
            )
        try:
            settings = {"limits": asdict(self._limits), "options": self._options}
            _write(process.stdin, json.dumps(settings).encode())
            _write(process.stdin, to_bytes(self._vocabulary))
        except (OSError, ValueError) as error:
            self._end()
            raise EngineError(f"the process that compiles grammars cannot start: {error}") from error
        return process


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None, "both are pipes"
    pipe.write(struct.pack("<I", len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes] | None, seconds: float | None = None) -> bytes:
    """Return the next frame. Raises EOFError at the end, or after `seconds` without an answer."""
    assert pipe is not None, "both are pipes"
    if seconds is not None and not select.select([pipe], [], [], seconds)[0]:
        raise EOFError(f"no answer within {seconds:g} s")
    header = pipe.read(4)
    if len(header) < 4:
        raise EOFError("it closed its pipe")
    (length,) = struct.unpack("<I", header)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError("it closed its pipe")
    return data


def serve() -> None:
    """Read settings and vocabulary, then answer until the pipe is closed."""
    os.nice(_NICENESS)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    settings, vocabulary = json.loads(_read(requests)), _read(requests)  # at once: the engine writes them
    # tvm_ffi imports torch, if it can, for tensors that are not used here
    sys.modules["torch"] = None  # type: ignore[assignment]
    from sagellm.engines.grammar.compiling import Compiler

    limits = CompileLimits(**settings["limits"])
    compiler = Compiler(from_bytes(vocabulary), **settings["options"])
    while True:
        try:
            request = _read(requests)
        except EOFError:
            return
        kind, text = json.loads(request)
        _write(answers, _compiled(compiler, limits, kind, text))


def _compiled(compiler: Compiler, limits: CompileLimits, kind: StructureKind, text: str) -> bytes:
    """Return the answer of a fork, or which limit it has exceeded."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_fork(writing, compiler, limits, kind, text)
    os.close(writing)
    answer, deadline = bytearray(), time.monotonic() + 3 * limits.seconds
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = pipe.read(1 << 20)
            if not part:
                break
            answer += part
        else:
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and answer:
        return bytes(answer)
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return _limit(kind, f"{limits.seconds:g} s of time")
    if code in (-signal.SIGABRT, -signal.SIGSEGV, _NO_THREAD_DATA):  # std::bad_alloc, or beyond the stack
        return _limit(kind, f"{limits.memory_bytes >> 20} MiB of memory")
    return _FAILED + f"compiling ended with the status {code}".encode()


def _limit(kind: StructureKind, limit: str) -> bytes:
    return _REFUSED + f"{kind}: compiling it takes more than {limit}; give a simpler one".encode()


def _run_fork(
    writing: int, compiler: Compiler, limits: CompileLimits, kind: StructureKind, text: str
) -> None:
    """Compile within the limits, write the answer, and end this process."""
    seconds = max(1, round(limits.seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = _OK + compiler.compile(kind, text, limits.mask_ms)
        if len(answer) > limits.compiled_bytes:
            answer = _limit(kind, f"{limits.compiled_bytes >> 20} MiB of compiled masks")
    except InvalidRequestError as error:
        answer = _REFUSED + str(error).encode("utf-8", "replace")
    except (MemoryError, RecursionError):
        answer = _limit(kind, f"{limits.memory_bytes >> 20} MiB of memory")
    except Exception as error:
        if "bad_alloc" in str(error):
            answer = _limit(kind, f"{limits.memory_bytes >> 20} MiB of memory")
        else:
            answer = _FAILED + f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    view = memoryview(answer)
    while view:
        view = view[os.write(writing, view) :]
    os._exit(0)


if __name__ == "__main__":
    serve()
