"""Which requests may be what kills the core, so that none can do so for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes

from sagellm.core import DeadlyRequestError, RequestId, get_logger
from sagellm.engines.logging import fields
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.server.remote.frames import packed

logger = get_logger(__name__)

REFUSED_FOR_S = 600.0
_MAX_SUSPECTS = 4096
_MAX_DEATHS = 2


@dataclass(slots=True)
class _Suspect:
    num_deaths: int
    forgotten_s: float


class Suspects:
    """Counts the deaths of the core that a request has seen, also when a client sends it again.

    A request that was live in one death is a suspect. Suspects start one job at a time: the next starts when
    all of the last have their first token or have ended. Other requests run beside them. If the core dies
    meanwhile, that job is the likely cause: the other suspects that run are not blamed. What was live in
    two deaths is refused. A suspect that is answered is cleared; all are forgotten ten minutes after their
    last death.

    A request is known by a hash, with a key of this process, of its tenant, namespace, tokens and parameters.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._key = token_bytes(32)
        self._suspects: dict[bytes, _Suspect] = {}  # the latest last
        self._live: dict[RequestId, bytes] = {}  # suspects that were sent to the core
        self._beginning: set[RequestId] = set()  # of one job: those without a token
        self._has_begun = asyncio.Event()
        self.num_ends = 0
        """How often all turns ended at once, which also ends those that `wait_for_turn` gave before."""

    async def wait_for_turn(self, requests: Sequence[QueuedRequest]) -> int:
        """Let a job with suspects begin when no other one does, and return `num_ends`; `leave` ends its turn.

        Raises DeadlyRequestError for a request that was live in two deaths.
        """
        suspects = self._known(requests)
        while suspects and self._beginning:
            self._has_begun.clear()
            await self._has_begun.wait()
            suspects = self._known(requests)
        self._live.update(suspects)
        self._beginning.update(suspects)
        return self.num_ends

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Record which requests have their first token, and which are answered."""
        if not self._live:
            return
        for output in outputs:
            self._begin(output.request_id)
            if output.finished:
                mark = self._live.get(output.request_id)
                if mark is not None and all(each.error is None for each in output.outputs):
                    self._suspects.pop(mark, None)
                self.leave(output.request_id)

    def leave(self, request_id: RequestId) -> None:
        """Record that a request has ended, or was not sent after all."""
        self._begin(request_id)
        self._live.pop(request_id, None)

    def blame(self, requests: Sequence[QueuedRequest]) -> None:
        """Count a death of the core for the requests that were live."""
        begun = self._live.keys() - self._beginning if self._beginning else set()
        now_s = self._now_s()
        for request, mark in zip(requests, self._marks(requests), strict=True):
            if request.request_id in begun:
                continue
            known = self._suspects.pop(mark, None)
            num_deaths = 1 if known is None else known.num_deaths + 1
            self._suspects[mark] = _Suspect(num_deaths, now_s + REFUSED_FOR_S)
            if num_deaths >= _MAX_DEATHS:
                told = "%d processes ended while they had request %s"
                shown = fields(request_id=request.request_id)
                logger.warning(told, num_deaths, request.request_id, extra=shown)
        for mark in list(self._suspects)[:-_MAX_SUSPECTS]:
            del self._suspects[mark]
        self.end_turns()

    def end_turns(self) -> None:
        """End all turns, because the core and what it ran are gone, and wake all that wait for one."""
        self.num_ends += 1
        self._live.clear()
        self._beginning.clear()
        self._has_begun.set()

    def _begin(self, request_id: RequestId) -> None:
        self._beginning.discard(request_id)
        if not self._beginning:
            self._has_begun.set()

    def _known(self, requests: Sequence[QueuedRequest]) -> dict[RequestId, bytes]:
        """Return the suspects among requests. Raises DeadlyRequestError."""
        now_s = self._now_s()
        self._suspects = {mark: each for mark, each in self._suspects.items() if each.forgotten_s > now_s}
        if not self._suspects:
            return {}
        found = {}
        for request, mark in zip(requests, self._marks(requests), strict=True):
            if (known := self._suspects.get(mark)) is None:
                continue
            if known.num_deaths >= _MAX_DEATHS:
                raise DeadlyRequestError(
                    f"the engine's process ended {known.num_deaths} times while it had this request, which "
                    f"is refused for {REFUSED_FOR_S / 60:g} minutes"
                )
            found[request.request_id] = mark
        return found

    def _marks(self, requests: Iterable[QueuedRequest]) -> Iterator[bytes]:
        """Yield the hash of each request; parameters, which neighbours share, are hashed once."""
        params, hashed = None, b""
        for request in requests:
            if request.params is not params:
                params, hashed = request.params, self._hash(request.params)
            asked = request.request
            yield self._hash((asked.tenant.name, asked.namespace, asked.token_ids, hashed))

    def _hash(self, value: object) -> bytes:
        return blake2b(packed(value), key=self._key, digest_size=16).digest()
