"""Saves what the prefix cache holds to a file, and loads it into another engine of the same model."""

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
"""More than a block's head and the rest of its last page take in a file."""

_UNDER_WAY_BYTES = 16 << 20
"""Of KV in buffers, on its way to or from a file."""

_GIVEN_UP_AFTER_NS = 10_000_000_000

_T = TypeVar("_T")
_Job: TypeAlias = Generator[None, None, None]
SavePhase: TypeAlias = Literal["reading the model", "copying", "writing", "done"]


@dataclass(kw_only=True)
class SaveProgress:
    """How far a save or load is. What was left out is gone meanwhile, damaged, or found no room."""

    name: str
    number: int = 0  # of all that this engine began
    phase: SavePhase = "reading the model"
    num_blocks: int = 0
    num_done: int = 0
    num_left_out: int = 0
    num_corrupt: int = 0
    block_bytes: int = 0
    tenants: list[str] = field(default_factory=list)


class KVSaves:
    """One save or load at a time, about a millisecond of it between two steps, so that requests go on.

    Files are opened, searched, read and written on other threads. A save is the file of a tier: every block
    with its header, both sealed by the key of `kv.store_key`. It gets its name when it is
    whole. What is loaded goes to free blocks, evicts nothing, and is cached as if it had been computed.
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
            raise InvalidInputError(
                f"{name!r} is being saved or loaded at this moment; wait until that is done"
            )
        return {"name": name, "num_bytes": self._folder.remove(name)}

    def save(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Begin to save what is cached, of one tenant or of all; `go_on` until it is done.

        Raises InvalidInputError for what is not a name, and while another one goes on; one with which nobody
        went on for 10 s is given up.
        """
        self._folder.check_name(name)
        return self._begin(name, lambda progress: self._saving(progress, tenant))

    def load(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Begin to load a save; `go_on` until it is done.

        Raises InvalidInputError for a name that is not there, and while another one goes on.
        """
        self._folder.find(name)
        return self._begin(name, lambda progress: self._loading(progress, tenant))

    def go_on(self, number: int | None = None) -> SaveProgress:
        """Do the next part, of what has this number if one is given.

        Raises InvalidInputError if nothing is under way, nothing is cached, there is no room, or a save is of
        another model, dtype, layout or tenant; EngineError if the device is full or fails.
        """
        if self._job is None or number not in (None, self._progress.number):
            raise InvalidInputError("no save or load is under way; another one may have taken its place")
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
        """Give up what is under way."""
        if self._job is not None:
            self._job.close()
            self._job = None

    @property
    def _is_under_way(self) -> bool:
        """Whether a save or load is still being advanced."""
        return self._job is not None and self._clock.now_ns() - self._went_on_ns < _GIVEN_UP_AFTER_NS

    def _begin(self, name: str, job: Callable[[SaveProgress], _Job]) -> SaveProgress:
        if self._is_under_way:
            raise InvalidInputError(
                f"{self._progress.name!r} is being saved or loaded at this moment; wait until that is done"
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
                "blocks could not be written: the device is full, or fails; "
                f"nothing of the save {progress.name!r} is kept"
            )
        progress.num_done += len(copy.part.headers)
        progress.num_left_out += len(copy.part.headers) - len(copy.headers)

    def _loading(self, progress: SaveProgress, tenant: str | None) -> _Job:
        identity = yield from self._identify()
        # The file ends with the last record, which had whole pages to itself.
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
        """Read the model, once, for what tells its KV from another's."""
        if not self._identity.model_fingerprint:
            fingerprint = yield from _in_background(self._fingerprint)
            self._identity = self._identity._replace(model_fingerprint=fingerprint)
        return self._identity


def _in_background(work: Callable[[], _T]) -> Generator[None, None, _T]:
    """Do work in a thread of its own while others run; waits for it if it is given up."""
    with ThreadPoolExecutor(1, thread_name_prefix="kv-saves") as worker:
        future: Future[_T] = worker.submit(work)
        while not future.done():
            yield
        return future.result()


class _Copies:
    """Parts on their way to or from a tier, so many bytes at a time; they end in their order, one a step."""

    def __init__(
        self,
        tier: KVTierProtocol,
        ended: Callable[[SaveProgress, Copy, Seq[TierOutcome]], None],
    ) -> None:
        self._tier, self._ended = tier, ended
        self._under_way: deque[Copy] = deque()
        self._outcomes: dict[Ticket, Seq[TierOutcome]] = {}

    def add(self, progress: SaveProgress, copy: Copy) -> _Job:
        """Have one more; go on when there is room for the next one."""
        self._under_way.append(copy)
        yield
        while sum(each.num_bytes for each in self._under_way) > _UNDER_WAY_BYTES:
            yield from self._end_first(progress)

    def finish(self, progress: SaveProgress) -> _Job:
        """Go on until all have ended."""
        while self._under_way:
            yield from self._end_first(progress)

    def _end_first(self, progress: SaveProgress) -> _Job:
        self._outcomes.update((result.ticket, result.outcomes) for result in self._tier.poll())
        outcomes = self._outcomes.pop(self._under_way[0].ticket, None)
        if outcomes is not None:
            self._ended(progress, self._under_way.popleft(), outcomes)
        yield


def _no_block(name: str, tier: KVTierProtocol) -> str:
    """Say why nothing of a save can be read."""
    if num_foreign := tier.metrics().num_foreign:
        return (
            f"the save {name!r} is sealed with another key, or of an older version ({num_foreign} records); "
            "name the key that it was saved with in kv.store_key, or save it again"
        )
    return f"the save {name!r} has no block that can be read"


def _require_same(
    name: str, headers: Seq[BlockHeader], identity: KVIdentity, tenant: str | None
) -> Generator[None, None, set[str]]:
    """Return the tenants of a save, some headers a step.

    Raises InvalidInputError if any block of it is not this engine's, or not the tenant's.
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
                    f"the save {name!r} is of another {what}: {found[what]!r}, and {value!r} is wanted; "
                    "nothing of it is loaded"
                )
        tenants.add(found["tenant"])
        if number % HEADERS_AT_ONCE == 0:
            yield
    return tenants
