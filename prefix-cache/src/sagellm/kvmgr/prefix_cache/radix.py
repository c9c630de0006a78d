"""The prefix cache: checks what comes in, counts what is used, and guards one radix tree with a mutex."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import cast

from sagellm.core.checks import require_object
from sagellm.core.errors import BlockError
from sagellm.core.ids import BlockId
from sagellm.core.kv_block import UNNAMED, KVIdentity
from sagellm.core.logging import get_logger
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import EvictionPolicyProtocol
from sagellm.core.protocols.kv_events import KVEventSink
from sagellm.core.protocols.prefix_cache import (
    CachedRun,
    EvictedBlocks,
    InsertResult,
    KVBlockDescriptor,
    MissExplanation,
    PinnedPrefix,
    PinResult,
    PrefixCacheMetrics,
    PrefixCacheProtocol,
    PrefixMatch,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.tokens import TokenIdsLike, pack
from sagellm.kvmgr.prefix_cache.explain import explain, explain_miss, note_miss
from sagellm.kvmgr.prefix_cache.ghosts import Departure
from sagellm.kvmgr.prefix_cache.insertion import Offer, insert
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU
from sagellm.kvmgr.prefix_cache.limits import (
    Limits,
    check_block_ids,
    check_num_dropped,
    check_number_of_blocks,
    check_ttl,
)
from sagellm.kvmgr.prefix_cache.lookups import Lookups
from sagellm.kvmgr.prefix_cache.matches import describe, describe_runs, end_of, owned_node
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES
from sagellm.kvmgr.prefix_cache.pins import Pins
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_log = get_logger(__name__)


class RadixPrefixCache(PrefixCacheProtocol):
    """Token-exact prefix cache that evicts its own leaves, least recently used first.

    A lock or an insertion is a use of the whole path. `eviction_policy` replaces the order; one
    that names no victim ends eviction, and one that raises, or names anything but an unlocked leaf, is
    itself replaced by this order. A leaf that no lock protects grows in place when its prefix is inserted
    with more blocks and the same priority.

    Reuse goes into blocks where `reuses_partial_blocks`: the last block of an insertion is kept though it
    is not full, up to four of them behind a node, and matched as far as its tokens agree, as are the next
    block of an edge, the first ones of the latest eight children, and of the latest with the same token.

    `tenant_quotas` are the full blocks that an account (`Namespace.account`) may have, "*" for all that
    are not named. `max_pinned_blocks` is the budget of pins, by default half of `max_blocks`.

    What was evicted is remembered without its blocks, `max_ghost_blocks` of them (if None, 16
    times `max_blocks`, at least 65,536; 150 bytes each): when it is inserted again, its counts go on.

    Raises ConfigError for sizes below one, negative values of what may be 0, and what is not a policy.
    """

    def __init__(  # noqa: PLR0913
        self,
        max_blocks: int = 1000,
        block_size: int = 16,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
        max_ghost_blocks: int | None = None,
        max_pinned_blocks: int | None = None,
        tenant_quotas: Mapping[str, int] | None = None,
        reuses_partial_blocks: bool = True,
        identity: KVIdentity = UNNAMED,
    ) -> None:
        if eviction_policy is not None:
            require_object("eviction_policy", eviction_policy, EvictionPolicyProtocol, "eviction_policy")
        self.max_blocks = max_blocks
        self.block_size = block_size
        self._clock = SystemClock() if clock is None else clock
        limits = Limits.of(
            max_blocks=max_blocks,
            block_size=block_size,
            max_ghost_blocks=max_ghost_blocks,
            max_pinned_blocks=max_pinned_blocks,
            tenant_quotas=tenant_quotas,
            reuses_partial_blocks=reuses_partial_blocks,
            identity=identity,
        )
        self._tree = RadixTree(limits, LeafLRU() if eviction_policy is None else eviction_policy)
        self._pins = Pins(self._tree, limits.max_pinned_blocks)
        self._mutex = Lock()  # held while tree, pins or counts are read or changed
        self._lookups = Lookups(self._tree.ledger)
        self._num_inserted = self._num_inserted_partials = self._num_evicted = 0

    def __repr__(self) -> str:
        tree = self._tree  # without the lock: a debugger may ask while it is held
        policy = type(tree.leaves.order.current).__name__
        used = f"{len(tree.cached):,} of {self.max_blocks:,} blocks of {self.block_size} tokens"
        return f"<{type(self).__name__} {used}, {tree.num_nodes:,} nodes, {policy}>"

    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Find the longest cached prefix. Changes nothing, counts nothing."""
        data = pack(token_ids).data
        with self._mutex:
            return self._tree.match(data, namespace)

    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Protect the whole blocks of a match from eviction and count a lookup of `num_lookup_tokens` tokens.

        A match without a whole block protects nothing. Raises StaleMatchError if blocks entered or left
        the cache since the match, or if the match is another cache's.
        """
        with self._mutex:
            node = end_of(match, self._tree)
            now_ns = self._clock.now_ns()
            is_hit = num_lookup_tokens is not None
            if node is not None:
                depth = match.match_length // self.block_size * self.block_size
                node = self._tree.lock(node, depth, now_ns, is_hit=is_hit)
                if is_hit and self._pins:
                    self._pins.refresh(node, now_ns)
            if match.partial is not None:
                self._tree.partials.touch(match.partial.block_id)
            if num_lookup_tokens is not None:
                self._lookups.count(
                    num_lookup_tokens,
                    match.match_length,
                    match.match_length % self.block_size,
                    match.namespace,
                )
            return match._replace(node=node, version=self._tree.version)

    def unlock(self, match: PrefixMatch) -> None:
        """Undo one `lock`; a match without a whole block was never locked.

        Raises BlockError if no lock ends where this match does.
        """
        if match.match_length < self.block_size:
            return
        with self._mutex:
            node = owned_node(match, self._tree)
            if node is None or node.num_own_locks <= (node in self._pins):
                raise BlockError(
                    f"a match of {match.match_length} tokens is not locked; unlock once what lock returned"
                )
            self._tree.unlock(node)

    def insert_prefix(
        self,
        token_ids: TokenIdsLike,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT,
        *,
        priority: int = 0,
    ) -> InsertResult:
        """Remember which blocks hold the beginning of `token_ids`.

        Evicts nothing: at `max_blocks`, or at the tenant's quota, it keeps the first ones that fit. Raises
        BlockError, and changes nothing, when an id is not an int of at least 0, there are more blocks than
        tokens to fill them, one is given twice, or one is in the cache for other tokens.
        """
        tokens = pack(token_ids)
        check_number_of_blocks(block_ids, len(tokens), self.block_size)
        ids = cast("list[BlockId]", list(block_ids))
        offer = Offer(data=tokens.data, block_ids=ids, namespace=namespace, priority=priority)
        with self._mutex:
            result = insert(self._tree, offer, self.max_blocks, self._clock.now_ns())
            self._num_inserted += result.num_new_blocks + (result.partial_block_id is not None)
            self._num_inserted_partials += result.partial_block_id is not None
            self._num_evicted += len(result.released_block_ids)
        return result

    def query_by_prefix(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Return the cached blocks of a prefix, or None when fewer tokens match. Counts a lookup.

        The last one holds fewer tokens of it than a block where only its beginning agrees.
        """
        tokens = pack(token_ids)
        size = self.block_size
        with self._mutex:
            match = self._tree.match(tokens.data, namespace)
            is_hit = match.match_length >= max(min_match_length, 1)
            num_hit = match.match_length if is_hit else 0
            self._lookups.count(len(tokens), num_hit, num_hit % size, namespace)
        if not is_hit:
            return None
        return describe(match, size)

    def evict(self, num_blocks: int, *, namespace: Namespace | None = None) -> list[BlockId]:
        """Drop blocks until `num_blocks` are dropped or no victim is left, and return them.

        Partial blocks go first.
        """
        check_num_dropped(num_blocks)
        with self._mutex:
            if namespace is None or not self._tree.ledger.has_quotas:
                return self._evict(num_blocks, namespace)
            own = self._evict_own(num_blocks, namespace)
            return own + self._evict(num_blocks - len(own), namespace)

    def make_room(self, num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Drop what keeps `num_blocks` from being inserted under a namespace, and nothing else."""
        check_num_dropped(num_blocks)
        with self._mutex:
            own = self._evict_own(num_blocks, namespace)
            account = self._tree.ledger.account(namespace)
            if account.max_blocks is not None:
                num_blocks = min(num_blocks, account.max_blocks - account.num_blocks)
            num_over = len(self._tree.cached) + num_blocks - self.max_blocks
            return own + self._evict(min(num_over, num_blocks), namespace)

    def clear(self) -> list[BlockId]:
        """Drop everything that no lock or pin protects and return the blocks, whatever the policy says."""
        with self._mutex:
            now_ns = self._clock.now_ns()
            self._pins.expire(now_ns)
            dropped = self._tree.clear(Departure(now_ns, "cleared"))
            self._num_evicted += len(dropped)
            num_left = len(self._tree.cached)
        _log.info("prefix cache cleared: %d blocks dropped, %d locked", len(dropped), num_left)
        return dropped

    def move_blocks(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Hold the second block of each pair in place of the first, where it holds that.

        Raises BlockError, and changes nothing, if a second one is in the cache, given twice, or no id.
        Costs about 0.02 µs a cached block and 0.2 µs a node.
        """
        with self._mutex:
            cached = self._tree.cached
            wanted = [(source, target) for source, target in moves if source in cached]
            if not wanted:
                return
            moved, targets = dict(wanted), [target for _, target in wanted]
            check_block_ids(targets)
            if not len(moved) == len(set(targets)) == len(wanted):
                raise BlockError(f"a block is given twice in the moves {wanted[:8]}; move each once")
            if not cached.isdisjoint(targets):
                taken = sorted(cached.intersection(targets))
                raise BlockError(f"blocks {taken} are in the cache; move to blocks that are not")
            self._tree.move(moved)

    @property
    def num_evictable_blocks(self) -> int:
        """Partial blocks, and those of unlocked nodes. Whatever is below one is unlocked too."""
        if self._pins:
            with self._mutex:
                self._pins.expire(self._clock.now_ns())
        return self._tree.num_evictable

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Return how many matched blocks are evictable now and would stop being so when locked.

        Raises StaleMatchError as `lock` does.
        """
        with self._mutex:
            node = end_of(match, self._tree)
            if node is None or node.lock_count:
                return 0
            num_idle = sum(step.num_blocks for step in node.path() if not step.lock_count)
            return num_idle - (node.depth // self.block_size - match.match_length // self.block_size)

    def pin(
        self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT, *, ttl_s: float | None = None
    ) -> PinResult:
        """Keep the cached whole blocks of a prefix until `unpin`, or until no lookup hit them for `ttl_s`.

        Pinning the same again sets its time anew. Raises InvalidInputError for a `ttl_s` not above 0.
        """
        check_ttl(ttl_s)
        tokens = pack(token_ids)
        ttl_ns = None if ttl_s is None else round(ttl_s * 1e9)
        with self._mutex:
            found = self._tree.find(tokens.data, namespace)
            return self._pins.pin(found, len(tokens), ttl_ns, self._clock.now_ns())

    def unpin(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> int:
        """End the pins that end within a prefix and return how many they were."""
        data = pack(token_ids).data
        with self._mutex:
            self._pins.expire(self._clock.now_ns())
            node = self._tree.find(data, namespace).node
            path = [] if node is None else node.path()
            end = len(data) // TOKEN_BYTES
            return sum(self._pins.end(step) for step in path if step.depth <= end)

    def pins(self) -> list[PinnedPrefix]:
        """Return the pins that hold now, in the order in which they were made."""
        with self._mutex:
            return self._pins.prefixes(self._clock.now_ns())

    def runs(self) -> list[CachedRun]:
        """Return all full blocks that are cached, a run for each node, parents first."""
        with self._mutex:
            return describe_runs(self._tree.nodes())

    def explain_miss(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> MissExplanation:
        """Say why no more of some tokens would match now. Counts nothing."""
        data = pack(token_ids).data
        with self._mutex:
            return explain_miss(self._tree, data, namespace, self._clock.now_ns())

    def note_miss(self, token_ids: TokenIdsLike, match: PrefixMatch) -> Callable[[], MissExplanation]:
        """Return a function that explains a miss later. Costs 1 µs, or 0.2 µs for each evicted block."""
        data, tree = pack(token_ids).data, self._tree
        with self._mutex:
            position = match.match_length // self.block_size * self.block_size * TOKEN_BYTES
            node = end_of(match, tree) or tree.roots.get(match.namespace)
            miss = note_miss(tree, data, node, position, match.namespace, self._clock.now_ns())

        def explain_later() -> MissExplanation:
            with self._mutex:
                return explain(tree, data, miss)

        return explain_later

    def keep_evicted(self, keep: Callable[[EvictedBlocks], None]) -> None:
        """Show `keep` what is about to be evicted; if it raises, it is shown nothing more."""
        with self._mutex:
            self._tree.ledger.events.keep = keep

    def subscribe(self, sink: KVEventSink) -> None:
        """Tell `sink` of every full block that enters or leaves, beginning with those that are there."""
        with self._mutex:
            self._tree.ledger.events.add(sink, self._tree.nodes())

    def metrics(self) -> PrefixCacheMetrics:
        """Return the counts so far; what `clear` dropped counts as evicted."""
        with self._mutex:
            self._pins.expire(self._clock.now_ns())
            tree, lookups = self._tree, self._lookups
            num_blocks = len(tree.cached)
            return PrefixCacheMetrics(
                num_lookups=lookups.num_lookups,
                num_hits=lookups.num_hits,
                num_lookup_tokens=lookups.num_tokens,
                num_hit_tokens=lookups.num_hit_tokens,
                num_partial_hit_tokens=lookups.num_partial_hit_tokens,
                num_nodes=tree.num_nodes,
                num_blocks=num_blocks,
                num_locked_blocks=num_blocks - tree.num_evictable,
                max_blocks=self.max_blocks,
                num_inserted_blocks=self._num_inserted,
                num_inserted_partial_blocks=self._num_inserted_partials,
                num_evicted_blocks=self._num_evicted,
                num_partial_blocks=len(tree.partials),
                num_pins=len(self._pins),
                num_pinned_blocks=self._pins.num_blocks,
                max_pinned_blocks=self._pins.max_blocks,
                num_ghost_blocks=len(tree.ledger.ghosts),
                policy_failure=tree.leaves.order.failure,
                tenants={name: replace(usage) for name, usage in tree.ledger.accounts.items()},
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. O(cache)."""
        with self._mutex:
            self._tree.check_integrity()
            self._pins.check_integrity(self._tree.nodes())
            num_blocks = len(self._tree.cached)
            assert num_blocks <= self.max_blocks, f"{num_blocks} blocks, {self.max_blocks} allowed"
            assert self._num_inserted - self._num_evicted == num_blocks, "blocks came or went uncounted"
            ghosts = self._tree.ledger.ghosts
            assert len(ghosts) <= ghosts.max_blocks, f"{len(ghosts)} ghosts, {ghosts.max_blocks} allowed"

    def _evict(self, num_blocks: int, namespace: Namespace | None, own: str | None = None) -> list[BlockId]:
        if num_blocks <= 0:
            return []
        now_ns = self._clock.now_ns()
        self._pins.expire(now_ns)
        tree = self._tree
        whom = None if namespace is None else namespace.account
        if own is None:
            departure = Departure(now_ns, "evicted", tree.leaves.policy_name, whom)
        else:
            departure = Departure(now_ns, "quota", None, whom)
        dropped = tree.evict(num_blocks, departure, own)
        self._num_evicted += len(dropped)
        return dropped

    def _evict_own(self, num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Drop of a tenant's own leaves as many blocks as `num_blocks` more would exceed its quota."""
        account = self._tree.ledger.account(namespace)
        if account.max_blocks is None:
            return []
        num_over = account.num_blocks + num_blocks - account.max_blocks
        return self._evict(min(num_over, num_blocks), namespace, own=namespace.account)
