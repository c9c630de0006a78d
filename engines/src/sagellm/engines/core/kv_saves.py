"""Saves what the prefix cache holds to a file, and loads it into another engine of the same model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from sagellm.core import BlockHeader, Clock, EngineError, InvalidInputError, KVIdentity, KVTierProtocol
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_copier import KVCopier, joined_runs, named_runs
from sagellm.engines.core.kv_memory import KVMemory
from sagellm.engines.core.save_folder import SaveFolder

_RECORD_BYTES = 1 << 14
"""More than a block's head and the rest of its last page take in a file."""

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
    """One save or load at a time, a part of it between two steps, so that requests go on.

    A save is the file of a tier: every block with its header and checksum. It gets its name when it is
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
            tier = self._open_tier(num_bytes, unfinished)
            try:
                for run in named_runs(runs, chosen, identity):
                    for part in self._copier.parts(run):
                        num_saved = self._copier.save(tier, part)
                        progress.num_done += len(part.headers)
                        progress.num_left_out += len(part.headers) - num_saved
                        yield
            except EngineError as error:
                raise EngineError(f"{error}; nothing of the save {progress.name!r} is kept") from error
            finally:
                tier.close()
            progress.phase = "writing"
            yield from _in_background(lambda: self._folder.finish(unfinished, progress.name))

    def _loading(self, progress: SaveProgress, tenant: str | None) -> _Job:
        identity = yield from self._identify()
        # The file ends with the last record, which had whole pages to itself.
        tier = self._open_tier((self._folder.size(progress.name) or 0) + _RECORD_BYTES, progress.name)
        try:
            headers = [header for header, _ in tier.stored()]
            _require_same(progress.name, headers, identity, tenant)
            progress.tenants = sorted({header.namespace.account for header in headers})
            progress.num_blocks = len(headers)
            progress.phase = "copying"
            num_loaded = 0
            for run in joined_runs(headers):
                for part in self._copier.parts(run):
                    num_cached, outcomes = self._copier.load(tier, part)
                    num_loaded += num_cached
                    progress.num_done += len(part.headers)
                    progress.num_corrupt += outcomes.count("corrupt")
                    progress.num_left_out = progress.num_done - num_loaded
                    yield
            progress.num_done = progress.num_blocks
            progress.num_left_out = progress.num_blocks - num_loaded
        finally:
            tier.close()

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


def _require_same(name: str, headers: Seq[BlockHeader], identity: KVIdentity, tenant: str | None) -> None:
    """Raise InvalidInputError if any block of a save is not this engine's, or not the tenant's."""
    if not headers:
        raise InvalidInputError(f"the save {name!r} has no block that can be read")
    wanted = {"dtype": identity.dtype, "layout": identity.layout, "model": identity.model_fingerprint}
    if tenant is not None:
        wanted["tenant"] = tenant
    for header in headers:
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
