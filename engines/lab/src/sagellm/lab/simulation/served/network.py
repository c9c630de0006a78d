"""Simulated sockets: bytes that arrive later, in pieces or not at all, and buffers that become full."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from errno import ECONNREFUSED, EPIPE
from random import Random

from sagellm.lab.simulation.served.weather import Weather

_READ_BYTES = 1 << 16


class Pipe:
    """One direction of a connection: at most `capacity` bytes that the reader has not taken.

    Bytes arrive in order. `cut` loses those under way from a random one on, and then the reader finds the
    connection reset.
    """

    def __init__(self, network: Network, name: str, capacity: int) -> None:
        self._network, self._name, self.capacity = network, name, capacity
        self._random = Random(f"{network.seed}/{name}")
        self._under_way: deque[tuple[asyncio.TimerHandle, bytes]] = deque()
        self._num_under_way = 0
        self._last_s = 0.0
        self.arrived = bytearray()
        self.is_ended = self.is_reset = False  # as the reader sees it
        self.is_shut = False  # as the writer sees it: the reader is gone, or the writer has ended
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None

    @property
    def room(self) -> int:
        """How many bytes can be written now."""
        return self.capacity - self._num_under_way - len(self.arrived)

    def write(self, data: bytes | bytearray | memoryview, now_s: float) -> int:
        """Take as many bytes as there is room for, written at this time; return how many."""
        taken = bytes(data[: max(0, self.room)])
        rest, weather = taken, self._network.weather
        while rest:
            size = weather.piece(self._random, len(rest))
            self._schedule(rest[:size], now_s)
            rest = rest[size:]
        return len(taken)

    def end(self, now_s: float) -> None:
        """Let the reader find the end after all that was written."""
        if not self.is_shut:
            self.is_shut = True
            self._schedule(b"", now_s)

    def read(self, size: int) -> bytes:
        """Take bytes that have arrived."""
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        if data:
            self.on_room()
        return data

    def cut(self) -> None:
        """Reset the connection, from a random piece that is under way."""
        if self.is_ended:
            return
        self.is_shut = True
        for _ in range(self._random.randint(0, len(self._under_way))):
            handle, data = self._under_way.pop()
            self._num_under_way -= len(data)
            handle.cancel()
        self._last_s = max(self._last_s, self._network.now_s())
        self._network.loop.call_at(self._last_s, self._reset)

    def abandon(self) -> None:
        """Record that the reader is gone: the writer gets an error from now on."""
        self.is_shut = True
        self.arrived.clear()
        self.on_room()

    def _schedule(self, data: bytes, now_s: float) -> None:
        latency_s = self._network.weather.latency_s(self._random)
        self._last_s = max(self._last_s, now_s + latency_s)
        handle = self._network.loop.call_at(self._last_s, self._arrive)
        self._under_way.append((handle, data))
        self._num_under_way += len(data)

    def _arrive(self) -> None:
        _, data = self._under_way.popleft()
        self._num_under_way -= len(data)
        if data:
            self.arrived += data
        else:
            self.is_ended = True
        self._network.log(f"{self._name} {len(data)}")
        self.on_arrival()

    def _reset(self) -> None:
        if not self.is_ended:
            self.is_ended = self.is_reset = True
            self._network.log(f"{self._name} reset")
            self.on_arrival()


class SimSocket:
    """One end of a connection, as a non-blocking socket. `on_change` is called when it may be ready."""

    def __init__(self, reading: Pipe, writing: Pipe, now_s: Callable[[], float], peer: str) -> None:
        self.reading, self.writing = reading, writing
        self.peer = peer
        self.now_s = now_s
        self.is_closed = False
        self.on_change: Callable[[], None] | None = None
        reading.on_arrival = writing.on_room = self._tell

    @property
    def is_readable(self) -> bool:
        """Whether `recv` would return something."""
        return bool(self.reading.arrived) or self.reading.is_ended

    @property
    def is_writable(self) -> bool:
        """Whether `send` would take something, or fail."""
        return self.writing.is_shut or self.writing.room > 0

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001 - as sockets have it
        """Do nothing: it never blocks."""

    def fileno(self) -> int:
        """Return a number below 0 once it is closed."""
        return -1 if self.is_closed else id(self)

    def recv(self, size: int) -> bytes:
        """Return bytes, or b"" at the end. Raises BlockingIOError, ConnectionResetError."""
        data = self.reading.read(size)
        if data or self.reading.is_ended:
            if not data and self.reading.is_reset:
                raise ConnectionResetError("the connection was reset")
            return data
        raise BlockingIOError

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Take some bytes. Raises BlockingIOError, BrokenPipeError."""
        if self.writing.is_shut:
            raise BrokenPipeError(EPIPE, os.strerror(EPIPE))
        num_taken = self.writing.write(data, self.now_s())
        if not num_taken:
            raise BlockingIOError
        return num_taken

    def close(self) -> None:
        """End both directions. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.on_change = None
            self.writing.end(self.now_s())
            self.reading.abandon()

    def cut(self) -> None:
        """Reset the connection for both ends."""
        self.reading.cut()
        self.writing.cut()

    def getpeername(self) -> tuple[str, int]:
        """Return the peer's address."""
        return self.peer, 1

    def getsockname(self) -> tuple[str, int]:
        """Return this end's address."""
        return "127.0.0.1", 8000

    def getsockopt(self, *_: int) -> bytes:
        """Return the state of the connection: 7 once it was reset, as TCP_INFO has it."""
        return bytes([7 if self.reading.is_reset else 1])

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()


class SimListener:
    """A listening socket with the connections not accepted yet."""

    def __init__(self, network: Network, name: str) -> None:
        self._network, self._name = network, name
        self.pending: deque[SimSocket] = deque()
        self.on_change: Callable[[], None] | None = None
        self.is_writable = False

    @property
    def is_readable(self) -> bool:
        """Whether `accept` would return a connection."""
        return bool(self.pending)

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001 - as sockets have it
        """Do nothing: it never blocks."""

    def accept(self) -> tuple[SimSocket, str]:
        """Return a connection. Raises BlockingIOError, and EMFILE while descriptors are short."""
        if not self.pending:
            raise BlockingIOError
        self._network.weather.check_descriptor()
        return self.pending.popleft(), ""

    def close(self) -> None:
        """Stop listening; connections that were not accepted are reset."""
        self._network.listeners.pop(self._name, None)
        while self.pending:
            self.pending.popleft().cut()


class Network:
    """All listeners by name, and the connections between ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, weather: Weather, seed: str, log: Callable[[str], None]
    ) -> None:
        self.loop, self.weather, self.seed, self.log = loop, weather, seed, log
        self.listeners: dict[str, SimListener] = {}
        self.capacity = 1 << 16
        self._num_connections: dict[str, int] = {}

    def now_s(self) -> float:
        """Return the time of the loop."""
        return self.loop.time()

    def listen(self, name: str) -> SimListener:
        """Begin to listen under a name."""
        listener = self.listeners[name] = SimListener(self, name)
        return listener

    def connect(
        self, name: str, *, label: str | None = None, capacity: int | None = None, peer: str = "127.0.0.1"
    ) -> SimSocket:
        """Connect to a listener and return this end. `label` names the streams of random numbers.

        Raises ConnectionRefusedError unless a listener has that name.
        """
        listener = self.listeners.get(name)
        if listener is None:
            raise ConnectionRefusedError(ECONNREFUSED, os.strerror(ECONNREFUSED))
        label = label or name.rpartition("/")[2]
        number = self._num_connections[label] = self._num_connections.get(label, 0) + 1
        there = Pipe(self, f"{label}#{number}>", capacity or self.capacity)
        back = Pipe(self, f"{label}#{number}<", capacity or self.capacity)
        listener.pending.append(SimSocket(there, back, self.now_s, peer))
        if listener.on_change is not None:
            listener.on_change()
        return SimSocket(back, there, self.now_s, name)


class SimTransport(asyncio.Transport):
    """asyncio's transport over one end of a connection, with its flow control."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: SimSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": end, "peername": end.getpeername(), "sockname": end.getsockname()})
        self._loop, self._end, self._protocol = loop, end, protocol
        self._buffer = bytearray()
        self._max_buffer_bytes = end.writing.capacity  # unsent bytes above which the protocol is to pause
        self._is_closing = self._is_lost = self._is_ending = False
        self._is_paused = self._has_paused_protocol = self._has_ended = False
        end.on_change = self._exchange
        protocol.connection_made(self)
        loop.call_soon(self._exchange)

    def is_closing(self) -> bool:
        """Say whether it is being closed."""
        return self._is_closing

    def pause_reading(self) -> None:
        """Stop reading for now."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Go on reading."""
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._exchange)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Keep the limits that the simulation has chosen."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, now or when there is room."""
        if not self._is_closing and not self._is_ending:
            self._buffer += data
            self._flush()

    def write_eof(self) -> None:
        """End the sending half after what is unsent."""
        self._is_ending = True
        self._flush()

    def close(self) -> None:
        """Close after what is unsent."""
        if not self._is_closing:
            self._is_closing = True
            self._flush()

    def abort(self) -> None:
        """Close at once; what is unsent or under way is lost."""
        if not self._is_lost:
            self._buffer.clear()
            self._end.writing.cut()
            self._lose(None)

    def lose(self) -> None:
        """Reset the connection, as a fault."""
        self._end.cut()

    def _exchange(self) -> None:
        if self._is_lost:
            return
        self._flush()
        reading = self._end.reading
        while not (self._is_paused or self._is_closing or self._has_ended):
            data = reading.read(_READ_BYTES)
            if data:
                self._protocol.data_received(data)
            elif reading.is_reset:
                self._lose(ConnectionResetError("the connection was reset"))
                return
            elif reading.is_ended:
                self._has_ended = True
                if not self._protocol.eof_received():
                    self.close()
            else:
                break
        if reading.is_reset and not self._is_paused:
            self._lose(ConnectionResetError("the connection was reset"))

    def _flush(self) -> None:
        if self._is_lost:
            return
        writing = self._end.writing
        if self._buffer:
            if writing.is_shut:
                self._buffer.clear()
                self._lose(BrokenPipeError("the peer is gone"))
                return
            del self._buffer[: writing.write(self._buffer, self._loop.time())]
        self._control_flow()
        if not self._buffer:
            if self._is_closing:
                self._lose(None)
            elif self._is_ending:
                writing.end(self._loop.time())

    def _control_flow(self) -> None:
        if not self._has_paused_protocol and len(self._buffer) > self._max_buffer_bytes:
            self._has_paused_protocol = True
            self._protocol.pause_writing()
        elif self._has_paused_protocol and len(self._buffer) <= self._max_buffer_bytes // 4:
            self._has_paused_protocol = False
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._end.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
