"""The process that workers are forked from: `python -m sagellm.server.text_process.fork_server PATH`.

Standard input is a socket. Each byte on it is the number of a worker to kill; if a socket is passed with the
byte, a new worker with that number is forked to serve it. The tokenizer is loaded first. When the front ends,
for whatever reason, the socket closes and all processes end.

It has one thread, so that forking is safe, and never runs a template or tokenizer itself, so that it always
responds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from sagellm.core import SageLLMError
from sagellm.engines.text.chat_template import ChatTemplate
from sagellm.server.text_process.worker import work

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load the tokenizer of the directory given as argument, then fork and kill workers on request."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # the front drains, and needs this process meanwhile
        signal.signal(ending, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    sys.modules["torch"] = None  # type: ignore[assignment]  # without it transformers loads in a third of the time
    template = _load(Path(sys.argv[1]))
    gc.collect()
    gc.freeze()  # a collection would write to the memory that workers share
    workers: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        number = data[0]
        if number in workers:
            _end(workers.pop(number))
        if descriptors:
            with socket.socket(fileno=descriptors[0]) as connection:
                workers[number] = _fork(control, connection, template)
    for pid in workers.values():
        _end(pid)


def _load(path: Path) -> ChatTemplate:
    from sagellm.engines.loading.tokenizer import open_tokenizer

    try:
        template = ChatTemplate(open_tokenizer(path))
        template.prepare()
    except SageLLMError as error:
        sys.exit(str(error))
    return template


def _fork(control: socket.socket, connection: socket.socket, template: ChatTemplate) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        control.close()
        _isolate(parent)
        work(connection, template)
        status = 0
    finally:
        os._exit(status)  # skip the parent's cleanup


def _isolate(parent: int) -> None:
    """Die with the parent, have no standard streams, and dump no core."""
    with suppress(OSError, AttributeError):  # where unsupported (not Linux), the CPU limit ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
