"""Evicts what the lifetime predictor does not expect back."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from sagellm.core.checks import require_object
from sagellm.core.errors import ConfigError
from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.logging import get_logger
from sagellm.core.node_ranking import RankingKey
from sagellm.core.protocols.eviction import CachedNode, EvictionCandidate, EvictionMetrics
from sagellm.core.protocols.lifetime import (
    LifetimePredictorProtocol,
    NullLifetimePredictor,
    PredictionRequest,
)
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy

_logger = get_logger(__name__)

_FIRST_AGE_S = 16.0
"""The predictor is asked again at this age of a turn, and then each time the age has doubled."""

_LOGGED_EVERY = 10_000
"""Predictions between two records of the log."""

_MAX_CALLS = 4
"""Due calls of the predictor per call of the policy, at most."""

_MAX_HISTORY = 32
_MAX_GONE = 8_192
"""Nodes that left the cache whose conversation is remembered, in case it comes back."""

_MIN_SHARE = 0.3
"""An evicted conversation counts as back if more than this share of it is."""


@dataclass(slots=True, eq=False)
class _Chat:
    """A conversation: all nodes on its path belong to it."""

    number: int
    history: list[int]  # bucket of its first length, then one per gap
    used_s: float
    depth: int
    leaf: CachedNode | None  # the newest, while it is cached
    turn: int = 0
    is_open: bool = True  # the predictor has not learnt the outcome of this turn yet
    due_turn: int = -1  # the turn with an entry waiting to be asked about
    asked_s: float = 0.0
    return_s: float | None = None  # None: unknown; infinity: not before the horizon

    @property
    def name(self) -> SequenceId:
        """The sequence id of the turn for the predictor."""
        return SequenceId(f"{self.number}.{self.turn}")


class _Due(NamedTuple):
    """A turn of a conversation with something due."""

    when_s: float
    number: int  # of the conversation; breaks ties
    chat: _Chat
    turn: int

    @property
    def is_past(self) -> bool:
        return self.chat.turn != self.turn


def _to_come(candidate: EvictionCandidate) -> float:
    return -(candidate.estimated_lifetime or 0.0)


class PredictiveEvictionPolicy(RankedEvictionPolicy):
    """Evicts first what is not expected back, then what is expected last; if unknown, by last use.

    The lifetime of a cached turn is the time until its conversation continues. A lifetime predictor learns
    it like output lengths, one token per second: it learns the gap when a conversation comes back, and
    `horizon_s` if it has not by then; it predicts the time left at the turn, and again while
    waiting. The "prompt" is the conversation's past: its first length, and the gaps so far. The predictor
    must be the policy's own, as output lengths differ; the engine makes one of the configured kind.

    A prediction counts if its confidence is at least `min_confidence`. One that reaches the horizon means
    "not expected", as does a conversation that continued without the leaf. If no prediction counts, the time
    to the next use is taken to be that since the last one, which is LRU. Without a predictor it is LRU.

    A conversation continues when the first prompt after it is inserted, or when it was evicted and is back;
    a node that several prompts continue (a system prompt) belongs to none. `select_victims` takes the
    sequences with the largest `estimated_lifetime`, as they hold their blocks longest; unknown counts as 0.
    Among equals, the longest unused goes first. Each call is O(log nodes); an insertion asks the predictor
    at most five times, a decision never.
    """

    sequence_keys = (_to_come, attrgetter("last_access_time"))

    def __init__(
        self,
        *,
        lifetime_predictor: LifetimePredictorProtocol | None = None,
        min_confidence: float = 0.8,
        horizon_s: int = 600,
    ) -> None:
        if not 0 <= min_confidence <= 1:
            raise ConfigError(f"min_confidence is {min_confidence!r}; it must be between 0 and 1")
        if type(horizon_s) is not int or horizon_s < 1:
            raise ConfigError(f"horizon_s is {horizon_s!r}; it must be a whole number of seconds, at least 1")
        if lifetime_predictor is not None:
            require_object(
                "lifetime_predictor", lifetime_predictor, LifetimePredictorProtocol, "lifetime_predictor"
            )
        super().__init__()
        self.lifetime_predictor = lifetime_predictor or NullLifetimePredictor()
        self._min_confidence, self._horizon_s = min_confidence, horizon_s
        self._chats: dict[NodeId, _Chat] = {}
        self._gone: OrderedDict[NodeId, _Chat] = OrderedDict()
        self._continued: set[NodeId] = set()  # a prompt was inserted after it
        self._common: set[NodeId] = set()  # several prompts were
        self._open: deque[_Due] = deque()  # turns until their horizon, oldest first
        self._to_ask: list[_Due] = []  # a heap
        self._now_s = 0.0
        self._num_chats = self._num_asked = self._num_known = self._num_not_expected = 0
        _logger.info(
            "eviction asks %s when conversations return within %d s; answers count from confidence %g on",
            type(self.lifetime_predictor).__name__,
            horizon_s,
            min_confidence,
        )

    def on_insert(self, node: CachedNode) -> None:
        """Find the conversation that this node continues, or begin one."""
        super().on_insert(node)
        now_s = self._see(node.created_ns)
        self._ask_due()
        chat = self._former(node, now_s) or self._of_parent(node)
        if chat is None:
            self._num_chats += 1
            chat = _Chat(self._num_chats, [node.depth.bit_length()], now_s, node.depth, node)
            self._begin(chat)
        left, chat.leaf = chat.leaf, node
        chat.used_s, chat.depth = max(chat.used_s, now_s), node.depth
        self._chats[node.node_id] = chat
        if left is not None and left in self._ranking:
            self._ranking.add(left)  # the conversation went on without it

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Both parts belong to the conversation of the whole."""
        super().on_insert(upper)
        chat = self._chats.get(lower.node_id)
        if chat is not None:
            self._chats[upper.node_id] = chat
        if lower.node_id in self._common:
            self._common.add(upper.node_id)

    def on_hit(self, node: CachedNode) -> None:
        """Record that its conversation is back."""
        now_s = self._see(node.last_access_ns)
        chat = self._chats.get(node.node_id)
        if chat is not None and node.node_id not in self._common:
            self._return(chat, now_s)
        super().on_hit(node)

    def on_remove(self, node: CachedNode) -> None:
        """Remember its conversation for a while."""
        node_id = node.node_id
        chat = self._chats.pop(node_id, None)
        if chat is not None and chat.leaf is node:
            chat.leaf = None
        if chat is not None and node_id not in self._common:
            self._gone[node_id] = chat
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)
        self._continued.discard(node_id)
        self._common.discard(node_id)
        super().on_remove(node)

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it, and schedule the next prediction."""
        now_s = self._see(node.last_access_ns)
        chat = self._chats.get(node.node_id)
        if chat is not None and chat.leaf is node:
            chat.used_s = max(chat.used_s, node.last_access_ns / 1e9)
            self._ask_later(chat, now_s)
        super().add_candidate(node)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far; the details count the predictor's calls and answers."""
        details = {
            "num_asked": float(self._num_asked),
            "num_return_known": float(self._num_known),
            "num_not_expected": float(self._num_not_expected),
        }
        return replace(super().metrics(), details=details)

    def node_key(self, node: CachedNode) -> RankingKey:
        """Rank first what is not expected back, then by return or by last use."""
        chat, used_s = self._chats.get(node.node_id), node.last_access_ns / 1e9
        if chat is None:  # it is older than this policy
            return (1, used_s)
        if used_s < chat.used_s or chat.return_s == math.inf:
            return (0, used_s)
        if chat.return_s is None:
            return (1, used_s)
        # As if its last use were as long ago as its next use is ahead.
        return (1, 2 * chat.asked_s - chat.return_s)

    def _see(self, time_ns: int) -> float:
        """Advance the time, and teach the predictor the turns whose horizon has passed."""
        now_s = self._now_s = max(self._now_s, time_ns / 1e9)
        for _ in range(_MAX_CALLS):
            if not self._open or self._open[0].when_s > now_s:
                break
            due = self._open.popleft()
            if not due.is_past:
                due.chat.is_open = False
                self._teach(due.chat, self._horizon_s)
        return now_s

    def _former(self, node: CachedNode, now_s: float) -> _Chat | None:
        """Return the evicted conversation that is now back."""
        if node.former_id is None:
            return None
        chat = self._gone.get(node.former_id) or self._chats.get(node.former_id)
        if chat is None or node.former_depth <= _MIN_SHARE * chat.depth:
            return None
        self._return(chat, now_s)
        return chat

    def _of_parent(self, node: CachedNode) -> _Chat | None:
        """Return the parent's conversation, if this node is the first to continue it."""
        parent_id = node.parent_id
        if parent_id is None or parent_id not in self._chats:
            return None
        if parent_id in self._continued:
            self._common.add(parent_id)
            return None
        self._continued.add(parent_id)
        return self._chats[parent_id]

    def _return(self, chat: _Chat, now_s: float) -> None:
        """Record that a conversation is back; once for all nodes on its path."""
        gap_s = now_s - chat.used_s
        if gap_s <= 0:
            return
        if chat.is_open:
            self._teach(chat, min(gap_s, self._horizon_s))
        first, *gaps = chat.history
        chat.history = [first, *gaps[1 - _MAX_HISTORY :], 32 + round(2 * math.log2(1 + gap_s))]
        chat.turn += 1
        chat.used_s = now_s
        self._begin(chat)

    def _begin(self, chat: _Chat) -> None:
        chat.is_open = True
        self._open.append(_Due(chat.used_s + self._horizon_s, chat.number, chat, chat.turn))
        self._ask(chat)

    def _teach(self, chat: _Chat, time_s: float) -> None:
        self.lifetime_predictor.update(
            sequence_id=chat.name, actual_length=round(time_s), actual_time=float(time_s)
        )

    def _ask_later(self, chat: _Chat, now_s: float) -> None:
        age_s = now_s - chat.used_s
        if age_s < self._horizon_s and chat.due_turn != chat.turn:
            chat.due_turn = chat.turn
            when_s = chat.used_s + max(_FIRST_AGE_S, 2 * age_s)
            heappush(self._to_ask, _Due(when_s, chat.number, chat, chat.turn))

    def _ask_due(self) -> None:
        """Ask again about a few turns that are due."""
        for _ in range(_MAX_CALLS):
            if not self._to_ask or self._to_ask[0].when_s > self._now_s:
                break
            due = heappop(self._to_ask)
            leaf = due.chat.leaf
            due.chat.due_turn = -1
            if not due.is_past and leaf is not None and leaf in self._ranking:
                self._ask(due.chat)
                self._ask_later(due.chat, self._now_s)
                self._ranking.add(leaf)

    def _report(self) -> None:
        num_trusted = self._num_known + self._num_not_expected
        _logger.log(
            logging.DEBUG if num_trusted else logging.INFO,
            "of %d predictions of returns %d were confident enough: %d say when, %d that none is expected%s",
            self._num_asked,
            num_trusted,
            self._num_known,
            self._num_not_expected,
            "" if num_trusted else "; so far eviction goes by last use",
        )

    def _ask(self, chat: _Chat) -> None:
        """Predict when a conversation comes back."""
        chat.asked_s = now_s = self._now_s
        age_s = int(now_s - chat.used_s)
        if age_s >= self._horizon_s:
            chat.return_s = math.inf
            return
        self._num_asked += 1
        if self._num_asked % _LOGGED_EVERY == 0:
            self._report()
        asked = PredictionRequest(
            sequence_id=chat.name,
            token_ids=chat.history,
            current_length=age_s,
            max_length=self._horizon_s,
        )
        found = self.lifetime_predictor.predict(asked)
        if found.confidence < self._min_confidence:
            chat.return_s = None
        elif age_s + found.remaining_length >= self._horizon_s:
            chat.return_s = math.inf
            self._num_not_expected += 1
        else:
            chat.return_s = now_s + found.remaining_length
            self._num_known += 1
