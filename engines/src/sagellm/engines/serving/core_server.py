"""The core's side of the socket: takes requests in, steps, sends out what the steps did."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sagellm.core import (
    EngineError,
    EngineProtocol,
    SequenceId,
    TokenOutput,
    UnknownNameError,
    get_logger,
    nearest,
)
from sagellm.engines.serving.conversion import make_sequences
from sagellm.engines.serving.messages import (
    Abort,
    Add,
    Call,
    FrameReader,
    Hello,
    NewRequest,
    Reply,
    Step,
    ToCore,
    encode,
)

logger = get_logger(__name__)

_READ_BYTES = 1 << 20
_MAX_UNSENT_BYTES = 64 << 20
"""A connection that leaves so much unread is closed: the others must not wait for it."""

Operation = Callable[..., Any]


class _Connection:
    """One peer: what came in pieces, what could not be sent yet, whose sequences it owns."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.reader = FrameReader(ToCore)
        self.unsent = bytearray()
        self.sequence_ids: set[SequenceId] = set()

    @property
    def is_closed(self) -> bool:
        return self.peer.fileno() < 0


class CoreServer:
    """Runs a core behind a listening socket, in one thread; any number of peers may connect.

    A peer gets Hello, then a Step for each step that did something to its sequences. When it goes
    away, its sequences end. When the file `lifeline` comes to its end, serving ends.
    """

    def __init__(
        self,
        core: EngineProtocol,
        listener: socket.socket,
        hello: Hello,
        operations: Mapping[str, Operation],
        *,
        lifeline: int | None = None,
    ) -> None:
        self._core = core
        self._hello = encode(hello)
        self._operations = operations
        self._owner: dict[SequenceId, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._is_stopping = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self.stop)

    def stop(self) -> None:
        """Have `serve` return after the step that runs; safe in a signal handler."""
        self._is_stopping = True

    def serve(self) -> None:
        """Serve until `stop`."""
        while not self._is_stopping:
            self._exchange(timeout=0 if self._core.has_unfinished() else 0.5)
            if self._core.has_unfinished():
                self._send_outputs(self._core.step())

    def close(self) -> None:
        """Close every connection, the listener and the core."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                self._drop(key.data)
        self._selector.close()
        self._listener.close()
        self._core.close()

    def _exchange(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            if not isinstance(key.data, _Connection):
                key.data()
                continue
            connection = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(connection)
                if events & selectors.EVENT_READ:
                    self._read(connection)
            except (OSError, EngineError) as error:
                logger.warning("a connection ends: %s", error)
                self._drop(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # gone already, or no descriptors left
            if not isinstance(error, BlockingIOError):
                logger.warning("a connection cannot be taken: %s", error)
            return
        peer.setblocking(False)
        connection = _Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        self._send(connection, self._hello)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._drop(connection)
            return
        for message in connection.reader.feed(data):
            if connection.is_closed:  # by an answer that could not be sent
                return
            match message:
                case Add():
                    for request in message.requests:
                        self._add(connection, request)
                case Abort():
                    self._core.abort(message.sequence_ids, finish_reason=message.finish_reason)
                    self._forget(message.sequence_ids)
                case Call():
                    self._send(connection, encode(self._call(message)))

    def _add(self, connection: _Connection, request: NewRequest) -> None:
        for sequence in make_sequences(request):
            if sequence.sequence_id in self._owner:
                raise EngineError(f"sequence id {sequence.sequence_id!r} is in use")
            self._owner[sequence.sequence_id] = connection
            connection.sequence_ids.add(sequence.sequence_id)
            self._core.add(sequence)

    def _call(self, call: Call) -> Reply:
        try:
            operation = self._operations.get(call.operation)
            if operation is None:
                hint = nearest(call.operation, self._operations)
                raise UnknownNameError(f"the engine has no operation {call.operation!r}.{hint}")
            return Reply(call.number, msgspec.to_builtins(operation(**call.arguments), str_keys=True))
        except Exception as error:
            logger.info("operation %s failed", call.operation, exc_info=error)
            return Reply(call.number, None, str(error))

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        batches: dict[_Connection, list[TokenOutput]] = {}
        for output in outputs:
            owner = self._owner.get(output.sequence_id)
            if owner is not None:
                batches.setdefault(owner, []).append(output)
        self._forget([output.sequence_id for output in outputs if output.finish_reason is not None])
        for connection, batch in batches.items():
            self._send(connection, encode(Step(batch)))

    def _forget(self, sequence_ids: list[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            owner = self._owner.pop(sequence_id, None)
            if owner is not None:
                owner.sequence_ids.discard(sequence_id)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        connection.unsent += frame
        try:
            self._flush(connection)
            if len(connection.unsent) > _MAX_UNSENT_BYTES:
                raise EngineError(f"{len(connection.unsent)} bytes wait to be read by the other side")
        except (OSError, EngineError) as error:
            logger.warning("a connection ends: %s", error)
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.peer.send(connection.unsent)]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.peer).events != events:
            self._selector.modify(connection.peer, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.is_closed:
            return
        self._selector.unregister(connection.peer)
        connection.peer.close()
        sequence_ids = list(connection.sequence_ids)
        self._forget(sequence_ids)
        self._core.abort(sequence_ids)
