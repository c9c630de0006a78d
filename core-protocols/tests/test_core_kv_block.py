"""The header of a block: every field counts, what was written is read, anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import BlockHeader, BlockKey, InvalidInputError, Namespace, pack
from sagellm.core.kv_block import HASH_BYTES, ROOT_HASH

HEADER = BlockHeader(
    parent_hash=ROOT_HASH,
    token_ids=pack(range(16)),
    namespace=Namespace("tenant", "salt", "adapter"),
    model_fingerprint="model",
    layout="layout",
    dtype="float32",
    group=2,
)


@pytest.mark.no_cover
@settings(deadline=None, derandomize=True)
@given(
    parent_hash=st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    texts=st.lists(st.text(max_size=12), min_size=6, max_size=6),
    group=st.integers(0, 2**32 - 1),
)
def test_what_is_encoded_is_decoded(parent_hash: bytes, ids: list[int], texts: list[str], group: int) -> None:
    header = BlockHeader(
        parent_hash=parent_hash,
        token_ids=pack(ids),
        namespace=Namespace(*texts[:3]),
        model_fingerprint=texts[3],
        layout=texts[4],
        dtype=texts[5],
        group=group,
    )
    again = BlockHeader.decode(header.encode())
    assert (again, again.key) == (header, header.key)


def test_the_key_is_the_group_and_the_hash_of_the_header() -> None:
    assert HEADER.hash == blake2b(HEADER.encode(), digest_size=16).digest()
    assert HEADER.key == BlockKey(2, HEADER.hash)
    assert len(HEADER.hash) == HASH_BYTES


def test_every_field_changes_the_hash() -> None:
    others = [
        replace(HEADER, parent_hash=HEADER.hash),
        replace(HEADER, token_ids=pack(range(1, 17))),
        replace(HEADER, namespace=Namespace("other", "salt", "adapter")),
        replace(HEADER, namespace=Namespace("tenant", "other", "adapter")),
        replace(HEADER, namespace=Namespace("tenant", "salt", "other")),
        replace(HEADER, model_fingerprint="other"),
        replace(HEADER, layout="other"),
        replace(HEADER, dtype="bfloat16"),
        replace(HEADER, group=3),
    ]
    assert len({header.hash for header in (HEADER, *others)}) == 10


def test_text_that_moves_between_fields_changes_the_hash() -> None:
    moved = replace(HEADER, namespace=Namespace("tenants", "alt", "adapter"))
    assert "".join(moved.namespace) == "".join(HEADER.namespace)
    assert moved.hash != HEADER.hash


def test_every_truncation_is_refused() -> None:
    data = HEADER.encode()
    for length in range(len(data)):
        with pytest.raises(InvalidInputError):
            BlockHeader.decode(data[:length])


def test_bytes_behind_the_header_are_refused() -> None:
    for tail in (b"\0", b"\0\0\0\0", b"more"):
        with pytest.raises(InvalidInputError):
            BlockHeader.decode(HEADER.encode() + tail)


def test_a_mutated_header_is_refused_or_another_one() -> None:
    rng, data = Random(0), HEADER.encode()
    refused = 0
    for _ in range(1000):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
        if bytes(mutated) == data:
            continue
        try:
            header = BlockHeader.decode(bytes(mutated))
        except InvalidInputError:
            refused += 1
        else:
            assert header.encode() == bytes(mutated)
            assert header.hash != HEADER.hash
    assert refused > 100


@pytest.mark.parametrize("size", [0xFFFFFFFF, 1 << 24])
def test_a_field_that_claims_to_be_huge_is_refused(size: int) -> None:
    data = HEADER.encode()[:8] + size.to_bytes(4, "little")
    with pytest.raises(InvalidInputError, match=f"a field of {size} bytes does not fit"):
        BlockHeader.decode(data)


@pytest.mark.parametrize("data", [b"", b"sKV1", b"sKV2" + bytes(80), b"\x80\x04N."])
def test_something_else_is_no_header(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="not a KV block header"):
        BlockHeader.decode(data)


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="not a KV block header"):
        BlockHeader.decode(HEADER.encode().replace(b"salt", b"\xff\xfe\xfd\xfc"))


def test_token_bytes_that_are_no_ids_are_refused() -> None:
    data = HEADER.encode()
    tokens = (64).to_bytes(4, "little") + HEADER.token_ids.data
    cut = (62).to_bytes(4, "little") + HEADER.token_ids.data[:62]
    with pytest.raises(InvalidInputError):
        BlockHeader.decode(data.replace(tokens, cut))
