"""The policy that asks a lifetime predictor: what it teaches it, and what it does with the answers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sagellm.core import (
    CachedNode,
    ConfigError,
    EvictionCandidate,
    LifetimePrediction,
    NodeId,
    PredictionRequest,
)
from sagellm.core.protocols.lifetime import NullLifetimePredictor
from sagellm.kvmgr.eviction import PredictiveEvictionPolicy, predictive
from sagellm.testing import RankingEvictionPolicyContract

SECOND = 1_000_000_000
HORIZON_S = 100


class ByHistory(NullLifetimePredictor):
    """Answers by the length of the history, and keeps what it was told."""

    def __init__(self, answers: dict[int, float], confidence: float = 0.9) -> None:
        super().__init__()
        self.answers, self.confidence = answers, confidence
        self.asked: list[tuple[str, list[int], int]] = []
        self.taught: list[tuple[str, int]] = []

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        self.asked.append((request.sequence_id, list(request.token_ids), request.current_length))
        left = request.max_length - request.current_length
        answer = self.answers.get(len(request.token_ids))
        if answer is None:
            return LifetimePrediction(remaining_length=left, estimated_time=left, confidence=0.0)
        remaining = min(left, max(0.0, answer - request.current_length))
        return LifetimePrediction(
            remaining_length=remaining, estimated_time=remaining, confidence=self.confidence
        )

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        assert actual_length == round(actual_time)
        self.taught.append((sequence_id, actual_length))


class TestWithoutPredictor(RankingEvictionPolicyContract):
    def make(self):
        return PredictiveEvictionPolicy()

    def rank(self, node):
        return node.last_access_ns, node.node_id  # LRU


class TestWithPredictor(RankingEvictionPolicyContract):
    def make(self):
        return PredictiveEvictionPolicy(lifetime_predictor=ByHistory({1: 500.0, 2: 20.0}))


@dataclass(slots=True, eq=False, kw_only=True)
class Node(CachedNode):
    """A node with a parent."""

    above: Node | None = None

    @property
    def parent_id(self) -> NodeId | None:
        return None if self.above is None else self.above.node_id


class Cache:
    """Tells a policy of conversations, as a prefix cache would."""

    def __init__(self, answers: dict[int, float], **options) -> None:
        self.predictor = ByHistory(answers)
        self.policy = PredictiveEvictionPolicy(
            lifetime_predictor=self.predictor, horizon_s=HORIZON_S, **options
        )
        self.num_nodes = 0

    def insert(self, second: float, above: Node | None = None, **values) -> Node:
        """Insert a leaf and unlock it."""
        self.num_nodes += 1
        now_ns = round(second * SECOND)
        node = Node(
            node_id=NodeId(self.num_nodes),
            num_blocks=4,
            depth=(above.depth if above else 0) + 64,
            created_ns=now_ns,
            last_access_ns=now_ns,
            above=above,
            **values,
        )
        self.policy.on_insert(node)
        self.policy.add_candidate(node)
        return node

    def go_on(self, second: float, node: Node) -> Node:
        """Hit a leaf and insert the next turn below it."""
        self.policy.remove_candidate(node)
        self.hit(second, node)
        return self.insert(second, above=node)

    def hit(self, second: float, node: Node | None) -> None:
        while node is not None:
            node.last_access_ns = round(second * SECOND)
            node.access_count += 1
            self.policy.on_hit(node)
            node = node.above

    def victim(self, second: float) -> CachedNode | None:
        """Let time pass, by a prompt that comes and goes, and ask."""
        passing = self.insert(second)
        self.policy.remove_candidate(passing)
        self.policy.on_remove(passing)
        return self.policy.victim()


def test_the_predictor_is_told_each_gap_once_and_what_did_not_come_back():
    cache = Cache({})
    first = cache.insert(0)
    second = cache.go_on(30, first)
    cache.go_on(40, second)
    cache.insert(30 + HORIZON_S)
    cache.insert(41 + HORIZON_S)
    assert cache.predictor.taught == [("1.0", 30), ("1.1", 10), ("1.2", HORIZON_S)]
    histories = {name: history for name, history, _ in cache.predictor.asked}
    assert len(histories["1.2"]) == 3
    assert histories["1.2"][:2] == histories["1.1"]


def test_what_is_not_expected_goes_before_what_is_older():
    cache = Cache({1: 1000.0, 2: 20.0})
    chat = cache.go_on(5, cache.insert(0))
    once = cache.insert(10)
    assert cache.policy.victim() is once
    assert chat.last_access_ns < once.last_access_ns


def test_what_is_expected_soon_stays_longer_than_what_was_used_later():
    cache = Cache({2: 62.0})
    cache.go_on(1, cache.insert(0))
    other = cache.insert(30)
    assert cache.victim(60) is other, "one is due in 3 seconds, the other was used 30 seconds ago"


def test_an_answer_without_confidence_leaves_the_order_to_the_last_use():
    cache = Cache({1: 1000.0, 2: 20.0}, min_confidence=0.95)
    chat = cache.go_on(5, cache.insert(0))
    cache.insert(10)
    assert cache.policy.victim() is chat


def test_the_predictor_is_asked_again_as_a_turn_grows_older():
    cache = Cache({1: 1000.0})
    cache.predictor.answers = {}
    leaf = cache.insert(0)
    younger = cache.insert(1)
    assert cache.policy.victim() is leaf
    cache.predictor.answers = {1: 1000.0}
    cache.policy.remove_candidate(leaf)
    assert cache.victim(20) is younger
    ages = [age for name, _, age in cache.predictor.asked if name == "2.0"]
    assert ages == [0, 19]
    for second in (30, 37, 38, 39, 76, 77):
        cache.victim(second)
    ages = [age for name, _, age in cache.predictor.asked if name == "2.0"]
    assert ages == [0, 19, 38, 76], "at twice the age each time"


def test_what_a_conversation_left_behind_goes_first():
    cache = Cache({})
    old = cache.insert(0)
    whole = cache.insert(1)
    upper = Node(node_id=NodeId(50), num_blocks=3, depth=48, created_ns=SECOND, last_access_ns=SECOND)
    whole.num_blocks, whole.above = 1, upper
    cache.policy.on_split(upper, whole)
    cache.hit(9, upper)
    grown = cache.insert(9, above=upper)
    assert cache.policy.victim() is whole
    for node in (whole, old):
        cache.policy.remove_candidate(node)
        cache.policy.on_remove(node)
    assert cache.policy.victim() is grown


def test_a_system_prompt_belongs_to_nobody():
    cache = Cache({})
    system = cache.insert(0)
    for second in range(1, 50):
        cache.hit(second, system)
        cache.insert(second, above=system)
    assert len(cache.predictor.taught) <= 2, "until it is known that prompts part there"


def test_what_was_evicted_and_is_back_is_the_next_turn():
    cache = Cache({})
    first = cache.insert(0)
    cache.policy.remove_candidate(first)
    cache.policy.on_remove(first)
    cache.insert(40, former_id=first.node_id, former_depth=first.depth)
    assert cache.predictor.taught == [("1.0", 40)]
    cache.insert(50, former_id=first.node_id, former_depth=10)
    assert len(cache.predictor.taught) == 1, "a small part of it is another conversation"


def test_sequences_with_most_to_come_go_first():
    def candidate(name, lifetime, used=0.0, **values):
        return EvictionCandidate(
            sequence_id=name,
            block_ids=[ord(name)],
            last_access_time=used,
            estimated_lifetime=lifetime,
            **values,
        )

    candidates = [
        candidate("a", None, 2.0),
        candidate("b", 5.0),
        candidate("c", 90.0, 3.0),
        candidate("d", 90.0, 1.0),
        candidate("e", 500.0, is_pinned=True),
        candidate("f", None, 1.0),
    ]
    assert PredictiveEvictionPolicy().select_victims(candidates, 9) == ["d", "c", "b", "f", "a"]


def test_metrics_say_what_the_predictor_answered():
    cache = Cache({1: 1000.0, 2: 20.0})
    cache.go_on(5, cache.insert(0))
    assert cache.policy.metrics().details == {
        "num_asked": 2.0,
        "num_return_known": 1.0,
        "num_not_expected": 1.0,
    }


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        PredictiveEvictionPolicy(min_confidence=1.5)
    for horizon_s in (0, 1.5):
        with pytest.raises(ConfigError, match="whole number of seconds"):
            PredictiveEvictionPolicy(horizon_s=horizon_s)


def test_the_name_of_a_predictor_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"lifetime_predictor is 'statistical'; .*by name: PluginRegistry"):
        PredictiveEvictionPolicy(lifetime_predictor="statistical")


@pytest.mark.parametrize(("confidence", "ending"), [(0.9, "that none is expected"), (0.5, "by last use")])
def test_the_log_says_who_is_asked_and_now_and_then_whether_the_answers_count(
    caplog, monkeypatch, confidence, ending
):
    monkeypatch.setattr(predictive, "_LOGGED_EVERY", 20)
    caplog.set_level("DEBUG", "sagellm.kvmgr.eviction")
    cache = Cache({1: 1000.0, 2: 20.0})
    cache.predictor.confidence = confidence
    (message,) = caplog.messages
    assert message.startswith(f"eviction asks ByHistory when conversations return within {HORIZON_S} s;")
    for number in range(10):
        cache.go_on(100 * number + 5, cache.insert(100 * number))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith(ending)
    assert caplog.records[1].levelname == ("DEBUG" if confidence > 0.8 else "INFO")
