"""Learns which conversations come back, and keeps those whose room earns most."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from sagellm.core.errors import ConfigError
from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.node_ranking import NodeRanking
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)
from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy
from sagellm.kvmgr.eviction.return_model import ReturnModels, TurnFacts
from sagellm.kvmgr.eviction.return_ranking import END, LEFT_BEHIND, LIVE, Place, ReturnRanking
from sagellm.kvmgr.eviction.shadows import Duel, Stretch, Turn

_UNIT_TOKENS = 512
"""Tokens per unit of length in the model."""

_MAX_WINDOW = 1 << 20
"""Turns to learn from, at most, about 170 bytes each."""

_MIN_SHARE = 0.3
"""An evicted turn counts as back if more than this share of it is."""

_MIN_ENDS = 20
"""Returns needed to decide whether the last blocks of turns are reused."""

_MAX_GONE = 8_192
"""Nodes that left the cache whose turn is remembered, in case they come back: about 1 KB each."""

_SAME_USE_S = 1.0
"""Uses of a shared beginning within this time count once."""

_MAX_PARTINGS = 2
"""If prompts diverge more often than this after a block, they share a beginning; conversations do less."""

_LAST_USE = LRUEvictionPolicy().node_key


@dataclass(slots=True, eq=False)
class _Known:
    """What the policy knows about a node of the cache."""

    node: CachedNode
    above: _Known | None = field(repr=False)
    turn: Turn | None = None  # the newest one whose path it is on
    ranked: Turn | None = None  # the one that it is ranked by while it is a candidate

    def give(self, turn: Turn | None) -> None:
        """Let it belong to a turn."""
        former, self.turn = self.turn, turn
        if turn is not None:
            turn.num_nodes += 1
        if former is not None:
            former.drop()


class ReuseEvictionPolicy(EvictionPolicyProtocol):
    """Evicts the leaf whose room earns least: the chance that its conversation returns, per unit of time.

    Every prompt that enters the cache is a turn. It continues a conversation if it begins with the
    whole of its last turn, or diverges from it where no prompts diverged before: a system prompt is not a
    turn. ReturnModel learns from the turns which ones are continued and when.

    Evicted first is what a conversation left behind when it continued; then the last block of each turn, if
    such blocks prove not to be reused (in replays, they are a prompt's partial blocks); then the rest by the
    model's index. `select_victims` does not know turns and goes by last use.

    This order applies while two shadows of the cache show that it saves more than evicting by last use;
    otherwise the least recently used leaf goes first.

    Each call is O(log nodes), and an insertion O(nodes on its path); learning from the last `window` turns
    adds 0.1 ms to every fourth. Raises ConfigError unless `window` is an int from 1 to 1,048,576.
    """

    def __init__(self, *, window: int = 8192) -> None:
        if type(window) is not int or not 1 <= window <= _MAX_WINDOW:
            raise ConfigError(
                f"window is {window!r}; it must be a whole number of turns, 1 to {_MAX_WINDOW:,}"
            )
        self._begin(ReturnModels(window=window))

    @classmethod
    def sharing(cls, models: ReturnModels) -> Self:
        """Make a policy that shares its models with others but ranks its own leaves."""
        policy = cls.__new__(cls)
        policy._begin(models)
        return policy

    def _begin(self, models: ReturnModels) -> None:
        self._models = models
        self._ranking: ReturnRanking[CachedNode] = ReturnRanking(models)
        self._duel = Duel(models, lambda: self._gives_up_ends)
        self._known: dict[NodeId, _Known] = {}
        self._gone: OrderedDict[NodeId, Turn] = OrderedDict()
        self._by_use = NodeRanking(_LAST_USE)
        self._stateless = LRUEvictionPolicy()
        self._metrics = EvictionMetrics()
        self._named: NodeId | None = None  # the last victim, until it has left
        self._next_above: NodeId | None = None  # the next node of a path that is being hit
        self._num_ends = self._num_lost_ends = 0
        self._num_blocks = self._block = 0
        self._is_full = False  # something has been evicted
        self._num_evicted = {False: 0, True: 0}  # blocks, by whether the learnt order was in force
        self._now_s = 0.0

    def learn_from(self, other: Self) -> None:
        """Take over the models, and which order saves more."""
        self._models.learn_from(other._models)
        self._duel.learn_from(other._duel)
        self._num_ends, self._num_lost_ends = other._num_ends, other._num_lost_ends

    def on_insert(self, node: CachedNode) -> None:
        """Find the turn that the node belongs to."""
        self._metrics.num_inserted += 1
        self._num_blocks += node.num_blocks
        now_s = self._see(node.created_ns)
        above = None if node.parent_id is None else self._known.get(node.parent_id)
        if not self._block:
            self._block = max(1, (node.depth - (0 if above is None else above.node.depth)) // node.num_blocks)
        known = self._known[node.node_id] = _Known(node, above)
        before = None if above is None else above.turn
        if before is not None and above is not None and _is_same_request(before, above.node):
            self._lengthen(known, before)
            known.give(before)
            return
        self._begin_turn(known, now_s)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Both parts belong to the turn of the whole."""
        self._metrics.num_inserted += 1
        whole = self._known.get(lower.node_id)
        above = None if whole is None else whole.above
        known = self._known[upper.node_id] = _Known(upper, above)
        if whole is not None:
            known.give(whole.turn)
            whole.above = known

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """New blocks of a leaf belong to its turn; where some were evicted, another may have used its end."""
        self._num_blocks += num_more
        known = self._known.get(node.node_id)
        if num_more < 0:
            self._num_evicted[self._duel.is_won] -= num_more
            ranked = None if known is None else known.ranked
            if known is not None and ranked is not None and ranked is not self._end_of(known)[0]:
                self.add_candidate(node)
        elif known is not None and known.turn is not None and not known.turn.is_shared:
            self._lengthen(known, known.turn)

    def on_hit(self, node: CachedNode) -> None:
        """Count it; its meaning becomes clear when the prompt is inserted."""
        self._metrics.num_hits += 1
        now_s = self._see(node.last_access_ns)
        known = self._known.get(node.node_id)
        if known is not None:
            if node.node_id != self._next_above and known.turn is not None:
                depth = node.depth // self._block
                path = self._duel.path(known.turn, depth)
                self._note_uses(path, 0, now_s)
                self._assign(known, None, path)
                self._duel.hit(path, depth, self._room, now_s)
            self._next_above = None if known.above is None else known.above.node.node_id
        if node.node_id in self._ranking:
            self.add_candidate(node)

    def on_remove(self, node: CachedNode) -> None:
        """Remember its turn for a while."""
        node_id = node.node_id
        self._forget(node)
        if node_id == self._named:
            self._metrics.num_victims += 1
            self._num_evicted[self._duel.is_won] += node.num_blocks
            self._named = None

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it by its turn."""
        now_s = self._see(node.last_access_ns)
        known = self._known.get(node.node_id)
        turn = None if known is None else known.turn
        if known is None or turn is None:  # it is older than this policy
            place = Place.of(LEFT_BEHIND, 0.0, 1.0, node.last_access_ns / 1e9)
        else:
            is_whole = turn.leaf_id == node.node_id and not turn.is_continued
            if is_whole and node.access_count > turn.num_hits:
                depth = node.depth // self._block
                path = self._duel.path(turn, depth)
                turn = self._next_turn(node, turn, node.depth, now_s)
                self._assign(known, turn, path)
                self._duel.use(path, turn, depth, depth, self._room, now_s)
            known.ranked = turn = self._end_of(known)[0] or turn
            place = turn.place(self._rank(node, turn))
        self._ranking.add(node.node_id, node, place, now_s)
        self._by_use.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Remove it from the ranking."""
        known = self._known.get(node.node_id)
        if known is not None:
            known.ranked = None
        self._ranking.discard(node.node_id)
        self._by_use.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the leaf whose room earns least, or the least recently used one; None without a leaf."""
        self._is_full = True
        node = self._ranking.first(self._now_s) if self._duel.is_won else self._by_use.first()
        self._named = None if node is None else node.node_id
        return node

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        """Yield leaves to evict whole."""
        self._is_full = True
        by_use, by_worth, is_won = self._by_use, self._ranking, self._duel.is_won
        taken = by_worth.take(self._now_s, num_blocks, self._is_in_one) if is_won else by_use.take(num_blocks)
        for node in taken:
            if is_won:
                by_use.discard(node)
            else:
                by_worth.discard(node.node_id)
            self._forget(node)
            self._metrics.num_victims += 1
            self._num_evicted[is_won] += node.num_blocks
            yield node

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Return how many blocks a victim gives up from its end.

        By the learnt order, those of the turn that used its last block; of a turn that is whole only the last
        one, if such blocks do not come back.
        """
        known = self._known.get(node.node_id)
        turn, num_blocks = (None, 0) if known is None else self._end_of(known)
        if turn is None or not self._duel.is_won:
            return num_wanted
        if self._rank(node, turn) != END:
            return min(num_wanted, num_blocks)
        turn.is_cut = True
        self.add_candidate(node)
        return 1

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences by their last use until their blocks cover `required_blocks`."""
        return self._stateless.select_victims(candidates, required_blocks)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far; the details are what was learnt and what the shadows saved."""
        evicted = {
            "num_blocks_by_last_use": float(self._num_evicted[False]),
            "num_blocks_by_learnt_order": float(self._num_evicted[True]),
        }
        details = self._models.details() | self._duel.details() | evicted
        return replace(self._metrics, num_candidates=len(self._by_use), details=details)

    @property
    def _room(self) -> float:
        return self._num_blocks if self._is_full else math.inf

    def _see(self, time_ns: int) -> float:
        self._now_s = max(self._now_s, time_ns / 1e9)
        return self._now_s

    def _rank(self, node: CachedNode, turn: Turn) -> int:
        if turn.is_continued:
            return LEFT_BEHIND
        is_end = turn.leaf_id == node.node_id and not turn.is_cut and node.num_blocks > 1
        return END if is_end and self._gives_up_ends else LIVE

    def _end_of(self, known: _Known) -> tuple[Turn | None, int]:
        """Return the newest turn that used a node's last block, and the node's blocks in the same stretch.

        A node that was evicted and is back has several stretches.
        """
        node, turn, block = known.node, known.turn, self._block
        step = None if turn is None else turn.stretch
        while step is not None and step.start * block > node.depth - block:
            step = step.parent
        if step is None:
            return turn, node.num_blocks
        return step.turn, min(node.num_blocks, node.depth // block - step.start)

    def _is_in_one(self, node: CachedNode) -> bool:
        known = self._known.get(node.node_id)
        return known is None or self._end_of(known)[1] == node.num_blocks

    @property
    def _gives_up_ends(self) -> bool:
        return self._num_ends >= _MIN_ENDS and 2 * self._num_lost_ends > self._num_ends

    def _forget(self, node: CachedNode) -> None:
        """Forget a node; its turn is remembered for a while."""
        known = self._known.pop(node.node_id, None)
        if known is None:
            return
        self._num_blocks -= node.num_blocks
        turn = known.turn
        if turn is not None:
            self._gone[node.node_id] = turn
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)[1].drop()

    def _lengthen(self, known: _Known, turn: Turn) -> None:
        """Assign the blocks that a request generates to its turn."""
        node, block = known.node, self._block
        begin = turn.depth // block
        path = self._duel.path(turn, begin)
        turn.leaf_id, turn.depth, turn.num_hits = node.node_id, node.depth, node.access_count
        self._duel.use(path, turn, begin, node.depth // block, self._room, self._now_s)

    def _begin_turn(self, known: _Known, now_s: float) -> None:
        """Create the turn that a new leaf ends, the next one of a conversation or the first."""
        node, block = known.node, self._block
        start = 0 if known.above is None else known.above.node.depth
        agreed, former = start, None if known.above is None else known.above.turn
        was_known = min(node.former_depth, node.depth)  # its end may have gone since
        if was_known > start and (back := self._back(node)) is not None:
            agreed, former = was_known, back
        path = self._duel.path(former, agreed // block)
        previous = self._previous(former, agreed, start, path)
        if previous is not None:
            self._note_end(previous.depth - agreed, block)
        self._note_uses(path, start // block, now_s)
        turn = self._next_turn(node, previous, max(agreed, was_known), now_s)
        self._assign(known, turn, path)
        self._duel.use(path, turn, start // block, node.depth // block, self._room, now_s)

    def _previous(self, former: Turn | None, agreed: int, start: int, path: list[Stretch]) -> Turn | None:
        """Return the turn that a prompt continues, if it is the next one of a conversation.

        Its first `agreed` tokens are the former turn's, on that path; `start` of them are cached.
        """
        if former is None:
            return None
        is_end = former.depth - agreed <= self._block and not former.is_shared
        is_parting = bool(path) and path[0].num_partings >= _MAX_PARTINGS
        if path and not is_end:
            path[0].num_partings += 1
            if is_parting and path[0].shared is None:
                path[0].shared = self._use_of(path[0], None, self._now_s)
        if former.is_continued or former.is_shared or (is_parting and not is_end):
            return None
        if agreed > start and agreed <= _MIN_SHARE * former.depth:
            return None
        return former

    def _back(self, node: CachedNode) -> Turn | None:
        """Return the turn whose evicted blocks are back."""
        if node.former_id is None:
            return None
        known = self._known.get(node.former_id)
        return self._gone.get(node.former_id) if known is None else known.turn

    def _next_turn(self, node: CachedNode, previous: Turn | None, agreed: int, now_s: float) -> Turn:
        """Create the turn that ends at a node; `agreed` of its tokens are known."""
        turn = self._learn_turn(previous, agreed, node.depth, now_s, is_shared=False)
        turn.leaf_id, turn.num_hits = node.node_id, node.access_count
        return turn

    def _note_uses(self, path: list[Stretch], begin: int, now_s: float) -> None:
        """Record the uses of shared beginnings on a path, from a block on."""
        for step in path:
            if step.end <= begin:
                break
            if step.shared is not None and now_s - step.shared.time_s >= _SAME_USE_S:
                step.shared = self._use_of(step, step.shared, now_s)

    def _use_of(self, stretch: Stretch, previous: Turn | None, now_s: float) -> Turn:
        """Create the next use of a stretch that conversations share."""
        depth = stretch.end * self._block
        return self._learn_turn(previous, depth, depth, now_s, is_shared=True)

    def _learn_turn(
        self, previous: Turn | None, agreed: int, depth: int, now_s: float, *, is_shared: bool
    ) -> Turn:
        number, log_gaps, gap_s = 1, 0.0, None
        if previous is not None:
            gap_s = max(0.0, now_s - previous.time_s)
            number, log_gaps = previous.number + 1, previous.log_gaps + math.log(max(1.0, gap_s))
            self._go_on(previous, now_s)
        facts = TurnFacts(
            time_s=now_s,
            number=number,
            log_gaps=log_gaps,
            gap_s=gap_s,
            new=(depth - agreed) / _UNIT_TOKENS,
            length=depth / _UNIT_TOKENS,
            known=agreed / _UNIT_TOKENS,
        )
        index, chance, scale_s = self._models.of(is_shared=is_shared).add(facts)
        return Turn(
            time_s=now_s,
            number=number,
            log_gaps=log_gaps,
            depth=depth,
            index=index,
            chance=chance,
            scale_s=scale_s,
            leaf_id=0,
            num_hits=0,
            is_shared=is_shared,
        )

    def _go_on(self, turn: Turn, now_s: float) -> None:
        """Record that a conversation came back; what it leaves behind is evicted first from now on."""
        turn.is_continued = True
        self._models.of(is_shared=turn.is_shared).go_on(turn.index, now_s)
        if turn.leaf_id in self._ranking:
            self.add_candidate(self._known[NodeId(turn.leaf_id)].node)

    def _note_end(self, num_missing: float, block_tokens: float) -> None:
        """Count whether the next turn used the last block of a turn."""
        if num_missing <= block_tokens:
            self._num_ends += 1
            self._num_lost_ends += num_missing > 0

    def _assign(self, known: _Known, turn: Turn | None, path: list[Stretch]) -> None:
        """Assign the nodes of a path to a turn or, where they are shared, to their newest use."""
        shared = [step for step in path if step.shared is not None]  # the deepest first
        step: _Known | None = known
        common: Stretch | None = None
        while step is not None:
            while shared and step.node.depth <= shared[0].end * self._block:
                common = shared.pop(0)
                turn = common.shared
            if turn is not None:
                if common is not None:
                    turn.end_in(common)
                step.give(turn)
            step = step.above


def _is_same_request(turn: Turn, leaf: CachedNode) -> bool:
    """Say whether what follows a leaf was generated by its own request: it is unused since."""
    return turn.leaf_id == leaf.node_id and leaf.access_count <= turn.num_hits
