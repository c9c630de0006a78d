"""What every tier of KV must do. Subclass `KVTierContract` and override `make`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.kv_block import BlockHeader
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_tier import KVTierProtocol, TierOutcome, TierRequest, run_to_end
from sagellm.core.runtime import Randomness
from sagellm.core.tokens import pack
from sagellm.testing.kv_tier_model import MODEL, KVTierMachine, ThreadedKVTier

BLOCK_BYTES = 192
_LARGE_BYTES = 4032


def make_header(number: int, namespace: Namespace | None = None) -> BlockHeader:
    """Return the header of a block whose tokens are its number."""
    return BlockHeader(
        parent_hash=bytes(16),
        token_ids=pack([number] * 4),
        namespace=namespace or Namespace(),
        model_fingerprint=MODEL,
        layout="layout",
        dtype="bfloat16",
    )


def make_data(number: int, num_bytes: int = BLOCK_BYTES) -> memoryview:
    """Return bytes that are unique to a block."""
    return memoryview(bytearray(number.to_bytes(4, "little") * (num_bytes // 4)))


def put(tier: KVTierProtocol, header: BlockHeader, data: memoryview) -> TierOutcome:
    """Store one block."""
    return run_to_end(tier, [TierRequest("put", header, data)])[0]


def get(tier: KVTierProtocol, header: BlockHeader, num_bytes: int = BLOCK_BYTES) -> tuple[TierOutcome, bytes]:
    """Get one block."""
    data = memoryview(bytearray(num_bytes))
    return run_to_end(tier, [TierRequest("get", header, data)])[0], bytes(data)


class KVTierContract:
    """The contract of KVTierProtocol as tests.

    `make` may return a tier with less room than requested, even none; tests that need more are skipped.
    """

    num_long_operations = 30_000  # of the long random test

    def make(self, max_bytes: int) -> KVTierProtocol:
        """Return a fresh tier."""
        raise NotImplementedError

    def make_with(self, num_blocks: int) -> KVTierProtocol:
        """Return a fresh tier; skip if this many blocks do not fit."""
        tier = self.make(max(16, num_blocks) * 8192)
        stored = [
            put(tier, make_header(1000 + number), make_data(number)) for number in range(1, num_blocks + 1)
        ]
        if stored.count("done") < num_blocks:
            pytest.skip(f"needs room for {num_blocks} blocks")
        for number in range(1, num_blocks + 1):
            run_to_end(tier, [TierRequest("delete", make_header(1000 + number))])
        return tier

    def test_a_new_tier_is_empty(self) -> None:
        """No block is found, and all counts are zero."""
        tier = self.make(1 << 16)
        assert tier.poll() == []
        assert not tier.contains(make_header(1).key)
        assert tier.get_cost_ns([make_header(1).key]) == 0
        metrics = tier.metrics()
        assert (metrics.num_blocks, metrics.num_bytes, metrics.num_hits) == (0, 0, 0)
        tier.check_integrity()
        assert get(tier, make_header(1))[0] == "missing"
        tier.close()

    def test_what_was_put_comes_back(self) -> None:
        """Byte for byte, more than once, and until it is deleted."""
        tier = self.make_with(3)
        for number in (1, 2, 3):
            assert put(tier, make_header(number), make_data(number)) == "done"
        for number in (3, 1, 2, 1):
            assert tier.contains(make_header(number).key)
            assert get(tier, make_header(number)) == ("done", bytes(make_data(number)))
        assert tier.metrics().num_blocks == 3
        assert run_to_end(tier, [TierRequest("delete", make_header(2))]) == ("done",)
        assert run_to_end(tier, [TierRequest("delete", make_header(2))]) == ("missing",)
        assert get(tier, make_header(2))[0] == "missing"
        assert get(tier, make_header(3)) == ("done", bytes(make_data(3)))
        tier.check_integrity()
        tier.close()

    def test_a_block_that_is_not_there_is_wanted(self) -> None:
        """A block that has been put is not wanted, unless it is elsewhere by now; asking changes nothing."""
        tier = self.make_with(1)
        put(tier, make_header(1), make_data(1))
        for _ in range(2):
            assert tier.touch([make_header(number).key for number in (1, 2)]) == [False, True]
        assert not tier.contains(make_header(2).key)
        assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
        tier.check_integrity()
        tier.close()

    def test_requests_of_one_submit_are_done_in_their_order(self) -> None:
        """One outcome per request, even for the same block."""
        tier = self.make_with(2)
        header, data = make_header(1), memoryview(bytearray(BLOCK_BYTES))
        outcomes = run_to_end(
            tier,
            [
                TierRequest("get", header, memoryview(bytearray(BLOCK_BYTES))),
                TierRequest("put", header, make_data(1)),
                TierRequest("get", header, data),
                TierRequest("delete", header),
                TierRequest("get", header, memoryview(bytearray(BLOCK_BYTES))),
            ],
        )
        assert outcomes == ("missing", "done", "done", "done", "missing")
        assert data == make_data(1)
        assert run_to_end(tier, []) == ()
        tier.close()

    def test_a_block_of_another_tenant_salt_or_adapter_is_a_miss(self) -> None:
        """The same tokens in another namespace are another block, even for `contains`."""
        tier = self.make_with(2)
        assert put(tier, make_header(1), make_data(1)) == "done"
        for namespace in (Namespace("other"), Namespace(salt="salt"), Namespace(adapter="adapter")):
            other = make_header(1, namespace)
            assert not tier.contains(other.key)
            assert get(tier, other)[0] == "missing"
        tier.close()

    def test_a_block_of_anything_else_is_a_miss(self) -> None:
        """Another model, layout, dtype, parent or group, and another size of data."""
        tier = self.make_with(2)
        header = make_header(1)
        assert put(tier, header, make_data(1)) == "done"
        others = (
            replace(header, model_fingerprint="other"),
            replace(header, layout="other"),
            replace(header, dtype="float32"),
            replace(header, parent_hash=bytes(15) + b"x"),
            replace(header, group=1),
        )
        for other in others:
            assert get(tier, other)[0] == "missing"
        assert get(tier, header, BLOCK_BYTES + 64)[0] == "missing"
        assert get(tier, header)[0] == "done"
        tier.close()

    def test_a_hash_alone_never_decides(self) -> None:
        """A block with the same key and other tokens is a miss."""
        tier = self.make_with(1)
        header, impostor = make_header(1), make_header(2)
        assert put(tier, header, make_data(1)) == "done"
        vars(impostor)["hash"] = header.hash  # as if two prefixes had the same hash
        assert impostor.key == header.key
        assert get(tier, impostor)[0] != "done"
        tier.check_integrity()
        tier.close()

    def test_what_comes_back_was_put_last(self) -> None:
        """Bytes of a deleted block are never seen again."""
        tier = self.make_with(2)
        for number in (1, 2, 3):
            assert put(tier, make_header(1), make_data(number)) == "done"
            found, data = get(tier, make_header(1))
            assert found == "done"
            assert data == make_data(number), "the bytes of an earlier put came back"
            run_to_end(tier, [TierRequest("delete", make_header(1))])
        tier.close()

    def test_a_buffer_that_was_put_may_change(self) -> None:
        """The stored data does not change."""
        tier = self.make_with(1)
        data = make_data(1)
        assert put(tier, make_header(1), data) == "done"
        data[:] = make_data(2)
        assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
        tier.close()

    def test_nothing_is_written_to_a_buffer_after_the_result(self) -> None:
        """It is the caller's again, whatever follows and however the request ended."""
        tier = self.make_with(3)
        for number in (1, 2):
            assert put(tier, make_header(number), make_data(number)) == "done"
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(3)]
        for number, buffer in enumerate(buffers, 1):
            run_to_end(tier, [TierRequest("get", make_header(number), buffer)])
            buffer[:] = mine = make_data(99)
            get(tier, make_header(2))
            run_to_end(tier, [TierRequest("delete", make_header(number))])
            put(tier, make_header(number), make_data(50))
            tier.poll()
        for buffer in buffers:
            assert buffer == mine
        tier.close()

    def test_no_block_is_lost_while_there_is_room(self) -> None:
        """A block is there after a successful put, and later puts do not evict it."""
        tier = self.make_with(48)
        for number in range(48):
            assert put(tier, make_header(number), make_data(number)) == "done"
        lost = [number for number in range(48) if get(tier, make_header(number))[0] != "done"]
        assert not lost, f"of 48 blocks that were put, {len(lost)} are not there"
        tier.close()

    def test_no_more_is_stored_than_max_bytes(self) -> None:
        """After many puts, at most this many bytes come back; the metrics do not count more, either."""
        max_bytes = 32 * 4096
        tier = self.make(max_bytes)
        for number in range(100):
            put(tier, make_header(number), make_data(number, _LARGE_BYTES))
        found = [get(tier, make_header(number), _LARGE_BYTES)[0] for number in range(100)]
        num_bytes = found.count("done") * _LARGE_BYTES
        assert num_bytes <= max_bytes, f"{num_bytes} bytes came back, and {max_bytes} were allowed"
        assert tier.metrics().num_bytes <= max_bytes
        tier.check_integrity()
        tier.close()

    def test_a_put_or_get_without_data_is_refused(self) -> None:
        """Before anything is done."""
        tier = self.make(1 << 16)
        for action in ("put", "get"):
            with pytest.raises(InvalidInputError):
                tier.submit([TierRequest(action, make_header(1))])
        tier.check_integrity()
        tier.close()

    def test_random_operations_agree_with_a_model(self) -> None:
        """Never other bytes than those put last, and the bookkeeping is consistent after each."""
        tier = self.make(40 * 4096)
        KVTierMachine(tier, Randomness(0).stream("operations")).run(2_000, check_every=1)
        tier.close()

    def test_eight_threads_get_what_they_asked_for(self) -> None:
        """Each gets its own results, each once; never other bytes than the block's."""
        tier = self.make(40 * 4096)
        ThreadedKVTier(tier).run(1_600)
        tier.close()

    @pytest.mark.full
    def test_many_random_operations_agree_with_a_model(self) -> None:
        """A longer run."""
        self.make_with(1).close()
        tier = self.make(40 * 4096)
        machine = KVTierMachine(tier, Randomness(1).stream("operations"))
        machine.run(self.num_long_operations, check_every=100)
        tier.close()


def delete_blocks_of_the_kit(tier: KVTierProtocol) -> None:
    """Make a persistent tier forget the blocks of earlier tests, and no others."""
    old = [header for header, _ in tier.stored() if header.model_fingerprint == MODEL]
    run_to_end(tier, [TierRequest("delete", header) for header in old])


def probe_tier(factory: Callable[..., Any]) -> Any:
    """Make a tier, and check that its storage is available, and not in use by others.

    Raises ConfigError if not.
    """
    tier = factory(1 << 20)
    try:
        delete_blocks_of_the_kit(tier)
        num_others, outcome = tier.metrics().num_blocks, put(tier, make_header(1), make_data(1))
        delete_blocks_of_the_kit(tier)
        tier.close()
    except Exception:  # the tests will report it
        return tier
    if num_others:
        raise ConfigError(f"it has {num_others} blocks of somebody already; the kit needs a place of its own")
    if outcome == "failed":
        raise ConfigError("a put failed, so its server or device is not there")
    return tier
