"""The core's side of the socket: receives requests, runs steps, sends their outputs."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sagellm.core import (
    EngineError,
    EngineProtocol,
    FinishReason,
    SequenceId,
    TokenOutput,
    UnknownNameError,
    get_logger,
    nearest,
)
from sagellm.core.plugins.failure import contained, described
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.requests.request_checks import check_request, check_shared
from sagellm.server.chaos import flaky_selector
from sagellm.server.remote.messages import (
    Abort,
    Add,
    Call,
    FrameReader,
    Hello,
    Reply,
    Step,
    ToCore,
    encode,
)

logger = get_logger(__name__)

_MAX_CONNECTIONS = 256
_READ_BYTES = 1 << 20
_TURN_NS = 5_000_000
"""Time for messages between two steps; the current one is finished, the others wait for the next turn."""
_PAUSE_BYTES = 1 << 20
"""Unsent bytes above which a connection is not read from."""
_MAX_UNSENT_BYTES = 64 << 20
"""Unsent bytes above which a connection is closed."""

Operation = Callable[..., Any]


class _Connection:
    """One peer: its unhandled messages, unsent bytes, and the sequences that it owns."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.reader = FrameReader(ToCore)
        self.arriving: Iterator[QueuedRequest] = iter(())  # of a job, those that are not queued yet
        self.unsent = bytearray()
        self.sequence_ids: dict[SequenceId, None] = {}  # in order, so that a run can be replayed

    @property
    def is_closed(self) -> bool:
        return self.peer.fileno() < 0

    @property
    def is_paused(self) -> bool:
        return len(self.unsent) > _PAUSE_BYTES


class CoreServer:
    """Runs a core behind a listening socket, in one thread, for up to `_MAX_CONNECTIONS` peers.

    A peer receives Hello, then a Step for each step that affected its sequences. When it disconnects, its
    sequences end. When the file `lifeline` reaches its end, serving ends.

    An invalid message, or any exception while handling one, closes that peer's connection and nothing else.
    Between two steps peers take turns, each with one message or one request of its job, for `_TURN_NS` in
    all, so that none delays the others' requests or the next step.

    `beat` is called in each turn, for each message, and by the core inside its steps. A subclass may bring
    another clock or selector.
    """

    def __init__(
        self,
        core: EngineProtocol,
        listener: socket.socket,
        hello: Hello,
        operations: Mapping[str, Operation],
        *,
        lifeline: int | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._limits = hello.limits
        self._hello = encode(hello)
        self._operations = operations
        self._beat = beat
        self._owner: dict[SequenceId, _Connection] = {}
        self._backlog: dict[_Connection, None] = {}  # those with unhandled messages, in order of turns
        self._connections: set[_Connection] = set()
        self._selector = flaky_selector("core.select", self.make_selector())
        self._listener = listener
        self._is_stopping = False
        core.report_progress(beat)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self.stop)

    def now_ns(self) -> int:
        """Return the time by which messages get their share of a turn."""
        return time.monotonic_ns()

    def make_selector(self) -> selectors.BaseSelector:
        """Return what waits for sockets."""
        return selectors.DefaultSelector()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping

    @property
    def num_owned(self) -> int:
        """Unfinished sequences that peers have sent."""
        return len(self._owner)

    def stop(self) -> None:
        """Have `serve` return after the step that runs; safe in a signal handler."""
        self._is_stopping = True

    def serve(self) -> None:
        """Serve until `stop`."""
        while not self.is_stopping:
            self.turn()

    def turn(self, timeout_s: float = 0.5) -> None:
        """Exchange messages, and run a step if a sequence waits or runs; else wait for a message."""
        self._beat()
        is_busy = bool(self._backlog) or self._core.has_unfinished()
        self._exchange(0 if is_busy or self._core.use_idle_time() else timeout_s)
        self._handle_backlog()
        if self._core.has_unfinished():
            try:
                outputs = self._core.step()
            except SystemExit as error:  # it would end this process silently
                raise EngineError(f"the engine called sys.exit({error.code!r}) in a step") from error
            self._send_outputs(outputs)

    def close(self) -> None:
        """Close every connection, the listener and the core."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        self._core.close()

    def _exchange(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if not isinstance(key.data, _Connection):
                key.data()
                continue
            with self._closing_on_error(key.data):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and key.data not in self._backlog:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # disconnected already, or out of descriptors
            if not isinstance(error, BlockingIOError):
                logger.warning("cannot accept a connection: %s", error)
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            logger.warning("a connection is refused: there are %d already", len(self._connections))
            peer.close()
            return
        peer.setblocking(False)
        connection = _Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        self._connections.add(connection)
        self._send(connection, self._hello)

    @contextmanager
    def _closing_on_error(self, connection: _Connection) -> Iterator[None]:
        """Close the connection on any exception, including the panic of an extension module."""
        with contained() as failure:
            yield
        if failure.error is not None:
            logger.warning("a connection is closed: %s", described(failure.error))
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._drop(connection)
            return
        connection.reader.add(data)
        self._backlog[connection] = None

    def _handle_backlog(self) -> None:
        """Let connections take turns, for at most `_TURN_NS`; one without messages leaves the backlog."""
        deadline_ns = self.now_ns() + _TURN_NS
        while self._backlog and self.now_ns() < deadline_ns:
            connection = next(iter(self._backlog))
            del self._backlog[connection]
            with self._closing_on_error(connection):
                if self._handle_next(connection) and not connection.is_closed:
                    self._backlog[connection] = None
            self._beat()

    def _handle_next(self, connection: _Connection) -> bool:
        """Queue a connection's next request, or handle its next message; say if there may be more."""
        if connection.is_closed or connection.is_paused:
            return False
        if self._add_next(connection):
            return True
        match connection.reader.next():
            case None:
                return False
            case Add() as job:
                check_shared(job.params, job.stop_token_ids, self._limits)
                connection.arriving = job.requests()
                self._add_next(connection)
            case Abort() as abort:
                own = [each for each in abort.sequence_ids if each in connection.sequence_ids]
                self._abort(own, abort.finish_reason)
            case Call() as call:
                self._send(connection, self._call(call))
        return True

    def _add_next(self, connection: _Connection) -> bool:
        """Queue the next request of a connection's job, if one is left."""
        request = next(connection.arriving, None)
        if request is not None:
            self._add(connection, request)
        return request is not None

    def _add(self, connection: _Connection, request: QueuedRequest) -> None:
        """Queue all sequences of a request, or none and tell the peer the error if the core refuses one.

        Raises EngineError for a request that no front would send.
        """
        check_request(request, self._limits)
        sequence_ids = request.sequence_ids
        if not self._owner.keys().isdisjoint(sequence_ids):
            raise EngineError("a sequence id is in use")
        self._owner |= dict.fromkeys(sequence_ids, connection)
        connection.sequence_ids |= dict.fromkeys(sequence_ids)
        with contained() as failure:
            for sequence in request.sequences:
                self._core.add(sequence)
        if failure.error is not None:
            logger.error("a request cannot be queued", exc_info=failure.error)
            self._abort(sequence_ids, "error")
            text = described(failure.error)
            outputs = [TokenOutput(each, finish_reason="error", error=text) for each in sequence_ids]
            self._send(connection, encode(Step(outputs)))

    def _call(self, call: Call) -> bytes:
        try:
            operation = self._operations.get(call.operation)
            if operation is None:
                hint = nearest(call.operation, self._operations)
                raise UnknownNameError(f"the engine has no operation {call.operation!r}.{hint}")
            result = msgspec.to_builtins(operation(**call.arguments), str_keys=True)
            return encode(Reply(call.number, result))
        except Exception as error:
            logger.info("operation %s failed", call.operation, exc_info=error)
            return encode(Reply(call.number, None, str(error)))

    def _abort(self, sequence_ids: list[SequenceId], finish_reason: FinishReason = "abort") -> None:
        """End sequences; if that fails, retry one by one, so that a failing module affects only its own."""
        self._forget(sequence_ids)
        with contained() as failure:
            self._core.abort(sequence_ids, finish_reason=finish_reason)
        if failure.error is None:
            return
        logger.error("sequences could not be ended together", exc_info=failure.error)
        for sequence_id in sequence_ids:
            with contained() as failure:
                self._core.abort([sequence_id], finish_reason=finish_reason)
            if failure.error is not None:
                logger.error("sequence %s could not be ended", sequence_id, exc_info=failure.error)

    def _send_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        batches: dict[_Connection, list[TokenOutput]] = {}
        for output in outputs:
            owner = self._owner.get(output.sequence_id)
            if owner is not None:
                batches.setdefault(owner, []).append(output)
        self._forget([output.sequence_id for output in outputs if output.finish_reason is not None])
        for connection, batch in batches.items():
            with self._closing_on_error(connection):
                self._send(connection, encode(Step(batch)))

    def _forget(self, sequence_ids: list[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            owner = self._owner.pop(sequence_id, None)
            if owner is not None:
                owner.sequence_ids.pop(sequence_id, None)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        connection.unsent += frame
        with self._closing_on_error(connection):
            self._flush(connection)
            if len(connection.unsent) > _MAX_UNSENT_BYTES:
                raise EngineError(f"the peer has left {len(connection.unsent)} bytes unread")

    def _flush(self, connection: _Connection) -> None:
        was_paused = connection.is_paused
        try:
            while connection.unsent:
                del connection.unsent[: connection.peer.send(connection.unsent)]
        except BlockingIOError:
            pass
        reading = 0 if connection.is_paused else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.peer).events != events:
            self._selector.modify(connection.peer, events, connection)
        if was_paused and not connection.is_paused:
            self._backlog[connection] = None  # it may have unhandled messages

    def _drop(self, connection: _Connection) -> None:
        if connection.is_closed:
            return
        self._backlog.pop(connection, None)
        self._selector.unregister(connection.peer)
        connection.peer.close()
        self._connections.discard(connection)
        self._abort(list(connection.sequence_ids))
