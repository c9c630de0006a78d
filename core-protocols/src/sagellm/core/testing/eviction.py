"""What every eviction policy must do."""

from __future__ import annotations

import time
from collections import Counter
from random import Random
from typing import Any

from sagellm.core.ids import BlockId, NodeId, SequenceId
from sagellm.core.protocols.eviction import CachedNode, EvictionCandidate, EvictionPolicyProtocol
from sagellm.core.runtime import Randomness


def make_node(node_id: int, **values: int) -> CachedNode:
    """Return a node with what a test does not care about filled in."""
    fields = {"num_blocks": 1, "depth": 16, "created_ns": node_id, "last_access_ns": node_id} | values
    return CachedNode(node_id=NodeId(node_id), **fields)  # type: ignore[arg-type]


def make_candidates(random: Random, num_candidates: int) -> list[EvictionCandidate]:
    """Return random candidates, some pinned, some that share blocks."""
    return [
        EvictionCandidate(
            sequence_id=SequenceId(f"seq-{index}"),
            block_ids=[BlockId(random.randrange(4 * num_candidates)) for _ in range(random.randrange(1, 6))],
            last_access_time=float(random.randrange(num_candidates)),
            access_count=random.randrange(4),
            priority=random.randrange(-1, 2),
            is_pinned=random.random() < 0.2,
            estimated_lifetime=random.choice((None, 1.0, 100.0)),
        )
        for index in range(num_candidates)
    ]


class EvictionPolicyContract:
    """Holds for every policy, also for one that protects everything. Override `make`."""

    max_decision_s = 0.005  # median of one victim among 10,000 leaves, its removal included
    num_operations = 10_000

    def make(self) -> EvictionPolicyProtocol:
        """Return a new policy."""
        raise NotImplementedError

    def rank(self, node: CachedNode) -> Any:
        """Return a key whose smallest value must be the victim; None where the order is not tested."""
        return None

    def test_a_new_policy_names_no_victim(self) -> None:
        """There is nothing to choose from."""
        assert self.make().victim() is None

    def test_random_operations_keep_to_the_candidates(self) -> None:
        """The victim is a candidate, the one that `rank` wants, and the same when asked twice."""
        policy = self.make()
        random = Randomness(1).stream("eviction")
        outside: dict[int, CachedNode] = {}
        candidates: dict[int, CachedNode] = {}
        for now in range(1, self.num_operations + 1):
            self._change(policy, random, now, outside, candidates)
            victim = policy.victim()
            assert victim is policy.victim()
            assert victim is None or candidates[victim.node_id] is victim
            if candidates and self.rank(next(iter(candidates.values()))) is not None:
                assert victim is min(candidates.values(), key=self.rank)

    @staticmethod
    def _change(
        policy: EvictionPolicyProtocol,
        random: Random,
        now: int,
        outside: dict[int, CachedNode],
        candidates: dict[int, CachedNode],
    ) -> None:
        """Do what a cache could do next: a node enters, is hit, locked, unlocked, or evicted."""
        kind = random.random()
        if kind < 0.3 or not (outside or candidates):
            node = make_node(
                now, last_access_ns=now // 3, created_ns=now // 3, num_blocks=random.randrange(1, 9)
            )
            policy.on_insert(node)
            outside[now] = node
        elif kind < 0.6 and outside:
            node = outside.pop(random.choice(list(outside)))
            policy.add_candidate(node)
            candidates[node.node_id] = node
        elif kind < 0.8 and candidates:
            node = candidates.pop(random.choice(list(candidates)))
            policy.remove_candidate(node)
            node.last_access_ns = now // 3
            node.access_count += 1
            policy.on_hit(node)
            outside[node.node_id] = node
        elif victim := policy.victim():
            policy.remove_candidate(victim)
            policy.on_remove(victim)
            del candidates[victim.node_id]

    def test_two_policies_share_nothing(self) -> None:
        """What one is told, another does not know."""
        busy, idle = self.make(), self.make()
        node = make_node(1)
        busy.on_insert(node)
        busy.add_candidate(node)
        assert idle.victim() is None
        assert idle.metrics() == self.make().metrics()

    def test_a_pinned_sequence_is_never_chosen(self) -> None:
        """Not even when nothing else is there."""
        candidates = make_candidates(Randomness(2).stream("pinned"), 50)
        chosen = self.make().select_victims(candidates, 10_000)
        assert not {candidate.sequence_id for candidate in candidates if candidate.is_pinned} & set(chosen)

    def test_only_candidates_are_chosen_and_each_at_most_once(self) -> None:
        """The answer is a part of the question."""
        candidates = make_candidates(Randomness(3).stream("once"), 50)
        chosen = Counter(self.make().select_victims(candidates, 20))
        assert chosen.keys() <= {candidate.sequence_id for candidate in candidates}
        assert set(chosen.values()) <= {1}

    def test_nothing_is_chosen_when_nothing_is_required(self) -> None:
        """Zero and less."""
        candidates = make_candidates(Randomness(4).stream("nothing"), 5)
        for required_blocks in (0, -3):
            assert self.make().select_victims(candidates, required_blocks) == []

    def test_select_victims_depends_on_its_arguments_alone(self) -> None:
        """Neither on what was asked before nor on the tree."""
        candidates = make_candidates(Randomness(5).stream("stateless"), 40)
        policy = self.make()
        expected = policy.select_victims(candidates, 30)
        node = make_node(1, access_count=1)
        policy.on_insert(node)
        policy.on_hit(node)
        policy.add_candidate(node)
        policy.select_victims(candidates[::2], 7)
        assert policy.select_victims(candidates, 30) == expected
        assert policy.victim() in (None, node)

    def test_a_decision_is_cheap_among_many_leaves(self) -> None:
        """No call looks at all of them."""
        policy = self.make()
        for node_id in Randomness(6).stream("cost").sample(range(10_000), 10_000):
            node = make_node(node_id)
            policy.on_insert(node)
            policy.add_candidate(node)
        durations_s = []
        for _ in range(200):
            start = time.perf_counter()
            if victim := policy.victim():
                policy.remove_candidate(victim)
                policy.on_remove(victim)
            durations_s.append(time.perf_counter() - start)
        assert sorted(durations_s)[100] < self.max_decision_s


class RankingEvictionPolicyContract(EvictionPolicyContract):
    """Holds for every policy that names a victim as long as there is a candidate."""

    def test_every_candidate_is_named_once_before_none_is_left(self) -> None:
        """Evicting everything takes as many victims as there are leaves."""
        policy = self.make()
        nodes = [make_node(node_id) for node_id in range(100)]
        for node in nodes:
            policy.on_insert(node)
            policy.add_candidate(node)
        named = []
        while victim := policy.victim():
            named.append(victim.node_id)
            policy.remove_candidate(victim)
            policy.on_remove(victim)
        assert sorted(named) == [node.node_id for node in nodes]

    def test_a_removed_candidate_is_not_named_until_it_is_added_again(self) -> None:
        """A lock protects."""
        policy, node = self.make(), make_node(1)
        policy.on_insert(node)
        policy.add_candidate(node)
        policy.remove_candidate(node)
        assert policy.victim() is None
        policy.add_candidate(node)
        assert policy.victim() is node

    def test_victims_cover_what_is_required_and_all_are_needed(self) -> None:
        """Blocks that sequences share count once; without the last one it would not suffice."""
        candidates = make_candidates(Randomness(7).stream("cover"), 60)
        blocks = {candidate.sequence_id: set(candidate.block_ids) for candidate in candidates}
        for required_blocks in range(1, 80, 7):
            chosen = self.make().select_victims(candidates, required_blocks)
            assert len(set().union(*(blocks[one] for one in chosen))) >= required_blocks
            assert len(set().union(*(blocks[one] for one in chosen[:-1]))) < required_blocks

    def test_all_unpinned_sequences_are_chosen_when_they_do_not_suffice(self) -> None:
        """The caller gets what there is."""
        candidates = make_candidates(Randomness(8).stream("all"), 30)
        unpinned = {candidate.sequence_id for candidate in candidates if not candidate.is_pinned}
        assert set(self.make().select_victims(candidates, 10_000)) == unpinned

    def test_metrics_count_what_was_reported(self) -> None:
        """A victim is a node that left after it was named."""
        policy = self.make()
        nodes = [make_node(node_id, access_count=1) for node_id in range(4)]
        for node in nodes:
            policy.on_insert(node)
            policy.on_hit(node)
            policy.add_candidate(node)
        victim = policy.victim()
        assert victim is not None
        policy.remove_candidate(victim)
        policy.on_remove(victim)
        metrics = policy.metrics()
        counted = (metrics.num_inserted, metrics.num_hits, metrics.num_victims, metrics.num_candidates)
        assert counted == (4, 4, 1, 3)
