"""The prefix cache: checks input, counts use, and guards one radix tree with a mutex."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from threading import RLock
from typing import NamedTuple, cast

from sagellm.core.checks import require_object
from sagellm.core.errors import BlockError, InvalidInputError, StaleMatchError
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
    MissCause,
    MissExplanation,
    PinnedPrefix,
    PinResult,
    PrefixAnswers,
    PrefixCacheMetrics,
    PrefixCacheProtocol,
    PrefixMatch,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.tokens import TokenIds, TokenIdsLike, pack
from sagellm.kvmgr.prefix_cache.ghosts import NO_GHOSTS, Departure, GhostRun
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU
from sagellm.kvmgr.prefix_cache.limits import (
    Limits,
    check_block_ids,
    check_number_of_blocks,
    check_ttl,
    no_number,
)
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, Found, PrefixNode, find_partial
from sagellm.kvmgr.prefix_cache.tree import Offer, RadixTree, insert

_log = get_logger(__name__)


class RadixPrefixCache(PrefixCacheProtocol):
    """Token-exact prefix cache that evicts its own leaves, least recently used first.

    A lock or an insertion is a use of the whole path. `eviction_policy` replaces the order; a policy
    that names no victim ends eviction, and one that raises, or names anything but an unlocked leaf, is
    itself replaced by this order. An unlocked leaf grows in place when its prefix is inserted
    with more blocks and the same priority.

    With `reuses_partial_blocks`, parts of blocks are reused: the last block of an insertion is kept even if
    it is not full, up to four per node, and matched as far as its tokens agree. So are the next
    block of an edge, the first blocks of the latest eight children, and of the latest with the same token.

    `tenant_quotas` are the full blocks that an account (`Namespace.account`) may have, "*" for all accounts
    not named. `max_pinned_blocks` is the budget of pins, by default half of `max_blocks`.

    Evicted blocks are remembered without their content, `max_ghost_blocks` of them (if None, 16
    times `max_blocks`, at least 65,536; 150 bytes each): their counts resume when they are inserted again.

    Raises ConfigError for sizes below one, negative values of options that may be 0, and an invalid policy.
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
        limits = Limits(
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
        self._mutex = RLock()  # held while tree, pins or counts are read or changed
        self._lookups = Lookups(self._tree)
        self._num_inserted = self._num_inserted_partials = self._num_evicted = 0

    def __repr__(self) -> str:
        tree = self._tree  # without the lock: a debugger may ask while it is held
        policy = type(tree.leaves.policy).__name__
        used = f"{len(tree.cached):,} of {self.max_blocks:,} blocks of {self.block_size} tokens"
        return f"<{type(self).__name__} {used}, {tree.num_nodes:,} nodes, {policy}>"

    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Find the longest cached prefix. Changes nothing, counts nothing."""
        data = pack(token_ids).data
        with self._mutex:
            return self._tree.match(data, namespace)

    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Protect the whole blocks of a match from eviction and count a lookup of `num_lookup_tokens` tokens.

        A match without a whole block protects nothing. Raises StaleMatchError if blocks have entered or left
        the cache since the match, or if the match is from another cache.
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
                self._lookups.count(num_lookup_tokens, match.match_length, match.namespace)
            length, block_ids, namespace, _, _, partial = match  # `_replace` takes three times as long
            return PrefixMatch(length, block_ids, namespace, node, self._tree.version, partial)

    def unlock(self, match: PrefixMatch) -> None:
        """Undo one `lock`; a match without a whole block was never locked.

        Raises BlockError if no lock ends where this match does.
        """
        if match.match_length < self.block_size:
            return
        with self._mutex:
            node = self._tree.owned(match.node)
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
        """Record which blocks hold the beginning of `token_ids`.

        Evicts nothing: at `max_blocks`, or at the tenant's quota, it keeps the first blocks that fit. Raises
        BlockError, and changes nothing, when an id is not an int of at least 0, there are more blocks than
        tokens to fill them, one is given twice, or one is cached for other tokens.
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

        The last block holds fewer matching tokens if only its beginning agrees.
        """
        tokens = pack(token_ids)
        with self._mutex:
            match = self._tree.match(tokens.data, namespace)
            is_hit = match.match_length >= max(min_match_length, 1)
            self._lookups.count(len(tokens), match.match_length if is_hit else 0, namespace)
        if not is_hit:
            return None
        return describe(match, self.block_size)

    def evict(self, num_blocks: int, *, namespace: Namespace | None = None) -> list[BlockId]:
        """Drop blocks until `num_blocks` are dropped or no victim is left, and return them.

        Partial blocks go first.
        """
        if type(num_blocks) is not int:
            raise no_number(num_blocks)
        with self._mutex:
            if namespace is None or not self._tree.leaves.has_quotas:
                return self._evict(num_blocks, namespace)
            own = self._evict_own(num_blocks, namespace)
            return self._evict_after(own, num_blocks - len(own), namespace)

    def make_room(self, num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Drop what prevents inserting `num_blocks` in a namespace, and nothing else."""
        if type(num_blocks) is not int:
            raise no_number(num_blocks)
        with self._mutex:
            own = self._evict_own(num_blocks, namespace)
            account = self._tree.ledger.account(namespace)
            if account.max_blocks is not None:
                num_blocks = min(num_blocks, account.max_blocks - account.num_blocks)
            num_over = len(self._tree.cached) + num_blocks - self.max_blocks
            return self._evict_after(own, min(num_over, num_blocks), namespace)

    def clear(self) -> list[BlockId]:
        """Drop everything that no lock or pin protects and return the blocks, whatever the policy is."""
        with self._mutex:
            now_ns = self._clock.now_ns()
            self._pins.expire(now_ns)
            dropped = self._tree.clear(Departure(now_ns, "cleared"))
            self._num_evicted += len(dropped)
            num_left = len(self._tree.cached)
        _log.info("prefix cache cleared: %d blocks dropped, %d locked", len(dropped), num_left)
        return dropped

    def move_blocks(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Replace the first block of each pair, where it is cached, by the second.

        Raises BlockError, and changes nothing, if a second one is cached, given twice, or not a valid id.
        Costs about 0.02 µs per cached block and 0.2 µs per node.
        """
        with self._mutex:
            cached = self._tree.cached
            wanted = [(source, target) for source, target in moves if source in cached]
            if not wanted:
                self._tree.move_undelivered(moves)
                return
            moved, targets = dict(wanted), [target for _, target in wanted]
            check_block_ids(targets)
            if not len(moved) == len(set(targets)) == len(wanted):
                raise BlockError(f"a block is given twice in the moves {wanted[:8]}; move each once")
            if not cached.isdisjoint(targets):
                taken = sorted(cached.intersection(targets))
                raise BlockError(f"blocks {taken} are in the cache; move to blocks that are not")
            self._tree.move(moved)
            self._tree.move_undelivered(moves)

    @property
    def num_evictable_blocks(self) -> int:
        """Partial blocks, and those of unlocked nodes. Everything below an unlocked node is unlocked too."""
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

        Pinning the same prefix again restarts its time. Raises InvalidInputError for a `ttl_s` not above 0.
        """
        check_ttl(ttl_s)
        tokens = pack(token_ids)
        ttl_ns = None if ttl_s is None else round(ttl_s * 1e9)
        with self._mutex:
            found = self._tree.find(tokens.data, namespace)
            return self._pins.pin(found, len(tokens), ttl_ns, self._clock.now_ns())

    def unpin(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> int:
        """End the pins that end within a prefix and return their number."""
        data = pack(token_ids).data
        with self._mutex:
            self._pins.expire(self._clock.now_ns())
            node = self._tree.find(data, namespace).node
            path = [] if node is None else node.path()
            end = len(data) // TOKEN_BYTES
            return sum(self._pins.end(step) for step in path if step.depth <= end)

    def pins(self) -> list[PinnedPrefix]:
        """Return the current pins, in the order in which they were made."""
        with self._mutex:
            return self._pins.prefixes(self._clock.now_ns())

    def runs(self) -> list[CachedRun]:
        """Return all cached full blocks, one run per node, parents first."""
        with self._mutex:
            return describe_runs(self._tree.nodes())

    def explain_miss(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> MissExplanation:
        """Say why no more of these tokens would match now. Counts nothing.

        Costs a match, and up to 512 steps in other namespaces if this one never had the next block. Inside a
        block it looks no further for agreement than reuse does, but does so even when reuse is off.
        """
        tokens = pack(token_ids)
        with self._mutex:
            return self.note_miss(tokens, self._tree.match(tokens.data, namespace))()

    def note_miss(self, token_ids: TokenIdsLike, match: PrefixMatch) -> Callable[[], MissExplanation]:
        """Return a function that explains a miss later. Costs 1 µs, or 0.2 µs for each evicted block."""
        data, tree = pack(token_ids).data, self._tree
        size = tree.block_bytes
        with self._mutex:
            node = end_of(match, tree)
            position = match.match_length // self.block_size * size
            match_length = diverges_at = match.match_length
            if not tree.reuses_partial_blocks:
                end = node or tree.roots.get(match.namespace)
                agreed = None if end is None else find_partial(end, data, position, size)
                diverges_at += agreed.num_tokens if agreed else 0
            ghosts = NO_GHOSTS
            if len(data) - position >= size:
                key = hash(match.namespace) if node is None else tree.key_at(node, position)
                ghosts = tree.ghosts.find_run(key, data, position, size)
            now_ns = self._clock.now_ns()
        miss = Miss(match.namespace, now_ns, position, match_length, diverges_at, ghosts)

        def explain_later() -> MissExplanation:
            with self._mutex:
                return explain(tree, data, miss)

        return explain_later

    def record_answer(self, token_ids: TokenIdsLike, num_tokens: int, namespace: Namespace = DEFAULT) -> None:
        """Note that a prompt was answered with `num_tokens` tokens, as far as it is cached.

        Eight lengths are kept of a run of blocks, with the blocks and with what is remembered of them.
        """
        data = pack(token_ids).data
        with self._mutex:
            self._tree.record_answer(data, namespace, num_tokens, self._clock.now_ns())

    def answers(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> tuple[PrefixAnswers, ...]:
        """Return what is known of answers to prompts that begin alike, by the longest prefix first."""
        data = pack(token_ids).data
        with self._mutex:
            found = self._tree.answers(data, namespace)
        return tuple(PrefixAnswers(at, *answers) for at, answers in reversed(found) if answers.num_answers)

    def replace_policy(self, policy: EvictionPolicyProtocol) -> None:
        """Evict in the order of another policy from now on. 1 µs per node and what the policy takes."""
        require_object("policy", policy, EvictionPolicyProtocol, "eviction_policy")
        with self._mutex:
            self._tree.leaves.replace(policy, self._tree.nodes())

    def keep_evicted(self, keep: Callable[[EvictedBlocks], None]) -> None:
        """Show `keep` what is about to be evicted; if it raises, it is called no more."""
        with self._mutex:
            self._tree.events.keep = keep

    def subscribe(self, sink: KVEventSink) -> None:
        """Tell `sink` of every full block that enters or leaves, beginning with those already cached."""
        with self._mutex:
            self._tree.events.add(sink, self._tree.nodes())

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
                num_locked_blocks=num_blocks + len(tree.undelivered) - tree.num_evictable,
                max_blocks=self.max_blocks,
                num_inserted_blocks=self._num_inserted,
                num_inserted_partial_blocks=self._num_inserted_partials,
                num_evicted_blocks=self._num_evicted,
                num_partial_blocks=len(tree.partials),
                num_pins=len(self._pins),
                num_pinned_blocks=self._pins.num_blocks,
                max_pinned_blocks=self._pins.max_blocks,
                num_ghost_blocks=len(tree.ghosts),
                policy_failure=tree.leaves.failure,
                tenants={name: replace(usage) for name, usage in tree.ledger.accounts.items()},
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. O(cache)."""
        with self._mutex:
            self._tree.check_integrity()
            self._pins.check_integrity(self._tree.nodes())
            num_blocks = len(self._tree.cached)
            assert num_blocks <= self.max_blocks, f"{num_blocks} blocks, {self.max_blocks} allowed"
            num_held = num_blocks + len(self._tree.undelivered)
            assert self._num_inserted - self._num_evicted == num_held, "blocks came or went uncounted"
            ghosts = self._tree.ghosts
            assert len(ghosts) <= ghosts.max_blocks, f"{len(ghosts)} ghosts, {ghosts.max_blocks} allowed"

    def _evict(self, num_blocks: int, namespace: Namespace | None, own: str | None = None) -> list[BlockId]:
        if num_blocks <= 0:
            return []
        tree, now_ns = self._tree, self._clock.now_ns()
        if self._pins:
            self._pins.expire(now_ns)
        if own is None:
            departure = Departure(now_ns, "evicted", type(tree.leaves.policy).__name__, namespace)
        else:
            departure = Departure(now_ns, "quota", None, namespace)
        dropped = tree.evict(num_blocks, departure, own)
        self._num_evicted += len(dropped)
        return dropped

    def _evict_after(self, own: list[BlockId], num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Return `own`, which were dropped already, and more; the next eviction returns them on Ctrl-C."""
        try:
            return own + self._evict(num_blocks, namespace)
        except BaseException:
            self._num_evicted -= len(own)
            self._tree.deliver_later(own)
            raise

    def _evict_own(self, num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Drop as many of a tenant's own leaves' blocks as `num_blocks` more would exceed its quota by."""
        account = self._tree.ledger.account(namespace)
        if account.max_blocks is None:
            return []
        num_over = account.num_blocks + num_blocks - account.max_blocks
        return self._evict(min(num_over, num_blocks), namespace, own=namespace.account)


class Lookups:
    """Counts lookups, in total and by tenant."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.num_lookups = self.num_hits = self.num_tokens = 0
        self.num_hit_tokens = self.num_partial_hit_tokens = 0

    def count(self, num_tokens: int, num_hit_tokens: int, namespace: Namespace) -> None:
        """Count one lookup; hit tokens include those in a block that matched in part."""
        self.num_lookups += 1
        self.num_tokens += num_tokens
        self.num_hits += num_hit_tokens > 0
        self.num_hit_tokens += num_hit_tokens
        self.num_partial_hit_tokens += num_hit_tokens % self._tree.block_size
        root = self._tree.roots.get(namespace)
        account = self._tree.ledger.account(namespace) if root is None else root.usage
        account.num_lookups += 1
        account.num_hits += num_hit_tokens > 0
        account.num_lookup_tokens += num_tokens
        account.num_hit_tokens += num_hit_tokens


def end_of(match: PrefixMatch, tree: RadixTree) -> PrefixNode | None:
    """Return the node where the whole blocks of a match end; None if it has none.

    Raises StaleMatchError if blocks have entered or left since, or if the match is from another cache, and
    InvalidInputError for a match that was lengthened or cut inside a block.
    """
    if match.version != tree.version:
        raise StaleMatchError("blocks entered or left the cache since this match; match again")
    num_partial = match.match_length % tree.block_size
    depth = match.match_length - num_partial
    if num_partial and (match.partial is None or match.partial.num_tokens != num_partial):
        raise InvalidInputError(
            f"a match of {match.match_length} tokens; shorten one to whole blocks of {tree.block_size}"
        )
    if not depth:
        return None
    node = tree.owned(match.node)
    if node is None:
        raise StaleMatchError("this match is another cache's; match again in this one")
    if depth > node.depth:
        raise InvalidInputError(
            f"a match of {match.match_length} tokens ends at {node.depth}; make it no longer than it was"
        )
    while depth <= node.start and node.parent is not None:
        node = node.parent  # the caller shortened the match, or the node was split since
    return node


def describe(match: PrefixMatch, block_size: int) -> list[KVBlockDescriptor]:
    """Return which block holds which tokens of a match."""
    found = [(block_id, block_size) for block_id in match.block_ids]
    if match.partial is not None:
        found.append(match.partial)
    return [
        KVBlockDescriptor(
            block_id=block_id, start=index * block_size, num_tokens=num_tokens, namespace=match.namespace
        )
        for index, (block_id, num_tokens) in enumerate(found)
    ]


def describe_runs(nodes: Sequence[PrefixNode]) -> list[CachedRun]:
    """Return the contents of nodes, which must come parents first."""
    places = {node.node_id: place for place, node in enumerate(nodes)}
    return [
        CachedRun(
            token_ids=TokenIds(node.edge),
            block_ids=list(node.block_ids),
            namespace=node.namespace,
            parent=None if node.parent_id is None else places[node.parent_id],
            last_use_ns=node.last_access_ns,
        )
        for node in nodes
    ]


_MAX_OTHERS, _MAX_STEPS = 256, 512
"""Other namespaces to search, the latest first, and total nodes to visit in them."""


class Miss(NamedTuple):
    """What to record when a prompt matches no further; the rest can be found later."""

    namespace: Namespace
    now_ns: int
    position: int  # bytes of whole blocks that matched
    match_length: int
    diverges_at: int
    ghosts: GhostRun  # of the next blocks


def explain(tree: RadixTree, data: bytes, miss: Miss) -> MissExplanation:
    """Say why packed tokens did not match further; other namespaces count only if they had the block then."""
    departure = miss.ghosts.first.departure if miss.ghosts.first else None
    beneficiary = departure.evicted_for if departure else None
    return MissExplanation(
        cause=_cause(tree, data, miss),
        num_tokens=len(data) // TOKEN_BYTES,
        match_length=miss.match_length,
        diverges_at=miss.diverges_at,
        reason=departure.reason if departure else None,
        policy=departure.policy if departure else None,
        evicted_ns=departure.now_ns if departure else None,
        evicted_for=None if beneficiary is None else beneficiary.account,
        num_evicted_blocks=miss.ghosts.num_blocks,
    )


def _cause(tree: RadixTree, data: bytes, miss: Miss) -> MissCause:
    if miss.match_length * TOKEN_BYTES == len(data):
        return "none"
    is_inside = miss.diverges_at * TOKEN_BYTES > miss.position
    if len(data) - miss.position < tree.block_bytes:
        return "block_border" if is_inside or miss.position else "never_seen"
    if miss.ghosts.first is not None:
        return "evicted"
    cause = _others_have(tree, data, miss)
    if cause == "never_seen" and miss.ghosts.is_forgotten:
        return "unknown"
    if cause == "never_seen" and miss.diverges_at > miss.match_length:
        return "block_border"
    return cause


def _others_have(tree: RadixTree, data: bytes, miss: Miss) -> MissCause:
    """Say whether another namespace had the next block; `unknown` if there are too many to search."""
    num_steps = _MAX_STEPS
    end = miss.position + tree.block_bytes
    for other, root in islice(reversed(tree.roots.items()), _MAX_OTHERS + 1):
        if other == miss.namespace or other.adapter != miss.namespace.adapter:
            continue
        depth, node = 0, root.children.get(data[: tree.block_bytes])
        while node is not None and num_steps > 0 and node.created_ns <= miss.now_ns:
            num_steps -= 1
            num_wanted = min(len(node.edge), end - depth)
            if node.edge[:num_wanted] != data[depth : depth + num_wanted]:
                break
            depth += num_wanted
            if depth == end:
                return "other_tenant"
            node = node.children.get(data[depth : depth + tree.block_bytes])
    return "unknown" if num_steps == 0 or len(tree.roots) > _MAX_OTHERS + 1 else "never_seen"


_NEVER = 2**63


class Pin:
    """One pinned prefix; it ends with its node. `ttl_ns` counts from the last hit."""

    __slots__ = ("expires_ns", "ttl_ns")

    def __init__(self, ttl_ns: int | None, now_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self.expires_ns = _NEVER if ttl_ns is None else now_ns + ttl_ns


class Pins(dict[PrefixNode, Pin]):
    """The pins of one tree, each a lock on the path to a node. A block pinned more than once counts once."""

    def __init__(self, tree: RadixTree, max_blocks: int) -> None:
        super().__init__()
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._tree = tree
        self._next_ns = _NEVER  # no pin expires earlier

    def pin(self, found: Found, num_tokens: int, ttl_ns: int | None, now_ns: int) -> PinResult:
        """Pin what was found of this many tokens, within the budget, and say why not all of them."""
        num_pinned = self._set(found, ttl_ns, now_ns)
        return PinResult(
            num_tokens=num_tokens,
            num_pinned_tokens=num_pinned,
            num_pinned_blocks=self.num_blocks,
            max_pinned_blocks=self.max_blocks,
            reason=self._reason(found, num_tokens, num_pinned),
        )

    def prefixes(self, now_ns: int) -> list[PinnedPrefix]:
        """Return what is pinned, in the order of pinning."""
        self.expire(now_ns)
        return [
            PinnedPrefix(
                token_ids=TokenIds(b"".join(step.edge for step in reversed(node.path()))),
                namespace=node.namespace,
                ttl_s=None if pin.ttl_ns is None else pin.ttl_ns / 1e9,
                left_s=None if pin.ttl_ns is None else (pin.expires_ns - now_ns) / 1e9,
            )
            for node, pin in self.items()
        ]

    def _reason(self, found: Found, num_tokens: int, num_pinned: int) -> str:
        size = self._tree.block_size
        num_cached = len(found.block_ids) * size
        if num_tokens < size:
            return f"a block has {size} tokens, and only whole blocks are pinned"
        if num_pinned < num_cached:
            return f"{self.num_blocks} of the {self.max_blocks} blocks that may be pinned are"
        if num_cached == num_tokens // size * size:
            return ""
        whose = found.namespace
        if whose not in self._tree.roots:
            name = f"the public namespace {whose.salt!r}" if whose.is_public else f"tenant {whose.tenant!r}"
            salted = " with this salt" if whose.salt and not whose.is_public else ""
            return f"nothing at all is cached for {name}{salted}"
        if not num_cached:
            return "nothing of it is cached; send the prompt once, then pin it"
        return f"only {num_cached} tokens are cached; send the prompt once, then pin it"

    def end(self, node: PrefixNode) -> bool:
        """End the pin at a node, if there is one."""
        if self.pop(node, None) is None:
            return False
        for step in node.path():
            step.num_pins -= 1
            self.num_blocks -= 0 if step.num_pins else step.num_blocks
        self._tree.unlock(node)
        return True

    def refresh(self, node: PrefixNode, now_ns: int) -> None:
        """Record a hit of a path: the time of the pins on it restarts now."""
        for step in node.path():
            pin = self.get(step) if step.num_pins else None
            if pin is not None and pin.ttl_ns is not None:
                pin.expires_ns = now_ns + pin.ttl_ns

    def expire(self, now_ns: int) -> None:
        """End the expired pins. O(1) before the first expires."""
        if now_ns < self._next_ns:
            return
        for node in [node for node, pin in self.items() if pin.expires_ns <= now_ns]:
            self.end(node)
        self._next_ns = min((pin.expires_ns for pin in self.values()), default=_NEVER)

    def check_integrity(self, nodes: list[PrefixNode]) -> None:
        """Raise AssertionError if the counts on the nodes of the tree contradict the pins."""
        counted = dict.fromkeys(nodes, 0)
        for pinned in self:
            assert pinned.num_own_locks, f"node {pinned.node_id} is pinned, yet not locked"
            for step in pinned.path():
                counted[step] += 1
        for node, num_pins in counted.items():
            assert node.num_pins == num_pins, f"node {node.node_id}: {node.num_pins} pins, {num_pins} found"
        num_blocks = sum(node.num_blocks for node, num_pins in counted.items() if num_pins)
        assert num_blocks == self.num_blocks, f"{num_blocks} blocks are pinned, {self.num_blocks} counted"

    def _set(self, found: Found, ttl_ns: int | None, now_ns: int) -> int:
        """Return how many tokens are pinned."""
        self.expire(now_ns)
        node = found.node
        if node is None:
            return 0
        size = self._tree.block_size
        held = sum(step.num_blocks for step in node.path() if step.num_pins)
        depth = min(len(found.block_ids), held + self.max_blocks - self.num_blocks) * size
        if depth <= 0:
            return 0
        while depth <= node.start and node.parent is not None:
            node = node.parent
        if node.depth != depth or node not in self:
            node = self._tree.lock(node, depth, now_ns, is_hit=False)
            for step in node.path():
                self.num_blocks += 0 if step.num_pins else step.num_blocks
                step.num_pins += 1
        pin = self[node] = Pin(ttl_ns, now_ns)
        self._next_ns = min(self._next_ns, pin.expires_ns)
        return depth
