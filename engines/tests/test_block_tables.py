"""Blocks that sequences get while they run, and the tables in which workers see them."""

from __future__ import annotations

import numpy as np
import pytest

from sagellm.core import (
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    VirtualClock,
    pack,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.seats import FIRST_BLOCKS, Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.queued_request import QueuedSequence

BLOCK_SIZE, NUM_BLOCKS = 4, 16


def make(**settings):
    config = EngineConfig.from_flat(block_size=BLOCK_SIZE, **settings)
    seats = Seats(8, block_size=BLOCK_SIZE)
    return build_kv(Modules(PluginRegistry.load(), config), seats, NUM_BLOCKS, VirtualClock()).manager


@pytest.fixture
def kv():
    return make(enable_prefix_caching=False)


def admitted(kv, name, num_tokens, token=5):
    request = Request(request_id=RequestId(name), token_ids=pack([token] * num_tokens), max_tokens=4)
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
