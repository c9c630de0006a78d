"""Steps are padded to buckets that have room for whatever so many tokens may be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sagellm.accel.cuda.buckets import (
    DECODES,
    ROWS,
    check_sizes,
    decode_buckets,
    graph_bytes,
    row_buckets,
)
from sagellm.accel.cuda.graphs import GraphBuffers
from sagellm.accel.cuda.paged_attention import planned_arrays
from sagellm.accel.cuda.tiles import plan_all_tiles
from sagellm.core import AttentionSpec, ConfigError, ModelGeometry
from sagellm.core.protocols.forward import StepLimits

SPEC = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=1.0)
LIMITS = StepLimits(max_model_len=40960, max_num_seqs=200, max_num_batched_tokens=700)


def padded(bucket, num_new, lengths):
    num_new, lengths = np.array(num_new, np.int32), np.array(lengths, np.int32)
    tiles = plan_all_tiles(num_new, lengths, 2)[: len(bucket.launches)]
    return bucket.padded(planned_arrays(num_new, lengths, tiles), tiles)


def test_there_are_buckets_up_to_the_largest_step_and_no_more():
    assert [each.num_rows for each in decode_buckets(DECODES, LIMITS, SPEC)][-2:] == [192, 256]
    rows = row_buckets(ROWS, LIMITS, SPEC)
    assert [each.num_rows for each in rows][-2:] == [512, 768]
    assert rows[0].num_seqs == 8
    assert rows[-1].num_seqs == 200
    assert not decode_buckets((), LIMITS, SPEC)


@pytest.mark.parametrize("group", [1, 2, 7, 32, 200])
def test_any_step_fits_its_bucket(group):
    spec = AttentionSpec(num_heads=group, num_kv_heads=1, head_dim=8, scale=1.0)
    rng = np.random.default_rng(group)
    buckets = row_buckets(ROWS, LIMITS, spec)
    for _ in range(200):
        cuts = np.sort(rng.integers(0, 700, rng.integers(0, 200)))
        num_new = np.diff(np.concatenate(([0], cuts, [700])))
        num_new = np.minimum(num_new[num_new > 0], rng.choice([1, 5, 16, 17, 700])).astype(np.int32)
        bucket = next(each for each in buckets if each.num_rows >= num_new.sum())
        tiles = plan_all_tiles(num_new, num_new, group)[: len(bucket.launches)]
        found = bucket.padded(planned_arrays(num_new, num_new, tiles), tiles)
        assert found is not None
        assert [len(each) for each in found] == bucket.lengths


def test_padding_belongs_to_a_sequence_without_rows_and_has_no_items():
    (bucket,) = row_buckets((64,), replace(LIMITS, max_num_seqs=4), SPEC)
    begins, num_new, lengths, *launches = padded(bucket, [1, 20], [300, 20])
    assert (num_new.tolist(), lengths.tolist()) == ([1, 20, 0, 0, 0], [300, 20, 0, 0, 0])
    assert begins[:2].tolist() == [0, 1]
    for place, (real, num_items) in enumerate([([0], 2), ([], 0), ([], 0), ([1], 1)]):
        sequences, _, item_begins, item_tiles = launches[4 * place : 4 * place + 4]
        assert sequences.tolist() == real + [4] * (len(sequences) - len(real))
        assert item_begins.tolist() == [0] + [num_items] * (len(item_begins) - 1)
        assert not item_tiles.any()


def test_more_splits_than_there_is_memory_for_do_not_fit():
    (bucket,) = decode_buckets((2,), replace(LIMITS, max_model_len=512, max_num_seqs=2), SPEC)
    assert padded(bucket, [1, 1], [512, 512]) is not None
    assert padded(bucket, [1, 1], [512, 513]) is None
    (counts,) = decode_buckets((256,), LIMITS, SPEC)[0].launches
    assert 16_000 < counts.num_items < 256 * 160, "the memory of all decodes is limited"


def test_the_memory_of_buffers_is_planned():
    geometry = ModelGeometry(
        num_layers=2,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=1000,
        max_model_len=40960,
    )
    buckets = [*decode_buckets(DECODES, LIMITS, SPEC), *row_buckets(ROWS, LIMITS, SPEC)]
    buffers = GraphBuffers(buckets, 2560, SPEC, torch.empty(768, 1024, dtype=torch.bfloat16))
    model = SimpleNamespace(attention=(SPEC,), geometry=geometry)
    planned = graph_bytes(buckets, 2560, model, torch.bfloat16)
    assert 0 < planned - buffers.num_bytes < 200 << 20


@pytest.mark.parametrize("sizes", [[0], [1.5], ["8"]])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError, match="prefill_graphs of the backend cuda"):
        check_sizes("prefill_graphs", sizes)
    assert check_sizes("prefill_graphs", [8, 2, 8]) == (2, 8)
