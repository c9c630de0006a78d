"""Bugs to plant in the product, each of which the simulation of the served system must find.

    python integration-tests/planted_served_bugs.py            # plant each in a separate process, run seeds
    python integration-tests/planted_served_bugs.py NAME...    # only these
    python integration-tests/planted_served_bugs.py --json     # how many seeds each takes, as JSON

Exit code 1 if a bug is not found within `MAX_SEEDS` seeds, or a violation is found without any.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import planted_bugs
from planted_bugs import change

from sagellm.lab.simulation.served.plan import draw_plan
from sagellm.lab.simulation.served.world import run_plan

MAX_SEEDS, CLEAN_SEEDS = 600, 60
"""Seeds within which each bug must be found, and how many are run without one."""

ALSO_FOUND = (
    "a-double-insert-into-the-free-list",
    "a-reference-count-off-by-one",
    "compaction-into-a-block-in-use",
    "a-split-that-loses-a-block",
    "a-salt-ignored-by-the-prefix-cache",
    "a-lock-kept-after-an-abort",
    "blocks-kept-after-a-preemption",
    "a-partial-block-shared-for-writing",
    "a-stale-block-table",
    "a-namespace-ignored-by-the-tiers",
    "an-offload-that-reads-after-the-free",
    "fetched-blocks-in-the-wrong-order",
    "a-stop-string-not-cut",
    "one-tenant-for-all-keys",
)
"""Bugs of `planted_bugs.py` that the simulation must find too."""


@dataclass(frozen=True, kw_only=True)
class ServedBug:
    """A small change that breaks the product."""

    name: str
    breaks: str
    part: str  # "front", "link", "core" or "tiers"
    plant: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """How a bug was found: by which seed, as what; `kind` is None if no seed did."""

    num_seeds: int
    kind: str | None
    message: str
    duration_s: float


BUGS: list[ServedBug] = []


def bug(breaks: str, *, part: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function, which plants a bug, in `BUGS` under its own name."""

    def add(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.replace("_", "-")
        BUGS.append(ServedBug(name=name, breaks=breaks, part=part, plant=plant))
        return plant

    return add


# -- the front


@bug("A stream is not told its last output.", part="front")
def a_last_output_dropped() -> None:
    from sagellm.engines.requests.output_stream import OutputStream

    @change(OutputStream, "put")
    def put(original: Any, self: Any, output: Any) -> None:
        if not output.finished:
            original(self, output)


@bug("A client that disconnects leaves its seat in the admission taken.", part="front")
def a_seat_kept_after_a_disconnect() -> None:
    from sagellm.server.http.admission import Admission
    from sagellm.server.http.job_streams import ClientGoneError

    @change(Admission, "seat")
    @contextmanager
    def seat(original: Any, self: Any, *tenant: Any) -> Iterator[Any]:
        with original(self, *tenant) as held:
            try:
                yield held
            except ClientGoneError:
                self.num_live += 1
                raise


@bug("Two requests that get tokens in one step get each other's.", part="front")
def an_output_for_the_wrong_request() -> None:
    from sagellm.engines.requests.output_processor import OutputProcessor

    @change(OutputProcessor, "process")
    def process(original: Any, self: Any, outputs: Any) -> Any:
        outputs = list(outputs)
        if len(outputs) > 1:
            first, second = outputs[:2]
            outputs[0] = replace(first, token_ids=second.token_ids)
            outputs[1] = replace(second, token_ids=first.token_ids)
        return original(self, outputs)


@bug("When the core dies, streams are not told.", part="front")
def streams_that_outlive_their_core() -> None:
    from sagellm.engines.requests.output_stream import OutputStreams

    @change(OutputStreams, "fail_all")
    def fail_all(_: Any, self: Any, error: Any) -> None:
        pass


@bug("When the core dies, its requests end as if they were complete.", part="front")
def a_cut_answer_taken_for_a_whole_one() -> None:
    from sagellm.server.http.job_streams import JobStreams

    @change(JobStreams, "outputs")
    async def outputs(original: Any, self: Any) -> Any:
        from sagellm.core import EngineDeadError

        try:
            async for each in original(self):
                yield each
        except EngineDeadError:
            return


@bug("Every fiftieth piece of a stream is sent twice.", part="front")
def an_event_sent_twice() -> None:
    from sagellm.server.http.reply import EventReply

    sent = count(1)

    @change(EventReply, "write")
    async def write(original: Any, self: Any, events: bytes) -> None:
        await original(self, events)
        if next(sent) % 50 == 0:
            await original(self, events)


@bug("Requests of a core that died are answered with 500 instead of 503.", part="front")
def a_death_that_is_not_retryable() -> None:
    from sagellm.core import EngineDeadError
    from sagellm.server.http import generation

    @change(generation, "as_api_error")
    def as_api_error(original: Any, error: Any) -> Any:
        return original(RuntimeError("dead") if isinstance(error, EngineDeadError) else error)


@bug("A connection that is reset counts as open for ever.", part="front")
def a_connection_counted_for_ever() -> None:
    from sagellm.server.http.http_protocol import BoundedHTTP

    @change(BoundedHTTP, "connection_lost")
    def connection_lost(original: Any, self: Any, error: Any) -> None:
        if error is not None:
            self._connections.num_open += 1
        original(self, error)


@bug("A client that has ended its own half is disconnected.", part="front")
def a_half_closed_client_given_up() -> None:
    from sagellm.server.http.http_protocol import BoundedHTTP

    @change(BoundedHTTP, "eof_received")
    def eof_received(_: Any, self: Any) -> bool:
        return False


@bug("After a pause for a slow client nothing is written any more.", part="front")
def a_pause_without_an_end() -> None:
    from sagellm.server.http.http_protocol import BoundedHTTP

    @change(BoundedHTTP, "resume_writing")
    def resume_writing(_: Any, self: Any) -> None:
        pass


@bug("A refused request keeps the seats that it was refused.", part="front")
def seats_of_a_refused_request() -> None:
    from sagellm.server.http.admission import Admission
    from sagellm.server.http.errors import APIError

    @change(Admission, "_take")
    def take(original: Any, self: Any, use: Any, num_more: int, *sizes: int, **held: int) -> None:
        try:
            original(self, use, num_more, *sizes, **held)
        except APIError:
            self.num_live += num_more
            raise


@bug("Without a free descriptor no connection is accepted any more.", part="front")
def a_listener_that_gives_up() -> None:
    from sagellm.server.http.listener import Listener

    @change(Listener, "_pause")
    def pause(_: Any, self: Any) -> None:
        self._loop.remove_reader(self._socket)


@bug("All continuations of several prompts are told as the first's.", part="front")
def prompts_that_share_an_index() -> None:
    from sagellm.server.http.job_streams import JobStreams

    @change(JobStreams, "_merged")
    async def merged(original: Any, self: Any) -> Any:
        async for _, output in original(self):
            yield 0, output


# -- between front and core


@bug("What is left of a frame that arrives in pieces is dropped.", part="link")
def a_frame_in_pieces_dropped() -> None:
    from sagellm.server.remote.frames import FrameReader

    @change(FrameReader, "add")
    def add(original: Any, self: Any, data: bytes) -> None:
        self._pending.clear()
        original(self, data)


@bug("What a full socket does not take is dropped.", part="link")
def unsent_bytes_dropped() -> None:
    from sagellm.server.remote.core_server import CoreServer

    @change(CoreServer, "_flush")
    def flush(original: Any, self: Any, connection: Any) -> None:
        original(self, connection)
        connection.unsent.clear()


@bug("A core that hangs is never killed.", part="link")
def a_hanging_core_left_alone() -> None:
    from sagellm.server.remote.core_handle import Stall

    @change(Stall, "is_over")
    def is_over(_: Any, self: Any, progress: Any) -> bool:
        return False


@bug("While the core is restarted, the front counts as ready, so requests are lost.", part="link")
def ready_without_a_core() -> None:
    import asyncio

    from sagellm.server.remote.supervisor import Supervisor

    class NeverCleared(asyncio.Event):
        def clear(self) -> None:
            pass

    @change(Supervisor, "__init__")
    def init(original: Any, self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self._ready = NeverCleared()


@bug("A process that cannot be started again is not tried again.", part="link")
def a_restart_given_up() -> None:
    from sagellm.core import EngineError
    from sagellm.server.remote import supervisor

    @change(supervisor.Supervisor, "_run_once")
    async def run_once(original: Any, self: Any) -> None:
        try:
            await original(self)
        except OSError as error:
            self._failure = EngineError("given up")
            raise asyncio_cancelled() from error

    def asyncio_cancelled() -> BaseException:
        import asyncio

        return asyncio.CancelledError()


@bug("The core takes the requests of a front for those of the one before.", part="link")
def requests_of_a_front_that_is_gone() -> None:
    from sagellm.server.remote.core_server import CoreServer

    @change(CoreServer, "_forget")
    def forget(_: Any, self: Any, sequence_ids: Any) -> None:
        pass


@bug("What ended two processes of the core is tried again all the same.", part="link")
def a_deadly_request_tried_for_ever() -> None:
    from sagellm.server.remote import suspects

    suspects._MAX_DEATHS = 1 << 30


@bug("Suspects of a death begin all at once, so that the next one is blamed on all of them.", part="link")
def suspects_that_begin_together() -> None:
    from sagellm.server.remote.suspects import Suspects

    @change(Suspects, "wait_for_turn")
    async def wait_for_turn(original: Any, self: Any, requests: Any) -> Any:
        self._beginning.clear()
        turn = await original(self, requests)
        self._beginning.clear()
        return turn


# -- the core


@bug("Of every 60 blocks that are freed one stays allocated.", part="core")
def a_leaked_block_in_60_frees() -> None:
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator

    freed = count(1)

    @change(FreeListAllocator, "free")
    def free(original: Any, self: Any, block_ids: Any) -> None:
        original(self, block_ids)
        for block_id in block_ids:
            if next(freed) % 60 == 0:
                self.claim([block_id])


@bug("Cached blocks that a sequence shares are not locked against eviction.", part="core")
def a_prefix_that_is_not_locked() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "admit")
    def admit(original: Any, self: Any, sequence: Any) -> None:
        original(self, sequence)
        if sequence.match is not None and sequence.match.block_ids:
            self._pool.free(sequence.match.block_ids[-1:])


@bug("A partial block is taken over without a copy of its KV.", part="core")
def a_copy_on_write_skipped() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "take_copies")
    def take_copies(original: Any, self: Any) -> Any:
        original(self)
        return []


@bug("A worker is not told of new blocks.", part="core")
def new_blocks_not_told() -> None:
    from sagellm.engines.engine_core.seats import Seats

    @change(Seats, "take_block_updates")
    def take_block_updates(original: Any, self: Any) -> Any:
        original(self)


@bug("A sequence keeps its seat's tokens of the one before.", part="core")
def arrivals_not_told() -> None:
    from sagellm.engines.engine_core.seats import Seats

    @change(Seats, "take_arrivals")
    def take_arrivals(original: Any, self: Any) -> Any:
        return original(self)[1:]


# -- tiers


@bug("A record is not compared with its digest.", part="tiers")
def a_torn_record_taken_for_whole() -> None:
    from sagellm.kvmgr.kv_pool.tiers.record import RecordFormat

    @change(RecordFormat, "digest_of")
    def digest_of(original: Any, self: Any, header: Any, data: Any) -> bytes:
        return original(self, header, memoryview(bytes(len(data))))


@bug("A failed write to a tier counts as done.", part="tiers")
def a_full_disk_ignored() -> None:
    from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier

    @change(BackendTier, "_drop")
    def drop(original: Any, self: Any, key: Any) -> Any:
        return False


@bug("A failing disk ends the use of its tier.", part="tiers")
def a_disk_error_let_through() -> None:
    from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier

    @change(BackendTier, "_do")
    def do(original: Any, self: Any, request: Any) -> Any:
        outcome = original(self, request)
        if outcome == "failed":
            raise OSError(5, "Input/output error")
        return outcome


@bug("Each block that comes back from a tier is the one after it.", part="tiers")
def a_tier_that_returns_another_block() -> None:
    from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage

    @change(TieredKVStorage, "submit")
    def submit(original: Any, self: Any, requests: Any) -> Any:
        gets = [each for each in requests if each.action == "get"]
        if len(gets) > 1:
            swapped = {id(one): two for one, two in zip(gets, gets[1:] + gets[:1], strict=True)}
            requests = [
                each._replace(header=swapped[id(each)].header) if id(each) in swapped else each
                for each in requests
            ]
        return original(self, requests)


def all_bugs() -> list[ServedBug]:
    """Return the bugs of this file, then those of `planted_bugs.py` that the simulation finds too."""
    known = {each.name: each for each in planted_bugs.BUGS}
    others = [known[name] for name in ALSO_FOUND]
    return BUGS + [
        ServedBug(name=each.name, breaks=each.breaks, part="suite", plant=each.plant) for each in others
    ]


# -- running


def run_seeds(max_seeds: int) -> Found:
    """Run seeds until one has a violation."""
    started_s = time.monotonic()
    for seed in range(max_seeds):
        violation = run_plan(draw_plan(seed)).violation
        if violation is not None:
            return Found(
                num_seeds=seed + 1,
                kind=violation.kind,
                message=violation.message,
                duration_s=time.monotonic() - started_s,
            )
    return Found(num_seeds=max_seeds, kind=None, message="", duration_s=time.monotonic() - started_s)


def run_with(plant: Callable[[], None] | None, max_seeds: int = MAX_SEEDS) -> Found:
    """Run seeds in a separate process, with a bug planted or without."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            if plant is not None:
                plant()
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                json.dump(vars(run_seeds(max_seeds)), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        raise RuntimeError("the process that ran the seeds ended without a result")
    return Found(**json.loads(said))


def find_all(bugs: Sequence[ServedBug]) -> Iterator[tuple[str, bool, Found]]:
    """Yield for "none", then for each bug, whether it is as expected, and how it was found."""
    import torch

    torch.set_num_threads(1)  # no pool of threads, which a forked process would not have
    run_plan(draw_plan(0))  # imports all there is, once
    clean = run_with(None, CLEAN_SEEDS)
    yield "none", clean.kind is None, clean
    for each in bugs:
        found = run_with(each.plant)
        fits = "<locals>" not in found.message  # else the plant itself has failed, as what it changes is new
        yield each.name, found.kind is not None and fits, found


def main() -> int:
    """Print a line for each bug."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="of bugs; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args()
    known = {each.name: each for each in all_bugs()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no bug is called {unknown[0]!r}; there are: {', '.join(known)}")
    bugs = [known[name] for name in options.names] or list(known.values())
    is_good, rows = True, []
    for name, is_expected, found in find_all(bugs):
        is_good &= is_expected
        rows.append({"bug": name, **vars(found)})
        if not options.json:
            what = f"{found.kind} {found.message}"[:150] if found.kind else "nothing"
            mark = "" if is_expected else "WRONG: "
            print(
                f"{name}: {mark}{what} after {found.num_seeds} seeds ({found.duration_s:.1f} s)", flush=True
            )
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
