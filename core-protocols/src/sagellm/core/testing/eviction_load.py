"""What every eviction policy must withstand: any sequence of calls, eight threads, many leaves, much time."""

from __future__ import annotations

import gc
import statistics
import threading
import time
import weakref
from dataclasses import asdict
from random import Random

from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.eviction import CachedNode, EvictionCandidate, EvictionPolicyProtocol
from sagellm.core.runtime import Randomness
from sagellm.core.testing.eviction_machine import EvictionPolicyMachine, change, make_node
from sagellm.core.testing.random_operations import run_operations
from sagellm.core.testing.threads import NUM_THREADS, run_in_threads


def make_candidates(random: Random, num_candidates: int) -> list[EvictionCandidate]:
    """Return random candidates of three tenants, some pinned, some that share blocks."""
    return [
        EvictionCandidate(
            sequence_id=SequenceId(f"seq-{index}"),
            block_ids=[BlockId(random.randrange(4 * num_candidates)) for _ in range(random.randrange(1, 6))],
            last_access_time=float(random.randrange(num_candidates)),
            access_count=random.randrange(4),
            priority=random.randrange(-1, 2),
            is_pinned=random.random() < 0.2,
            estimated_lifetime=random.choice((None, 1.0, 100.0)),
            tenant=random.choice(("a", "b", "c")),
        )
        for index in range(num_candidates)
    ]


class EvictionPolicyLoad:
    """The part of the contract that needs many calls, inherited by `EvictionPolicyContract`.

    A decision should cost less than 5 µs per block and a choice among 1,000 sequences less than
    100 µs; the budgets are twenty times that, so that only a fault breaks them.
    """

    names_victims = False  # whenever there is a candidate
    max_decision_s = 100e-6  # median of one victim among 10,000 leaves, its removal included
    max_growth = 5.0  # of that from 1,000 leaves to 10,000; a linear one grows by 10
    max_choice_s = 2e-3  # of victims among 1,000 sequences, best of several
    max_kept_nodes = 1_000  # of 5,000 that left one at a time

    def make(self) -> EvictionPolicyProtocol:
        """Return a new policy."""
        raise NotImplementedError

    def test_no_random_sequence_of_calls_disagrees_with_a_model(self) -> None:
        """Only unlocked leaves are named, and, where the policy says so, whenever there are any."""
        run_operations(lambda: EvictionPolicyMachine(self.make(), names_victims=self.names_victims))

    def test_two_policies_decide_without_each_other(self) -> None:
        """Equal histories give equal victims, whatever calls another policy gets in between."""
        alone = _victims(self.make())
        other = _victims(self.make(), beside=self.make())
        assert other == alone, _first_difference(alone, other)

    def test_eight_threads_may_take_turns(self) -> None:
        """The cache calls from any thread, one at a time."""
        policy, lock = self.make(), threading.Lock()
        outside: dict[int, CachedNode] = {}
        candidates: dict[int, CachedNode] = {}
        ticks = iter(range(1, 1 << 30))

        def work(thread: int) -> None:
            random = Randomness(thread).stream("turns")
            for _ in range(200):
                with lock:
                    change(policy, random, next(ticks), outside, candidates)

        run_in_threads(work, num_threads=NUM_THREADS)
        victim = policy.victim()
        assert victim is None or victim.node_id in candidates

    def test_eight_threads_may_have_a_policy_each(self) -> None:
        """Nothing that two of them share is changed without a lock."""
        alone = _victims(self.make())

        def work(_thread: int) -> None:
            came = _victims(self.make())
            assert came == alone, f"another thread changed the order: {_first_difference(alone, came)}"

        run_in_threads(work, num_threads=NUM_THREADS)

    def test_a_decision_is_cheap_among_many_leaves(self) -> None:
        """Less than 5 µs per block is expected; twenty times that is a fault."""
        cost_s = self._decision_s(10_000)
        assert cost_s < self.max_decision_s, (
            f"one victim of 10,000 leaves took {cost_s * 1e6:.0f} µs; "
            f"at most {self.max_decision_s * 1e6:.0f} µs are allowed"
        )

    def test_the_cost_of_a_decision_does_not_grow_with_the_number_of_leaves(self) -> None:
        """No call examines all of them."""
        few_s, many_s = (min(self._decision_s(n) for _ in range(3)) for n in (1_000, 10_000))
        assert many_s < self.max_growth * max(few_s, 1e-6), (
            f"one victim takes {few_s * 1e6:.1f} µs among 1,000 leaves and {many_s * 1e6:.1f} µs among 10,000"
        )

    def test_the_cost_of_a_choice_among_a_thousand_sequences_is_small(self) -> None:
        """Less than 100 µs is expected; twenty times that is a fault."""
        policy, candidates = self.make(), make_candidates(Randomness(9).stream("choice"), 1_000)
        costs_s = []
        for _ in range(20):
            start = time.perf_counter()
            policy.select_victims(candidates, 500)
            costs_s.append(time.perf_counter() - start)
        assert min(costs_s) < self.max_choice_s, (
            f"500 blocks of 1,000 sequences took {min(costs_s) * 1e6:.0f} µs; "
            f"at most {self.max_choice_s * 1e6:.0f} µs are allowed"
        )

    def test_nodes_that_left_are_let_go(self) -> None:
        """Memory is bounded by the nodes in the tree; ids may be remembered, nodes may not."""
        policy, left = self.make(), []
        for node_id in range(1, 5_001):
            node = _WatchedNode(**asdict(make_node(node_id)))
            left.append(weakref.ref(node))
            _pass_through(policy, node)
        del node
        gc.collect()
        num_kept = sum(node() is not None for node in left)
        assert num_kept <= self.max_kept_nodes, f"{num_kept} of 5,000 nodes that left are still held"

    def _decision_s(self, num_leaves: int) -> float:
        policy = self.make()
        for node_id in Randomness(6).stream("cost").sample(range(num_leaves), num_leaves):
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
        return statistics.median(durations_s)


class _WatchedNode(CachedNode):
    __slots__ = ("__weakref__",)


def _pass_through(policy: EvictionPolicyProtocol, node: CachedNode) -> None:
    policy.on_insert(node)
    policy.add_candidate(node)
    policy.remove_candidate(node)
    node.access_count += 1
    policy.on_hit(node)
    policy.add_candidate(node)
    policy.remove_candidate(node)
    policy.on_remove(node)


def _victims(policy: EvictionPolicyProtocol, beside: EvictionPolicyProtocol | None = None) -> list[int]:
    """Return a policy's victims in a random history; make other calls on another policy meanwhile."""
    random, other = Randomness(10).stream("own"), Randomness(11).stream("other")
    nodes: tuple[dict[int, CachedNode], ...] = ({}, {}, {}, {})
    victims = []
    for now in range(1, 1_500):
        victim = change(policy, random, now, nodes[0], nodes[1])
        if victim is not None:
            victims.append(int(victim.node_id))
        if beside is not None:
            change(beside, other, now, nodes[2], nodes[3])
    return victims


def _first_difference(expected: list[int], came: list[int]) -> str:
    pairs = enumerate(zip(expected, came, strict=False), 1)
    number, (wanted, got) = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, (0, 0)))
    if not number:
        return f"{len(came)} nodes were given up instead of {len(expected)}"
    return f"victim {number} was node {got} instead of node {wanted}"
