"""vLLM's rows of `kv_micro.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import vllm
from rounds import Case, Subject, answer
from vllm_manager import Requests, make_manager
from workload import BLOCK_SIZE, LENGTHS, NUM_BLOCKS, fresh, hit, misses, others, path, resident


def cache(manager: Any, request: Any) -> None:
    """Run a prompt through: matched, allocated, computed and let go."""
    blocks, num_hit, _ = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is None:
        raise SystemExit("the pool is too small for the benchmark")
    request.num_computed_tokens = request.num_tokens
    manager.free(request)


class VLLM:
    """One manager that is matched, one that allocates, and one that is full and evicts."""

    def __init__(self) -> None:
        self.requests = Requests(BLOCK_SIZE)
        self.matched, self.allocating = (make_manager(NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
        for prompt in itertools.chain(others(), *map(resident, LENGTHS)):
            cache(self.matched, self.requests.make(prompt))
        self.numbers = itertools.count()
        self.num_given = 0  # blocks of the manager that allocates, since it was last empty

    def match(self, length: int) -> Case:
        """Look up a prompt whose blocks are hashed."""
        request = self.requests.make(hit(length))
        assert self.matched.get_computed_blocks(request)[1] == length, "the path is not resident"
        return Case(lambda _: self.matched.get_computed_blocks(request))

    def miss(self, length: int) -> Case:
        """Look up prompts that are not there, hashed too."""
        prompts = itertools.cycle([self.requests.make(prompt) for prompt in misses(length)])
        return Case(self.matched.get_computed_blocks, lambda: next(prompts))

    def key(self, length: int) -> Case:
        """Hash a prompt's blocks."""
        request = self.requests.make(path(length), is_hashed=False)
        return Case(lambda _: self.requests.hasher(request))

    def key_and_match(self, length: int) -> Case:
        """Hash a prompt's blocks and look them up."""
        request = self.requests.make(path(length), is_hashed=False)

        def call(_: None) -> None:
            request.block_hashes = self.requests.hasher(request)
            self.matched.get_computed_blocks(request)

        return Case(call, lambda: request.block_hashes.clear())

    def allocate(self, length: int) -> Case:
        """Give blocks to a prompt of which nothing is cached, and register their hashes."""
        manager = self.allocating

        def before() -> Any:
            if self.num_given + length // BLOCK_SIZE > NUM_BLOCKS:  # from here on it would evict, too
                assert manager.reset_prefix_cache(), "some request was not freed"
                self.num_given = 0
            self.num_given += length // BLOCK_SIZE
            return self.requests.make(fresh(length, next(self.numbers)))

        def call(request: Any) -> Any:
            manager.allocate_slots(request, length)
            return request

        return Case(call, before, manager.free)

    def free(self, length: int) -> Case:
        """Take the blocks of a prompt back; they stay cached."""
        make = self.allocate(length)
        return Case(self.allocating.free, lambda: make.call(make.before()))

    def evict(self, num_blocks: int, num_leaves: int, leaf_blocks: int) -> Case:
        """Take blocks from a pool in which every free block is cached."""
        num_cached = num_leaves * leaf_blocks
        manager = make_manager(num_cached, BLOCK_SIZE)
        pool = manager.block_pool

        def fill(num_tokens: int) -> None:
            cache(manager, self.requests.make(fresh(num_tokens, next(self.numbers))))

        for _ in range(num_cached // 500):
            fill(500 * BLOCK_SIZE)

        def after(blocks: Any) -> None:
            pool.free_blocks(blocks)
            fill(num_blocks * BLOCK_SIZE)

        return Case(lambda _: pool.get_new_blocks(num_blocks), after=after)


def make() -> tuple[Callable[..., list[int] | None], dict[str, str]]:
    """Make the rows and say what they contain."""
    return Subject(VLLM()).measure, {
        "version": vllm.__version__,
        "match, miss": "KVCacheManager.get_computed_blocks, hashes there; it also makes its result's objects",
        "key": "the block hasher (sha256) alone",
        "allocate": "allocate_slots of a miss, which registers hashes too; nothing is evicted",
        "free": "KVCacheManager.free",
        "evict": "BlockPool.get_new_blocks where every free block is cached: evicts and allocates",
    }


if __name__ == "__main__":
    answer(make)
