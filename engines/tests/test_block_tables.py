"""Blocks that sequences get while they run, and the tables in which workers see them."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from sagellm.core import (
    Namespace,
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    VirtualClock,
    pack,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.worker.seat_state import FIRST_TOKENS, SeatState, first_tables

BLOCK_SIZE, NUM_BLOCKS, NUM_SEATS = 4, 16, 8
FIRST_BLOCKS = FIRST_TOKENS // BLOCK_SIZE
MANY = 40  # sequences that grow in one step


def make(num_seats=NUM_SEATS, num_blocks=NUM_BLOCKS, **settings):
    config = EngineConfig.from_flat(block_size=BLOCK_SIZE, **settings)
    seats = Seats(num_seats, block_size=BLOCK_SIZE)
    return build_kv(Modules(PluginRegistry.load(), config), seats, num_blocks, VirtualClock()).manager


@pytest.fixture
def kv():
    return make(enable_prefix_caching=False)


def admitted(kv, name, num_tokens, token=5, **options):
    token_ids = pack([token] * num_tokens)
    request = Request(request_id=RequestId(name), token_ids=token_ids, max_tokens=4, **options)
    sequence = Sequence.of(QueuedSequence(SequenceId(name), request, SamplingParams(), 0, frozenset()))
    kv.admit(sequence)
    return sequence


def reserve(kv, *wanted):
    seats, num_tokens = zip(*((sequence.seat, number) for sequence, number in wanted), strict=True)
    return kv.reserve(np.array(seats, np.intp), np.array(num_tokens, np.int32))


def test_each_sequence_gets_the_blocks_that_it_lacks(kv):
    full, inside, long = admitted(kv, "full", 4), admitted(kv, "inside", 3), admitted(kv, "long", 4)
    kv.seats.take_block_updates()
    assert reserve(kv, (full, 5), (inside, 4), (long, 13)) == []
    assert [len(each.block_ids) for each in (full, inside, long)] == [2, 1, 4]
    updates = kv.seats.take_block_updates()
    told = zip(updates.seats.tolist(), updates.indices.tolist(), updates.block_ids.tolist(), strict=True)
    expected = [(full.seat, 1, full.block_ids[1])]
    assert list(told) == expected + [(long.seat, index, long.block_ids[index]) for index in (1, 2, 3)]
    assert updates.seats.dtype == updates.indices.dtype == updates.block_ids.dtype == np.int32


def test_a_sequence_that_gets_none_holds_up_no_other(kv):
    first, second = admitted(kv, "first", 4), admitted(kv, "second", 4)
    assert reserve(kv, (first, 4 * (NUM_BLOCKS + 1)), (second, 8)) == [0]
    assert [len(each.block_ids) for each in (first, second)] == [1, 2]


@pytest.mark.parametrize("num_free", range(4))
def test_all_that_grow_in_one_step_get_blocks_that_the_cache_gives_up(num_free):
    kv = make()
    growing = [admitted(kv, str(number), 4, token=number) for number in range(3)]
    ended = admitted(kv, "ended", 4 * (NUM_BLOCKS - len(growing) - num_free), token=9)
    kv.commit(ended, ended.num_tokens)
    kv.release(ended)
    assert kv._pool.get_free_blocks() == num_free
    assert reserve(kv, *((each, 8) for each in growing)) == []
    assert [len(each.block_ids) for each in growing] == [2] * 3
    assert kv._pool.get_free_blocks() == max(0, num_free - 3)
    kv.check_integrity()


def calls_of(monkeypatch, owner, name):
    """Record the arguments of the calls of a method from now on."""
    method, calls = getattr(owner, name), []

    def record(*arguments, **options):
        calls.append(arguments)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, record)
    return calls


def test_many_that_grow_in_one_step_get_their_blocks_in_one_call(monkeypatch):
    kv = make(MANY, 3 * MANY)
    growing = [admitted(kv, str(number), 4, token=number, priority=number) for number in range(MANY)]
    inside = growing.pop(20)  # has room for the next token
    kv.seats.take_block_updates()
    singly, together = (calls_of(monkeypatch, kv._pool, name) for name in ("allocate", "allocate_each"))
    assert reserve(kv, (inside, 4), *((each, 8) for each in growing)) == []
    assert (len(singly), len(together)) == (0, 1)
    updates = kv.seats.take_block_updates()
    assert updates.seats.tolist() == [each.seat for each in growing]
    assert updates.indices.tolist() == [1] * len(growing)
    assert updates.block_ids.tolist() == [each.block_ids[1] for each in growing]
    assert updates.seats.dtype == updates.indices.dtype == updates.block_ids.dtype == np.int32
    assert kv.seats.take_block_updates() is None
    infos = [kv._pool.block_info[each.block_ids[1]] for each in growing]
    assert [(info.sequence_id, info.priority) for info in infos] == [
        (each.sequence_id, each.request.priority) for each in growing
    ]


@pytest.mark.parametrize("num_missing", [0, 10])
def test_many_that_grow_evict_together_what_the_free_blocks_lack(monkeypatch, num_missing):
    kv = make(MANY + 1, 2 * MANY - num_missing)
    ended = admitted(kv, "ended", 4 * 30, token=99)
    growing = [
        admitted(kv, str(number), 4, token=number, namespace=Namespace("ab"[number % 2]))
        for number in range(MANY)
    ]
    kv.commit(ended, ended.num_tokens)
    kv.release(ended)
    num_short = MANY - kv._pool.get_free_blocks()
    evictions = calls_of(monkeypatch, kv.cache, "evict")
    without = reserve(kv, *((each, 8) for each in growing))
    assert without == list(range(MANY - num_missing, MANY))
    assert evictions[:2] == [(num_short // 2,)] * 2  # for each namespace
    assert len(evictions) == 2 or num_missing
    assert kv._pool.get_free_blocks() == 0
    kv.check_integrity()


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="counts the page faults of this thread")
@pytest.mark.parametrize("kind", [Seats, SeatState])
def test_a_sequence_that_takes_a_seat_writes_to_no_memory_for_the_first_time(kind):
    num_seats, num_pages = 64, 2
    state = kind(num_seats, block_size=16)
    assert state.tokens.shape[1] > FIRST_TOKENS
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    state.tokens[:, : num_pages * 1024], state.tables[..., : num_pages * 64] = 7, 7
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < num_seats


def test_tables_of_many_seats_begin_narrower():
    tables, tokens = first_tables(1 << 17, 16, num_groups=1)
    assert (tables.shape[2], tokens.shape[1]) == (4, 65)
    assert tokens.nbytes < 64 << 20


def test_what_was_given_before_a_failure_stays_given(kv, monkeypatch):
    sequences = [admitted(kv, name, 4) for name in "abc"]
    allocate, pool = kv._pool.allocate, kv._pool

    def failing(request):
        if request.sequence_id == "b":
            raise RuntimeError("the pool fails")
        return allocate(request)

    monkeypatch.setattr(pool, "allocate", failing)
    with pytest.raises(RuntimeError):
        reserve(kv, *((each, 9) for each in sequences))
    assert [len(each.block_ids) for each in sequences] == [3, 1, 1]
    for each in sequences:
        kv.release(each)
    assert pool.get_free_blocks() == NUM_BLOCKS


@pytest.mark.parametrize("num_more", [1, 2, FIRST_BLOCKS])
def test_a_table_widens_and_keeps_what_it_has(kv, num_more):
    seats, sequence = kv.seats, admitted(kv, "long", 6)
    before = sequence.block_ids
    num_more += FIRST_BLOCKS - len(before)
    seats.append_blocks(sequence.seat, range(100, 100 + num_more))
    assert sequence.block_ids == [*before, *range(100, 100 + num_more)]
    assert sequence.token_ids() == pack([5] * 6)
