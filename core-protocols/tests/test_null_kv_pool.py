"""The pool of no blocks keeps the contract, as far as it goes."""

from sagellm.core import Clock, KVPoolProtocol, NullKVPool
from sagellm.core.testing import KVPoolContract


class TestNullKVPool(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        return NullKVPool(total_blocks, block_size, clock=clock)


def test_it_never_asks_its_evictor() -> None:
    pool = NullKVPool(8)
    pool.set_evictor(lambda num_blocks: num_blocks)
    assert pool.total_blocks == pool.evict_if_needed(8) == 0
