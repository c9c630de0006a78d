"""Shares the cache among tenants by weight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import filterfalse
from operator import attrgetter
from typing import Self

from sagellm.core.errors import ConfigError
from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.logging import get_logger
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)
from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy
from sagellm.kvmgr.eviction.ranked import choose
from sagellm.kvmgr.eviction.return_model import ReturnModels
from sagellm.kvmgr.eviction.reuse import ReuseEvictionPolicy

_logger = get_logger(__name__)

_SLACK = 0.01
"""Share of its tenant's blocks that a leaf may give up beyond the excess, so as not to go block by block."""

_MAX_STALE = 64
_BLOCKS, _LAST_USE, _IS_PINNED = map(attrgetter, ("block_ids", "last_access_time", "is_pinned"))


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's state, and the policy that ranks its nodes."""

    number: int
    weight: float
    policy: EvictionPolicyProtocol
    num_blocks: int = 0
    num_nodes: int = 0
    claimed: float = -math.inf  # its highest level in the heap

    @property
    def level(self) -> float:
        """Blocks held ÷ weight."""
        return self.num_blocks / self.weight


class QoSEvictionPolicy(EvictionPolicyProtocol):
    """Evicts from the tenant that holds most for its weight, in the order of the policy `within`.

    A tenant's share of the cached blocks is its weight ÷ the weights of all tenants with blocks. The tenant
    that holds most for its weight is never below its share, and gives up blocks down to 1 % below it at once,
    at least one: so no tenant loses a block of its share to another that exceeds its own. Others may use
    what a tenant leaves unused until it wants it back.

    `weights` are by tenant, `default_weight` for the rest; `within` is `lru` or `reuse`, which learns
    from all tenants together and ranks each by itself. A node belongs to the tenant of its namespace.
    Each call costs that of the policy within plus O(log tenants), amortised.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        default_weight: float = 1.0,
        within: str = "lru",
    ) -> None:
        self._weights = dict(weights or {})
        for name, weight in (*self._weights.items(), ("default_weight", default_weight)):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
                raise ConfigError(f"the weight of {name!r} is {weight!r}; it must be a number above 0")
        self._default_weight = default_weight
        self._make = _maker(within)
        self._tenants: dict[str, _Tenant] = {}
        self._learnt: dict[str, EvictionPolicyProtocol] = {}  # for tenants that come
        self._counted: dict[NodeId, int] = {}  # blocks counted for each node
        self._heap: list[tuple[float, int, _Tenant]] = []  # fullest first; claims may be outdated
        self._changed: set[_Tenant] = set()  # tenants whose claim may be too low
        self._num_blocks, self._weight = 0, 0.0  # of all tenants
        self._num_tenants = 0  # ever
        self._added: CachedNode | None = None  # the last candidate: its prefix may be growing
        self._named: CachedNode | None = None  # the last victim: it may have given up its end
        self._metrics = EvictionMetrics()
        _logger.info(
            "tenants share the cache by weight: %d have one of their own, others %g; within a tenant %s",
            len(self._weights),
            default_weight,
            within,
        )

    def learn_from(self, other: Self) -> None:
        """Let the policies of tenants begin with what the other's have learnt."""
        for name, tenant in other._tenants.items():
            self._learnt[name] = self._make()
            self._learnt[name].learn_from(tenant.policy)

    def on_insert(self, node: CachedNode) -> None:
        """Count its blocks for its tenant."""
        self._metrics.num_inserted += 1
        self._count(node).policy.on_insert(node)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Count the two parts in place of the whole."""
        self._metrics.num_inserted += 1
        self._count(lower)
        self._count(upper).policy.on_split(upper, lower)

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """Update the blocks of the node's tenant."""
        self._count(node).policy.on_resize(node, num_more)

    def on_hit(self, node: CachedNode) -> None:
        """Report it to its tenant's policy."""
        self._metrics.num_hits += 1
        self._count(node).policy.on_hit(node)

    def on_remove(self, node: CachedNode) -> None:
        """Subtract it; a tenant is removed with its last node."""
        tenant = self._count(node)
        tenant.policy.on_remove(node)
        num_blocks = self._counted.pop(node.node_id)
        tenant.num_blocks -= num_blocks
        self._num_blocks -= num_blocks
        tenant.num_nodes -= 1
        if node is self._named:
            self._metrics.num_victims += 1
            self._named = None
        if not tenant.num_nodes:
            del self._tenants[node.namespace.account]
            self._weight = self._weight - tenant.weight if self._tenants else 0.0
            tenant.policy = LRUEvictionPolicy()  # the heap may hold the tenant for long, and not its nodes

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it among its tenant's candidates."""
        tenant = self._count(node)
        tenant.policy.add_candidate(node)
        self._count_again(self._added)
        self._added = node

    def remove_candidate(self, node: CachedNode) -> None:
        """Remove it from its tenant's ranking."""
        self._count(node).policy.remove_candidate(node)

    def victim(self) -> CachedNode | None:
        """Return the first victim of the fullest tenant that has candidates."""
        self._count_again(self._added)
        self._count_again(self._named)
        for tenant in self._changed:
            self._claim(tenant)
        self._changed.clear()
        heap = self._heap
        while heap:
            claim, number, tenant = heap[0]
            level = -tenant.level
            if claim != -tenant.claimed:
                heappop(heap)
            elif claim != level:
                tenant.claimed = -level
                heapreplace(heap, (level, number, tenant))
            elif (node := tenant.policy.victim()) is not None:
                self._named = node
                return node
            else:
                heappop(heap)
                tenant.claimed = -math.inf
        self._named = None
        return None

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Give up the tenant's excess over its share, and 1 % of the share."""
        tenant = self._tenants[node.namespace.account]
        num_blocks = tenant.policy.num_victim_blocks(node, num_wanted)
        if len(self._tenants) == 1:
            return num_blocks
        share = self._num_blocks * tenant.weight / self._weight
        return min(num_blocks, max(1, math.ceil(tenant.num_blocks - (1 - _SLACK) * share)))

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences of the tenant that holds most for its weight, by last use.

        A tenant holds the blocks of its candidates, including pinned ones; shared blocks count twice here.
        """
        of_tenant: defaultdict[str, list[EvictionCandidate]] = defaultdict(list)
        for candidate in candidates:
            of_tenant[candidate.tenant].append(candidate)
        if len(of_tenant) == 1:
            return choose(sorted(candidates, key=_LAST_USE), required_blocks)
        return choose(self._by_level(of_tenant), required_blocks)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far; the details say how many blocks each tenant has."""
        self._count_again(self._named)
        details = {f"num_blocks[{name}]": float(one.num_blocks) for name, one in self._tenants.items()}
        num_candidates = sum(one.policy.metrics().num_candidates for one in self._tenants.values())
        return replace(self._metrics, num_candidates=num_candidates, details=details)

    def _by_level(self, of_tenant: Mapping[str, list[EvictionCandidate]]) -> Iterator[EvictionCandidate]:
        """Yield sequences in eviction order, each from the tenant that is then fullest."""
        heap = []
        for number, (name, group) in enumerate(of_tenant.items()):
            weight = self._weight_of(name)
            heap.append((-sum(map(len, map(_BLOCKS, group))) / weight, number, weight, _by_use(group)))
        heapify(heap)
        while heap:
            level, number, weight, ordered = heap[0]
            candidate = next(ordered, None)
            if candidate is None:
                heappop(heap)
            else:
                yield candidate
                heapreplace(heap, (level + len(candidate.block_ids) / weight, number, weight, ordered))

    def _count(self, node: CachedNode) -> _Tenant:
        """Update the count of a node's blocks and return its tenant."""
        tenant = self._tenants.get(node.namespace.account) or self._add_tenant(node.namespace.account)
        counted = self._counted.get(node.node_id)
        if counted != node.num_blocks:
            if counted is None:
                tenant.num_nodes += 1
            num_more = node.num_blocks - (counted or 0)
            self._counted[node.node_id] = node.num_blocks
            tenant.num_blocks += num_more
            self._num_blocks += num_more
        self._changed.add(tenant)
        return tenant

    def _count_again(self, node: CachedNode | None) -> None:
        if node is not None and self._counted.get(node.node_id, node.num_blocks) != node.num_blocks:
            self._count(node)

    def _add_tenant(self, name: str) -> _Tenant:
        self._num_tenants += 1
        weight = self._weight_of(name)
        policy = self._learnt.pop(name, None) or self._make()
        tenant = self._tenants[name] = _Tenant(self._num_tenants, weight, policy)
        self._weight += weight
        _logger.debug("tenant %d has weight %g of %g", self._num_tenants, weight, self._weight)
        return tenant

    def _weight_of(self, name: str) -> float:
        return self._weights.get(name, self._default_weight)

    def _claim(self, tenant: _Tenant) -> None:
        """Put a tenant in the heap at its level, unless it has a higher entry."""
        if tenant.num_nodes and tenant.level > tenant.claimed:
            tenant.claimed = tenant.level
            heappush(self._heap, (-tenant.claimed, tenant.number, tenant))
        if len(self._heap) > 4 * len(self._tenants) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if -entry[0] == entry[2].claimed]
            heapify(self._heap)


def _by_use(group: list[EvictionCandidate]) -> Iterator[EvictionCandidate]:
    """Yield a tenant's sequences by last use; sorts on first use."""
    yield from filterfalse(_IS_PINNED, sorted(group, key=_LAST_USE))


def _maker(within: str) -> Callable[[], EvictionPolicyProtocol]:
    models = ReturnModels()
    makers: dict[str, Callable[[], EvictionPolicyProtocol]] = {
        "lru": LRUEvictionPolicy,
        "reuse": lambda: ReuseEvictionPolicy.sharing(models),
    }
    if within not in makers:
        raise ConfigError(f"within is {within!r}; what ranks a tenant's blocks is one of {', '.join(makers)}")
    return makers[within]
