"""All modules that manage KV, together: three requests are matched, scheduled, given blocks and cached.

A radix cache of 1,000 blocks, a pool of 10,000 blocks of 16 tokens, LRU eviction, a predictor of lengths
and a scheduler with two passes; only the model is missing, so tokens are made up. A number as the argument
is the size of the pool: with 3 blocks those of ended requests must be evicted to go on.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace

from sagellm.core import OutOfBlocksError, PrefixMatch, SequenceId, VirtualClock
from sagellm.kvmgr.eviction import EvictionCandidate, LRUEvictionPolicy
from sagellm.kvmgr.kv_pool import BlockAllocationRequest, GPUKVPool
from sagellm.kvmgr.lifetime import PredictionRequest, StatisticalLifetimePredictor
from sagellm.kvmgr.prefix_cache import RadixPrefixCache
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, PrefixHit, ScheduleRequest
from sagellm.kvmgr.scheduler_ir.passes import PrefixCacheAwarePass, PriorityBasedPass

BLOCK_SIZE, STEP_NS = 16, 20_000_000
REQUESTS = [
    ScheduleRequest("first", [1, 2, 3, 4, 5, 10, 11, 12], max_tokens=20, priority=1),
    ScheduleRequest("second", [1, 2, 3, 4, 5, 20, 21, 22], max_tokens=30, priority=1),
    ScheduleRequest("third", [100, 101, 102], max_tokens=10, priority=0),
]


@dataclass
class Running:
    """A request that has blocks."""

    row: ScheduleRequest
    tokens: list[int]
    match: PrefixMatch  # the lock on its cached prefix
    block_ids: list[int]
    started_ns: int


@dataclass
class Report:
    """What happened."""

    match_lengths: dict[str, int] = field(default_factory=dict)
    victims: list[str] = field(default_factory=list)


class Server:
    """The part of an engine that manages KV."""

    def __init__(self, total_blocks: int) -> None:
        self.clock = VirtualClock()
        self.policy = LRUEvictionPolicy()
        self.cache = RadixPrefixCache(
            max_blocks=1000, block_size=BLOCK_SIZE, eviction_policy=self.policy, clock=self.clock
        )
        self.pool = GPUKVPool(total_blocks, block_size=BLOCK_SIZE, clock=self.clock)
        self.predictor = StatisticalLifetimePredictor()
        # One seat, so that a request finds in the cache what those before it left there.
        self.scheduler = BaseSchedulerIR(
            max_num_seqs=1, block_size=BLOCK_SIZE, probe=self.probe, clock=self.clock
        )
        self.scheduler.add_optimization_pass(PrefixCacheAwarePass(self.cache))
        self.scheduler.add_optimization_pass(PriorityBasedPass())
        self.running: list[Running] = []
        self.report = Report()

    def serve(self, requests: list[ScheduleRequest]) -> Report:
        """Step until every request has all its tokens."""
        waiting = [self.predicted(row) for row in requests]
        while waiting or self.running:
            plan = self.scheduler.schedule(
                pending_requests=waiting,
                running_requests=[each.row for each in self.running],
                available_memory=self.pool.get_free_blocks() + self.cache.num_evictable_blocks,
            )
            assert not plan.preempted, "one request at a time has room"
            for row, num_tokens, num_new_blocks in zip(
                plan.rows.tolist(), plan.num_tokens.tolist(), plan.num_new_blocks.tolist(), strict=True
            ):
                running = self.running[row]
                running.block_ids += self.allocate(num_new_blocks, running.row.request_id)
                self.compute(running, num_tokens, plan.step)
            for entry in plan.admitted:
                row = waiting.pop(entry.row)
                self.compute(self.admit(row), entry.num_tokens, plan.step)
            self.clock.advance_ns(STEP_NS)
            for ended in [each for each in self.running if self.num_generated(each) == each.row.max_tokens]:
                self.end(ended)
        return self.report

    def predicted(self, row: ScheduleRequest) -> ScheduleRequest:
        """Ask how long the answer becomes."""
        asked = PredictionRequest(
            sequence_id=row.request_id, token_ids=row.token_ids, max_length=row.max_tokens
        )
        answer = self.predictor.predict(asked)
        return replace(row, predicted_remaining_tokens=answer.remaining_length, confidence=answer.confidence)

    def probe(self, row: ScheduleRequest) -> PrefixHit:
        """Say how much of a prompt is cached, and how many blocks its admission takes."""
        match = self.cache.match_prefix(row.token_ids[:-1])  # the last token is computed, for its logits
        num_new_blocks = -(-row.num_tokens // BLOCK_SIZE) - len(match.block_ids)
        return PrefixHit(match.match_length, num_new_blocks + self.cache.num_idle_blocks(match))

    def admit(self, row: ScheduleRequest) -> Running:
        """Lock what is cached and allocate the rest. Only whole cached blocks are shared."""
        tokens = list(row.token_ids)
        match = self.cache.lock(self.cache.match_prefix(tokens[:-1]), num_lookup_tokens=len(tokens))
        num_new_blocks = -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids)
        new_blocks = self.allocate(num_new_blocks, row.request_id)
        if match.block_ids:
            self.pool.share(match.block_ids)
        # An engine copies the KV of match.partial into the first new block here.
        self.report.match_lengths[row.request_id] = match.match_length
        blocks = [*match.block_ids, *new_blocks]
        row = replace(row, num_computed_tokens=match.match_length, num_blocks=len(blocks))
        self.running.append(Running(row, tokens, match, blocks, self.clock.now_ns()))
        return self.running[-1]

    def allocate(self, num_blocks: int, sequence_id: str) -> list[int]:
        """Take blocks from the pool; if there are not enough, evict ended sequences and try again."""
        if not num_blocks:
            return []
        request = BlockAllocationRequest(num_blocks=num_blocks, sequence_id=SequenceId(sequence_id))
        try:
            return self.pool.allocate(request)
        except OutOfBlocksError as error:  # a MemoryError
            print(f"  {sequence_id}: {error}")
        self.evict(num_blocks - self.pool.get_free_blocks())
        return self.pool.allocate(request)

    def evict(self, num_blocks: int) -> None:
        """Free cached blocks of the sequences that the policy chooses."""
        candidates = self.candidates()
        victims = self.policy.select_victims(candidates, required_blocks=num_blocks)
        held = {each.sequence_id: each.block_ids for each in candidates}
        dropped = self.cache.evict(sum(len(held[victim]) for victim in victims))
        self.pool.free(dropped)
        self.report.victims += victims
        print(f"  evicted {', '.join(victims)}: blocks {sorted(dropped)}")

    def candidates(self) -> list[EvictionCandidate]:
        """Return the ended sequences whose blocks are cached; nothing is left to generate for them."""
        blocks_of: defaultdict[str, list[int]] = defaultdict(list)
        in_use = {block_id for each in self.running for block_id in each.block_ids}
        for block_id, info in self.pool.block_info.items():
            if info.sequence_id is not None and block_id not in in_use:
                blocks_of[info.sequence_id].append(block_id)
        return [
            EvictionCandidate(
                sequence_id=sequence_id,
                block_ids=block_ids,
                last_access_time=max(self.pool.block_info[each].last_access_time for each in block_ids),
                estimated_lifetime=0.0,
            )
            for sequence_id, block_ids in blocks_of.items()
        ]

    def compute(self, running: Running, num_tokens: int, step: int) -> None:
        """Stand in for a model: compute KV, and sample a token once the last known one is computed."""
        row = running.row
        num_computed = row.num_computed_tokens + num_tokens
        if num_computed == row.num_tokens:
            running.tokens.append(1000 + num_computed)
        running.row = replace(
            row,
            num_tokens=len(running.tokens),
            num_computed_tokens=num_computed,
            num_blocks=len(running.block_ids),
            last_scheduled_step=step,
        )

    def num_generated(self, running: Running) -> int:
        """Count the tokens of its answer."""
        return len(running.tokens) - len(running.row.token_ids)

    def end(self, ended: Running) -> None:
        """Cache what was computed, free the rest, and tell the predictor how many tokens were generated."""
        self.running.remove(ended)
        computed = ended.tokens[: ended.row.num_computed_tokens]
        blocks = ended.block_ids[: -(-len(computed) // BLOCK_SIZE)]
        result = self.cache.insert_prefix(computed, blocks)
        first_new = len(result.block_ids) - result.num_new_blocks
        kept = {*result.block_ids[first_new:], result.partial_block_id} - {None}  # the cache's from now on
        self.pool.free([block_id for block_id in ended.block_ids if block_id not in kept])
        self.pool.free(list(result.released_block_ids))
        self.cache.unlock(ended.match)
        seconds = (self.clock.now_ns() - ended.started_ns) / 1e9
        num_generated = self.num_generated(ended)
        self.predictor.update(
            sequence_id=ended.row.request_id, actual_length=num_generated, actual_time=seconds
        )
        print(f"{ended.row.request_id}: {num_generated} tokens in {seconds:.2f} s, {len(kept)} blocks cached")

    def close(self) -> None:
        """Drop the cache; then every block must be free."""
        self.pool.free(self.cache.clear())
        self.cache.check_integrity()
        self.pool.check_integrity()
        assert self.pool.get_free_blocks() == self.pool.total_blocks


def main(total_blocks: int = 10_000) -> Report:
    """Serve the requests, check what was reused, and return what happened."""
    longest = max(len(row.token_ids) + row.max_tokens for row in REQUESTS)
    if total_blocks * BLOCK_SIZE < longest:
        raise ValueError(f"{total_blocks} blocks do not hold the longest request, which has {longest} tokens")
    server = Server(total_blocks)
    report = server.serve(REQUESTS)
    print(f"cached tokens found: {report.match_lengths}; evicted: {report.victims or 'nobody'}")
    assert report.match_lengths == {"first": 0, "second": 5, "third": 0}
    descriptors = server.cache.query_by_prefix([1, 2, 3, 4, 5])
    print(f"blocks that begin with 1 2 3 4 5: {descriptors}")
    server.close()
    return report


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
