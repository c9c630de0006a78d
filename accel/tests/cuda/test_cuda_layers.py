"""Norms, rotation, KV store, gate and FP8 products equal what torch computes in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sagellm.accel import FP8Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.accel.cuda.layer_ops import (
    Norm,
    RotateAndStore,
    Rotation,
    add_and_normalise,
    round_to_fp8,
    silu_and_mul,
)
from sagellm.accel.cuda.linear import FP8Linear
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.accel.cuda.support import IS_INTERPRETED
from sagellm.accel.linear import LinearContext, PlainLinear, WideRows
from sagellm.core import AttentionSpec, KVGroup, KVLayout, OutOfMemoryError, UnsupportedModelError

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
EPS = 1e-5


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def normalised(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("size", [1, 24, 64, 1000])
def test_a_sum_is_normalised_and_becomes_the_residual(size):
    x, residual, weight = random(3, size), random(3, size, seed=1), random(size, seed=2)
    total = x.double() + residual.double()
    close(add_and_normalise(None, residual, Norm(weight, EPS)), normalised(residual, weight))
    close(add_and_normalise(x, residual, Norm(weight, EPS)), normalised(total, weight))
    close(residual, total)


def test_no_rows_are_no_launch():
    empty = random(0, 8)
    assert add_and_normalise(empty, empty, Norm(random(8), EPS)).shape == (0, 8)


@pytest.mark.parametrize("size", [3, 1024, 1500])
def test_the_gate_is_silu(size):
    gate_up = random(2, 2 * size)
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up)


def rotated(heads, positions, rotation):
    heads, half = heads.double(), heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = (table[positions].double()[:, None] for table in (rotation.cosines, rotation.sines))
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 24), (7, 7, 6)])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_queries_are_rotated_and_keys_and_values_stored(num_heads, num_kv_heads, head_dim, has_norms, dtype):
    block_size, layer = 8, 1
    scale_bytes = 4 * block_size if dtype in ("int8", "float8_e4m3fn") else 0
    group = KVGroup(
        layer_ids=(0, 1, 2),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        scale_bytes_per_head=scale_bytes,
    )
    layout = KVLayout(group=group, block_size=block_size)
    kv = PagedKV(layout, 4, DEVICE)
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0)
    qkv = random(3, num_heads + 2 * num_kv_heads, head_dim)
    positions, slots = (torch.tensor(each, device=DEVICE) for each in ([0, 9, 40], [30, 11, -1]))
    angles = random(64, head_dim // 2, seed=3)
    rotation = Rotation(angles.cos(), angles.sin())
    weights = random(head_dim, seed=4), random(head_dim, seed=5)
    norms = (Norm(weights[0], EPS), Norm(weights[1], EPS)) if has_norms else None
    query = RotateAndStore(kv, layer, spec, rotation, norms)(qkv, positions, slots)

    queries, keys, values = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if has_norms:
        queries, keys = normalised(queries, weights[0]), normalised(keys, weights[1])
    close(query, rotated(queries, positions, rotation))
    expected = torch.stack((rotated(keys, positions, rotation), values.double()), 1)  # (rows, 2, heads, D)
    shape = (4, 3, 2, num_kv_heads, block_size)
    stored = kv.bytes[:, : layout.scales_offset_bytes].view(kv.values.dtype).view(*shape, head_dim).double()
    if scale_bytes:
        end = layout.scales_offset_bytes + 4 * 3 * 2 * num_kv_heads * block_size
        scales = kv.bytes[:, layout.scales_offset_bytes : end].view(torch.float32).view(*shape, 1)
        stored *= scales
    found = torch.stack([stored[slot // block_size, layer, :, :, slot % block_size] for slot in (30, 11)])
    off = (found - expected[:2]).abs()
    largest = expected[:2].abs().amax(-1, keepdim=True)
    allowed = {
        "float32": 1e-5 + 0 * largest,
        "bfloat16": 2.0**-7 * expected[:2].abs(),  # the interpreter truncates
        "int8": largest / 254 * 1.001,
        "float8_e4m3fn": expected[:2].abs() / 16 * 1.001 + largest / 448 * 2.0**-9,
    }[dtype]
    assert (off <= allowed).all()
    stored[3, layer, :, :, 6] = stored[1, layer, :, :, 3] = 0
    assert not stored.any(), "nothing else was written, and nothing for slot -1"


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        *((448.0, 1.0), (449.0, 2.0), (2.0**-30, 2.0**-38), (2.0**127, 2.0**119)),
        *((torch.finfo(torch.float32).max, 2.0**120), (torch.nan, torch.nan), (torch.inf, torch.nan)),
    ],
)
def test_values_in_fp8_are_those_that_the_cpu_kernels_store(largest, scale):
    group = KVGroup(
        layer_ids=(0,), num_kv_heads=1, head_dim=16, dtype="float8_e4m3fn", scale_bytes_per_head=32
    )
    layout = KVLayout(group=group, block_size=8)
    kv = PagedKV(layout, 1, DEVICE)
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0)
    units = [
        17.0,
        -19.0,
        15.5,
        2**-6,
        2**-7,
        1.5 * 2**-7,
        -(2**-8),
        0.0,
        -(2**-6.5),
        208.0,
        1.0,
        2.0,
        3.0,
        1.1,
    ]
    unit = scale if math.isfinite(scale) else 1.0
    value = torch.tensor([largest, *(each * unit for each in units), -1.0 * unit], device=DEVICE)
    qkv = torch.zeros(1, 3, 16, device=DEVICE)
    qkv[0, 2] = value
    rotation = Rotation(torch.ones(1, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE))
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    RotateAndStore(kv, 0, spec, rotation, None)(qkv, at, at)
    stored = kv.views(0)[1][0, 0, 0].float().tolist()
    offset = layout.scales_offset_bytes + 32
    found = kv.bytes[0, offset : offset + 4].view(torch.float32).item()
    if math.isnan(scale):
        assert math.isnan(found)
        assert all(map(math.isnan, stored))
        return
    assert found == scale
    top = (value[:1] / scale).to(torch.float8_e4m3fn).float().item()
    exact = [16.0, -20.0, 16.0, 2**-6, 0, 2**-6, 0, 0, -(2**-6), 208.0, 1.0, 2.0, 3.0, 1.125, -1.0]
    assert stored == [top, *exact]


def test_rows_are_rounded_to_fp8_by_their_own_scale():
    x = random(3, 64) * torch.tensor([[1.0], [1e4], [1e-6]], device=DEVICE)
    values, scales = round_to_fp8(x)
    assert (values.float().abs().amax(1) == 448).all()
    back = values.float() * scales
    assert ((back - x).abs() <= x.abs() / 16 * 1.001 + x.abs().amax(1, keepdim=True) / 448 * 2.0**-9).all()
    zero, _ = round_to_fp8(x * 0)
    assert not zero.float().any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("granularity", "num_scales"),
    [(QuantizationGranularity.PER_CHANNEL, 48), (QuantizationGranularity.PER_TENSOR, 1)],
)
def test_a_product_in_fp8_is_close_and_half_the_size(granularity, num_scales, has_bias):
    weight, x = random(48, 64), random(5, 64, seed=1)
    bias = random(48, seed=2) if has_bias else None
    plain = PlainLinear(DEVICE).adopt(weight, bias)
    rounded = FP8Linear(DEVICE, FP8Quantizer(QuantizationConfig(granularity=granularity)))
    rounded.adopt(weight, bias)
    ctx = LinearContext(WideRows(x.dtype, DEVICE))
    expected = plain.apply(x, ctx)
    # Both factors are rounded to 4 significant bits, 2.6 % each; errors of 64 terms add up at random.
    assert 0 < (rounded.apply(x, ctx) - expected).norm() / expected.norm() < 0.05
    bias_bytes = 192 if has_bias else 0
    assert plain.metrics().weight_bytes == 48 * 64 * 4 + bias_bytes
    assert rounded.metrics().weight_bytes == 48 * 64 + num_scales * 4 + bias_bytes


def test_a_layout_without_room_for_scales_is_refused():
    group = KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8, dtype="int8")
    with pytest.raises(UnsupportedModelError, match="64 bytes of scales"):
        PagedKV(KVLayout(group=group), 1, DEVICE)


def test_kv_beyond_memory_is_an_error_that_says_so():
    group = KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(OutOfMemoryError, match="blocks needs"):
        PagedKV(KVLayout(group=group), 1 << 46, DEVICE)
