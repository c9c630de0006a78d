"""SGLang's rows of `kv_micro.py`: its unified radix cache over its own tree core, pages of one token.

Runs in an interpreter with torch and the wheel; the GPU packages that its imports name are replaced by
empty ones, as nothing here calls them. Written for 0.5.23.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from array import array
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

from rounds import Case, Subject, answer
from workload import BLOCK_SIZE, LENGTHS, NUM_BLOCKS, fresh, hit, misses, others, path, resident

_ABSENT = {"torchvision", "sgl_kernel", "flashinfer", "torch_memory_saver", "torchao", "kernels"}


class _EmptyModules:
    """Finds a module without content for packages that only serve a GPU."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__name__=spec.name, __spec__=spec, __path__=[], __version__="0")

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, _EmptyModules())  # type: ignore[arg-type]

import torch  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

torch.set_num_threads(1)


class _Uncounted(TokenToKVPoolAllocator):
    """Allocates as upstream and forgets what is freed: on a CPU, torch would copy the whole free list."""

    def free(self, free_index: torch.Tensor) -> None:
        pass

    def free_segment(self, free_index: torch.Tensor, **_: Any) -> None:
        pass

    def free_segments(self, segments: Any) -> None:
        pass


def make_cache() -> Any:
    """Make a cache with the tree core that is the default."""
    slots = _Uncounted(NUM_BLOCKS * BLOCK_SIZE, torch.bfloat16, "cpu", None, False)
    tables = ReqToTokenPool(size=8, max_context_len=40_000, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False, req_to_token_pool=tables, token_to_kv_pool_allocator=slots, page_size=1
    )
    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


class SGLang:
    """One tree that is matched; a tree of its own for each eviction."""

    def __init__(self) -> None:
        self.cache = make_cache()
        self.slots = self.cache.token_to_kv_pool_allocator
        for prompt in itertools.chain(others(), *map(resident, LENGTHS)):
            self.insert(self.cache, prompt)
        self.numbers = itertools.count()

    def insert(self, cache: Any, prompt: list[int]) -> None:
        """Cache a prompt in slots of its own; where they lie costs nothing here."""
        value = torch.zeros(len(prompt), dtype=torch.int64)
        cache.insert(InsertParams(key=RadixKey(array("q", prompt)), value=value))

    def look_up(self, ids: array[int]) -> Any:
        """Match a prompt that is an array."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(ids)))

    def match(self, length: int) -> Case:
        """Match the resident path."""
        ids = array("q", hit(length))
        assert self.look_up(ids).device_prefix_len == length, "the path is not resident"
        return Case(lambda _: self.look_up(ids))

    def miss(self, length: int) -> Case:
        """Match prompts that are not there."""
        prompts = itertools.cycle([array("q", prompt) for prompt in misses(length)])
        return Case(self.look_up, lambda: next(prompts))

    def key(self, length: int) -> Case:
        """Turn a list into an array."""
        ids = path(length)
        return Case(lambda _: RadixKey(array("q", ids)))

    def key_and_match(self, length: int) -> Case:
        """Turn a list into an array and match it."""
        ids = path(length)
        return Case(lambda _: self.look_up(array("q", ids)))

    def allocate(self, length: int) -> Case:
        """Take slots; all are free again before each call."""
        pages = self.slots.free_pages

        def before() -> None:
            self.slots.free_pages = pages

        return Case(lambda _: self.slots.alloc(length), before)

    def evict(self, num_blocks: int, num_leaves: int, leaf_blocks: int) -> Case:
        """Evict from a tree of leaves of so many blocks' tokens each."""
        cache = make_cache()

        def fill(num_prompts: int) -> None:
            for _ in range(num_prompts):
                self.insert(cache, fresh(leaf_blocks * BLOCK_SIZE, next(self.numbers)))

        fill(num_leaves)
        params = EvictParams(num_tokens=num_blocks * BLOCK_SIZE)
        return Case(lambda _: cache.evict(params), after=lambda _: fill(num_blocks // leaf_blocks))


def make() -> tuple[Callable[..., list[int] | None], dict[str, str]]:
    """Make the rows and say what they contain."""
    sglang = SGLang()
    return Subject(sglang).measure, {
        "version": importlib.metadata.version("sglang"),
        "tree": type(sglang.cache.tree_core).__name__,
        "match, miss": "UnifiedRadixCache.match_prefix of an array, page 1; it also updates recency",
        "key": "list to array('q')",
        "allocate": "a slice of torch's tensor of free slots, on the CPU",
        "free": "left out: it concatenates tensors of the device",
        "evict": "the tree alone, slots are not given back",
    }


if __name__ == "__main__":
    answer(make)
