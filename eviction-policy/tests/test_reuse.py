"""The policy that learns who comes back: its model, its order, and what it gives up first."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import dataclass
from random import Random

import pytest

from sagellm.core import CachedNode, ConfigError, NodeId
from sagellm.kvmgr.eviction import ReuseEvictionPolicy
from sagellm.kvmgr.eviction.return_model import ReturnModel, ReturnModels, TurnFacts, Worth
from sagellm.kvmgr.eviction.return_ranking import END, LEFT_BEHIND, LIVE, Place, ReturnRanking
from sagellm.kvmgr.eviction.shadows import Duel, Stretch, Turn
from sagellm.testing import RankingEvictionPolicyContract

SECOND = 1_000_000_000


class TestReuseEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return ReuseEvictionPolicy()

    def rank(self, node):
        return None


def turn(time_s: float, number: int, gap_s: float | None = None, log_gaps: float = 0.0) -> TurnFacts:
    return TurnFacts(
        time_s=time_s, number=number, log_gaps=log_gaps, gap_s=gap_s, new=4.0, length=8.0, known=0.0
    )


def learn(chance_of: dict[int, float], median_gap_s: float, num_turns: int = 4000) -> ReturnModel:
    """Show a model conversations that go on with a chance by the number of the turn."""
    model, random = ReturnModel(window=num_turns), Random(1)
    due: list[tuple[float, int, float, float, int]] = []  # when, number, gap, sum of logs, the turn before
    now = 0.0
    for _ in range(num_turns):
        now += 1.0
        if due and min(due)[0] <= now:
            due.sort()
            when, number, gap_s, log_gaps, before = due.pop(0)
            model.go_on(before, when)
            described = turn(when, number, gap_s, log_gaps)
        else:
            when, number, log_gaps, described = now, 1, 0.0, turn(now, 1)
        index, _, _ = model.add(described)
        if random.random() < chance_of[min(number, 3)]:
            gap_s = median_gap_s * math.exp(random.gauss(0, 0.5))
            due.append((when + gap_s, number + 1, gap_s, log_gaps + math.log(gap_s), index))
    return model


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "8192", None, 1 << 40])
def test_a_window_out_of_range_is_refused(window):
    with pytest.raises(ConfigError, match=r"window is .*; it must be a whole number of turns"):
        ReuseEvictionPolicy(window=window)


def test_the_model_finds_who_comes_back_and_when():
    model = learn({1: 0.2, 2: 0.5, 3: 0.8}, median_gap_s=30.0)
    now = 10_000.0
    for number, chance in ((1, 0.2), (2, 0.5), (5, 0.8)):
        gap_s = None if number == 1 else 30.0
        _, predicted, scale_s = model.add(turn(now, number, gap_s, (number - 1) * math.log(30.0)))
        assert predicted == pytest.approx(chance, abs=0.08), number
        assert scale_s == pytest.approx(30.0, rel=0.35)
    details = model.details()
    assert 0.2 < details["returned_share"] < 0.6
    assert details["num_turns"] == 4003


def test_a_fit_to_few_turns_does_not_run_away():
    random, model = Random(40), ReturnModel()
    now, waiting = 0.0, []  # (when it came, number, sum of logs, index, length)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(500):
            now += random.expovariate(0.2)
            length = random.lognormvariate(2.5, 1.2)
            described = TurnFacts(
                time_s=now, number=1, log_gaps=0.0, gap_s=None, new=length, length=length, known=0
            )
            if waiting and random.random() < 0.4:
                came, number, log_gaps, before, known = waiting.pop(random.randrange(len(waiting)))
                model.go_on(before, now)
                gap_s = now - came
                described = TurnFacts(
                    time_s=now,
                    number=number + 1,
                    log_gaps=log_gaps + math.log(max(1.0, gap_s)),
                    gap_s=gap_s,
                    new=5 * random.random(),
                    length=known + 1,
                    known=known,
                )
            index, chance, scale_s = model.add(described)
            assert 0 < chance < 1
            assert 0 < scale_s < 1e9
            if random.random() < 0.4:
                waiting.append((now, described.number, described.log_gaps, index, described.length))


def test_room_earns_most_shortly_before_the_return_and_nothing_long_after():
    model = learn({1: 0.5, 2: 0.5, 3: 0.5}, median_gap_s=30.0)
    fresh, due, late = (model.worth(0.5, 30.0, age_s).returns_per_s for age_s in (0.0, 25.0, 300.0))
    assert due > fresh > late
    likely, unlikely = (model.worth(chance, 30.0, 25.0).returns_per_s for chance in (0.9, 0.1))
    assert likely > due > unlikely
    slow = model.worth(0.5, 60.0, 50.0).returns_per_s
    assert slow == pytest.approx(due / 2), "twice as slow earns half as much"


@dataclass(frozen=True)
class Leaf:
    number: int
    num_blocks: int = 1


def test_the_order_is_that_of_the_index_at_every_moment():
    models, random = ReturnModels(), Random(3)
    ranking: ReturnRanking[Leaf] = ReturnRanking(models)
    places: dict[int, Place] = {}

    def key(place: Place, now_s: float) -> tuple[int, float]:
        rank, is_shared, chance, scale = place.group
        if rank != LIVE:
            return rank, 0.0
        age_s = now_s - place.time_s
        worth = models.worth((chance + 0.5) / 32, math.exp(scale / 4), age_s, is_shared=is_shared)
        return rank, worth.returns_per_s

    now = 0.0
    for number in range(1200):
        now += random.random()
        if random.random() < 0.6 or not places:
            rank = random.choice([LIVE, LIVE, LIVE, LIVE, END, LEFT_BEHIND])
            time_s = now - random.choice([0.0, 0.0, 100.0 * random.random()])
            place = Place.of(rank, random.random(), random.choice([5.0, 50.0, 400.0]), time_s)
            places[number] = place
            ranking.add(number, Leaf(number), place, now)
        elif random.random() < 0.5:
            gone = random.choice(list(places))
            ranking.discard(gone)
            del places[gone]
        found = ranking.first(now)
        if not places:
            assert found is None
            continue
        assert key(places[found.number], now) == min(key(place, now) for place in places.values())
        if random.random() < 0.2:
            for leaf in ranking.take(now, random.randrange(4), lambda leaf: True):
                first = key(places.pop(leaf.number), now)
                assert first <= min((key(place, now) for place in places.values()), default=first)
        assert len(ranking) == len(places)


@dataclass(slots=True, eq=False, kw_only=True)
class Node(CachedNode):
    """A node with a parent."""

    above: CachedNode | None = None

    @property
    def parent_id(self) -> NodeId | None:
        return None if self.above is None else self.above.node_id


class Cache:
    """Tells a policy of conversations, as a prefix cache would."""

    def __init__(self, policy: ReuseEvictionPolicy) -> None:
        self.policy = policy
        self.num_nodes = 0

    def insert(self, second: int, above: Node | None = None, num_blocks: int = 4, **values) -> Node:
        self.num_nodes += 1
        now_ns = second * SECOND
        node = Node(
            node_id=NodeId(self.num_nodes),
            num_blocks=num_blocks,
            depth=(above.depth if above else 0) + 16 * num_blocks,
            created_ns=now_ns,
            last_access_ns=now_ns,
            above=above,
            **values,
        )
        self.policy.on_insert(node)
        return node

    def hit(self, second: int, node: Node) -> None:
        step = node
        while step is not None:
            step.last_access_ns = second * SECOND
            step.access_count += 1
            self.policy.on_hit(step)
            step = step.above


def num_turns_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, Turn) for each in gc.get_objects())


@pytest.mark.no_cover
def test_what_is_remembered_of_evicted_prompts_is_bounded():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    policy._is_full = True  # so that the shadows of the cache give up what it does
    held = [cache.insert(0)]
    num_before = num_turns_in_memory()
    for second in range(1, 18_000):
        held.append(cache.insert(second))
        if len(held) > 8:
            policy.on_remove(held.pop(0))
    assert num_turns_in_memory() - num_before < 16_500


@pytest.mark.no_cover
def test_what_is_forgotten_is_freed_without_the_collector():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    policy._is_full = True
    random, held = Random(0), [cache.insert(0)]
    beginning = held[0]
    gc.collect()
    gc.disable()
    try:
        num_before = sum(isinstance(each, (Turn, Stretch)) for each in gc.get_objects())
        for second in range(1, 30_000):
            above = held[-1] if second % 3 == 1 else beginning
            cache.hit(second, above)
            held.append(cache.insert(second, above))
            if len(held) > 8:
                policy.on_remove(held.pop(random.randrange(1, 3)))
        num_after = sum(isinstance(each, (Turn, Stretch)) for each in gc.get_objects())
    finally:
        gc.enable()
    assert num_after - num_before < 2.5 * 8_192


class Sure:
    """Knows that conversations return, but for those of the lowest chance."""

    version = 0

    def worth(self, chance, scale_s, age_s, *, is_shared):
        return Worth(float(chance > 0.1), -math.inf, math.inf)


def test_groups_whose_leaves_all_came_back_are_forgotten():
    ranking = ReturnRanking(Sure())
    worst = CachedNode(node_id=NodeId(1), num_blocks=1, depth=1, created_ns=0, last_access_ns=0)
    ranking.add(1, worst, Place.of(LIVE, 0.0, 1.0, 0.0), 0.0)
    random, most = Random(0), 0
    for second in range(1, 5_000):
        place = Place.of(LIVE, random.uniform(0.2, 1), math.exp(random.uniform(-5, 10)), second)
        ranking.add(2, worst, place, second)
        ranking.discard(2)
        assert ranking.first(second) is worst
        most = max(most, len(ranking._groups))
    assert most < 300


def follow_what_was_learnt(policy: ReuseEvictionPolicy) -> None:
    policy._duel.is_won = True


def test_what_a_conversation_leaves_behind_goes_first():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    other = cache.insert(0)
    policy.add_candidate(other)
    whole = cache.insert(1)
    policy.add_candidate(whole)
    # The next turn has all but the end of it: the node is split, and the end stays behind.
    policy.remove_candidate(whole)
    upper = Node(
        node_id=NodeId(99), num_blocks=3, depth=48, created_ns=SECOND, last_access_ns=SECOND, access_count=0
    )
    whole.num_blocks, whole.above = 1, upper
    policy.on_split(upper, whole)
    policy.add_candidate(whole)
    cache.hit(30, upper)
    grown = cache.insert(31, above=upper)
    policy.add_candidate(grown)
    follow_what_was_learnt(policy)
    assert policy.victim() is whole
    policy.remove_candidate(whole)
    policy.on_remove(whole)
    assert policy.victim() in (other, grown)
    assert policy.metrics().num_victims == 1


def test_a_system_prompt_is_nobodys_turn():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    system = cache.insert(0)
    for second in range(1, 200):
        cache.hit(second, system)
        policy.add_candidate(cache.insert(second, above=system))
    assert policy.metrics().details["returned_share"] < 0.05
    turns = [known.turn for node_id, known in policy._known.items() if node_id != system.node_id]
    numbers = [turn.number for turn in turns]
    assert max(numbers) <= 4, "until it is known that prompts part there"
    assert numbers.count(1) > 190
    used = policy._known[system.node_id].turn
    assert used.is_shared
    assert used.number > 190, "its own uses are what comes back"


def test_what_was_generated_belongs_to_the_same_turn():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    prompt = cache.insert(0)
    answer = cache.insert(5, above=prompt)
    assert policy._known[answer.node_id].turn is policy._known[prompt.node_id].turn
    cache.hit(60, answer)
    cache.insert(61, above=answer)
    assert policy._known[prompt.node_id].turn.number == 2
    assert policy.metrics().details["returned_share"] == 0.5


def test_what_was_evicted_and_comes_back_is_the_next_turn():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    first = cache.insert(0)
    policy.on_remove(first)
    again = cache.insert(40, num_blocks=6, former_id=first.node_id, former_depth=first.depth)
    assert policy._known[again.node_id].turn.number == 2


def test_the_last_blocks_of_turns_go_first_once_they_are_known_not_to_come_back():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    for number in range(40):
        first = cache.insert(100 * number, num_blocks=4)
        policy.on_remove(first)
        known = first.depth - 16  # all but the last block
        cache.insert(100 * number + 50, num_blocks=6, former_id=first.node_id, former_depth=known)
    leaf = cache.insert(5000, num_blocks=4)
    policy.add_candidate(leaf)
    follow_what_was_learnt(policy)
    assert policy.victim() is leaf
    assert policy.num_victim_blocks(leaf, 4) == 1
    leaf.num_blocks -= 1
    leaf.depth -= 16
    policy.on_resize(leaf, -1)
    assert policy.victim() is leaf
    assert policy.num_victim_blocks(leaf, 4) == 3, "only once"


def test_of_a_shared_beginning_that_is_back_with_a_prompt_only_the_prompts_own_end_is_given_up():
    policy = ReuseEvictionPolicy()
    cache = Cache(policy)
    system = cache.insert(0, num_blocks=8)
    for second in range(1, 8):
        cache.hit(second, system)
        own = cache.insert(second, above=system, num_blocks=2)
        policy.add_candidate(own)
        policy.remove_candidate(own)
        policy.on_remove(own)
    policy.on_remove(system)
    other = cache.insert(10)
    policy.add_candidate(other)
    known = system.depth
    whole = cache.insert(20, num_blocks=10, former_id=system.node_id, former_depth=known)
    policy.add_candidate(whole)
    policy.remove_candidate(other)
    policy.on_remove(other)
    follow_what_was_learnt(policy)
    assert policy.victim() is whole
    assert not list(policy.victims(10)), "it does not go whole"
    assert policy.num_victim_blocks(whole, 10) == 2
    whole.num_blocks, whole.depth = 8, known
    policy.on_resize(whole, -2)
    assert policy.num_victim_blocks(whole, 10) == 8
    assert list(policy.victims(10)) == [whole]
    evicted = policy.metrics().details
    assert evicted["num_blocks_by_learnt_order"] == 10
    assert evicted["num_blocks_by_last_use"] == 4 + 7 * 2 + 8 - 26, "what was not named does not count"


def test_before_it_has_learnt_long_conversations_are_expected_to_go_on():
    model = ReturnModel()
    chances = [
        model.add(turn(float(number), number, None if number == 1 else 60.0, (number - 1) * math.log(60.0)))[
            1
        ]
        for number in (1, 2, 5, 9)
    ]
    assert chances == sorted(chances)
    assert chances[0] < 0.5 < chances[2]


def test_no_call_learns_from_more_than_a_slice_of_the_turns(monkeypatch):
    """At the full window, where learning from all of them takes 20 ms, and a slice of 256 rows 0.1 ms."""
    sizes: list[int] = []
    add_up, tabulate = ReturnModel._add_up, ReturnModel._tabulate

    def note_rows(model, sums, rows):
        sizes.append(rows.stop - rows.start)
        add_up(model, sums, rows)

    def note_chances(model):
        for rows in tabulate(model):
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(ReturnModel, "_add_up", note_rows)
    monkeypatch.setattr(ReturnModel, "_tabulate", note_chances)
    policy = ReuseEvictionPolicy(window=4096)
    cache = Cache(policy)
    num_slices = 0
    for second in range(6000):
        before = len(sizes)
        policy.add_candidate(cache.insert(second, num_blocks=1))
        assert len(sizes) <= before + 1, "more than a slice"
        num_slices += len(sizes) - before
    assert max(sizes) == 256
    assert num_slices > 600, "it learns all the time"
    assert policy._models.version > 30


def make_turn(time_s: float, chance: float, depth: int) -> Turn:
    return Turn(
        time_s=time_s,
        number=1,
        log_gaps=0.0,
        depth=depth,
        index=0,
        chance=chance,
        scale_s=2000.0,
        leaf_id=0,
        num_hits=0,
    )


class ByChance:
    """Room earns what the chance of a return is, at any age."""

    version = 0

    def worth(self, chance: float, scale_s: float, age_s: float, *, is_shared: bool) -> Worth:
        return Worth(chance, -math.inf, math.inf)


def play(duel: Duel, room: float, start_s: float, num_turns: int, *, is_right: bool) -> None:
    """Let a third of all prompts come back after 42 others; the model tells which, or takes the others."""
    waiting: list[Turn] = []
    for number in range(num_turns):
        now_s = start_s + number
        returns = number % 3 == 0
        turn = make_turn(now_s, 0.95 if returns == is_right else 0.05, 10)
        duel.use([], turn, 0, 10, room, now_s)
        if returns:
            waiting.append(turn)
        if len(waiting) > 14:
            former = waiting.pop(0)
            duel.hit(duel.path(former, 10), 10, room, now_s)


def test_the_learnt_order_is_used_while_it_saves_more_and_no_longer(caplog):
    caplog.set_level("INFO", "sagellm.kvmgr.eviction")
    duel = Duel(ByChance(), lambda: False)
    assert not duel.is_won, "what is not known to be better is not used"
    play(duel, 150.0, 0.0, 300, is_right=True)
    assert duel.is_won
    lru, reuse = (duel.details()[f"shadow_blocks_saved_{name}"] for name in ("lru", "reuse"))
    assert reuse > 1.5 * lru
    play(duel, 600.0, 300.0, 900, is_right=False)
    assert not duel.is_won, "where the latest come back first, and the model says the opposite"
    assert len(caplog.messages) == duel.details()["num_switches"], "each switch is logged"
    assert caplog.messages[0].startswith("eviction goes by the learnt order from now on: ")
    assert caplog.messages[-1].startswith("eviction goes by last use from now on: ")


def test_what_was_learnt_from_another_is_learnt_apart_from_it():
    one, other = Cache(ReuseEvictionPolicy()), Cache(ReuseEvictionPolicy())
    for second in range(30):
        one.insert(second)
    other.policy.learn_from(one.policy)
    other.insert(30)
    found = [each.policy.metrics().details["num_turns"] for each in (one, other)]
    assert found == [30, 31]


def test_a_shadow_that_evicts_by_last_use_is_an_lru_cache():
    """Paths of a random tree, beside a list of blocks in the order of their last use."""
    random, room = Random(8), 60
    duel = Duel(ReturnModels(), lambda: False)
    prompts: list[tuple[Turn, list[int]]] = []  # a turn, and the blocks of its prompt by number
    order: list[int] = []  # least recently used first
    num_blocks = num_saved = 0
    for step in range(3000):
        former, known = None, 0
        blocks: list[int] = []
        if prompts and random.random() < 0.8:
            former, whole = random.choice(prompts[-40:])
            known = random.randint(1, len(whole))
            blocks = whole[:known]
        new = list(range(num_blocks, num_blocks + random.randint(1, 5)))
        num_blocks += len(new)
        held = 0
        while held < known and blocks[held] in order:
            held += 1
        num_saved += held
        blocks = blocks + new
        for block in blocks:
            if block in order:
                order.remove(block)
        order = [*order[max(0, len(order) + len(blocks) - room) :], *reversed(blocks)]
        turn = make_turn(float(step), random.random(), len(blocks))
        duel.use(duel.path(former, known), turn, 0, len(blocks), room, float(step))
        if len(blocks) < 25:
            prompts.append((turn, blocks))
        assert duel.details()["shadow_blocks_saved_lru"] == num_saved
