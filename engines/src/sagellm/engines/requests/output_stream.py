"""The asyncio consumer's view of its request: a stream of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Self
from weakref import WeakValueDictionary

from sagellm.core import RequestId
from sagellm.core.chaos import flaky
from sagellm.engines.requests.outputs import RequestOutput


class OutputStream:
    """Yields a request's cumulative output each time it has grown; ends after the last.

    A slow consumer misses no tokens: the next output contains all that arrived in the meantime. A consumer
    that goes away (break, cancellation, garbage collection) aborts the request.
    """

    __slots__ = (
        "__weakref__",
        "_drop",
        "_error",
        "_is_changed",
        "_is_done",
        "_output",
        "_waiter",
        "request_id",
    )

    def __init__(self, request_id: RequestId, drop: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._drop = drop
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._is_changed = self._is_done = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    @flaky("stream.next")
    async def __anext__(self) -> RequestOutput:
        if not self._is_changed and not self._is_done and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                self._waiter = None
        if self._is_done:
            raise StopAsyncIteration
        if self._error is not None:
            self._is_done = True
            raise self._error
        assert self._output is not None, "woken without an output"
        self._is_changed = False
        self._is_done = self._output.finished
        return self._output

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request unless it has ended. Consumers still waiting get no further output."""
        if not self._is_done:
            self._is_done = True
            self._wake()
            if self._output is None or not self._output.finished:  # else the id may be another's by now
                self._drop(self.request_id)

    def put(self, output: RequestOutput) -> None:
        """Record that the output has grown."""
        self._output = output
        self._is_changed = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputStreams(WeakValueDictionary[RequestId, OutputStream]):
    """The streams that consumers of one engine hold, by request; used on their event loop only."""

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Give each output to its stream, if a consumer still holds it."""
        for output in outputs:
            if (stream := self.get(output.request_id)) is not None:
                if output.finished:
                    del self[output.request_id]
                stream.put(output)

    def fail_all(self, error: BaseException) -> None:
        """End every stream with an error."""
        for stream in list(self.values()):
            stream.fail(error)
