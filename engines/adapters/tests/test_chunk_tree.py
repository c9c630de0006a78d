"""Chunks in a prefix tree: what a policy is told, and what is evicted."""

from __future__ import annotations

import logging
import re
from random import Random
from typing import Any

import pytest

from sagellm.adapters import ChunkTree
from sagellm.core import CachedNode, EvictionPolicyProtocol, NodeId, PluginRegistry, VirtualClock
from sagellm.core.errors import AuditError
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.testing import AuditingEvictionPolicy

REGISTRY = PluginRegistry.load()
POLICIES = [
    entry.provider.name
    for entry in REGISTRY.providers("eviction_policy")
    if entry.provider.name not in ("null", "belady", "predictive")  # need to know the future, or a predictor
]


def make(policy: str = "audit", max_chunks: int = 100) -> tuple[ChunkTree[str], VirtualClock]:
    clock = VirtualClock()
    made = AuditingEvictionPolicy() if policy == "audit" else REGISTRY.make("eviction_policy", policy)
    return ChunkTree(made, max_chunks, clock=clock), clock


def put(tree: ChunkTree[str], clock: VirtualClock, names: str, before: str | None = None) -> None:
    """Add a chunk for each letter, written at once."""
    clock.advance_ns(10**9)
    tree.insert(list(names), [512 * (1 + i) for i in range(len(names))], before)
    for name in names:
        tree.unpin(name)


def test_the_end_of_a_prompt_goes_before_its_beginning():
    tree, clock = make()
    put(tree, clock, "abc")
    assert tree.evict(2, ()) == ["c", "b"]
    assert tree.evict(1, ()) == ["a"]
    assert len(tree) == 0


def test_what_others_continue_stays_until_they_are_gone():
    tree, clock = make()
    put(tree, clock, "ab")
    put(tree, clock, "xy", before="b")
    assert tree.evict(3, ()) == ["y", "x", "b"]


def test_a_prompt_that_parts_in_the_midst_of_a_run_divides_it():
    tree, clock = make()
    put(tree, clock, "abcd")
    put(tree, clock, "xy", before="b")
    tree.check_integrity()
    assert tree.evict(2, ()) == ["d", "c"], "the older end"
    assert tree.evict(4, ()) == ["y", "x", "b", "a"]


def test_a_hit_saves_what_was_used_and_not_what_followed_it():
    tree, clock = make()
    put(tree, clock, "abcd")
    put(tree, clock, "xy")
    clock.advance_ns(10**9)
    tree.hit(["a", "b", "q"])
    assert tree.evict(4, ()) == ["d", "c", "y", "x"]
    assert sorted(tree.evict(2, ()) or ()) == ["a", "b"]


def test_pinned_and_protected_chunks_stay():
    tree, clock = make()
    put(tree, clock, "abc")
    tree.pin("b")
    assert tree.evict(1, {"c"}) == ["a"], "not the last, as that is protected, nor the one that is read"
    assert tree.evict(2, ()) is None
    tree.check_integrity()
    tree.unpin("b")
    assert tree.evict(2, ()) == ["c", "b"]


def test_too_much_is_refused_and_nothing_changes():
    tree, clock = make()
    put(tree, clock, "abc")
    assert tree.evict(4, ()) is None
    assert tree.evict(3, {"a"}) is None
    assert len(tree) == 3


def test_a_chunk_that_could_not_be_written_leaves_and_those_after_it_stay():
    tree, _ = make()
    tree.insert(["a", "b", "c"], [1, 2, 3], None)
    tree.unpin("a")
    tree.remove("b")
    tree.check_integrity()
    tree.unpin("c")
    assert tree._chunks["c"].node.parent is None
    assert sorted(tree.evict(2, ()) or ()) == ["a", "c"]


def test_a_request_lengthens_its_own_leaf():
    tree, clock = make()
    put(tree, clock, "ab")
    tree.lengthen(["c"], [1536], "b")
    tree.check_integrity()
    tree.unpin("c")
    assert tree.evict(3, ()) == ["c", "b", "a"]


def test_what_comes_back_continues_the_counts_of_what_was_evicted():
    tree, clock = make("lfu")
    put(tree, clock, "a")
    for _ in range(3):
        tree.hit(["a"])
    assert tree.evict(1, ()) == ["a"]
    put(tree, clock, "x")
    tree.hit(["x"])
    put(tree, clock, "a")
    assert tree.evict(1, ()) == ["x"], "used once, and the other one four times"


def test_an_error_in_the_books_is_found():
    tree, clock = make()
    put(tree, clock, "ab")
    put(tree, clock, "xy", before="a")
    (upper,) = {chunk.node.parent for chunk in tree._chunks.values()} - {None}
    child = upper.children.popitem()
    with pytest.raises(AuditError, match=f"node {upper.node_id} has"):
        tree.check_integrity()
    upper.children.update([child])
    tree.check_integrity()
    tree._num_pinned = 1
    with pytest.raises(AuditError, match="num_pinned is 1; 0 chunks are pinned"):
        tree.check_integrity()


def churn(tree: ChunkTree[str], clock: VirtualClock) -> None:
    """Insert, hit, pin, evict and remove at random, in a tree of 60 chunks."""
    rng = Random(7)
    prompts: list[list[str]] = []
    pinned: set[str] = set()
    for number in range(400):
        clock.advance_ns(rng.randrange(10**9))
        base = rng.choice(prompts)[: rng.randint(0, 6)] if prompts and rng.random() < 0.7 else []
        prompt = [*base, *(f"{number}.{i}" for i in range(rng.randint(1, 8)))]
        prompts.append(prompt)
        num_here = next((i for i, key in enumerate(prompt) if key not in tree), len(prompt))
        tree.hit(prompt[:num_here])
        if len(tree) + len(prompt) - num_here > 60:
            num = min(len(tree) + len(prompt) - num_here - 60, len(tree))
            evicted = tree.evict(num, set(prompt))
            free = [key for key in tree._chunks if key not in pinned and key not in prompt]
            assert (evicted is None) <= (len(free) < num)
            assert evicted is None or len(set(evicted)) == num
            assert not set(evicted or ()) & (pinned | set(prompt))
            if evicted is None:
                continue
        num_here = next((i for i, key in enumerate(prompt) if key not in tree), len(prompt))
        new = [key for key in prompt[num_here:] if key not in tree]
        if new:
            ends = [512 * (prompt.index(key) + 1) for key in new]
            tree.insert(new, ends, prompt[num_here - 1] if num_here else None)
            for key in new[: rng.randint(0, len(new))]:
                tree.unpin(key)
            pinned |= {key for key in new if tree._chunks[key].is_pinned}
        for key in rng.sample(sorted(pinned), len(pinned) // 2):
            pinned.discard(key)
            tree.unpin(key) if rng.random() < 0.8 else tree.remove(key)
        tree.touch(rng.choice(prompts))
        tree.check_integrity()


@pytest.mark.parametrize("policy", ["audit", *POLICIES])
def test_random_operations_keep_the_books(policy):
    tree, clock = make(policy, max_chunks=60)
    churn(tree, clock)
    assert not tree.policy_failure


class Fails:
    """A policy whose calls of one name fail from the `number`th on."""

    def __init__(self, policy: EvictionPolicyProtocol, call: str, number: int) -> None:
        self._policy, self._call, self._left = policy, call, number

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            self._left -= 1
            if self._left < 0:
                return self._fail
        return getattr(self._policy, name)

    def _fail(self, *_: object) -> None:
        raise RuntimeError(f"no {self._call}")


@pytest.mark.parametrize("number", [0, 1, 9])
@pytest.mark.parametrize(
    "call",
    [
        *("on_insert", "on_split", "on_resize", "on_hit", "on_remove"),
        *("add_candidate", "remove_candidate", "victim", "num_victim_blocks"),
    ],
)
def test_a_policy_that_fails_is_asked_no_more_and_nothing_is_lost(call, number, caplog):
    clock = VirtualClock()
    tree: ChunkTree[str] = ChunkTree(Fails(AuditingEvictionPolicy(), call, number), 60, clock=clock)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        churn(tree, clock)
    assert tree.policy_failure == f"Fails: RuntimeError: no {call}"
    assert len(caplog.records) == 1
    assert "policy Fails failed" in caplog.text


def test_without_its_policy_the_least_recently_used_chunk_goes_first():
    clock = VirtualClock()
    tree: ChunkTree[str] = ChunkTree(Fails(AuditingEvictionPolicy(), "victim", 0), 60, clock=clock)  # type: ignore[arg-type]
    put(tree, clock, "ab")
    put(tree, clock, "xy")
    clock.advance_ns(10**9)
    tree.hit(["a", "b"])
    assert tree.evict(3, ()) == ["y", "x", "b"]
    assert tree.policy_failure


class Names(NullEvictionPolicy):
    """Names the first candidate that it was ever given, whatever became of it, or what it is told to."""

    def __init__(self, victim: CachedNode | None = None) -> None:
        self._victim = victim

    def add_candidate(self, node: CachedNode) -> None:
        self._victim = self._victim or node

    def victim(self) -> CachedNode | None:
        return self._victim


STRANGER = CachedNode(node_id=NodeId(77), num_blocks=1, depth=1, created_ns=0, last_access_ns=0)


@pytest.mark.parametrize(("victim", "protected", "evicted"), [(STRANGER, "", "ba"), (None, "b", "a")])
def test_a_victim_that_is_none_of_the_candidates_is_the_end_of_a_policy(victim, protected, evicted):
    clock = VirtualClock()
    tree: ChunkTree[str] = ChunkTree(Names(victim), 60, clock=clock)
    put(tree, clock, "ab")
    assert tree.evict(len(evicted), protected) == list(evicted)
    assert re.match(r"Names: PluginError: it chose node (77|1), which is not", tree.policy_failure)
    tree.check_integrity()
