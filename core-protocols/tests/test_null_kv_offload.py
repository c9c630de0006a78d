"""The null offload and the null saves keep nothing, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.core import (
    DEFAULT,
    UNNAMED,
    BlockId,
    EvictedBlocks,
    InvalidInputError,
    KVMemory,
    Runtime,
    SaveStore,
    headers_of,
    pack,
)
from sagellm.core.protocols.forward import NullForwardBackend
from sagellm.core.protocols.kv_offload import NullKVOffload
from sagellm.core.protocols.kv_saves import NullKVSaves
from sagellm.core.protocols.kv_tier import NullKVTier

TOKENS = pack(range(32))
HEADERS = headers_of(TOKENS, 16, DEFAULT, UNNAMED)
BLOCKS = [BlockId(0), BlockId(1)]
MEMORY = KVMemory(NullForwardBackend(), 16, 64, UNNAMED)


def test_what_is_evicted_is_gone_and_every_fetch_is_over() -> None:
    offload = NullKVOffload(MEMORY, tiers={}, rule="always", clock=None)
    offload.keep(EvictedBlocks(BLOCKS, HEADERS))
    assert offload.find(TOKENS, DEFAULT, 0) == []
    fetch = offload.begin(HEADERS, BLOCKS)
    assert (fetch.num_done, fetch.is_over, fetch.is_whole) == (0, True, False)
    assert offload.fetch_of(HEADERS[0]) is None
    offload.poll()
    offload.measure_prefill(16, 128.0, 1_000)
    offload.check_integrity()
    assert offload.metrics().num_fetches == 0
    offload.close()


def test_copies_are_made_all_the_same() -> None:
    copied = []

    class Memory(NullForwardBackend):
        def copy_blocks(self, pairs):  # type: ignore[no-untyped-def]
            copied.extend(pairs)

    NullKVOffload(MEMORY._replace(access=Memory())).copy_now([(BLOCKS[0], BLOCKS[1])])
    assert copied == [(0, 1)]


def test_nothing_is_saved_or_loaded() -> None:
    store = SaveStore(Path("nowhere"), 0, lambda max_bytes, name: NullKVTier())
    saves = NullKVSaves(MEMORY, None, store=store, fingerprint=str, runtime=Runtime.virtual())
    assert saves.saves() == []
    for call in (saves.save, saves.load, saves.delete):
        with pytest.raises(InvalidInputError, match=r"'chat'.*this engine has no saves"):
            call("chat")
    with pytest.raises(InvalidInputError, match="no save or load is running"):
        saves.go_on()
    saves.close()
