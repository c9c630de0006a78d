"""Saves the prefix cache to a file, and loads it into an engine of the same model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from sagellm.core import (
    BlockHeader,
    Clock,
    EngineError,
    InvalidInputError,
    KVIdentity,
    KVTierProtocol,
    Ticket,
    TierOutcome,
)
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_copier import HEADERS_AT_ONCE, Copy, KVCopier, joined_runs, named_runs
from sagellm.engines.core.kv_memory import KVMemory
from sagellm.engines.core.save_folder import SaveFolder

_RECORD_BYTES = 1 << 14
"""Upper bound of a block's head and the padding after its data in a file."""

_MAX_BUFFERED_BYTES = 16 << 20
"""KV in buffers that is being written or read."""

_ABANDONED_AFTER_NS = 10_000_000_000

_T = TypeVar("_T")
_Job: TypeAlias = Generator[None, None, None]
SavePhase: TypeAlias = Literal["reading the model", "copying", "writing", "done"]


@dataclass(kw_only=True)
class SaveProgress:
    """Progress of a save or load; blocks left out were evicted meanwhile, are damaged or found no room."""

    name: str
    number: int = 0  # counts this engine's saves and loads
    phase: SavePhase = "reading the model"
    num_blocks: int = 0
    num_done: int = 0
    num_left_out: int = 0
    num_corrupt: int = 0
    block_bytes: int = 0
    tenants: list[str] = field(default_factory=list)


class KVSaves:
    """Runs one save or load at a time, about 1 ms of it between two steps, so that requests continue.

    Files are opened, searched, read and written on other threads. A save is a tier's file: blocks with their
    headers, sealed with the key of `kv.store_key`. It gets its name when it is complete. Loaded blocks go to
    free blocks, evict nothing, and are cached as if computed.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        memory: KVMemory,
        folder: SaveFolder,
        open_tier: Callable[[int, str], KVTierProtocol],
        fingerprint: Callable[[], str],
        *,
        clock: Clock,
    ) -> None:
        self._kv, self._memory, self._folder, self._open_tier = kv, memory, folder, open_tier
        self._copier = KVCopier(kv, memory)
        self._fingerprint = fingerprint
        self._identity = memory.identity
        self._clock, self._went_on_ns = clock, 0
        self._job: _Job | None = None
        self._progress = SaveProgress(name="")

    def saves(self) -> list[dict[str, object]]:
        """Return what can be loaded: names and bytes."""
        return [{"name": name, "num_bytes": self._folder.size(name) or 0} for name in self._folder.names()]

    def delete(self, name: str) -> dict[str, object]:
        """Delete a save and return its name and bytes.

        Raises InvalidInputError for a name that does not exist, or that is being saved or loaded.
        """
        if self._is_under_way and self._progress.name == name:
            raise InvalidInputError(f"{name!r} is being saved or loaded; wait until that is done")
        return {"name": name, "num_bytes": self._folder.remove(name)}

    def save(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start to save the cached blocks of one tenant or of all; call `go_on` until it is done.

        Raises InvalidInputError for an invalid name, and while another save or load runs; one without a
        `go_on` for 10 s is abandoned.
        """
        self._folder.check_name(name)
        return self._begin(name, lambda progress: self._saving(progress, tenant))

    def load(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start to load a save; call `go_on` until it is done.

        Raises InvalidInputError for an unknown name, and while another save or load runs.
        """
        self._folder.find(name)
        return self._begin(name, lambda progress: self._loading(progress, tenant))

    def go_on(self, number: int | None = None) -> SaveProgress:
        """Run the next part of the current save or load, which must have this number if one is given.

        Raises InvalidInputError if none is running, nothing is cached, there is no room, or a save is of
        another model, dtype, layout or tenant; EngineError if the device is full or fails.
        """
        if self._job is None or number not in (None, self._progress.number):
            raise InvalidInputError("no save or load is running; another one may have replaced it")
        self._went_on_ns = self._clock.now_ns()
        try:
            next(self._job)
        except StopIteration:
            self._job = None
            self._progress.phase = "done"
        except BaseException:
            self._job = None
            raise
        return self._progress

    def close(self) -> None:
        """Abandon a running save or load."""
        if self._job is not None:
            self._job.close()
            self._job = None

    @property
    def _is_under_way(self) -> bool:
        """Whether a save or load is still being advanced."""
        return self._job is not None and self._clock.now_ns() - self._went_on_ns < _ABANDONED_AFTER_NS

    def _begin(self, name: str, job: Callable[[SaveProgress], _Job]) -> SaveProgress:
        if self._is_under_way:
            raise InvalidInputError(
                f"{self._progress.name!r} is being saved or loaded; wait until that is done"
            )
        self.close()
        self._went_on_ns = self._clock.now_ns()
        self._progress = SaveProgress(
            name=name, number=self._progress.number + 1, block_bytes=self._memory.layout.block_bytes
        )
        self._job = job(self._progress)
        return self._progress

    def _saving(self, progress: SaveProgress, tenant: str | None) -> _Job:
        identity = yield from self._identify()
        runs = self._kv.cache.runs()
        chosen = [n for n, run in enumerate(runs) if tenant in (None, run.namespace.account)]
        if not chosen:
            raise InvalidInputError("nothing is cached" + (f" of tenant {tenant!r}" if tenant else ""))
        progress.tenants = sorted({runs[n].namespace.account for n in chosen})
        progress.num_blocks = sum(len(runs[n].block_ids) for n in chosen)
        progress.phase = "copying"
        num_bytes = progress.num_blocks * (progress.block_bytes + _RECORD_BYTES)
        with self._folder.new(progress.name, num_bytes) as unfinished:
            tier = yield from _in_background(lambda: self._open_tier(num_bytes, unfinished))
            with closing(tier):
                copies = _Copies(tier, self._ended_save)
                for run in named_runs(runs, chosen, identity):
                    if run is None:
                        yield
                        continue
                    for part in self._copier.parts(run):
                        yield from copies.add(progress, self._copier.begin_save(tier, part))
                yield from copies.finish(progress)
            progress.phase = "writing"
            yield from _in_background(lambda: self._folder.finish(unfinished, progress.name))

    def _ended_save(self, progress: SaveProgress, copy: Copy, outcomes: Seq[TierOutcome]) -> None:
        if any(outcome != "done" for outcome in outcomes):
            raise EngineError(
                f"the save {progress.name!r} is not kept: its blocks could not be written; the device is "
                "full or fails"
            )
        progress.num_done += len(copy.part.headers)
        progress.num_left_out += len(copy.part.headers) - len(copy.headers)

    def _loading(self, progress: SaveProgress, tenant: str | None) -> _Job:
        identity = yield from self._identify()
        # The file ends with the last record, without the padding that its pages had.
        num_bytes = (self._folder.size(progress.name) or 0) + _RECORD_BYTES
        tier = yield from _in_background(lambda: self._open_tier(num_bytes, progress.name))
        with closing(tier):
            headers = [header for header, _ in tier.stored()]
            if not headers:
                raise InvalidInputError(_no_block(progress.name, tier))
            progress.tenants = sorted((yield from _require_same(progress.name, headers, identity, tenant)))
            progress.num_blocks = len(headers)
            progress.phase = "copying"
            copies = _Copies(tier, self._ended_load)
            for run in joined_runs(headers):
                if run is None:
                    yield
                    continue
                for part in self._copier.parts(run):
                    yield from copies.add(progress, self._copier.begin_load(tier, part))
            yield from copies.finish(progress)
            progress.num_left_out += progress.num_blocks - progress.num_done
            progress.num_done = progress.num_blocks

    def _ended_load(self, progress: SaveProgress, copy: Copy, outcomes: Seq[TierOutcome]) -> None:
        num_loaded = self._copier.end_load(copy, outcomes)
        progress.num_done += len(copy.part.headers)
        progress.num_left_out += len(copy.part.headers) - num_loaded
        progress.num_corrupt += list(outcomes).count("corrupt")

    def _identify(self) -> Generator[None, None, KVIdentity]:
        """Return what identifies this model's KV; reads the model's weights the first time."""
        if not self._identity.model_fingerprint:
            fingerprint = yield from _in_background(self._fingerprint)
            self._identity = self._identity._replace(model_fingerprint=fingerprint)
        return self._identity


def _in_background(work: Callable[[], _T]) -> Generator[None, None, _T]:
    """Run work on its own thread, yielding until it is done; if abandoned, wait for it."""
    with ThreadPoolExecutor(1, thread_name_prefix="kv-saves") as worker:
        future: Future[_T] = worker.submit(work)
        while not future.done():
            yield
        return future.result()


class _Copies:
    """Parts being copied to or from a tier, bounded in bytes; they end in order, one per step."""

    def __init__(
        self,
        tier: KVTierProtocol,
        ended: Callable[[SaveProgress, Copy, Seq[TierOutcome]], None],
    ) -> None:
        self._tier, self._ended = tier, ended
        self._under_way: deque[Copy] = deque()
        self._outcomes: dict[Ticket, Seq[TierOutcome]] = {}

    def add(self, progress: SaveProgress, copy: Copy) -> _Job:
        """Add a part and yield until there is room for another."""
        self._under_way.append(copy)
        yield
        while sum(each.num_bytes for each in self._under_way) > _MAX_BUFFERED_BYTES:
            yield from self._end_first(progress)

    def finish(self, progress: SaveProgress) -> _Job:
        """Yield until all have ended."""
        while self._under_way:
            yield from self._end_first(progress)

    def _end_first(self, progress: SaveProgress) -> _Job:
        self._outcomes.update((result.ticket, result.outcomes) for result in self._tier.poll())
        outcomes = self._outcomes.pop(self._under_way[0].ticket, None)
        if outcomes is not None:
            self._ended(progress, self._under_way.popleft(), outcomes)
        yield


def _no_block(name: str, tier: KVTierProtocol) -> str:
    """Return the error for a save without a readable block."""
    if num_foreign := tier.metrics().num_foreign:
        return (
            f"the save {name!r} is sealed with another key, or of an older version ({num_foreign} records); "
            "set kv.store_key to the key that it was saved with, or save again"
        )
    return f"the save {name!r} has no readable block"


def _require_same(
    name: str, headers: Seq[BlockHeader], identity: KVIdentity, tenant: str | None
) -> Generator[None, None, set[str]]:
    """Return the tenants of a save, checking some headers per step.

    Raises InvalidInputError if a block does not fit this engine, or is not the tenant's.
    """
    wanted = {"dtype": identity.dtype, "layout": identity.layout, "model": identity.model_fingerprint}
    if tenant is not None:
        wanted["tenant"] = tenant
    tenants: set[str] = set()
    for number, header in enumerate(headers):
        found = {
            "dtype": header.dtype,
            "layout": header.layout,
            "model": header.model_fingerprint,
            "tenant": header.namespace.account,
        }
        for what, value in wanted.items():
            if found[what] != value:
                raise InvalidInputError(
                    f"the save {name!r} is of another {what}: {found[what]!r} instead of {value!r}; "
                    "nothing is loaded"
                )
        tenants.add(found["tenant"])
        if number % HEADERS_AT_ONCE == 0:
            yield
    return tenants
