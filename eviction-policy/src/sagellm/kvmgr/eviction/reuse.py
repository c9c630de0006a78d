"""Learns which conversations come back, and keeps those whose room earns most."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)
from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy
from sagellm.kvmgr.eviction.return_model import ReturnModel, Turn
from sagellm.kvmgr.eviction.return_ranking import END, LEFT_BEHIND, LIVE, Place, ReturnRanking

_UNIT_TOKENS = 512
"""Lengths enter the model in units of so many tokens."""

_MIN_SHARE = 0.3
"""An evicted turn is back if more than this share of it is."""

_MIN_ENDS = 20
"""Returns after which it is judged whether the last blocks of turns come back."""

_MAX_GONE = 100_000
"""Nodes that left the cache and whose turn is remembered, in case they come back."""


@dataclass(slots=True, eq=False)
class _Turn:
    """The newest request of a conversation: every node on its path belongs to it."""

    time_s: float
    number: int
    log_gaps: float
    depth: int  # tokens from the root to its end
    index: int  # in the model
    chance: float
    scale_s: float
    leaf_id: NodeId
    num_hits: int  # of the leaf, when the turn ended there
    is_continued: bool = False
    is_cut: bool = False  # its end was given up


class ReuseEvictionPolicy(EvictionPolicyProtocol):
    """Evicts the leaf whose room earns least: the chance that its conversation comes back, over the time.

    Every prompt that enters the cache is a turn. It goes on with a conversation if it begins with the
    whole of its last turn, or parts from it where no prompts parted before: a system prompt is nobody's
    turn. ReturnModel learns from the turns who comes back and when, starting cold.

    First goes what a conversation left behind when it went on; then the last block of each turn, if it
    turns out that such blocks are not reused (they are a prompt's partial ones, in replays); then the
    rest by the model's index. `select_victims` knows no turns and goes by the last use.

    Each call is O(log nodes), an insertion O(nodes on its path); a fit of a few milliseconds comes with
    every `refit_every`th turn, and learns from the last `window`.
    """

    def __init__(self, *, window: int = 8192, refit_every: int = 100) -> None:
        self._learn_with(ReturnModel(window=window, refit_every=refit_every))
        self._turns: dict[NodeId, _Turn] = {}
        self._gone: OrderedDict[NodeId, _Turn] = OrderedDict()
        self._common: set[NodeId] = set()  # from here on prompts have differed before
        self._nodes: dict[NodeId, CachedNode] = {}
        self._by_use = LRUEvictionPolicy()
        self._metrics = EvictionMetrics()
        self._named: NodeId | None = None  # the last victim, until it has left
        self._num_ends = self._num_lost_ends = 0
        self._now_s = 0.0

    @classmethod
    def sharing(cls, model: ReturnModel) -> Self:
        """Make a policy that learns with others, each for its own leaves."""
        policy = cls()
        policy._learn_with(model)
        return policy

    def on_insert(self, node: CachedNode) -> None:
        """Find the turn that the node belongs to."""
        self._metrics.num_inserted += 1
        self._nodes[node.node_id] = node
        now_s = self._see(node.created_ns)
        parent = None if node.parent_id is None else self._nodes.get(node.parent_id)
        of_parent = None if parent is None else self._turns.get(parent.node_id)
        if of_parent is not None and parent is not None and _is_same_request(of_parent, parent):
            of_parent.leaf_id, of_parent.depth = node.node_id, node.depth
            of_parent.num_hits = node.access_count
            self._turns[node.node_id] = of_parent
            return
        self._assign(node, self._new_turn(node, parent, of_parent, now_s))

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Both parts belong to the turn of the whole."""
        self._metrics.num_inserted += 1
        self._nodes[upper.node_id] = upper
        turn = self._turns.get(lower.node_id)
        if turn is not None:
            self._turns[upper.node_id] = turn

    def on_hit(self, node: CachedNode) -> None:
        """Count it; what it means shows when the prompt is inserted."""
        self._metrics.num_hits += 1
        self._see(node.last_access_ns)
        if node.node_id in self._ranking:
            self.add_candidate(node)

    def on_remove(self, node: CachedNode) -> None:
        """Remember its turn for a while."""
        node_id = node.node_id
        self._nodes.pop(node_id, None)
        turn = self._turns.pop(node_id, None)
        is_common = node_id in self._common
        self._common.discard(node_id)
        if turn is not None and (turn.leaf_id == node_id or not is_common):
            self._gone[node_id] = turn
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)
        if node_id == self._named:
            self._metrics.num_victims += 1
            self._named = None

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it by its turn."""
        now_s = self._see(node.last_access_ns)
        turn = self._turns.get(node.node_id)
        if turn is None:  # it came before this policy did
            place = Place.of(LEFT_BEHIND, 0.0, 1.0, node.last_access_ns / 1e9)
        else:
            is_whole = turn.leaf_id == node.node_id and not turn.is_continued
            if is_whole and node.access_count > turn.num_hits:
                turn = self._repeat(node, turn, now_s)
            place = Place.of(self._rank(node, turn), turn.chance, turn.scale_s, turn.time_s)
        self._ranking.add(node.node_id, place, now_s)

    def remove_candidate(self, node: CachedNode) -> None:
        """Take it out of the ranking."""
        self._ranking.discard(node.node_id)

    def victim(self) -> CachedNode | None:
        """Return the leaf whose room earns least, or None when there is none."""
        self._named = self._ranking.first(self._now_s)
        return None if self._named is None else self._nodes[self._named]

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Give up only the last block of a turn that is whole, if such blocks do not come back."""
        turn = self._turns.get(node.node_id)
        if turn is None or self._rank(node, turn) != END:
            return num_wanted
        turn.is_cut = True
        self.add_candidate(node)
        return 1

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences by their last use until their blocks cover `required_blocks`."""
        return self._by_use.select_victims(candidates, required_blocks)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far; the details say what was learnt."""
        return replace(self._metrics, num_candidates=len(self._ranking), details=self._model.details())

    def _learn_with(self, model: ReturnModel) -> None:
        self._model = model
        self._ranking = ReturnRanking(model.index)

    def _see(self, time_ns: int) -> float:
        self._now_s = max(self._now_s, time_ns / 1e9)
        return self._now_s

    def _rank(self, node: CachedNode, turn: _Turn) -> int:
        if turn.is_continued:
            return LEFT_BEHIND
        is_end = turn.leaf_id == node.node_id and not turn.is_cut and node.num_blocks > 1
        return END if is_end and self._gives_up_ends else LIVE

    @property
    def _gives_up_ends(self) -> bool:
        return self._num_ends >= _MIN_ENDS and 2 * self._num_lost_ends > self._num_ends

    def _new_turn(
        self, node: CachedNode, parent: CachedNode | None, of_parent: _Turn | None, now_s: float
    ) -> _Turn:
        """Make the turn that a new leaf ends, as the next one of a conversation or the first."""
        start = 0 if parent is None else parent.depth
        agreed = max(start, node.former_depth)
        previous = self._former(node)
        if parent is not None and of_parent is not None:
            is_end = of_parent.leaf_id == parent.node_id
            if previous is None and (is_end or parent.node_id not in self._common):
                previous = of_parent
            if not is_end:
                self._common.add(parent.node_id)
        if previous is not None and previous.is_continued:
            previous = None
        if previous is not None:
            self._note_end(previous.depth - agreed, (node.depth - start) / node.num_blocks)
        return self._next_turn(node, previous, agreed, now_s)

    def _former(self, node: CachedNode) -> _Turn | None:
        """Return the turn that was evicted and is back."""
        if node.former_id is None:
            return None
        turn = self._turns.get(node.former_id) or self._gone.get(node.former_id)
        if turn is None or turn.is_continued or node.former_depth <= _MIN_SHARE * turn.depth:
            return None
        return turn

    def _repeat(self, node: CachedNode, turn: _Turn, now_s: float) -> _Turn:
        """Make a turn of a prompt that was found whole."""
        repeated = self._next_turn(node, turn, node.depth, now_s)
        self._assign(node, repeated)
        return repeated

    def _next_turn(self, node: CachedNode, previous: _Turn | None, agreed: int, now_s: float) -> _Turn:
        number, log_gaps, gap_s = 1, 0.0, None
        if previous is not None:
            gap_s = max(0.0, now_s - previous.time_s)
            number, log_gaps = previous.number + 1, previous.log_gaps + math.log(max(1.0, gap_s))
            self._go_on(previous, now_s)
        described = Turn(
            time_s=now_s,
            number=number,
            log_gaps=log_gaps,
            gap_s=gap_s,
            new=(node.depth - agreed) / _UNIT_TOKENS,
            length=node.depth / _UNIT_TOKENS,
            known=agreed / _UNIT_TOKENS,
        )
        index, chance, scale_s = self._model.add(described)
        return _Turn(
            time_s=now_s,
            number=number,
            log_gaps=log_gaps,
            depth=node.depth,
            index=index,
            chance=chance,
            scale_s=scale_s,
            leaf_id=node.node_id,
            num_hits=node.access_count,
        )

    def _go_on(self, turn: _Turn, now_s: float) -> None:
        """Note that a conversation came back; what it leaves behind goes first from now on."""
        turn.is_continued = True
        self._model.go_on(turn.index, now_s)
        if turn.leaf_id in self._ranking:
            self.add_candidate(self._nodes[turn.leaf_id])

    def _note_end(self, num_missing: float, block_tokens: float) -> None:
        """Count whether the last block of a turn was used by the next one."""
        if num_missing <= block_tokens:
            self._num_ends += 1
            self._num_lost_ends += num_missing > 0

    def _assign(self, node: CachedNode, turn: _Turn) -> None:
        """Let the whole path to a node belong to a turn."""
        step: CachedNode | None = node
        while step is not None:
            self._turns[step.node_id] = turn
            step = None if step.parent_id is None else self._nodes.get(step.parent_id)


def _is_same_request(turn: _Turn, leaf: CachedNode) -> bool:
    """Say whether what follows a leaf is what its own request generated: nobody has used it since."""
    return turn.leaf_id == leaf.node_id and leaf.access_count <= turn.num_hits
