"""The streams of one job in the engine: opened together, read together, closed when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sagellm.core import EngineError
from sagellm.engines.requests.input_processor import RequestOptions
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.server.http.engine_front import EngineFront, Stream
from sagellm.server.http.errors import APIError, deadline_exceeded
from sagellm.server.http.metrics import RequestTimer
from sagellm.server.http.shape import Job

if TYPE_CHECKING:
    from starlette.types import Receive


_GRACE_S = 0.02
"""How long after its deadline the server gives up on a request that the engine has not ended."""


class ClientGoneError(Exception):
    """The client no longer waits for the answer."""


class JobStreams:
    """A job's requests in the engine. Reading raises ClientGoneError when the client disconnects."""

    def __init__(self, receive: Receive, timers: Sequence[RequestTimer]) -> None:
        self._streams: Sequence[Stream] = ()
        self._timers = timers
        self._stopped: Exception | None = None
        self._opening: asyncio.Future[Sequence[Stream]] | None = None
        self._watch: asyncio.Task[None] | None = asyncio.create_task(self._wait_for_disconnect(receive))

    async def open(self, front: EngineFront, job: Job, options: RequestOptions) -> None:
        """Queue every prompt. Raises InvalidRequestError, EngineError, ClientGoneError."""
        prompts = [each.token_ids for each in job.prompts]
        adding = front.add_job(prompts, job.params, request_ids=job.request_ids, **options)
        self._opening = asyncio.ensure_future(adding)  # which may wait for the engine to start
        try:
            self._streams = await self._opening
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
        self.raise_if_stopped()

    def stop(self, error: Exception) -> None:
        """End opening or reading with an error, even if outputs are missing."""
        if self._stopped is None:
            self._stopped = error
        if self._opening is not None:
            self._opening.cancel()
        for stream in self._streams:
            stream.close()

    def raise_if_stopped(self) -> None:
        """Raise ClientGoneError if the client has disconnected, or the error of `stop`."""
        if self._stopped is not None:
            raise self._stopped

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield the position of a prompt and its cumulative output, until all are finished."""
        source = self._one() if len(self._streams) == 1 else self._merged()
        still_open = set(range(len(self._streams)))
        async for index, output in source:
            if index not in still_open:
                continue  # one object grows: its end may have been seen with an earlier notification
            self._timers[index].take(output)
            if output.finished:
                still_open.remove(index)
            yield index, output
        if still_open:
            self.raise_if_stopped()
            raise EngineError("a stream ended before its request")

    async def close(self, reason: str) -> None:
        """Abort unfinished requests, which count as ended for this reason.

        What they have generated is freed at once then: what is kept here of exceptions, and of tasks that
        end with one, refers to frames that refer to this, and only the garbage collector would find that.
        """
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._opening = self._stopped = None
        for stream in self._streams:
            stream.close()
        for timer in self._timers[: len(self._streams)]:  # refused prompts never became requests
            timer.end(reason)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientGoneError())

    async def _one(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        async for output in self._streams[0]:
            yield 0, output

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Read all streams, each in its own task; only the latest output of each is kept."""
        latest: dict[int, RequestOutput] = {}
        errors: list[Exception] = []
        has_news = asyncio.Event()

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for output in stream:
                    latest[index] = output
                    has_news.set()
            except Exception as error:
                errors.append(error)
            finally:
                has_news.set()

        tasks = [asyncio.create_task(pump(*entry)) for entry in enumerate(self._streams)]
        try:
            while latest or not all(task.done() for task in tasks):
                await has_news.wait()
                has_news.clear()
                changed = list(latest.items())
                latest.clear()
                for entry in changed:
                    yield entry
                if errors:
                    raise errors[0]
        finally:
            for task in tasks:
                task.cancel()
            errors.clear()


@asynccontextmanager
async def running(
    receive: Receive, timers: Sequence[RequestTimer], left_ms: float | None = None
) -> AsyncIterator[JobStreams]:
    """Hold a run; whatever happens, none of its requests stay in the engine.

    Raises APIError if it takes longer than `left_ms`. The engine ends late requests itself, but between two
    steps, and not while it loads; so this waits a little longer.
    """
    run = JobStreams(receive, timers)
    reason = "error"
    try:
        async with asyncio.timeout(None if left_ms is None else left_ms / 1e3 + _GRACE_S) as limit:
            yield run
    except TimeoutError:
        if not limit.expired():
            raise
        reason = "deadline"
        raise deadline_exceeded() from None
    except APIError as error:
        if error.status == 504:  # a stream tells of the first late prompt; the others are as late
            reason = "deadline"
        raise
    except (ClientGoneError, asyncio.CancelledError):
        reason = "abort"
        raise
    finally:
        await run.close(reason)
