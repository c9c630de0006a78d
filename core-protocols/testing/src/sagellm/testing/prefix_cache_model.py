"""A model of a prefix cache as plain dicts, and a machine that compares the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import NamedTuple, TypeAlias

from sagellm.core.ids import BlockId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.prefix_cache import InsertResult, PrefixCacheProtocol, PrefixMatch
from sagellm.core.tokens import pack

Tokens: TypeAlias = tuple[int, ...]
Prefix: TypeAlias = tuple[Namespace, Tokens]
"""Names a cached block: its namespace, and all tokens up to its end."""

NAMESPACES = (DEFAULT, Namespace("other"), Namespace("other", salt="s"), Namespace("other", adapter="a"))


class PrefixCacheModel:
    """A prefix cache without a tree: a dict from prefixes to blocks. It follows the real one's evictions."""

    def __init__(self, max_blocks: int, block_size: int) -> None:
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.blocks: dict[Prefix, BlockId] = {}
        self.prefixes: dict[BlockId, Prefix] = {}
        self.partials: dict[BlockId, Prefix] = {}  # of partial blocks; the real cache decides which to keep
        self.locks: Counter[Prefix] = Counter()

    def match(self, namespace: Namespace, tokens: Tokens) -> list[Prefix]:
        """Return the prefixes of `tokens` that are cached, the shortest first."""
        found = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            prefix = (namespace, tokens[:end])
            if prefix not in self.blocks:
                break
            found.append(prefix)
        return found

    def check_partial(self, namespace: Namespace, tokens: Tokens, match: PrefixMatch) -> None:
        """Check that the partly matching block holds exactly this many of the tokens."""
        num_whole = len(match.block_ids) * self.block_size
        assert match.match_length == num_whole + (match.partial.num_tokens if match.partial else 0)
        if match.partial is not None:
            block_id, num_tokens = match.partial
            owner, held = self.prefixes.get(block_id) or self.partials[block_id]
            assert owner == namespace
            assert 0 < num_tokens < self.block_size or block_id in self.partials
            agreed = tokens[: num_whole + num_tokens]
            assert held[: len(agreed)] == agreed, "a block matched whose tokens are others"
            rest = (held[len(agreed) :], tokens[len(agreed) :])
            assert not all(rest) or rest[0][0] != rest[1][0], "more of the block agrees"

    def insert(self, namespace: Namespace, tokens: Tokens, offered: list[BlockId]) -> InsertResult:
        """Keep what fits and return what that was, partial blocks aside."""
        cached = [self.blocks[prefix] for prefix in self.match(namespace, tokens)][: len(offered)]
        num_full = min(len(offered), len(tokens) // self.block_size)
        offered_new = offered[len(cached) : num_full]
        grown = offered_new[:1] if offered_new and offered_new[0] in self.partials else []
        room = self.max_blocks - len(self.blocks) - len(self.partials)
        new = offered_new[: room + len(grown)]
        for block_id in new[: len(grown)]:
            del self.partials[block_id]
        for index, block_id in enumerate(new, len(cached) + 1):
            prefix = (namespace, tokens[: index * self.block_size])
            self.blocks[prefix] = block_id
            self.prefixes[block_id] = prefix
        duplicates = [block for block, kept in zip(offered, cached, strict=False) if block != kept]
        return InsertResult(cached + new, len(new) - (len(grown) if new else 0), duplicates)

    def follow(
        self, namespace: Namespace, tokens: Tokens, offered: list[BlockId], result: InsertResult
    ) -> None:
        """Record which partial blocks came and went with an insertion."""
        for block_id in result.released_block_ids:
            del self.partials[block_id]
        is_partial = len(offered) * self.block_size > len(tokens)
        if result.partial_block_id is not None:
            assert is_partial, "a block is called partial that is full"
            assert result.partial_block_id == offered[-1] not in self.partials
            self.partials[offered[-1]] = (namespace, tokens)
        elif is_partial and offered[-1] in self.partials:
            self.partials[offered[-1]] = (namespace, tokens)  # the same block holds more now

    def drop(self, block_ids: Iterable[BlockId]) -> None:
        """Follow an eviction. AssertionError if a block was not there, was locked or had blocks after it."""
        for block_id in block_ids:
            if self.partials.pop(block_id, None) is not None:
                continue
            prefix = self.prefixes.pop(block_id)
            assert not self.locks[prefix], f"block {block_id} was evicted although it is locked"
            del self.blocks[prefix]
        for namespace, tokens in self.blocks:
            parent = (namespace, tokens[: -self.block_size])
            assert len(tokens) == self.block_size or parent in self.blocks, f"{tokens} lost its beginning"

    def move(self, moved: Mapping[BlockId, BlockId]) -> None:
        """Replace the blocks that are keys by their values."""
        self.partials = {moved.get(block_id, block_id): held for block_id, held in self.partials.items()}
        self.prefixes = {moved.get(block_id, block_id): prefix for block_id, prefix in self.prefixes.items()}
        self.blocks = {prefix: moved.get(block_id, block_id) for prefix, block_id in self.blocks.items()}

    @property
    def num_unlocked(self) -> int:
        """Blocks that no lock protects, including all partial ones."""
        return sum(not self.locks[prefix] for prefix in self.blocks) + len(self.partials)


class _Running(NamedTuple):
    match: PrefixMatch
    prefixes: list[Prefix]
    namespace: Namespace
    tokens: Tokens
    block_ids: list[BlockId]


class PrefixCacheMachine:
    """Random requests on a cache and its model, compared after every operation."""

    def __init__(self, cache: PrefixCacheProtocol, block_size: int, random: Random) -> None:
        self.cache = cache
        self.model = PrefixCacheModel(cache.metrics().max_blocks, block_size)
        self._random = random
        self._running: list[_Running] = []
        self._next_block = 0
        self._counts: Counter[str] = Counter()
        self._operations = (
            [self.admit] * 5
            + [self.insert] * 5
            + [self.finish] * 4
            + [self.evict] * 4
            + [self.query, self.grow, self.refill, self.move]
        )

    def run(self, num_operations: int, check_every: int = 1) -> None:
        """Do random operations. Raises AssertionError where the cache differs from the model."""
        for index in range(num_operations):
            self._random.choice(self._operations)()
            if self._random.random() < 0.001:
                self.clear()
            assert self.cache.num_evictable_blocks == self.model.num_unlocked
            if index % check_every == 0:
                self.check()
        while self._running:
            self.finish()
        self.check()
        self.clear()
        assert not self.model.blocks, "clear leaves nothing when nothing is locked"
        assert not self.model.partials, "clear leaves no partial block"
        self.check()

    def check(self) -> None:
        """Compare the cache's own counts with the model's."""
        self.cache.check_integrity()
        metrics = self.cache.metrics()
        num_blocks = len(self.model.blocks) + len(self.model.partials)
        assert (metrics.num_blocks, metrics.num_partial_blocks) == (num_blocks, len(self.model.partials))
        assert metrics.num_locked_blocks == num_blocks - self.model.num_unlocked
        assert metrics.num_inserted_blocks - metrics.num_evicted_blocks == num_blocks
        counted = (metrics.num_lookups, metrics.num_hits, metrics.num_lookup_tokens, metrics.num_hit_tokens)
        assert counted == tuple(self._counts[name] for name in ("lookups", "hits", "tokens", "hit tokens"))

    def admit(self) -> None:
        """Match and lock a random prefix, sometimes one that is shortened first."""
        namespace, tokens = self._tokens()
        prefixes = self.model.match(namespace, tokens)
        match = self.cache.match_prefix(pack(tokens), namespace)
        assert match.block_ids == [self.model.blocks[prefix] for prefix in prefixes]
        self.model.check_partial(namespace, tokens, match)
        if prefixes and self._random.random() < 0.2:
            prefixes.pop()
            length = len(prefixes) * self.model.block_size
            match = match._replace(match_length=length, block_ids=match.block_ids[:-1], partial=None)
        num_idle = sum(not self.model.locks[prefix] for prefix in prefixes)
        assert self.cache.num_idle_blocks(match) == num_idle
        if len(self._running) >= 6:
            return
        first_time = self._random.random() < 0.8
        match = self.cache.lock(match, num_lookup_tokens=len(tokens) if first_time else None)
        if first_time:
            self._count(len(tokens), match.match_length)
        self.model.locks.update(prefixes)
        self._running.append(_Running(match, prefixes, namespace, tokens, match.block_ids))

    def insert(self) -> None:
        """Insert random tokens with blocks of their own."""
        namespace, tokens = self._tokens()
        self._insert(namespace, tokens, [])

    def grow(self) -> None:
        """Let a running request insert all its blocks, the cached ones too, and some more."""
        if self._running:
            running = self._random.choice(self._running)
            self._insert(running.namespace, running.tokens, running.block_ids)

    def refill(self) -> None:
        """Let the owner of a partial block offer it again with more tokens in it."""
        if self.model.partials:
            block_id = self._random.choice(list(self.model.partials))
            namespace, tokens = self.model.partials[block_id]
            held = [self.model.blocks[prefix] for prefix in self.model.match(namespace, tokens)]
            more = tuple(self._random.choices((0, 1), k=self._random.randrange(self.model.block_size + 1)))
            if (len(held) + 1) * self.model.block_size > len(tokens) >= len(held) * self.model.block_size:
                self._insert(namespace, tokens + more, [*held, block_id])

    def finish(self) -> None:
        """Unlock a random request."""
        if self._running:
            running = self._running.pop(self._random.randrange(len(self._running)))
            self.cache.unlock(running.match)
            self.model.locks.subtract(running.prefixes)

    def evict(self) -> None:
        """Evict a few blocks; exactly as many go as were wanted or unlocked."""
        if 2 * len(self.model.blocks) < self.model.max_blocks and self._random.random() < 0.9:
            return  # a mostly full cache is the hard case
        wanted = self._random.randrange(-1, 9)
        num_unlocked = self.model.num_unlocked
        dropped = self.cache.evict(wanted)
        is_full_gone = not self.model.prefixes.keys().isdisjoint(dropped)
        self.model.drop(dropped)
        assert not (is_full_gone and self.model.partials), "partial blocks go before full ones"
        assert len(dropped) == max(0, min(wanted, num_unlocked))

    def move(self) -> None:
        """Move some cached blocks, and one that is not cached, to new ids."""
        held = [*self.model.prefixes, *self.model.partials]
        sources = self._random.sample(held, min(len(held), self._random.randrange(5)))
        moved = {source: BlockId(self._next_block + index) for index, source in enumerate(sources)}
        self._next_block += len(moved) + 2
        unknown = (BlockId(self._next_block - 2), BlockId(self._next_block - 1))
        self.cache.move_blocks([*moved.items(), unknown])
        self.model.move(moved)
        for running in self._running:
            running.block_ids[:] = [moved.get(block_id, block_id) for block_id in running.block_ids]

    def query(self) -> None:
        """Query by prefix alone."""
        namespace, tokens = self._tokens()
        prefixes = self.model.match(namespace, tokens)
        min_match_length = self._random.randrange(1, 2 * self.model.block_size)
        found = self.cache.query_by_prefix(pack(tokens), min_match_length, namespace)
        match = self.cache.match_prefix(pack(tokens), namespace)
        is_hit = match.match_length >= min_match_length
        self._count(len(tokens), match.match_length if is_hit else 0)
        assert (found is not None) == is_hit
        if found is not None:
            whole = [block.block_id for block in found if block.num_tokens == self.model.block_size]
            assert whole == [self.model.blocks[prefix] for prefix in prefixes]
            assert sum(block.num_tokens for block in found) == match.match_length

    def clear(self) -> None:
        """Drop all that is not locked."""
        num_unlocked = self.model.num_unlocked
        dropped = self.cache.clear()
        self.model.drop(dropped)
        assert len(dropped) == num_unlocked

    def _insert(self, namespace: Namespace, tokens: Tokens, held: list[BlockId]) -> None:
        num_blocks = -(-len(tokens) // self.model.block_size)
        num_own = self._random.randint(0, max(num_blocks - len(held), 0))
        offered = held + [BlockId(self._next_block + index) for index in range(num_own)]
        self._next_block += num_own
        expected = self.model.insert(namespace, tokens, offered)
        priority = int(self._random.random() < 0.1)
        result = self.cache.insert_prefix(pack(tokens), offered, namespace, priority=priority)
        assert result[:3] == expected[:3]
        self.model.follow(namespace, tokens, offered, result)

    def _tokens(self) -> tuple[Namespace, Tokens]:
        random = self._random
        namespace = random.choice(NAMESPACES)
        if self.model.blocks and random.random() < 0.5:  # continue a cached prefix
            namespace, start = random.choice(list(self.model.blocks))
            start = start[: random.randint(0, len(start))]
        else:
            start = ()
        return namespace, start + tuple(random.choices((0, 1), k=random.randrange(12)))

    def _count(self, num_tokens: int, num_hit_tokens: int) -> None:
        self._counts.update(
            {
                "lookups": 1,
                "hits": int(num_hit_tokens > 0),
                "tokens": num_tokens,
                "hit tokens": num_hit_tokens,
            }
        )
