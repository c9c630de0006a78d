from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagellm.core import KVGroup, KVLayout, ModelGeometry, OutOfMemoryError
from sagellm.core.protocols.forward import StepLimits
from sagellm.engines.engine_core import num_blocks
from sagellm.engines.engine_core.num_blocks import find_num_blocks

GIB = 1 << 30
CPU = torch.device("cpu")
GEOMETRY = ModelGeometry(
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    max_model_len=4096,
)
LAYOUT = KVLayout(group=KVGroup(layer_ids=(0, 1, 2, 3), num_kv_heads=2, head_dim=64), block_size=16)
LIMITS = StepLimits(max_model_len=4096, max_num_seqs=1000, max_num_batched_tokens=2048)


@pytest.fixture
def find(monkeypatch):
    def find(free_bytes, limits=LIMITS, device=CPU, **options):
        monkeypatch.setattr(num_blocks, "available_memory_bytes", lambda device: free_bytes)
        return find_num_blocks(LAYOUT, GEOMETRY, limits, device=device, **{"fraction": None} | options)

    return find


def test_a_share_of_what_is_free_is_taken_half_on_a_cpu_and_most_of_a_gpu(find):
    on_cpu, on_gpu = find(4 * GIB), find(4 * GIB, device=torch.device("cuda"))
    assert on_cpu == find(4 * GIB, fraction=0.5)
    assert on_gpu == find(4 * GIB, fraction=0.9)
    assert on_gpu - on_cpu == pytest.approx(0.4 * 4 * GIB / LAYOUT.block_bytes, abs=2)


def test_activations_are_set_aside(find):
    more = replace(LIMITS, max_num_batched_tokens=2 * LIMITS.max_num_batched_tokens)
    assert find(4 * GIB, more) < find(4 * GIB)
    assert find(4 * GIB) * LAYOUT.block_bytes < 2 * GIB


def test_what_the_backend_takes_besides_is_set_aside(find):
    reserved = find(4 * GIB, reserved_bytes=10 * LAYOUT.block_bytes)
    assert reserved == find(4 * GIB) - 10


def test_no_more_than_all_seats_could_fill_is_taken(find):
    assert find(64 * GIB, replace(LIMITS, max_model_len=100, max_num_seqs=3)) == 3 * 7


def test_where_not_one_block_fits_the_settings_that_help_are_named(find):
    with pytest.raises(OutOfMemoryError, match=r"kv\.memory_fraction, or lower scheduler"):
        find(GIB // 8)
