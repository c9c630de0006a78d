"""Steps, evictions, compaction, copies and late answers of tiers in any order, from a seed, on virtual time.

The model's KV of a token is a hash of all tokens up to it, and its next token follows from all KV of the
sequence. So one wrong, stale or foreign block anywhere changes the output.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import pytest
import torch

from sagellm.core import (
    BlockId,
    ForwardBackendProtocol,
    ForwardMetrics,
    KVGroup,
    KVLayout,
    PluginRegistry,
    Request,
    RequestId,
    Runtime,
    SequenceId,
    pack,
)
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.assembly import build_computing_core
from sagellm.engines.engine_core.building import CorePlan
from sagellm.engines.engine_core.compaction import Compactor
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence

VOCAB, BLOCK_SIZE, TOKEN_BYTES = 64, 4, 32
LAYOUT = KVLayout(
    group=KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=4, dtype="float32"), block_size=BLOCK_SIZE
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
assert LAYOUT.block_bytes == BLOCK_SIZE * TOKEN_BYTES


def hashed(before: int, token: int) -> int:
    data = before.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


@cache
def expected_tokens(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens, chain = list(prompt), []
    for position in range(len(prompt) + num_tokens):
        if position == len(tokens):
            tokens.append(sum(chain) % VOCAB)
        chain.append(hashed(chain[-1] if chain else 0, tokens[position]))
    return tokens[len(prompt) :]


class HashBackend(ForwardBackendProtocol):
    """The forward pass of that model; a step takes a millisecond and another one for each 100 tokens."""

    def __init__(self, runtime):
        self._clock = runtime.clock

    def initialize_kv_caches(self, layouts, num_blocks):
        self.kv = torch.zeros(num_blocks[0] * BLOCK_SIZE, TOKEN_BYTES // 8, dtype=torch.int64)
        self._blocks = memoryview(self.kv.numpy()).cast("B")

    def _block(self, block_id):
        return self._blocks[block_id * LAYOUT.block_bytes : (block_id + 1) * LAYOUT.block_bytes]

    def copy_blocks(self, pairs):
        for source, target in pairs:
            self._block(target)[:] = self._block(source)

    def read_blocks(self, block_ids, into, *, num_in_flight=0):
        for block_id, buffer in zip(block_ids, into, strict=True):
            buffer[:] = self._block(block_id)

    def write_blocks(self, block_ids, data):
        for block_id, buffer in zip(block_ids, data, strict=True):
            self._block(block_id)[:] = buffer

    def forward(self, batch):
        self._clock.advance_ns(1_000_000 + 10_000 * len(batch.input_ids))
        logits = torch.zeros(len(batch.input_ids), VOCAB)
        at = 0
        for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            table = batch.block_tables[row].tolist()
            slots = [
                table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(seq_len)
            ]
            chain = self.kv[slots[: seq_len - query_len], 0].tolist()
            for position in range(seq_len - query_len, seq_len):
                assert batch.slot_mapping[at] == slots[position]
                chain.append(hashed(chain[-1] if chain else 0, int(batch.input_ids[at])))
                self.kv[slots[position]] = chain[-1]
                logits[at, sum(chain) % VOCAB] = 1
                at += 1
        return logits[batch.logits_indices]

    def metrics(self):
        return ForwardMetrics()


def begin_nothing_twice(tiers):
    """Raise AssertionError for a save or fetch of a block that is under way already."""
    submit, poll, under_way = tiers.submit, tiers.poll, {}

    def submit_checked(requests):
        names = {(request.action, request.header.encode()) for request in requests}
        assert len(names) == len(requests), "one submit names a block twice"
        for others in under_way.values():
            assert not names & others, "a block is saved or fetched twice at once"
        ticket = submit(requests)
        under_way[ticket] = names
        return ticket

    def poll_noted():
        results = poll()
        for result in results:
            del under_way[result.ticket]
        return results

    tiers.submit, tiers.poll = submit_checked, poll_noted


class Simulation:
    """One core under random requests, aborts and operators, its tiers late and failing."""

    def __init__(self, seed: int, folder, **settings):
        self.runtime = Runtime.virtual(seed=seed)
        self.random = self.runtime.randomness.stream("driver")
        tiers = {"host": 20 * 512, "file": {"max_bytes": 60 * 4096, "folder": str(folder)}}
        values = {
            "kv.block_size": BLOCK_SIZE,
            "kv.num_blocks": self.random.choice((18, 24, 40)),
            "kv.tiers": tiers,
            "kv.fetch": self.random.choice(("always", "always", "cheaper")),
            "prefix_cache.eviction_policy": self.random.choice(("reuse", "lru", "s3fifo")),
            "scheduler.max_num_batched_tokens": self.random.choice((16, 64)),
            "scheduler.max_num_seqs": 6,
        }
        config = EngineConfig().with_values(values | settings)
        plan = CorePlan(
            modules=Modules(PluginRegistry.load(), config),
            layout=LAYOUT,
            num_blocks=config.kv.num_blocks,
            vocab_size=VOCAB,
            runtime=self.runtime,
            fingerprint=lambda: "hash",
        )
        self.core = build_computing_core(plan, HashBackend(self.runtime))
        self.offload = self.core.kv.offload
        storage, failures = self.offload.tiers, self.random.choice((0.0, 0.05))
        for guarded in storage._tiers:
            guarded.tier = self._late(guarded.tier, failures)
        self.offload.tiers = self._late(storage, 0.0)
        begin_nothing_twice(self.offload.tiers)
        self.families = [self._tokens(self.random.randint(8, 48)) for _ in range(5)]
        self.live: dict[str, tuple[QueuedSequence, list[int]]] = {}
        self.log = blake2b()
        self.num_finished = self.num_moved = 0
        self.compactor = Compactor(
            self.core.kv, self.core.steps.copy_blocks, self.runtime.clock, self.core.has_unfinished
        )

    def _late(self, tier, failure_rate):
        stream = self.runtime.randomness.stream(f"late{self.random.random()}")
        return LateKVTier(tier, stream, failure_rate=failure_rate)

    def _tokens(self, count):
        return tuple(self.random.randrange(VOCAB) for _ in range(count))

    def run(self, num_events: int) -> str:
        for number in range(num_events):
            drawn = self.random.random()
            if drawn < 0.2 and len(self.live) < 12:
                self._add(number)
            elif drawn < 0.23 and self.live:
                self._abort(self.random.choice(list(self.live)))
            elif drawn < 0.26:
                self.core.kv.evict(self.random.randint(1, 10))
            elif drawn < 0.27:
                self.core.kv.clear_cache()
            elif drawn < 0.4:
                self.num_moved += self.compactor.advance()
            else:
                self._step()
            if number % 10 == 0:
                self.core.kv.check_integrity()
                self.offload.check_integrity()
        for _ in range(20_000):
            if not self.live and not self.core.kv.num_fetches:
                break
            self._step()
        assert not self.live, f"{len(self.live)} requests never ended"
        self.core.kv.check_integrity()
        assert self.core.kv.available_blocks == self.core.kv.total_blocks
        return self.log.hexdigest()

    def _add(self, number):
        family = self.random.choice(self.families)
        prompt = family[: self.random.randint(4, len(family))] + self._tokens(self.random.randint(1, 8))
        self._send(str(number), prompt, self.random.randint(1, 16))

    def _send(self, name, prompt, max_tokens):
        request = Request(
            request_id=RequestId(name),
            token_ids=pack(prompt),
            max_tokens=max_tokens,
            arrival_ns=self.runtime.clock.now_ns(),
        )
        sequence = QueuedSequence(SequenceId(name), request, PARAMS, 0, frozenset())
        self.core.add(sequence)
        self.live[name] = sequence, []

    def _abort(self, name):
        self.core.abort([SequenceId(name)])
        del self.live[name]

    def _step(self):
        for output in self.core.step():
            sequence, tokens = self.live[output.sequence_id]
            assert output.finish_reason != "error", output.error
            tokens += output.token_ids
            self.log.update(f"{output.sequence_id} {tokens[-1]};".encode())
            if output.finish_reason is not None:
                request = sequence.request
                assert tokens == expected_tokens(tuple(request.token_ids), request.max_tokens)
                del self.live[output.sequence_id]
                self.num_finished += 1


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_steps_copies_and_late_answers_changes_a_token(seed, tmp_path):
    simulation = Simulation(seed, tmp_path)
    simulation.run(800)
    metrics = simulation.offload.metrics()
    assert simulation.num_finished > 50
    assert metrics.num_kept_blocks > 50
    assert simulation.num_moved > 10
    if simulation.offload.rule == "always":
        assert metrics.num_fetched_blocks > 10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 115))
def test_no_order_of_many_changes_a_token(seed, tmp_path):
    Simulation(seed, tmp_path).run(2_000)


def test_a_fetch_begins_after_the_copies_that_wait_for_a_step(tmp_path):
    simulation = Simulation(0, tmp_path, **{"kv.fetch": "always"})
    kv, offload, calls = simulation.core.kv, simulation.offload, []
    prompt = simulation.families[0]
    for name in ("first", "again"):
        simulation._send(name, prompt, 4)
        if name == "again":
            # One of the blocks that the fetch gets may be the source of the copy.
            kv._copies.append((BlockId(0), BlockId(1)))
            for call in ("copy_now", "begin"):
                spy(offload, call, calls)
        while simulation.live:
            simulation._step()
        kv.evict(kv.total_blocks)
        while offload._puts:
            offload.poll()
    assert calls[:2] == ["copy_now", "begin"]


def spy(owner, name, calls):
    original = getattr(owner, name)

    def call(*arguments):
        calls.append(name)
        return original(*arguments)

    setattr(owner, name, call)


def test_a_seed_replays_what_it_did(tmp_path):
    runs = [Simulation(3, tmp_path).run(500) for _ in range(2)]
    assert runs[0] == runs[1]
    assert Simulation(4, tmp_path).run(500) != runs[0]


def test_a_wrong_block_would_be_seen(tmp_path):
    simulation = Simulation(0, tmp_path)
    memory = simulation.core.kv.offload._memory.access
    write = memory.write_blocks
    memory.write_blocks = lambda block_ids, data: write(block_ids, data[::-1])
    with pytest.raises(AssertionError):
        simulation.run(2_000)
