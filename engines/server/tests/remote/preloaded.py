"""Runs `python -m` in processes that have their imports already: `python preloaded.py FOLDER`.

Importing torch and transformers is most of what a server costs at its start. Two processes import them, and
nothing of ours, one with torch and one for programs that do without. They fork themselves for each program
that FOLDER/python, in the place of Python, asks them to run. The program has the environment, the open files
and the working directory of its launcher; when one of them ends so does the other, and the launcher passes
signals on.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SIZE_BYTES = 4
_ABOVE_ALL = 500
"""Descriptors from here on are out of the way of those that a program is given."""

_WHOLE = (
    "torch",
    "transformers",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto",
    "safetensors.torch",
    "starlette.applications",
    "uvicorn",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.loops.uvloop",
    "typer",
    "msgspec",
    "prometheus_client",
)
_TEXT = ("transformers", "transformers.models.auto.tokenization_auto", "msgspec")

_LAUNCHER = """\
#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
if arguments[:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *arguments])
open_files = []
for each in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(each)
        open_files.append(each)
    except OSError:  # the listing itself
        pass
pid, asked = 0, []

def pass_on(number, _):
    try:
        os.kill(pid, number) if pid else asked.append(number)
    except ProcessLookupError:  # it has just ended
        pass

for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(each) is not signal.SIG_IGN:
        signal.signal(each, pass_on)
peer = socket.socket(socket.AF_UNIX)
peer.connect({folder!r} + ("/text" if "fork_server" in arguments[1] else "/whole"))
order = json.dumps([sys.argv[0], arguments[1:], dict(os.environ), os.getcwd(), open_files]).encode()
socket.send_fds(peer, [len(order).to_bytes(4, "little")], open_files)
peer.sendall(order)
for each in open_files:
    os.close(each)
replies = peer.makefile("r")
pid = int(replies.readline())
for each in asked:
    pass_on(each, None)
code = int(replies.readline() or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def _fork_for_each(listener: socket.socket) -> socket.socket:
    """Fork for each connection, and tell it how the process ended. Returns the connection in each fork."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    pid = os.fork()
                    if pid == 0:
                        listener.close()
                        return connection
                    ended = os.pidfd_open(pid)
                    running[ended] = (pid, connection)
                    selector.register(ended, selectors.EVENT_READ)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, connection = running.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with connection, suppress(OSError):
                        connection.sendall(b"%d\n" % code)


def _become(connection: socket.socket) -> str:
    """Take over files, environment and arguments from the launcher; return the module that is to run."""
    prefix, files, _, _ = socket.recv_fds(connection, _SIZE_BYTES, 64)
    left = int.from_bytes(prefix, "little")
    order = b""
    while len(order) < left:
        order += connection.recv(left - len(order))
    program, (module, *arguments), environment, folder, numbers = json.loads(order)
    moved = [os.dup(each) if each >= _ABOVE_ALL else _above(each) for each in files]
    peer = socket.socket(fileno=_above(connection.detach()))
    os.closerange(0, _ABOVE_ALL)
    for given, number in zip(moved, numbers, strict=True):
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable, sys.argv = program, [module, *arguments]
    sys.orig_argv = [program, "-m", module, *arguments]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    peer.sendall(b"%d\n" % os.getpid())
    threading.Thread(target=_die_with, args=(peer,), daemon=True).start()
    return module


def _above(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL)
    os.close(descriptor)
    return moved


def _die_with(peer: socket.socket) -> None:
    peer.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Import, listen, fork; run the program in each fork."""
    folder = Path(sys.argv[1])
    sys.path[0] = ""  # in place of this file's folder
    is_text = os.fork() == 0
    if is_text:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.modules["torch"] = None  # type: ignore[assignment]
    for name in _TEXT if is_text else _WHOLE:
        with suppress(ImportError):  # some are only there on some systems
            import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / ("text" if is_text else "whole")))
    listener.listen(64)
    if not is_text:
        while not (folder / "text").exists():
            time.sleep(0.01)
        path = folder / "python.new"
        path.write_text(_LAUNCHER.format(python=sys.executable, folder=str(folder)))
        path.chmod(0o700)
        path.rename(folder / "python")
    module = _become(_fork_for_each(listener))
    if "PYTHONPATH" in os.environ:
        sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            import_module("sitecustomize")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
