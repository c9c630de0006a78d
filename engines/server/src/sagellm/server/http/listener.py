"""Accepts connections one at a time, and only while a descriptor is free for the next."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from sagellm.server.http.connections import Connections

_ACCEPTS_PER_EVENT = 16
_RETRY_S = 0.05
_NO_MEMORY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """A listening socket on the running loop, with the interface of asyncio.Server that uvicorn uses.

    The servers of asyncio and uvloop accept all pending connections before telling anyone, and stop accepting
    or drop pending ones when the process runs out of descriptors.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
    ) -> None:
        self.sockets = (listening,)
        self._socket = listening
        self._make_protocol = make_protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def wait_closed(self) -> None:
        """Return at once: connections have their own lifetime."""

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.call_later(_RETRY_S, self._resume)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            if not self._connections.has_room:
                self._connections.make_room()  # the loop calls again when the descriptor is free
                return
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    self._connections.make_room()
                self._pause()
                return
            self._connections.num_open += 1
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            await self._loop.connect_accepted_socket(self._make_protocol, accepted)
        except OSError:  # disconnected already
            accepted.close()
            self._connections.num_open -= 1
