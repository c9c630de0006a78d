"""Attention over paged KV equals a float64 loop over sequences, heads and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sagellm.accel.cuda.kernel import IS_INTERPRETED
from sagellm.accel.cuda.paged_attention import layer_kv, plan_attention
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.accel.cuda.tiles import SHORT_TOKENS, SPLIT_TOKENS, plan_tiles
from sagellm.core import AttentionSpec, KVGroup, KVLayout

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
NUM_LAYERS = 2
LAYER = 1


def layout_of(spec, *, dtype="float32", block_size=16):
    scale_bytes = 4 * block_size if dtype in ("int8", "float8_e4m3fn") else 0
    group = KVGroup(
        layer_ids=tuple(range(NUM_LAYERS)),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        scale_bytes_per_head=scale_bytes,
    )
    return KVLayout(group=group, block_size=block_size)


def spec_of(num_heads=4, num_kv_heads=2, head_dim=32, **settings):
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0.4, **settings
    )


class Step:
    """Sequences with random KV in scattered blocks, and queries for the last tokens of each."""

    def __init__(self, spec, num_new, lengths, *, dtype="float32", block_size=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.num_new, self.lengths = spec, np.array(num_new, np.int32), np.array(lengths, np.int32)
        layout = layout_of(spec, dtype=dtype, block_size=block_size)
        width = -(-max(lengths) // block_size)
        self.kv = PagedKV(layout, len(lengths) * width + 1, DEVICE)
        order = torch.randperm(len(lengths) * width + 1, generator=generator)[: len(lengths) * width]
        self.tables = order.view(len(lengths), width).to(DEVICE)
        blocks, heads, size = len(self.kv.bytes), spec.num_kv_heads, block_size
        values = torch.randn(blocks, NUM_LAYERS, 2, heads, size, spec.head_dim, generator=generator)
        scales = torch.ones(blocks, NUM_LAYERS, 2, heads, size, 1)
        if self.kv.scaled_max:
            scales = values.abs().amax(-1, keepdim=True) / self.kv.scaled_max
            if dtype == "float8_e4m3fn":
                scales = scales.log2().ceil().exp2()
            values = values / scales
            values = values.round() if dtype == "int8" else values
        stored = values.to(getattr(torch, dtype)).contiguous()
        end = layout.scales_offset_bytes
        self.kv.bytes[:, :end] = stored.view(torch.uint8).reshape(blocks, -1).to(DEVICE)
        if self.kv.scaled_max:
            of_scales = scales.view(torch.uint8).reshape(blocks, -1)
            self.kv.bytes[:, end : end + of_scales.shape[1]] = of_scales.to(DEVICE)
        self.values = (stored.double() * scales)[:, LAYER]  # (blocks, 2, heads, block_size, D)
        rows = int(self.num_new.sum())
        self.query = torch.randn(rows, spec.num_heads, spec.head_dim, generator=generator)

    def run(self):
        plan = plan_attention(self.tables, self.num_new, self.lengths, self.spec)
        return plan.run(self.query.to(DEVICE), layer_kv(self.kv, LAYER, self.spec, self.query.dtype)).cpu()

    def expected(self):
        """Return what the definition gives, in float64."""
        spec, out = self.spec, []
        group = spec.num_heads // spec.num_kv_heads
        queries = iter(self.query.double().split(self.num_new.tolist()))
        for table, count, length in zip(self.tables.cpu(), self.num_new, self.lengths, strict=True):
            keys, values = (
                self.values[table][:, which]
                .transpose(1, 2)
                .reshape(-1, spec.num_kv_heads, spec.head_dim)[:length]
                for which in (0, 1)
            )
            scores = (
                torch.einsum("qhd,khd->hqk", next(queries), keys.repeat_interleave(group, 1)) * spec.scale
            )
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            place = torch.arange(length)
            back = torch.arange(length - count, length)[:, None] - place[None, :]
            is_hidden = (back < 0) | (back >= (spec.sliding_window or length))
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)))
        return torch.cat(out)

    def check(self, tolerance=2e-5):
        torch.testing.assert_close(self.run().double(), self.expected(), rtol=tolerance, atol=tolerance)


DECODES = ([1, 1, 1, 1], [1, 17, 256, 600])


def test_decodes_attend_to_all_their_tokens_across_splits():
    Step(spec_of(), *DECODES).check()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (14, 2, 64), (8, 1, 24), (3, 1, 80), (4, 2, 128)]
)
def test_heads_of_any_number_and_size_share_keys(num_heads, num_kv_heads, head_dim):
    Step(spec_of(num_heads, num_kv_heads, head_dim), [1, 1, 20], [3, 270, 41]).check()


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_blocks_may_have_any_size(block_size):
    Step(spec_of(), [1, 3, 18], [259, 30, 40], block_size=block_size).check()


@pytest.mark.parametrize("window", [1, 5, 100, 300])
def test_a_window_hides_what_lies_before_it(window):
    Step(spec_of(sliding_window=window), [1, 1, 4, 30], [2, 513, 260, 280]).check()


def test_a_soft_cap_bounds_the_scores():
    Step(spec_of(soft_cap=2.0), [1, 5, 20], [300, 9, 33]).check()
    Step(spec_of(soft_cap=30.0, sliding_window=7), [1, 5, 20], [300, 9, 33], seed=1).check()


def test_a_prefill_sees_the_cached_prefix_and_no_later_token():
    Step(spec_of(), [70, 129, 17], [70, 300, 150]).check()


def test_drafts_are_verified_in_splits_beside_decodes_and_prefills():
    step = Step(spec_of(), [1, 6, 16, 90, 1, 17], [400, 300, 530, 100, 20, 18])
    plan = plan_tiles(step.num_new, step.lengths, 2)
    assert [tiles.split for tiles in plan] == [SPLIT_TOKENS] * 3 + [0]
    assert [tiles.tile_tokens for tiles in plan] == [1, 16, 32, 64]
    assert [tiles.sequences.tolist() for tiles in plan] == [[0, 4], [1, 2], [5], [3, 3]]
    step.check()


@pytest.mark.parametrize(
    ("group", "sizes"), [(1, 2), (2, 3), (4, 4), (7, 5), (8, 4), (16, 4), (32, 3), (200, 1)]
)
def test_drafts_read_their_kv_once_unless_that_takes_more_rows_than_a_tile_has(group, sizes):
    num_new = np.arange(1, SHORT_TOKENS + 1, dtype=np.int32)
    plan = plan_tiles(num_new, num_new + 300, group)
    assert len(plan) == sizes
    assert sorted(place for tiles in plan for place in set(tiles.sequences.tolist())) == list(
        range(len(num_new))
    )
    for tiles in plan:
        for place in tiles.sequences.tolist():
            num_tiles = tiles.sequences.tolist().count(place)
            most = max(1, 128 // group)
            assert num_tiles == -(-int(num_new[place]) // most)
    assert plan[0].tile_tokens == 1


@pytest.mark.parametrize("num_heads", [4, 14])
def test_rows_have_the_same_bits_whatever_is_computed_beside_them(num_heads):
    num_new, lengths = [1, 4, 60, 2, 17, 1, 9], [300, 530, 80, 2, 280, 7, 520]
    step = Step(spec_of(num_heads), num_new, lengths)
    batched = step.run().split(num_new)
    step.check()
    queries, tables = step.query.split(num_new), step.tables
    for place in range(len(num_new)):
        step.query, step.tables = queries[place], tables[place : place + 1]
        step.num_new, step.lengths = (
            np.array(each[place : place + 1], np.int32) for each in (num_new, lengths)
        )
        assert torch.equal(step.run(), batched[place])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_8_bit_kv_is_scaled_by_token_and_head(dtype):
    Step(spec_of(), [1, 5, 20], [300, 9, 33], dtype=dtype).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_kv_is_widened(dtype):
    # The queries are float32, so products are, too: in the interpreter as on a GPU.
    Step(spec_of(), [1, 5, 20], [300, 9, 33], dtype=dtype).check()


def test_a_decode_has_the_same_bits_alone_and_batched():
    step = Step(spec_of(), *DECODES)
    batched = step.run()
    for row in range(4):
        alone = Step(spec_of(), *DECODES)
        alone.query, alone.tables = alone.query[row : row + 1], alone.tables[row : row + 1]
        alone.num_new, alone.lengths = alone.num_new[row : row + 1], alone.lengths[row : row + 1]
        assert torch.equal(alone.run()[0], batched[row])


def test_any_number_of_programs_gives_the_same_bits(monkeypatch):
    step = Step(spec_of(), *DECODES)
    expected = step.run()
    for number in (1, 64):
        monkeypatch.setattr(
            "sagellm.accel.cuda.paged_attention.num_programs", lambda _, number=number: number
        )
        assert torch.equal(step.run(), expected)
