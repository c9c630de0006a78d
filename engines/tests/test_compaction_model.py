"""The KV manager over a memory that knows which tokens each block has the KV of, while blocks move."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sagellm.core import (
    Namespace,
    OutOfBlocksError,
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    VirtualClock,
    pack,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_core.compaction import Compactor
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class Memory:
    """For each slot the tokens up to its own, which is what KV depends on."""

    def __init__(self):
        self.slots = [None] * (NUM_BLOCKS * BLOCK_SIZE)

    def copy(self, pairs):
        for source, target in pairs:
            source, target = source * BLOCK_SIZE, target * BLOCK_SIZE
            self.slots[target : target + BLOCK_SIZE] = self.slots[source : source + BLOCK_SIZE]

    def slot(self, sequence, position):
        return sequence.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def write(self, sequence, position):
        namespace, tokens = sequence.request.namespace, sequence.token_ids().data
        self.slots[self.slot(sequence, position)] = (namespace, tokens[: 4 * (position + 1)])

    def check(self, sequence):
        tokens = sequence.token_ids().data
        for position in range(sequence.num_computed_tokens):
            found = self.slots[self.slot(sequence, position)]
            assert found == (sequence.request.namespace, tokens[: 4 * (position + 1)]), f"slot of {position}"


class Load:
    """Sequences that come, grow, are preempted and end at random, with compaction in between."""

    def __init__(self, registry, seed, allocator, *, with_cache):
        self.random = random.Random(seed)
        config = EngineConfig.from_flat(
            kv_allocator=allocator, enable_prefix_caching=with_cache, block_size=BLOCK_SIZE
        )
        seats = Seats(64, block_size=BLOCK_SIZE)
        built = build_kv(Modules(registry, config), seats, NUM_BLOCKS, VirtualClock())
        self.kv, self.pool = built.manager, built.pool
        self.memory = Memory()
        self.compactor = Compactor(self.kv, self.memory.copy, VirtualClock(), lambda: True)
        self.running, self.waiting = [], []
        self.num_moved = self.num_made = 0
        self.prompts = [self.tokens(30) for _ in range(3)]

    def tokens(self, most):
        return [self.random.randrange(2) for _ in range(self.random.randrange(1, most))]

    def step(self):
        self.random.choice(
            [self.add, self.admit, self.decode, self.decode, self.end, self.preempt, self.evict]
        )()
        if self.random.random() < 0.7:
            self.num_moved += self.compactor.advance()
        self.kv.check_integrity()
        for sequence in self.running:
            self.memory.check(sequence)
            matched = sequence.match.block_ids
            assert sequence.block_ids[: len(matched)] == matched
        holders = [block for sequence in self.running for block in sequence.block_ids]
        num_cached = self.kv.cache.metrics().num_blocks
        references = sum(info.ref_count for info in self.pool.block_info.values())
        assert references == len(holders) + num_cached

    def add(self):
        base = self.random.choice(self.prompts)
        prompt = base[: self.random.randrange(1, len(base) + 1)] + self.tokens(5)
        request = Request(
            request_id=RequestId(str(self.num_made)),
            token_ids=pack(prompt),
            max_tokens=40,
            arrival_ns=0,
            namespace=Namespace(self.random.choice("ab")),
        )
        self.num_made += 1
        self.waiting.append(
            Sequence.of(
                QueuedSequence(SequenceId(request.request_id), request, SamplingParams(), 0, frozenset())
            )
        )

    def admit(self):
        if not self.waiting:
            return
        sequence = self.waiting[0]
        try:
            self.kv.admit(sequence)
        except OutOfBlocksError:
            if not self.running:
                self.waiting.pop(0)  # too long for this pool
            return
        self.running.append(self.waiting.pop(0))
        self.memory.copy(self.kv.take_copies())
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            self.memory.write(sequence, position)
        self.kv.commit(sequence, sequence.num_tokens)
        self.kv.share_computed(sequence)

    def decode(self):
        for sequence in list(self.running):
            if self.kv.reserve(np.array([sequence.seat]), np.array([sequence.num_tokens + 1])):
                continue
            seats = self.kv.seats
            seats.tokens[sequence.seat, sequence.num_tokens] = self.random.randrange(2)
            seats.num_tokens[sequence.seat] += 1
            self.memory.write(sequence, sequence.num_tokens - 1)
            self.kv.commit(sequence, sequence.num_tokens)

    def end(self):
        if self.running:
            self.kv.release(self.running.pop(self.random.randrange(len(self.running))))

    def preempt(self):
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            self.kv.release(sequence)
            self.waiting.append(sequence)

    def evict(self):
        self.kv.evict(self.random.randrange(1, 6))


@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("allocator", ["free_list", "buddy"])
def test_every_slot_holds_its_sequences_kv_wherever_its_block_went(allocator, with_cache):
    registry = PluginRegistry.load()
    for seed in range(8):
        load = Load(registry, seed, allocator, with_cache=with_cache)
        for _ in range(400):
            load.step()
        assert load.num_moved > 30
        while load.running:
            load.end()
        load.kv.clear_cache()
        assert load.pool.get_free_blocks() == NUM_BLOCKS
        load.kv.check_integrity()
