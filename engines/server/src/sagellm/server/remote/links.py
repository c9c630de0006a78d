"""The front's connections to one core: one for calls, and one for the requests of each tenant.

The core reads from all of them in turn, and each has its own buffers. So what one tenant sends, or is sent,
is never in front of what another one waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from errno import ECONNREFUSED
from pathlib import Path
from typing import cast
from zlib import crc32

from sagellm.core import FinishReason, SequenceId, get_logger
from sagellm.core.chaos import flaky
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.text.guarded_tokenizer import is_foreign
from sagellm.server.chaos import in_pieces
from sagellm.server.remote.messages import Abort, Add, FrameReader, FromCore, Step, ToCore, encode

logger = get_logger(__name__)

_MAX_TENANTS = 128
"""Tenants with a connection of their own; further ones share theirs."""


class Link(asyncio.Protocol):
    """One connection: its first message, all others, and its end.

    Each message is a turn of the event loop, as one may take 20 ms; until it is handled nothing is read.
    """

    def __init__(self, receive: Callable[[FromCore], None], lost: asyncio.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[FromCore | None] = self._loop.create_future()
        self._receive, self._lost = receive, lost
        self._reader = FrameReader(FromCore)
        self._transport: asyncio.Transport | None = None
        self._next_turn: asyncio.Handle | None = None
        self._takes_more = asyncio.Event()
        self._takes_more.set()

    @flaky("front.send")
    def send(self, message: ToCore) -> None:
        """Send a message; it is lost if the core is dead."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    async def wait_until_taken(self) -> None:
        """Wait until the core has read nearly all that was sent, or is gone."""
        while not self._takes_more.is_set():  # of several that wait, one may have sent much
            await self._takes_more.wait()

    def close(self) -> None:
        """Disconnect."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to send."""
        self._transport = cast(asyncio.Transport, transport)

    @in_pieces("front.receive", lambda self: self._transport.is_closing())
    def data_received(self, data: bytes) -> None:
        """Pass on the first message; others have to wait for their turn."""
        self._reader.add(data)
        if self._next_turn is None:
            self._take_turn()

    def pause_writing(self) -> None:
        """Record that the core has much to read."""
        self._takes_more.clear()

    def resume_writing(self) -> None:
        """Record that the core has read it."""
        self._takes_more.set()

    def connection_lost(self, _error: Exception | None) -> None:
        """Handle what has come, and release everybody who waits."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        while self._reader.has_next:
            self._handle_next()
        self._takes_more.set()
        if not self.first.done():
            self.first.set_result(None)  # the core refuses a connection beyond those that it has
        elif not self._lost.done():
            self._lost.set_result(None)

    def _take_turn(self) -> None:
        """Handle the next message, and read no more while others have come already."""
        was_full, self._next_turn = self._next_turn is not None, None
        if self._reader.has_next:
            self._handle_next()
        is_full = self._reader.has_next
        if is_full:
            self._next_turn = self._loop.call_soon(self._take_turn)
        if self._transport is not None and not self._transport.is_closing() and is_full != was_full:
            self._transport.pause_reading() if is_full else self._transport.resume_reading()

    def _handle_next(self) -> None:
        """Pass on a message; disconnect after an invalid one."""
        try:
            message = self._reader.next()
            assert message is not None, "`has_next` said so"
            if not self.first.done():
                self.first.set_result(message)
            else:
                self._receive(message)
        except BaseException as error:
            if not is_foreign(error):
                raise
            logger.exception("the engine sent an invalid message")
            self._reader = FrameReader(FromCore)
            self.close()


class Links:
    """All connections to one core. Once one of them is `lost`, the core counts as dead."""

    def __init__(self, socket: Path, receive: Callable[[FromCore], None]) -> None:
        self._socket, self._receive = socket, receive
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls = Link(self._take, self.lost)
        self._tenants: dict[str, Link] = {}
        self._owner: dict[SequenceId, Link] = {}
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Connect, for calls. Raises OSError."""
        await self._connect(self.calls)

    async def reach(self, tenant: str) -> None:
        """Wait until the tenant's connection, which is opened if it has none, takes more requests."""
        async with self._opening:
            if tenant not in self._tenants:
                self._tenants[tenant] = await self._open(tenant)
        link = self._tenants[tenant]
        if await asyncio.shield(link.first) is None:  # others may wait for it, too
            link = self._tenants[tenant] = self.calls
        await link.wait_until_taken()

    def add(self, requests: Sequence[QueuedRequest]) -> None:
        """Send requests of one tenant with the same parameters."""
        link = self._tenants.get(requests[0].request.tenant.name, self.calls)
        link.send(Add.of(requests))
        self._owner.update(dict.fromkeys((each for one in requests for each in one.sequence_ids), link))

    def abort(self, sequence_ids: Iterable[SequenceId], finish_reason: FinishReason) -> None:
        """End sequences that have not ended; each on its own connection, so that it is known there."""
        by_link: dict[Link, list[SequenceId]] = {}
        for sequence_id in sequence_ids:
            link = self._owner.pop(sequence_id, None)
            if link is not None:
                by_link.setdefault(link, []).append(sequence_id)
        for link, own in by_link.items():
            link.send(Abort(own, finish_reason))

    def close(self) -> None:
        """Disconnect."""
        for link in (self.calls, *self._tenants.values()):
            link.close()

    async def _open(self, tenant: str) -> Link:
        if len(set(self._tenants.values())) >= _MAX_TENANTS:
            links = list(self._tenants.values())
            return links[crc32(tenant.encode()) % len(links)]
        link = Link(self._take, self.lost)
        try:
            await self._connect(link)
        except OSError as error:  # no descriptor is free, or the core has just ended
            logger.info("a tenant shares the connection of the calls: %s", error)
            return self.calls
        return link

    @flaky("core.connect", ECONNREFUSED, rate=10)
    async def _connect(self, link: Link) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: link, str(self._socket))

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Step):
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._owner.pop(output.sequence_id, None)
        self._receive(message)
