"""What servers say of themselves while a load runs: KV in use, cache hits, and the work that was done."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from sagellm.lab.bench.contenders import Contender
    from sagellm.server.remote import AdminClient

_TICK_S = 0.25
_TIMEOUT_S = 10.0
_STEP_S = 300.0
"""Our engine answers between two steps; one of a large model on a slow CPU may take long."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A server at one moment. Shares are of its KV blocks; None is what it does not say."""

    live_share: float | None = None  # blocks of running requests
    held_share: float | None = None  # those, and blocks that hold reusable KV
    num_looked_up_tokens: int | None = None
    num_hit_tokens: int | None = None
    num_evicted_blocks: int | None = None
    work: Any = None  # WorkMetrics of our own engine


class ServerReader:
    """Reads a server now; called from one thread, a few times per second. This one says nothing."""

    def read(self) -> Reading:
        """Return what it says; an empty reading if it says nothing."""
        return Reading()

    def close(self) -> None:
        """Disconnect."""


class OwnReader(ServerReader):
    """Asks our own engine over its admin socket."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    def read(self) -> Reading:
        """Ask for the metrics of the engine's modules."""
        engine = self._client.metrics()
        pool, cache = engine.modules.get("kv_pool"), engine.modules.get("prefix_cache")
        total = 0 if pool is None else pool.total_blocks
        return Reading(
            live_share=engine.num_held_blocks / total if total else None,
            held_share=pool.num_used_blocks / total if pool is not None and total else None,
            num_looked_up_tokens=None if cache is None else cache.num_lookup_tokens,
            num_hit_tokens=None if cache is None else cache.num_hit_tokens,
            num_evicted_blocks=None if cache is None else cache.num_evicted_blocks,
            work=engine.modules.get("work"),
        )

    def close(self) -> None:
        """Close the socket."""
        self._client.close()


class PageReader(ServerReader):
    """Reads the Prometheus page of a server whose names end like vLLM's."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._url = f"{parts.scheme}://{parts.netloc}/metrics"

    def read(self) -> Reading:
        """Fetch the page; a server without one gives an empty reading."""
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
                values = page_values(answer.read().decode(errors="replace"))
            looked_up, hit = values.get("prefix_cache_queries_total"), values.get("prefix_cache_hits_total")
            return Reading(
                live_share=values.get("kv_cache_usage_perc"),
                num_looked_up_tokens=None if looked_up is None else int(looked_up),
                num_hit_tokens=None if hit is None else int(hit),
            )
        return Reading()


def page_values(page: str) -> dict[str, float]:
    """Read a Prometheus page: name behind the first colon → value, summed over labels."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("#") or ":" not in line:
            continue
        name, _, rest = line.partition("{")
        with suppress(ValueError, IndexError):
            value = float(rest.rpartition("}")[2].split()[0] if rest else line.split()[1])
            key = name.split()[0].partition(":")[2]
            values[key] = values.get(key, 0.0) + value
    return values


def reader_of(contender: Contender) -> ServerReader:
    """Choose how a server is read."""
    if contender.admin_socket is None:
        return PageReader(contender.url)
    from sagellm.server.remote import AdminClient

    return OwnReader(AdminClient.connect(contender.admin_socket, timeout_s=_STEP_S))


class ServerWatch:
    """Reads a server again and again for the duration of the `async with` block."""

    def __init__(self, reader: ServerReader) -> None:
        self._reader = reader
        self.readings: list[Reading] = []

    async def __aenter__(self) -> ServerWatch:
        self.readings.append(await asyncio.to_thread(self._reader.read))
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticker
        if error is None:
            self.readings.append(await asyncio.to_thread(self._reader.read))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            # Shielded: a read that is cut off would leave half an answer on the socket.
            self.readings.append(await asyncio.shield(asyncio.to_thread(self._reader.read)))


@dataclass(frozen=True, kw_only=True)
class KVUse:
    """KV memory over a run, as shares of all blocks.

    Under pressure: utilisation = blocks that hold live or reusable KV ÷ total blocks, mean over the readings
    from the first one on in which the server had evicted something. None: nothing to say.
    """

    live_share: float | None
    held_share: float | None
    held_share_under_pressure: float | None
    prefix_hit_rate: float | None  # tokens found ÷ tokens looked up, by the server's own count


def kv_use(readings: Sequence[Reading]) -> KVUse:
    """Summarise the readings of a run; the first and the last one stand at its ends."""
    first, last = readings[0], readings[-1]
    pressed = [one.held_share for one in readings[1:] if one.num_evicted_blocks]
    looked_up = _difference(first.num_looked_up_tokens, last.num_looked_up_tokens)
    hit = _difference(first.num_hit_tokens, last.num_hit_tokens)
    return KVUse(
        live_share=_mean([one.live_share for one in readings[1:]]),
        held_share=_mean([one.held_share for one in readings[1:]]),
        held_share_under_pressure=_mean(pressed),
        prefix_hit_rate=hit / looked_up if looked_up and hit is not None else None,
    )


def _difference(earlier: int | None, later: int | None) -> int | None:
    return None if earlier is None or later is None else later - earlier


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
