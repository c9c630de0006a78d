"""What every prefix cache must do, and what every one that keeps what it is given must do."""

from __future__ import annotations

import statistics

import pytest

from sagellm.core.errors import BlockError, ConfigError, EngineError, InvalidInputError, StaleMatchError
from sagellm.core.ids import BlockId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import EvictionPolicyProtocol, NullEvictionPolicy
from sagellm.core.protocols.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from sagellm.core.protocols.prefix_cache import EvictedBlocks, PrefixCacheProtocol, PrefixMatch
from sagellm.core.runtime import Clock, Randomness, VirtualClock
from sagellm.core.tokens import pack
from sagellm.testing.cost import cpu_ns, slowness
from sagellm.testing.eviction_audit import AuditingEvictionPolicy
from sagellm.testing.prefix_cache_model import PrefixCacheMachine
from sagellm.testing.prefix_cache_threads import ThreadedCache, YieldingClock, YieldingPolicy


def blocks(first: int, num_blocks: int) -> list[BlockId]:
    """Return consecutive block ids."""
    return [BlockId(first + index) for index in range(num_blocks)]


OTHER = Namespace("other")


class PrefixCacheContract:
    """Holds for every prefix cache, even one that remembers nothing. Override `make`."""

    # CPU time on a server of 2023; a slower machine is allowed as much more as it is slower.
    max_match_s = 0.002  # median of one match of 512 tokens
    max_evict_s = 0.002  # per block, among 2,000 leaves

    def make(
        self,
        max_blocks: int = 100,
        block_size: int = 4,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
    ) -> PrefixCacheProtocol:
        """Return a new cache."""
        raise NotImplementedError

    def test_a_new_cache_is_empty(self) -> None:
        """No match, nothing to evict, all counts zero."""
        cache = self.make()
        assert cache.match_prefix(range(16)) == PrefixMatch(
            0, [], DEFAULT, None, cache.match_prefix([]).version
        )
        assert cache.num_evictable_blocks == 0
        assert cache.evict(3) == cache.clear() == []
        assert cache.metrics().num_lookups == cache.metrics().num_blocks == 0
        assert cache.metrics().token_hit_rate == 0.0
        cache.check_integrity()

    @pytest.mark.parametrize("block_size", [1, 2, 3])
    @pytest.mark.parametrize("with_policy", [False, True])
    def test_random_operations_agree_with_a_plain_model(self, block_size: int, with_policy: bool) -> None:  # noqa: FBT001
        """Each operation gives what a dict would, and the bookkeeping is whole after each."""
        policy = AuditingEvictionPolicy() if with_policy else None
        cache = self.make(40, block_size, eviction_policy=policy, clock=VirtualClock())
        PrefixCacheMachine(cache, block_size, Randomness(block_size).stream("operations")).run(10_000)

    @pytest.mark.full
    def test_a_million_random_operations_agree_with_a_plain_model(self) -> None:
        """A longer run, with the bookkeeping checked at every hundredth."""
        cache = self.make(40, 2)
        PrefixCacheMachine(cache, 2, Randomness(0).stream("operations")).run(1_000_000, check_every=100)

    def test_two_caches_share_nothing(self) -> None:
        """What one holds, another does not know."""
        busy, idle = self.make(), self.make()
        match = busy.lock(busy.match_prefix(range(8)), num_lookup_tokens=8)
        busy.insert_prefix(range(8), blocks(0, 2))
        busy.unlock(match)
        assert idle.match_prefix(range(8)).match_length == 0
        assert idle.metrics() == self.make().metrics()

    def test_pins_are_listed_until_they_are_ended(self) -> None:
        """With the tokens and namespace to end them; empty if pins are not supported."""
        cache = self.make(clock=VirtualClock())
        cache.insert_prefix(range(8), blocks(0, 2), OTHER)
        num_pinned = cache.pin(range(10), OTHER, ttl_s=5.0).num_pinned_tokens
        pins = cache.pins()
        assert [len(pin.token_ids) for pin in pins] == ([num_pinned] if num_pinned else [])
        for pin in pins:
            assert (pin.token_ids, pin.namespace) == (pack(range(num_pinned)), OTHER)
            assert (pin.ttl_s, pin.left_s) == (5.0, 5.0)
            assert cache.unpin(pin.token_ids, pin.namespace) == 1
        assert cache.pins() == []
        cache.check_integrity()

    def test_threads_lose_no_block_and_get_none_twice(self) -> None:
        """Eight of them: every match holds its tokens, every block that the cache took comes back once."""
        cache = self.make(60, 2, eviction_policy=YieldingPolicy(), clock=YieldingClock())
        ThreadedCache(cache).run(20_000)

    @pytest.mark.full
    def test_threads_lose_no_block_in_a_million_operations(self) -> None:
        """A longer run."""
        ThreadedCache(self.make(60, 2)).run(1_000_000, seed=1)

    def test_a_match_of_512_tokens_is_cheap(self) -> None:
        """No work grows quadratically."""
        cache = self.make(1000, 16)
        tokens = pack(range(512))
        cache.insert_prefix(tokens, blocks(0, 32))
        cost_ns = statistics.median(cpu_ns(lambda: cache.match_prefix(tokens)) for _ in range(101))
        assert cost_ns / 1e9 < self.max_match_s * slowness()


class KeepingPrefixCacheContract(PrefixCacheContract):
    """Holds for every prefix cache that keeps what it is given, up to its capacity."""

    def test_what_was_inserted_is_matched_by_whole_blocks(self) -> None:
        """The matching part of one more block is reported separately."""
        cache = self.make()
        result = cache.insert_prefix(range(10), blocks(7, 3))
        assert result[:3] == ([7, 8], 2, [])
        match = cache.match_prefix([*range(7), 99, 99])
        assert match.block_ids == [7]
        assert match.partial in (None, (8, 3))
        assert match.match_length == (7 if match.partial else 4)
        assert cache.match_prefix(range(100)).block_ids == [7, 8]
        assert cache.match_prefix([1, *range(7)]).match_length == 0

    def test_tokens_are_compared_exactly(self) -> None:
        """One different token anywhere ends the match at its block."""
        cache = self.make()
        tokens = list(range(32))
        cache.insert_prefix(tokens, blocks(0, 8))
        for position in range(32):
            changed = [*tokens[:position], 2**31 - 1, *tokens[position + 1 :]]
            match = cache.match_prefix(changed)
            assert match.block_ids == blocks(0, position // 4)
            assert match.match_length in (position // 4 * 4, position)

    def test_namespaces_never_share(self) -> None:
        """Tenant, salt and adapter each keep prefixes apart, in both directions."""
        cache = self.make()
        namespaces = [DEFAULT, OTHER, Namespace(salt="s"), Namespace(adapter="a"), Namespace("", "default")]
        for index, namespace in enumerate(namespaces):
            assert cache.match_prefix(range(8), namespace).match_length == 0
            assert cache.query_by_prefix(range(8), namespace=namespace) is None
            assert cache.insert_prefix(range(8), blocks(2 * index, 2), namespace).num_new_blocks == 2
        for index, namespace in enumerate(namespaces):
            assert cache.match_prefix(range(8), namespace).block_ids == blocks(2 * index, 2)

    def test_runs_are_all_that_is_cached_parents_first(self) -> None:
        """They are walked to save a cache; a cache that lists nothing is saved as empty."""
        cache = self.make()
        prompts = [
            ([*range(8), *range(20, 28)], DEFAULT),
            (list(range(16)), DEFAULT),
            (list(range(8)), OTHER),
        ]
        for number, (tokens, namespace) in enumerate(prompts):
            cache.insert_prefix(tokens, blocks(4 * number, len(tokens) // 4), namespace)
        runs = cache.runs()
        assert isinstance(runs, list)
        if not runs:
            pytest.skip("it lists nothing")
        paths: list[list[int]] = []
        for number, run in enumerate(runs):
            assert run.parent is None or run.parent < number
            paths.append([*(paths[run.parent] if run.parent is not None else []), *run.token_ids])
            found = cache.match_prefix(paths[-1], run.namespace).block_ids
            assert found[-len(run.block_ids) :] == run.block_ids
        assert sum(len(run.block_ids) for run in runs) == cache.metrics().num_blocks == 8

    def test_offering_the_cached_blocks_again_changes_nothing(self) -> None:
        """A running request inserts its whole table again, and only the new end is new."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        assert cache.insert_prefix(range(8), blocks(0, 2))[:3] == ([0, 1], 0, [])
        assert cache.insert_prefix(range(16), blocks(0, 4))[:3] == ([0, 1, 2, 3], 2, [])
        assert cache.insert_prefix(range(4), blocks(0, 1))[:3] == ([0], 0, [])

    def test_other_blocks_for_cached_tokens_stay_with_the_caller(self) -> None:
        """They are duplicates; the cached ones remain."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        result = cache.insert_prefix(range(12), [BlockId(0), BlockId(11), BlockId(12)])
        assert result[:3] == ([0, 1, 12], 1, [11])

    def test_a_full_cache_keeps_what_fits_and_evicts_nothing(self) -> None:
        """The rest is neither new nor duplicate."""
        cache = self.make(max_blocks=3)
        assert cache.insert_prefix(range(8), blocks(0, 2)).num_new_blocks == 2
        tokens = range(100, 116)
        assert cache.insert_prefix(tokens, blocks(10, 4))[:3] == ([10], 1, [])
        assert cache.insert_prefix(tokens, blocks(20, 4))[:3] == ([10], 0, [20])
        assert cache.match_prefix(range(8)).block_ids == [0, 1]
        cache.check_integrity()

    @pytest.mark.parametrize("offered", [[0, 1, 2, 3], [0, 1, 0]])
    def test_too_many_or_repeated_blocks_are_refused(self, offered: list[BlockId]) -> None:
        """Nothing changes then."""
        cache = self.make()
        with pytest.raises(BlockError):
            cache.insert_prefix(range(10), offered)
        assert cache.metrics().num_blocks == 0

    def test_a_block_cannot_hold_two_contents(self) -> None:
        """The id of a cached block is refused for other tokens."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        with pytest.raises(BlockError, match="1"):
            cache.insert_prefix(range(50, 58), blocks(1, 2))
        assert cache.match_prefix(range(50, 58)).match_length == 0

    def test_bad_tokens_are_refused(self) -> None:
        """Text and negative ids are not tokens."""
        for tokens in ("text", [-1, 2]):
            with pytest.raises(InvalidInputError):
                self.make().match_prefix(tokens)  # type: ignore[arg-type]

    def test_a_locked_path_survives_eviction(self) -> None:
        """Everything else may be evicted; after `unlock`, the path too."""
        cache = self.make()
        cache.insert_prefix(range(16), blocks(0, 4))
        cache.insert_prefix([*range(8), *range(50, 58)], [*blocks(0, 2), *blocks(8, 2)])
        match = cache.lock(cache.match_prefix(range(12)))
        assert (match.match_length, cache.num_evictable_blocks) == (12, 3)
        assert sorted(cache.evict(100)) == [3, 8, 9]
        assert cache.evict(1) == cache.clear() == []
        assert cache.match_prefix(range(16)).block_ids == [0, 1, 2]
        cache.unlock(match)
        assert sorted(cache.evict(100)) == [0, 1, 2]
        assert cache.metrics().num_nodes == 0

    def test_locks_of_one_path_add_up(self) -> None:
        """Each has to be undone, in any order, even after others split the path."""
        cache = self.make()
        cache.insert_prefix(range(16), blocks(0, 4))
        matches = [cache.lock(cache.match_prefix(range(length))) for length in (16, 4, 8, 16)]
        for match, num_evictable in zip(matches, (0, 0, 0, 4), strict=True):
            assert cache.evict(4) == []
            cache.unlock(match)
            cache.check_integrity()
            assert cache.num_evictable_blocks == num_evictable

    def test_num_idle_blocks_is_what_a_lock_would_take(self) -> None:
        """Blocks that another lock protects are not counted."""
        cache = self.make()
        cache.insert_prefix(range(16), blocks(0, 4))
        cache.lock(cache.match_prefix(range(4)))
        match = cache.match_prefix(range(12))
        assert cache.num_idle_blocks(match) == 2
        cache.lock(match)
        assert cache.num_evictable_blocks == 1
        assert cache.num_idle_blocks(cache.match_prefix(range(12))) == 0

    def test_a_shortened_match_locks_only_what_is_left_of_it(self) -> None:
        """A caller that must compute the last token gives its block up."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        match = cache.match_prefix(range(8))
        cache.lock(match._replace(match_length=4, block_ids=match.block_ids[:1]))
        assert cache.evict(2) == [1]

    def test_a_lock_fails_after_blocks_entered_or_left(self) -> None:
        """The match may no longer be the longest, or may hold blocks that are gone."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        match = cache.match_prefix(range(8))
        cache.insert_prefix(range(50, 58), blocks(2, 2))
        with pytest.raises(StaleMatchError):
            cache.lock(match)
        match = cache.match_prefix(range(8))
        cache.evict(1)
        with pytest.raises(StaleMatchError):
            cache.lock(match)
        assert cache.metrics().num_lookups == 0

    def test_unlocking_twice_is_refused(self) -> None:
        """So is unlocking a match that was not locked."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        match = cache.match_prefix(range(8))
        with pytest.raises(BlockError):
            cache.unlock(match)
        locked = cache.lock(match)
        cache.unlock(locked)
        with pytest.raises(BlockError):
            cache.unlock(locked)
        cache.check_integrity()

    def test_moved_blocks_hold_what_they_held(self) -> None:
        """Whole and partial ones, locked or not; blocks that are not cached are skipped."""
        cache = self.make()
        cache.insert_prefix(range(10), blocks(0, 3))
        locked = cache.lock(cache.match_prefix(range(4)))
        stale = cache.match_prefix(range(8))
        cache.move_blocks([(BlockId(0), BlockId(40)), (BlockId(2), BlockId(42)), (BlockId(7), BlockId(47))])
        cache.check_integrity()
        match = cache.match_prefix(range(12))
        assert match.block_ids == [40, 1]
        assert match.partial in (None, (42, 2))
        with pytest.raises(StaleMatchError):
            cache.lock(stale)
        assert sorted(cache.evict(9)) == [1, 42][: 2 if match.partial else 1]
        cache.unlock(locked)
        assert cache.clear() == [40]

    def test_a_move_that_cannot_be_changes_nothing(self) -> None:
        """To a block that is cached, to the same block twice, or to an invalid id."""
        cache = self.make()
        cache.insert_prefix(range(12), blocks(0, 3))
        wrong: list[list[tuple[int, int]]] = [[(0, 9), (1, 2)], [(0, 9), (1, 9)], [(0, 9), (0, 8)], [(0, -1)]]
        for moves in wrong:
            with pytest.raises(BlockError):
                cache.move_blocks([(BlockId(source), BlockId(target)) for source, target in moves])
            cache.check_integrity()
        assert cache.match_prefix(range(12)).block_ids == [0, 1, 2]

    def test_leaves_go_least_recently_used_first(self) -> None:
        """A lock is a use, including of its ancestors; a match alone is not."""
        clock = VirtualClock()
        cache = self.make(clock=clock)
        for first in (0, 10, 20):
            cache.insert_prefix(range(first, first + 4), blocks(first, 1))
            clock.advance_ns(1)
        cache.unlock(cache.lock(cache.match_prefix(range(4))))
        cache.match_prefix(range(10, 14))
        assert [cache.evict(1) for _ in range(4)] == [[10], [20], [0], []]

    def test_a_long_leaf_gives_up_its_end_only(self) -> None:
        """Exactly the wanted number of blocks goes, and the beginning still matches."""
        cache = self.make()
        cache.insert_prefix(range(20), blocks(0, 5))
        assert sorted(cache.evict(2)) == [3, 4]
        assert cache.match_prefix(range(20)).block_ids == [0, 1, 2]
        assert cache.insert_prefix(range(20), blocks(0, 5))[:3] == ([0, 1, 2, 3, 4], 2, [])

    def test_the_policy_decides_and_none_ends_eviction(self) -> None:
        """A policy that names no victim keeps everything; `clear` does not ask the policy."""
        cache = self.make(eviction_policy=NullEvictionPolicy())
        cache.insert_prefix(range(8), blocks(0, 2))
        assert cache.evict(2) == []
        assert sorted(cache.clear()) == [0, 1]

    def test_a_hit_is_reported_for_every_node_of_the_path(self) -> None:
        """The ancestors of a leaf are reused too; insertions, and locks without a lookup, are not hits."""
        policy = AuditingEvictionPolicy()
        cache = self.make(eviction_policy=policy)
        cache.insert_prefix(range(8), blocks(0, 2))
        cache.insert_prefix([*range(4), *range(50, 54)], [BlockId(0), BlockId(5)])
        cache.lock(cache.match_prefix(range(8)))
        assert policy.num_hits == 0
        cache.lock(cache.match_prefix(range(8)), num_lookup_tokens=8)
        assert sorted(node.access_count for node in policy.nodes.values()) == [0, 1, 1]
        assert policy.num_hits == 2

    def test_lookups_are_counted_by_lock_and_query(self) -> None:
        """Not by a match, and not by a lock without a lookup."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        cache.lock(cache.match_prefix(range(8)))
        cache.lock(cache.match_prefix(range(10)), num_lookup_tokens=10)
        assert cache.query_by_prefix(range(8), min_match_length=9) is None
        found = cache.query_by_prefix(range(9), min_match_length=8)
        assert found is not None
        assert [(block.block_id, block.start, block.num_tokens) for block in found] == [(0, 0, 4), (1, 4, 4)]
        metrics = cache.metrics()
        assert (metrics.num_lookups, metrics.num_hits) == (3, 2)
        assert (metrics.num_lookup_tokens, metrics.num_hit_tokens) == (27, 16)
        assert metrics.token_hit_rate == pytest.approx(16 / 27)

    def test_a_miss_is_explained_by_what_matches(self) -> None:
        """What is cached is not reported as missing, and asking counts nothing."""
        cache = self.make()
        cache.insert_prefix(range(8), blocks(0, 2))
        before = cache.metrics()
        found, missed = cache.explain_miss(range(8)), cache.explain_miss(range(100, 112))
        assert (found.cause, found.num_tokens, found.match_length) == ("none", 8, 8)
        assert (missed.num_tokens, missed.match_length) == (12, 0)
        assert missed.cause in ("never_seen", "unknown")
        partly = cache.explain_miss([*range(8), *range(50, 54)])
        assert (partly.match_length, partly.diverges_at) == (8, 8)
        assert partly.cause != "none"
        assert cache.metrics() == before

    def test_a_noted_miss_is_explained_later_as_it_was(self) -> None:
        """Later insertions, evictions and clearing change nothing."""
        cache, tokens = self.make(), [*range(8), *range(50, 58)]
        cache.insert_prefix(range(8), blocks(0, 2))
        explained_then = cache.explain_miss(tokens)
        explain_later = cache.note_miss(tokens, cache.match_prefix(tokens))
        cache.insert_prefix(tokens, blocks(0, 4))
        assert explain_later() == explained_then
        cache.clear()
        assert explain_later() == explained_then

    def test_answers_are_remembered_with_their_prompts(self) -> None:
        """By every prefix of what is cached, in their own namespace; or a cache remembers none."""
        clock = VirtualClock()
        cache = self.make(clock=clock)
        assert cache.answers(range(8)) == ()
        cache.insert_prefix(range(12), blocks(0, 3))
        cache.insert_prefix([*range(8), *range(50, 54)], [*blocks(0, 2), BlockId(7)])
        before = cache.metrics()
        clock.advance_ns(5)
        cache.record_answer(range(12), 30)
        clock.advance_ns(1)
        cache.record_answer([*range(8), *range(50, 54)], 70)
        found = cache.answers(range(14))
        if not found:
            return
        assert found == ((12, 1, (30,), 5), (8, 2, (30, 70), 6))
        assert cache.answers(range(9)) == ((8, 2, (30, 70), 6),)
        assert cache.answers(range(12), OTHER) == cache.answers(range(100, 112)) == ()
        assert cache.metrics() == before

    def test_what_is_shown_to_a_keeper_is_what_is_evicted(self) -> None:
        """While it is cached; a cache that does not support keepers shows nothing."""
        cache = self.make()
        shown: list[EvictedBlocks] = []
        cache.keep_evicted(shown.append)
        cache.insert_prefix(range(12), blocks(0, 3), OTHER)
        dropped = cache.evict(2)
        if not shown:
            return
        assert sorted(block_id for each in shown for block_id in each.block_ids) == sorted(dropped)
        assert {header.namespace for each in shown for header in each.headers} == {OTHER}

    def test_a_subscriber_hears_of_every_block_or_of_none(self) -> None:
        """Of blocks already there, of new ones, and of each that leaves."""
        cache, events = self.make(), list[KVCacheEvent]()
        cache.insert_prefix(range(8), blocks(0, 2))
        cache.subscribe(events.append)
        cache.insert_prefix(range(12), blocks(0, 3))
        cache.evict(1)
        if not events:
            return
        stored = [one for event in events if isinstance(event, BlockStored) for one in event.block_hashes]
        gone = [one for event in events if isinstance(event, BlockRemoved) for one in event.block_hashes]
        assert len(set(stored)) == 3
        assert gone == stored[-1:]

    def test_another_policy_evicts_what_is_cached(self) -> None:
        """It is told of all nodes and unlocked leaves in order of last use; a cache may refuse to change."""
        clock = VirtualClock()
        cache = self.make(eviction_policy=NullEvictionPolicy(), clock=clock)
        for first in (0, 10, 20):
            cache.insert_prefix(range(first, first + 8), blocks(first, 2))
            clock.advance_ns(1)
        cache.insert_prefix([*range(4), *range(50, 54)], [BlockId(0), BlockId(5)])
        locked = cache.lock(cache.match_prefix(range(10, 18)))
        policy = AuditingEvictionPolicy()
        try:
            cache.replace_policy(policy)
        except EngineError:
            assert cache.evict(1) == []
            return
        cache.check_integrity()
        cached = [block_id for each in cache.runs() for block_id in each.block_ids]
        assert sorted(cached) == [0, 1, 5, 10, 11, 20, 21]
        assert len(policy.candidates) == 3
        assert [sorted(cache.evict(number)) for number in (1, 2, 2)] == [[21], [1, 20], [0, 5]]
        cache.unlock(locked)
        with pytest.raises(ConfigError):
            cache.replace_policy(None)  # type: ignore[arg-type]
        assert sorted(cache.evict(9)) == [10, 11]
        assert policy.nodes == policy.candidates == {}

    def test_room_is_made_for_what_is_about_to_be_inserted(self) -> None:
        """No more leaves are evicted than necessary."""
        cache = self.make(4)
        cache.insert_prefix(range(16), blocks(0, 4))
        dropped = cache.make_room(2, OTHER)
        assert sorted(dropped) == [2, 3]
        assert cache.insert_prefix(range(50, 58), blocks(10, 2), OTHER).num_new_blocks == 2
        cache.check_integrity()

    def test_eviction_does_not_grow_with_the_number_of_leaves(self) -> None:
        """Finding one victim does not examine all leaves."""
        cache = self.make(2_000, 1)
        for first in range(2_000):
            cache.insert_prefix([first], blocks(first, 1))
        evicted: list[BlockId] = []
        cost_ns = cpu_ns(lambda: evicted.extend(cache.evict(1_000)))
        assert len(evicted) == 1_000
        assert cost_ns / 1e9 < 1_000 * self.max_evict_s * slowness()
