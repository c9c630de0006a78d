"""The allocator of no blocks keeps the contract, as far as it goes."""

from sagellm.core import KVAllocatorProtocol, NullKVAllocator
from sagellm.core.testing import KVAllocatorContract


class TestNullKVAllocator(KVAllocatorContract):
    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        return NullKVAllocator(total_blocks)
