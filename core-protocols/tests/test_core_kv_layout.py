"""Where the KV of a block lies, counted by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from sagellm.core import ConfigError, KVGroup, KVLayout
from sagellm.core.kv_layout import BLOCK_ALIGNMENT_BYTES, ITEM_BYTES


def layout(block_size: int = 16, **group: Any) -> KVLayout:
    given = {"layer_ids": (0, 1, 2), "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"} | group
    return KVLayout(group=KVGroup(**given), block_size=block_size)


def test_strides_match_a_hand_count() -> None:
    made = layout()
    assert (made.token_stride, made.head_stride, made.kv_stride) == (8, 16 * 8, 2 * 16 * 8)
    assert (made.layer_stride, made.block_stride) == (2 * 2 * 16 * 8, 3 * 2 * 2 * 16 * 8)
    assert made.block_bytes == 4 * 3 * 2 * 2 * 16 * 8
    assert made.group.num_layers == 3


def test_a_block_of_qwen3_0_6b_takes_1792_kib() -> None:
    made = layout(layer_ids=tuple(range(28)), num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert made.block_bytes == 28 * 2 * 8 * 16 * 128 * 2 == 1792 * 1024


def test_no_two_elements_of_a_block_share_a_place() -> None:
    made = layout(block_size=3, num_kv_heads=2, head_dim=5)
    places = {
        layer * made.layer_stride
        + side * made.kv_stride
        + head * made.head_stride
        + token * made.token_stride
        + dim
        for layer, side, head, token, dim in product(range(3), range(2), range(2), range(3), range(5))
    }
    assert places == set(range(3 * 2 * 2 * 3 * 5))
    assert max(places) < made.block_stride


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize(
    ("block_size", "heads", "dim", "scales"), [(8, 1, 96, 0), (3, 7, 5, 2), (16, 2, 64, 4)]
)
def test_blocks_are_aligned_whatever_the_shape(
    dtype: str, block_size: int, heads: int, dim: int, scales: int
) -> None:
    made = layout(block_size, num_kv_heads=heads, head_dim=dim, dtype=dtype, scale_bytes_per_head=scales)
    values = 3 * 2 * heads * block_size * dim * ITEM_BYTES[dtype]
    assert made.scales_offset_bytes == values
    assert made.block_bytes % BLOCK_ALIGNMENT_BYTES == 0
    assert 0 <= made.block_bytes - values - 3 * 2 * heads * scales < BLOCK_ALIGNMENT_BYTES
    assert made.block_stride * ITEM_BYTES[dtype] == made.block_bytes


def test_a_part_of_a_block_holds_none() -> None:
    made = layout()
    assert [made.num_blocks_in(made.block_bytes * 5 + extra) for extra in (-1, 0, 1)] == [4, 5, 5]


def test_the_signature_differs_in_whatever_makes_blocks_different() -> None:
    changed: list[dict[str, Any]] = [
        {},
        {"block_size": 8},
        {"layer_ids": (0, 1)},
        {"num_kv_heads": 1},
        {"head_dim": 4},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
        {"scale_bytes_per_head": 4},
        {"index": 1},
    ]
    assert len({layout(**change).signature for change in changed}) == len(changed)
    assert layout().signature == layout().signature == "v1:g0:l0,1,2:h2:d8:b16:float32:s0"
    assert layout(dtype="float8_e4m3fn").signature.endswith(":s0:p2"), (
        "KV whose scales were any number differs"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "kv.dtype is 'float64'; it must be one of float32, bfloat16"),
        ({"layer_ids": ()}, "needs layers"),
        ({"num_kv_heads": 0}, "at least 1"),
        ({"head_dim": 0}, "at least 1"),
        ({"block_size": 0}, "kv.block_size is 0; it must be at least 1 token"),
    ],
)
def test_impossible_geometry_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(**change)
