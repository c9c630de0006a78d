"""What every eviction policy must do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sagellm.core.protocols.eviction import CachedNode, EvictionPolicyProtocol
from sagellm.core.runtime import Randomness
from sagellm.core.testing.eviction_load import EvictionPolicyLoad, make_candidates
from sagellm.core.testing.eviction_machine import change, make_node

__all__ = ["EvictionPolicyContract", "RankingEvictionPolicyContract", "make_candidates", "make_node"]


class EvictionPolicyContract(EvictionPolicyLoad):
    """Holds for every policy, even one that protects everything. Override `make`."""

    num_operations = 10_000

    def make(self) -> EvictionPolicyProtocol:
        """Return a new policy."""
        raise NotImplementedError

    def rank(self, node: CachedNode) -> Any:
        """Return a key whose smallest value must be the victim; None if the order is not tested."""
        return None

    def test_a_new_policy_names_no_victim(self) -> None:
        """There is nothing to choose from."""
        assert self.make().victim() is None

    def test_random_operations_keep_to_the_candidates(self) -> None:
        """The victim is a candidate, the one that `rank` expects, and the same when asked twice."""
        policy = self.make()
        random = Randomness(1).stream("eviction")
        outside: dict[int, CachedNode] = {}
        candidates: dict[int, CachedNode] = {}
        for now in range(1, self.num_operations + 1):
            change(policy, random, now, outside, candidates)
            victim = policy.victim()
            assert victim is policy.victim()
            assert victim is None or candidates.get(victim.node_id) is victim, (
                f"node {victim.node_id} was named and is not a candidate"
            )
            if candidates and self.rank(next(iter(candidates.values()))) is not None:
                assert victim is min(candidates.values(), key=self.rank)

    def test_two_policies_share_nothing(self) -> None:
        """Calls on one do not affect the other."""
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
        pinned = [each.sequence_id for each in candidates if each.is_pinned and each.sequence_id in chosen]
        assert not pinned, f"{len(pinned)} pinned sequences were chosen, {pinned[0]} among them"

    def test_only_candidates_are_chosen_and_each_at_most_once(self) -> None:
        """The answer is a subset of the candidates."""
        candidates = make_candidates(Randomness(3).stream("once"), 50)
        chosen = Counter(self.make().select_victims(candidates, 20))
        assert chosen.keys() <= {candidate.sequence_id for candidate in candidates}
        assert set(chosen.values()) <= {1}

    def test_nothing_is_chosen_when_nothing_is_required(self) -> None:
        """Zero and negative numbers."""
        candidates = make_candidates(Randomness(4).stream("nothing"), 5)
        for required_blocks in (0, -3):
            assert self.make().select_victims(candidates, required_blocks) == []

    def test_select_victims_depends_on_its_arguments_alone(self) -> None:
        """Neither on earlier calls nor on the tree."""
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


class RankingEvictionPolicyContract(EvictionPolicyContract):
    """Holds for every policy that names a victim whenever there is a candidate."""

    names_victims = True

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
        assert policy.victim() is None, "node 1 was named after remove_candidate"
        policy.add_candidate(node)
        assert policy.victim() is node, "node 1 was not named after add_candidate"

    def test_a_victim_gives_up_one_block_at_least_and_no_more_than_wanted(self) -> None:
        """Asking changes neither the victim nor its being a candidate."""
        policy = self.make()
        for node_id in range(1, 4):
            node = make_node(node_id, num_blocks=5)
            policy.on_insert(node)
            policy.add_candidate(node)
        victim = policy.victim()
        assert victim is not None
        for num_wanted in (1, 2, 5):
            assert 1 <= policy.num_victim_blocks(victim, num_wanted) <= num_wanted
        assert policy.victim() is victim

    def test_victims_cover_what_is_required_and_all_are_needed(self) -> None:
        """Blocks that sequences share count once; without the last sequence they would not suffice."""
        candidates = make_candidates(Randomness(7).stream("cover"), 60)
        blocks = {candidate.sequence_id: set(candidate.block_ids) for candidate in candidates}
        for required_blocks in range(1, 80, 7):
            chosen = self.make().select_victims(candidates, required_blocks)
            assert len(set().union(*(blocks[one] for one in chosen))) >= required_blocks
            assert len(set().union(*(blocks[one] for one in chosen[:-1]))) < required_blocks

    def test_all_unpinned_sequences_are_chosen_when_they_do_not_suffice(self) -> None:
        """The caller gets everything available."""
        candidates = make_candidates(Randomness(8).stream("all"), 30)
        unpinned = {candidate.sequence_id for candidate in candidates if not candidate.is_pinned}
        differing = unpinned ^ set(self.make().select_victims(candidates, 10_000))
        assert not differing, f"{len(differing)} sequences are missing or were not to be chosen"

    def test_leaves_taken_at_once_are_those_that_are_named_one_by_one(self) -> None:
        """In the same order, whole, and no more than wanted; a policy may leave this to `victim`."""
        at_once, one_by_one = self.make(), self.make()
        for node_id in range(1, 41):
            for policy in (at_once, one_by_one):
                node = make_node(node_id, num_blocks=1 + node_id % 3)
                policy.on_insert(node)
                policy.add_candidate(node)
        taken = [(node.node_id, node.num_blocks) for node in at_once.victims(30)]
        assert sum(num_blocks for _, num_blocks in taken) <= 30
        for node_id, _ in taken:
            named = one_by_one.victim()
            assert named is not None
            assert named.node_id == node_id
            one_by_one.remove_candidate(named)
            one_by_one.on_remove(named)
        counted = (at_once.metrics().num_victims, at_once.metrics().num_candidates)
        assert counted == (len(taken), 40 - len(taken))

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
