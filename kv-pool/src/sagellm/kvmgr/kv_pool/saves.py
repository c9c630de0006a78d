"""Saves the prefix cache to a file, and loads it into an engine of the same model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias, TypeVar

from sagellm.core.errors import EngineError, InvalidInputError
from sagellm.core.ids import SequenceId
from sagellm.core.kv_block import ROOT_HASH, BlockHeader, KVIdentity
from sagellm.core.protocols.kv_offload import KVMemory
from sagellm.core.protocols.kv_saves import KVSavesProtocol, KVSpace, SaveProgress, SaveStore
from sagellm.core.protocols.kv_tier import KVTierProtocol, Ticket, TierAction, TierOutcome, TierRequest
from sagellm.core.protocols.prefix_cache import CachedRun
from sagellm.core.runtime import Runtime
from sagellm.core.tokens import TokenIds
from sagellm.kvmgr.kv_pool.multi_granular import Extent, KVPoolConfig, MultiGranularKVPool
from sagellm.kvmgr.kv_pool.save_folder import SaveFolder

_RECORD_BYTES = 1 << 14
"""Upper bound of the size of a block's head and the padding after its data in a file."""

_MAX_BUFFERED_BYTES = 16 << 20
"""KV in buffers that is being written or read."""

_ABANDONED_AFTER_NS = 10_000_000_000

_T = TypeVar("_T")
_Job: TypeAlias = Generator[None, None, None]

_PART_BYTES, _PART_BLOCKS = 4 << 20, 32
"""KV copied between two steps, at least one block: about 1 ms."""

_HEADERS_AT_ONCE = 128
"""Headers made or compared between two steps: about 1 ms."""

_LOADING = SequenceId("cache load")


class KVSaves(KVSavesProtocol):
    """Runs one save or load at a time, about 1 ms of it between two steps, so that requests continue.

    Files are opened, searched, read and written on other threads. A save is a tier's file: blocks with their
    headers, sealed with the key of `kv.store_key`. It gets its name when it is complete. Loaded blocks go to
    free blocks, evict nothing, and are cached as if computed.
    """

    def __init__(
        self,
        memory: KVMemory,
        space: KVSpace,
        *,
        store: SaveStore,
        fingerprint: Callable[[], str],
        runtime: Runtime,
    ) -> None:
        self._cache, self._block_bytes = space.cache, memory.block_bytes
        self._copier = _Copier(memory, space)
        self._folder = SaveFolder(store.folder, runtime.files, store.max_bytes)
        self._open_tier = store.open_tier
        self._fingerprint = fingerprint
        self._identity = memory.identity
        self._clock, self._went_on_ns = runtime.clock, 0
        self._job: _Job | None = None
        self._progress = SaveProgress(name="")

    def saves(self) -> list[dict[str, Any]]:
        """List the folder."""
        return [{"name": name, "num_bytes": self._folder.size(name) or 0} for name in self._folder.names()]

    def delete(self, name: str) -> dict[str, Any]:
        """Delete the file of a save."""
        if self._is_under_way and self._progress.name == name:
            raise InvalidInputError(f"{name!r} is being saved or loaded; wait until that is done")
        return {"name": name, "num_bytes": self._folder.remove(name)}

    def save(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start a job that copies what is cached now."""
        self._folder.check_name(name)
        return self._begin(name, lambda progress: self._saving(progress, tenant))

    def load(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start a job that reads the file."""
        self._folder.find(name)
        return self._begin(name, lambda progress: self._loading(progress, tenant))

    def go_on(self, number: int | None = None) -> SaveProgress:
        """Run the job for about 1 ms."""
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
        number = self._progress.number + 1
        self._progress = SaveProgress(name=name, number=number, block_bytes=self._block_bytes)
        self._job = job(self._progress)
        return self._progress

    def _saving(self, progress: SaveProgress, tenant: str | None) -> _Job:
        identity = yield from self._identify()
        runs = self._cache.runs()
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
                copies = self._copier.copies(tier, self._ended_save)
                for run in _named_runs(runs, chosen, identity):
                    if run is None:
                        yield
                        continue
                    for part in self._copier.parts(run):
                        self._copier.begin_save(copies, part)
                        yield from copies.make_room(progress)
                yield from copies.finish(progress)
            progress.phase = "writing"
            yield from _in_background(lambda: self._folder.finish(unfinished, progress.name))

    def _ended_save(self, progress: SaveProgress, copy: _Copy, outcomes: Seq[TierOutcome]) -> None:
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
            copies = self._copier.copies(tier, self._ended_load)
            for run in joined_runs(headers):
                if run is None:
                    yield
                    continue
                for part in self._copier.parts(run):
                    self._copier.begin_load(copies, part)
                    yield from copies.make_room(progress)
            yield from copies.finish(progress)
            progress.num_left_out += progress.num_blocks - progress.num_done
            progress.num_done = progress.num_blocks

    def _ended_load(self, progress: SaveProgress, copy: _Copy, outcomes: Seq[TierOutcome]) -> None:
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
    """Parts being copied to or from a tier, staged in host memory; they end in order, one per step.

    A whole part is one extent of the memory, a shorter one an extent for each block. There is room for
    `_MAX_BUFFERED_BYTES` and one more part.
    """

    def __init__(self, tier: KVTierProtocol, ended: _Ended, memory: KVMemory, part_blocks: int) -> None:
        self._tier, self._ended = tier, ended
        self._block_size, self._block_bytes = memory.block_size, memory.block_bytes
        self._part_tokens = part_blocks * memory.block_size
        num_parts = _MAX_BUFFERED_BYTES // (part_blocks * memory.block_bytes) + 1
        self._pool = MultiGranularKVPool(
            KVPoolConfig(
                total_tokens=num_parts * self._part_tokens,
                sequence_tokens=self._part_tokens,
                page_tokens=memory.block_size,
            )
        )
        self._data = memoryview(
            mmap(-1, num_parts * part_blocks * memory.block_bytes)
        )  # zeroed as it is used
        self._under_way: deque[_Copy] = deque()
        self._outcomes: dict[Ticket, Seq[TierOutcome]] = {}

    def stage(self, num_blocks: int) -> _Staged:
        """Return memory for the blocks of one part, or of a piece of it, for which `make_room` made room."""
        extents = self._pool.allocate(num_blocks * self._block_size) if num_blocks else []
        size = self._block_bytes
        buffers = []
        for granularity, start in extents:
            first = start // self._block_size * size
            num_bytes = self._pool.config.size_of(granularity) // self._block_size * size
            buffers += [self._data[at : at + size] for at in range(first, first + num_bytes, size)]
        return _Staged(extents, buffers)

    def begin(self, action: TierAction, part: _NamedRun, headers: Seq[BlockHeader], staged: _Staged) -> None:
        """Put staged blocks of a part into the tier, or get them from it."""
        requests = [TierRequest(action, *each) for each in zip(headers, staged.buffers, strict=True)]
        self._under_way.append(_Copy(part, headers, staged, self._tier.submit(requests)))

    def make_room(self, progress: SaveProgress) -> _Job:
        """Yield at least once, and until there is room for another part."""
        yield
        while self._pool.get_free_tokens() < self._part_tokens:
            yield from self._end_first(progress)

    def finish(self, progress: SaveProgress) -> _Job:
        """Yield until all have ended."""
        while self._under_way:
            yield from self._end_first(progress)

    def _end_first(self, progress: SaveProgress) -> _Job:
        self._outcomes.update((result.ticket, result.outcomes) for result in self._tier.poll())
        outcomes = self._outcomes.pop(self._under_way[0].ticket, None)
        if outcomes is not None:
            copy = self._under_way.popleft()
            self._ended(progress, copy, outcomes)
            self._pool.free(copy.staged.extents)
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
        if number % _HEADERS_AT_ONCE == 0:
            yield
    return tenants


class _NamedRun(NamedTuple):
    """Consecutive blocks: the tokens from the prompt's first to their last, and their headers."""

    path: TokenIds
    headers: list[BlockHeader]


def _named_runs(runs: Seq[CachedRun], chosen: Seq[int], identity: KVIdentity) -> Iterator[_NamedRun | None]:
    """Yield the chosen cached runs with their headers, and None after each `_HEADERS_AT_ONCE`.

    The parents of a chosen run must be chosen too.
    """
    hashes: dict[int | None, bytes] = {None: ROOT_HASH}
    for number in chosen:
        run = runs[number]
        size = len(run.token_ids) // len(run.block_ids)
        headers: list[BlockHeader] = []
        parent_hash = hashes[run.parent]
        for start in range(0, len(run.token_ids), size):
            tokens = run.token_ids[start : start + size]
            headers.append(BlockHeader.of(parent_hash, tokens, run.namespace, identity))
            parent_hash = headers[-1].hash
            if len(headers) % _HEADERS_AT_ONCE == 0:
                yield None
        hashes[number] = parent_hash
        yield _NamedRun(_path_of(runs, number), headers)


def joined_runs(headers: Seq[BlockHeader]) -> Iterator[_NamedRun | None]:
    """Yield the runs that a tier's headers form, and None after each `_HEADERS_AT_ONCE`; parents come first.

    O(tokens of all runs' paths).
    """
    parents: set[bytes] = set()
    before: BlockHeader | None = None
    for number, header in enumerate(headers):
        if before is not None and header.parent_hash != before.hash:
            parents.add(header.parent_hash)
        before = header
        if number % _HEADERS_AT_ONCE == 0:
            yield None
    paths = {ROOT_HASH: TokenIds(b"")}
    run: list[BlockHeader] = []
    for number, header in enumerate(headers):
        if run and header.parent_hash != run[-1].hash:
            yield from _finished(run, paths, parents)
            run = []
        run.append(header)
        if number % _HEADERS_AT_ONCE == 0:
            yield None
    yield from _finished(run, paths, parents)


class _Staged(NamedTuple):
    """Staging memory: extents of a sequence's contiguous blocks, and a buffer for each block."""

    extents: list[Extent]
    buffers: list[memoryview]


class _Copy(NamedTuple):
    """Blocks of a part that are being copied between staging memory and a tier."""

    part: _NamedRun
    headers: Seq[BlockHeader]  # of the blocks that are copied
    staged: _Staged
    ticket: Ticket


_Ended: TypeAlias = Callable[[SaveProgress, _Copy, Seq[TierOutcome]], None]


class _Copier:
    """Copies between an engine's prefix cache and a tier; every call takes about 1 ms."""

    def __init__(self, memory: KVMemory, space: KVSpace) -> None:
        self._space, self._cache, self._access = space, space.cache, memory.access
        self._memory, self._block_size = memory, memory.block_size

    @property
    def _part_blocks(self) -> int:
        return min(_PART_BLOCKS, max(1, _PART_BYTES // self._memory.block_bytes))

    def copies(self, tier: KVTierProtocol, ended: _Ended) -> _Copies:
        """Return what copies parts to or from a tier."""
        return _Copies(tier, ended, self._memory, self._part_blocks)

    def parts(self, run: _NamedRun) -> Iterator[_NamedRun]:
        """Split a run into parts that can be copied between two steps."""
        num_blocks, first = self._part_blocks, self._first(run)
        for start in range(0, len(run.headers), num_blocks):
            headers = run.headers[start : start + num_blocks]
            yield _NamedRun(run.path[: (first + start + len(headers)) * self._block_size], headers)

    def begin_save(self, copies: _Copies, part: _NamedRun) -> None:
        """Start to store those blocks of a part that are still cached."""
        match = self._cache.match_prefix(part.path, part.headers[0].namespace)
        block_ids = match.block_ids[self._first(part) :]
        staged = copies.stage(len(block_ids))
        self._access.read_blocks(block_ids, staged.buffers)
        copies.begin("put", part, part.headers[: len(block_ids)], staged)

    def begin_load(self, copies: _Copies, part: _NamedRun) -> None:
        """Start to read those blocks of a part that are not cached yet."""
        headers = part.headers[self._num_known(part) :]
        copies.begin("get", part, headers, copies.stage(len(headers)))

    def end_load(self, copy: _Copy, outcomes: Seq[TierOutcome]) -> int:
        """Cache the blocks that were read, and return how many of the part's blocks are then cached.

        Blocks are left out if their parents are not cached, no block is free, or one before them failed.
        """
        part, cache, namespace = copy.part, self._cache, copy.part.headers[0].namespace
        num_good = next((n for n, each in enumerate(outcomes) if each != "done"), len(outcomes))
        num_cached = len(cache.match_prefix(part.path, namespace).block_ids)
        skipped = num_cached - self._first(part) - (len(part.headers) - len(copy.headers))
        if 0 <= skipped < num_good:  # else there is a gap, or requests have cached them meanwhile
            with ExitStack() as giving_back:
                block_ids = self._space.take_free(num_good - skipped, _LOADING)
                giving_back.callback(self._space.give_back, block_ids)
                if not block_ids:
                    return self._num_known(part)
                match = cache.lock(cache.match_prefix(part.path[: num_cached * self._block_size], namespace))
                giving_back.callback(cache.unlock, match)
                self._access.write_blocks(block_ids, copy.staged.buffers[skipped : skipped + len(block_ids)])
                self._space.adopt(part.path, match, block_ids, evicts=False)
        return self._num_known(part)

    def _num_known(self, part: _NamedRun) -> int:
        """Return how many blocks of a part are cached, from its first one."""
        match = self._cache.match_prefix(part.path, part.headers[0].namespace)
        return max(0, len(match.block_ids) - self._first(part))

    def _first(self, run: _NamedRun) -> int:
        return len(run.path) // self._block_size - len(run.headers)


def _path_of(runs: Seq[CachedRun], number: int) -> TokenIds:
    parts = []
    at: int | None = number
    while at is not None:
        parts.append(runs[at].token_ids.data)
        at = runs[at].parent
    return TokenIds(b"".join(reversed(parts)))


def _finished(
    run: list[BlockHeader], paths: dict[bytes, TokenIds], parents: set[bytes]
) -> Iterator[_NamedRun]:
    """Yield a run if its parent's path is known, and note the paths of other runs' parents."""
    path = paths.get(run[0].parent_hash) if run else None
    if path is None:
        return
    data = [path.data]
    for header in run:
        data.append(header.token_ids.data)
        if header.hash in parents:
            paths[header.hash] = TokenIds(b"".join(data))
    yield _NamedRun(TokenIds(b"".join(data)), run)
